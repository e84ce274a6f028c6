"""Compiling, capturing and running whole steps.

The life of a step, and where each part of it stands:

    runner.extend(seqs, tokens)
      |
      |  check_extend         what was given is what can be run, or an error names both
      |  drafting             what drafts have left behind is caught up with, if it must be
      |
      |  stepper.plan         from here to steps.prepare
      |  cache.make_batch     lengths become a Batch on the host     (caches/packing.py)
      |  check_batch          the caller's own look at it
      |
      |  planner.plan         decode or extend, whole or in two halves (two_batch), padded to a
      |                       bucket (buckets), a plan for each kind of layer (backends/);
      |                       says which Variant it is, and gives its Inputs (step)
      |
      |  steps.prepare        once for each variant:
      |    artefact             its graph is in a file: loaded, and that is all
      |    layers_once          Dynamo traces make_step (step) with the first layers alone
      |    compile              StepBackend takes the graph through
      |      instantiate          copies of those layers for all others
      |      passes               merge_linears, two halves interleaved (schedule, marks), routers
      |                           and other choices of the largest (own_routers, own_top_k),
      |                           products of many small matrices (narrow_products), and those that
      |                           give each row the bits that it has alone (row_products, row_sums,
      |                           ordered_sums); in decode on several GPUs, sums over the ranks
      |                           by one kernel (short_sums); values stay up to date
      |      regions              cut into regions, of which each distinct one is compiled by
      |                           Inductor (compile_region, keep_order, fixed_arithmetic), and none
      |                           may copy a pool (clone_check)
      |      kernels_ahead        on a GPU threads build the ops' kernels meanwhile, for the sizes
      |                           that come first, and for others before these are captured
      |    compiled_step        what remains: a function of regions, and where its arguments
      |                         stand in the inputs; Dynamo is not asked again
      |
      |  execution.logits
      |    static_inputs        the inputs are copied to fixed addresses, packed in one transfer
      |    capture_policy       on a GPU: captured when its bucket first comes, replayed ever after
      |                         (cuda_graph); otherwise the function is called
      |
      |  cache.commit         the sequences are longer; cut off before, they are broken (stepper)
      v
    logits

``runner.launch(seqs, tokens, draws)``, which engines call, goes the same way to
``execution.launch``. The compiled step is the same; what ``launch`` does before it (tokens that the
host has not read) and after it (the draw) is captured with it. The tokens are waited for when they
are asked for.

``assembly`` makes all of these for a runner from its ``options``, which it checks
(``check_options``) and measures where they are "auto" (``measure_kv_tokens``, ``measure_overlap``).
``drafting`` is what ``runner.verify`` and ``runner.draft`` do beside that, by steps of the same
life.

The folders: ``options`` turns a user's options into the parts of a runner. ``stepping`` takes a
step through its life. ``compiling`` turns a traced step into one that runs, and ``passes`` rewrite
its graph. ``capturing`` makes CUDA graphs of steps, ``artefact`` keeps compiled steps in a file.

``model_use`` keeps threads apart that run and trace one model. ``surroundings`` keeps a caller's
modes and defaults out. ``model_choices`` makes the choices that no backend makes. ``signature``
finds modules of one kind, and ``report`` has all that was compiled.
"""
