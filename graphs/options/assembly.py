"""Assembly of a runner: each part is made once, from the model up to the execution of steps.

    checks       refuse options before anything is measured or allocated
    Decided      the options with overlap and kv_tokens measured where they are "auto"
    cache        the pools of all layers, and the rows that stand for embeddings
    store        the artefact, in which compiled steps are looked up
    choices      the implementations of all kinds of layers, experts and linear layers
    planner      the modes of steps, their padding, and where they are cut
    steps        a graph for each variant, compiled before its first step or in the background
    execution    runs them; ``Stepper`` and ``Drafting`` lead sequences through it

A part is given those before it that it needs, and stores no others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from weakref import finalize

import torch
from torch import nn

from torch_hybrid.backends.mode import Mode, modes_of
from torch_hybrid.backends.select import Backends, Choice
from torch_hybrid.backends.step import LayerBackend, chunk_grid, make_backends
from torch_hybrid.caches.hybrid import HybridCache
from torch_hybrid.errors import UnsupportedError
from torch_hybrid.graphs.artefact.store import StepStore
from torch_hybrid.graphs.artefact.triton_kernels import note_kernels
from torch_hybrid.graphs.capturing.capture_policy import CapturePolicy
from torch_hybrid.graphs.capturing.launch import LastTokens
from torch_hybrid.graphs.compiling.toolchain import (
    check_toolchain,
    share_triton_cache,
    switched_off_by,
)
from torch_hybrid.graphs.options.check_options import (
    check_artefact,
    check_head_drafts,
    check_invariant,
    check_kv_tokens,
    check_max_drafts,
    check_max_tokens,
    kept_table,
    runs_one_mode,
)
from torch_hybrid.graphs.options.measure_kv_tokens import (
    KvRoom,
    measure_room,
    sizes_without_pages,
)
from torch_hybrid.graphs.options.measure_overlap import Trial, measure_overlap, policy_of
from torch_hybrid.graphs.options.options import MakeTrial, Options, artefact_facts
from torch_hybrid.graphs.passes import DEFAULT_PASSES, Pass
from torch_hybrid.graphs.passes.short_sums import can_sum_at_once
from torch_hybrid.graphs.step import ADAPTERS, Caches, Model, kinds_of_head
from torch_hybrid.graphs.stepping.adapters import Adapters, check_adapters, kinds_of
from torch_hybrid.graphs.stepping.background import BackgroundSteps, check_compile
from torch_hybrid.graphs.stepping.buckets import StepSizes
from torch_hybrid.graphs.stepping.drafting import Drafting
from torch_hybrid.graphs.stepping.embeds import GivenRows
from torch_hybrid.graphs.stepping.execution import Execution
from torch_hybrid.graphs.stepping.model_choices import choose, passes_for, start_builds
from torch_hybrid.graphs.stepping.planner import StepPlanner
from torch_hybrid.graphs.stepping.stepper import Stepper
from torch_hybrid.graphs.stepping.steps import Steps
from torch_hybrid.graphs.two_batch import OverlapPolicy, check_cuttable, overlap_policy
from torch_hybrid.host.memory import replace_inference_tensors
from torch_hybrid.host.progress import tell
from torch_hybrid.host.surroundings import isolated
from torch_hybrid.layers.adapted import AdaptedLayers
from torch_hybrid.ops.native.ahead import Builds
from torch_hybrid.specs import LayerTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """Options of a runner with "auto" resolved, before anything is allocated."""

    model: Model
    options: Options
    device: torch.device
    table: LayerTable  # the model's, with keys and values in kv_dtype
    capture: CapturePolicy | None
    overlap: OverlapPolicy
    overlap_trials: tuple[Trial, ...]  # empty unless overlap was "auto"
    backends: Backends
    passes: Sequence[Pass]
    kv_room: KvRoom | None  # None where kv_tokens was a number
    kv_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerParts:
    """Parts of a runner, all but its options."""

    cache: HybridCache
    given: GivenRows | None
    adapters: Adapters | None
    choices: tuple[Choice, ...]
    backends: dict[str, LayerBackend]
    modes: tuple[Mode, ...]  # modes of the model's steps, without its draft head's
    planner: StepPlanner
    steps: Steps | BackgroundSteps
    last: LastTokens
    execution: Execution
    stepper: Stepper
    drafting: Drafting


def decide(options: Options, make_trial: MakeTrial) -> Decided:
    """Check the options of a runner, and measure those that are "auto".

    Args:
        options: the options as they were given.
        make_trial: makes the runners whose steps are measured.

    Raises:
        UnsupportedError, CapacityError, ValueError: as ``Runner`` does.
    """
    model = options.model
    device = model.device  # a lookup walks through the model
    check_compile(options.compile, model)
    if options.compile and (setting := switched_off_by()):
        options = _uncompiled(options, setting)
    if options.batch_invariant:
        check_invariant(model, options.compile, options.two_batch_overlap, options.max_drafts)
    capture = CapturePolicy.of(options.cuda_graphs, device, compiles=bool(options.compile))
    check_artefact(options.artefact, compiles=bool(options.compile))
    check_kv_tokens(options.kv_tokens)
    check_max_drafts(options.max_drafts, options.max_tokens)
    check_adapters(options.max_adapters, options.max_lora_rank)
    table = kept_table(model.table, options.kv_dtype)
    if isinstance(model, nn.Module):
        replace_inference_tensors(model)
    with isolated():
        trials: tuple[Trial, ...] = ()
        if options.two_batch_overlap == "auto":
            trials = measure_overlap(model, options, make_trial)
        overlap = overlap_policy(options.two_batch_overlap, lambda: policy_of(trials))
        wanted = options.backends or Backends()
        if options.batch_invariant:
            wanted = replace(wanted, batch_invariant=True)
        kv_tokens, room = options.kv_tokens, None
        if kv_tokens == "auto":
            captures = capture is not None
            room = measure_room(model, options, table, wanted, make_trial, captures=captures)
            kv_tokens = room.num_tokens
    return Decided(
        model=model,
        options=options,
        device=device,
        table=table,
        capture=capture,
        overlap=overlap,
        overlap_trials=trials,
        backends=wanted,
        passes=DEFAULT_PASSES if options.passes is None else options.passes,
        kv_room=room,
        kv_tokens=kv_tokens,
    )


def _uncompiled(options: Options, setting: str) -> Options:
    """Switch compilation off in a runner's options, since a setting of torch does so.

    Raises:
        UnsupportedError: an option needs compiled steps.
    """
    wanted = {
        "artefact": options.artefact is not None,
        "cuda_graphs='on'": options.cuda_graphs == "on",
    }
    if needing := [name for name, is_wanted in wanted.items() if is_wanted]:
        raise UnsupportedError(
            f"{', '.join(needing)} of a runner needs compiled steps, and {setting} switches "
            f"torch.compile off"
        )
    tell(f"steps run uncompiled: {setting} switches torch.compile off")
    return replace(options, compile=False)


def assemble(decided: Decided, owner: object) -> RunnerParts:
    """Make the parts of a runner; background compilation ends with ``owner``.

    Raises:
        UnsupportedError, CapacityError, ValueError: as ``Runner`` does.
    """
    model, options, device = decided.model, decided.options, decided.device
    with isolated():
        cache = _make_cache(decided)
        given = GivenRows.of(model, options.max_tokens, options.takes_embeds)
        caches = {} if given is None else given.caches
        adapters = _make_adapters(decided, cache)
        if adapters is not None:
            caches = {**caches, ADAPTERS: adapters.layers.pools}
        store = _open_store(decided, cache, caches) if options.compile else None
        choices = choose(model, decided.backends, compiles=bool(options.compile))
        if adapters is not None:
            choices = (*choices, adapters.choose(decided.backends))
        batch_invariant = decided.backends.batch_invariant
        is_one_mode = options.prefill and batch_invariant and runs_one_mode(device)
        modes = modes_of(options.max_drafts, prefill=options.prefill, is_one_mode=is_one_mode)
        backends = make_backends(decided.table, cache.sizes, decided.backends, modes)
        builds = start_builds(choices, backends)
        kinds = kinds_of_head(model) if options.max_drafts else frozenset()
        all_modes = (*modes, *_modes_of_head(options.max_drafts)) if kinds else modes
        planner = _make_planner(decided, cache, backends, all_modes, kinds, given is not None)
        adapted = None if adapters is None else adapters.layers
        steps = _make_steps(
            decided, cache, caches, choices, planner, all_modes, store, builds, adapted
        )
        if isinstance(steps, BackgroundSteps):
            finalize(owner, steps.close)
        last = LastTokens(options.max_seqs, device)
        execution = Execution(
            steps, planner, last, decided.capture, max_seqs=options.max_seqs, device=device
        )
    stepper = Stepper(
        cache,
        planner,
        steps,
        execution,
        builds=builds,
        capture=decided.capture,
        given=given,
        num_position_axes=model.num_position_axes,
        check_batch=options.check_batch,
        device=device,
    )
    drafting = Drafting(
        cache,
        planner,
        stepper,
        execution,
        verify_mode=modes[-1],
        has_head=bool(kinds),
        max_drafts=options.max_drafts,
        max_tokens=options.max_tokens,
        num_position_axes=model.num_position_axes,
    )
    return RunnerParts(
        cache=cache,
        given=given,
        adapters=adapters,
        choices=choices,
        backends=backends,
        modes=modes,
        planner=planner,
        steps=steps,
        last=last,
        execution=execution,
        stepper=stepper,
        drafting=drafting,
    )


def _make_cache(decided: Decided) -> HybridCache:
    """Allocate the pools of all layers; set the dequantization scales of FP8 keys and values."""
    options = decided.options
    sizes = sizes_without_pages(decided.model, options, decided.table, decided.backends)
    cache = HybridCache(
        decided.table,
        max_seqs=options.max_seqs,
        kv_tokens=decided.kv_tokens,
        page_size=options.page_size,
        dtype=decided.model.dtype,
        device=decided.device,
        max_snapshots=options.max_snapshots,
        num_drafts=options.max_drafts,
        opens_chunks=sizes.opens_chunks,
    )
    if options.kv_scales is not None:
        cache.set_scales(options.kv_scales)
    return cache


def _make_adapters(decided: Decided, cache: HybridCache) -> Adapters | None:
    """Allocate the pools of adapters; None if the runner takes none.

    Raises:
        UnsupportedError: the model takes no adapters.
    """
    options = decided.options
    if not options.max_adapters:
        return None
    return Adapters.of(
        decided.model,
        cache,
        max_adapters=options.max_adapters,
        max_rank=options.max_lora_rank,
        kinds=kinds_of(options),
    )


def _open_store(decided: Decided, cache: HybridCache, given: Caches) -> StepStore:
    """Open the store of compiled steps; without an artefact, check that a compiler is installed.

    Raises:
        UnsupportedError: there is neither.
    """
    model, options = decided.model, decided.options
    share_triton_cache(decided.device)
    if decided.device.type == "cuda":
        note_kernels()
    facts = artefact_facts(options) | {
        "kv_tokens": decided.kv_tokens,
        "takes_embeds": options.max_tokens if given else 0,
        "batch_invariant": decided.backends.batch_invariant,
    }
    caches = {**cache.pools, **given}
    store = StepStore(
        options.artefact, model, caches, decided.passes, backends=options.backends, **facts
    )
    if not store.is_open and options.compile != "background":
        check_toolchain(decided.device)
    return store


def _modes_of_head(max_drafts: int) -> tuple[Mode, ...]:
    """List the modes of the draft head's steps.

    Raises:
        ValueError: the head cannot make that many drafts.
    """
    check_head_drafts(max_drafts)
    return tuple(Mode.draft(count) for count in sorted({1, max_drafts}))


def _make_planner(
    decided: Decided,
    cache: HybridCache,
    backends: dict[str, LayerBackend],
    modes: tuple[Mode, ...],
    drafting: frozenset[str],
    takes_embeds: bool,
) -> StepPlanner:
    """Make the planner of the steps of all modes.

    Raises:
        ValueError: a step is too small for a chunk, or for the halves that it is cut into.
    """
    options = decided.options
    grid = chunk_grid(backends)
    check_max_tokens(options.max_tokens, grid)
    check_cuttable(
        decided.overlap,
        max_seqs=options.max_seqs,
        max_tokens=options.max_tokens,
        chunk_size=grid,
    )
    return StepPlanner(
        backends,
        sizes=_step_sizes(decided, cache.num_pages, grid, decodes=Mode.DECODE in modes),
        num_position_axes=decided.model.num_position_axes,
        overlap=decided.overlap,
        chunk_grid=grid,
        modes=modes,
        takes_embeds=takes_embeds,
        takes_adapters=options.max_adapters > 0,
        drafting=drafting,
    )


def _step_sizes(decided: Decided, num_pages: int, grid: int, *, decodes: bool) -> StepSizes:
    """Choose the sizes that steps are padded to: few where each is captured."""
    options = decided.options
    sizes = {
        "max_seqs": options.max_seqs,
        "max_tokens": options.max_tokens,
        # The cut may lie half a chunk grid off the middle.
        "half_tokens": -(-(options.max_tokens + grid) // 2),
        "num_pages": num_pages,
        "page_size": options.page_size,
    }
    if decided.capture is None:
        return StepSizes.fine(**sizes)
    # A token-serial kernel goes by tokens per sequence: null sequences would make them look few.
    small_extends = not decodes or decided.backends.batch_invariant
    return StepSizes.coarse(**sizes, small_extends=small_extends)


def _make_steps(
    decided: Decided,
    cache: HybridCache,
    given: Caches,
    choices: tuple[Choice, ...],
    planner: StepPlanner,
    modes: tuple[Mode, ...],
    store: StepStore | None,
    builds: Builds,
    adapted: AdaptedLayers | None,
) -> Steps | BackgroundSteps:
    """Make the steps of all variants; they compile when first needed, or in the background."""
    model, options = decided.model, decided.options
    batch_invariant = decided.backends.batch_invariant
    make_steps = partial(
        Steps,
        cache=cache,
        planner=planner,
        adapted=adapted,
        passes=passes_for(
            choices,
            decided.passes,
            modes,
            batch_invariant=batch_invariant,
            num_ranks=1 if model.ranks is None else model.ranks.size,
            sums_at_once=can_sum_at_once(model.ranks, model.device),
        ),
        choices=choices,
        given=given,
        by_row=batch_invariant,
    )
    if options.compile == "background" and store is not None:
        return BackgroundSteps(make_steps, model, store, builds)
    return make_steps(model, store=store)
