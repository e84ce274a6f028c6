"""Attention to the blocks that an indexer picks, of keys and values or of latents: step plans, and
calls of the ops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from torch_hybrid.backends.mode import LayerForm, Mode, OneForm
from torch_hybrid.backends.recurrent import OpChoice, with_mixer
from torch_hybrid.backends.replay import plan_replay, walk
from torch_hybrid.backends.select import Backends, Choice, impls_of, select
from torch_hybrid.backends.statics import Statics
from torch_hybrid.batch import Batch
from torch_hybrid.caches.pools import LayerCache
from torch_hybrid.caches.sizes import PoolSizes
from torch_hybrid.ops.block_attention import op as attention
from torch_hybrid.ops.causal_conv1d.op import causal_conv1d
from torch_hybrid.ops.composed import COMPOSED, Parts
from torch_hybrid.ops.core.capability import Implementation, Need
from torch_hybrid.ops.gated_pooling import op as pooling
from torch_hybrid.ops.head_linear import op as head_linear
from torch_hybrid.ops.pooled_selection_step import op as selection_step
from torch_hybrid.ops.replay import Replay, Segments
from torch_hybrid.ops.select_blocks import op as selection
from torch_hybrid.pytrees import register_value
from torch_hybrid.specs import RECORDS, IndexedAttentionSpec, IndexedLatentSpec, LayerEntry

AnyIndexedSpec = IndexedAttentionSpec | IndexedLatentSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedPlan:
    """Plan of a step: where its N sequences keep keys, values and inputs of incomplete blocks."""

    cu_seqlens: Tensor  # [N + 1]
    seq_lens: Tensor  # [N]
    page_table: Tensor  # [N, max_pages]
    slot_mapping: Tensor  # [T]
    initial_indices: Tensor  # [N] slot that each sequence starts from; 0: zeros
    state_indices: Tensor  # [N] slot that receives its state
    statics: Statics
    replay: Replay | None = None  # in a step that verifies drafts


register_value(IndexedPlan)

# One of two ops that make a block's key from its tokens' keys; the other is the convolution.
GATED_POOLING = OpChoice(
    name="gated_pooling",
    implementations=pooling.IMPLEMENTATIONS,
    sizes=lambda spec: {"block_size": spec.block_size},
    preferred=lambda backends: backends.full,
)
# Fuses ``gated_pooling`` and ``select_blocks`` in decode steps.
POOLED_SELECTION_STEP = OpChoice(
    name="pooled_selection_step",
    implementations=selection_step.IMPLEMENTATIONS,
    sizes=lambda spec: {
        "block_size": spec.block_size,
        "index_dim": spec.index_dim,
        "num_index_heads": spec.num_index_heads,
    },
    preferred=lambda backends: backends.full,
)


class IndexedAttentionBackend(OneForm):
    """Planner of steps for a model's layers that attend to the blocks an indexer picks.

    ``key_of_block`` is the op that makes a block's key. ``whole``, if given, fuses that op and
    ``select_blocks`` in decode. The fused op runs where it can serve, unless the user named an
    implementation of either part.
    """

    chunk_size = 0

    def __init__(
        self,
        key_of_block: OpChoice,
        whole: OpChoice | None,
        entries: tuple[LayerEntry, ...],
        sizes: PoolSizes,
        backends: Backends,
        modes: Sequence[Mode],
    ) -> None:
        """Choose implementations for each of ``modes`` that serve every layer in ``entries``."""
        specs: set[AnyIndexedSpec] = {entry.spec for entry in entries}  # type: ignore[misc]

        def choose(op: str, impls: Mapping[str, Implementation], mode: Mode) -> Choice:
            needs = [
                Need(
                    device=sizes.device,
                    dtype=sizes.dtype,
                    sizes={"head_dim": spec.head_dim, "index_dim": spec.index_dim},
                    features=backends.features,
                )
                for spec in specs
            ]
            return select(op, impls, needs, backends.named(op, backends.full, mode))

        ops = {"block_attention": attention.IMPLEMENTATIONS}
        if backends.batch_invariant and any(isinstance(x, IndexedLatentSpec) for x in specs):
            ops["head_linear"] = head_linear.IMPLEMENTATIONS  # to latents and back

        def parts(mode: Mode) -> tuple[Choice, ...]:
            return (
                choose("select_blocks", selection.IMPLEMENTATIONS, mode),
                key_of_block.choose(set(specs), sizes, backends, mode),
            )

        def indexer(mode: Mode) -> tuple[Choice, ...]:
            if whole is None or backends.batch_invariant or mode != Mode.DECODE:
                return parts(mode)
            asked_for = (
                backends.named("select_blocks", backends.full, mode),
                key_of_block.asked_for(backends, mode),
            )
            by_name = whole.preferred if asked_for == ("auto", "auto") else lambda _: COMPOSED
            chosen = replace(whole, preferred=by_name).choose(set(specs), sizes, backends, mode)
            return (*parts(mode), chosen) if chosen.impl == COMPOSED else (chosen,)

        self._mixer = whole
        self.choices = {
            mode: (*(choose(op, impls, mode) for op, impls in ops.items()), *indexer(mode))
            for mode in modes
        }

    def plan(self, batch: Batch, mode: Mode, form: LayerForm) -> IndexedPlan:
        """Plan one step. Pure: the plan shares the batch's tensors, or derives its own."""
        return IndexedPlan(
            **batch.tensors_for(IndexedPlan),
            statics=Statics(with_mixer(impls_of(self.choices[mode]), self._mixer)),
            replay=plan_replay(batch, mode) if mode.num_drafts else None,
        )


def over_block(x: Tensor, weight: Tensor, plan: IndexedPlan, cache: LayerCache) -> Tensor:
    """Sum x [T, C] over the last ``block_size`` tokens, weighted by ``weight`` [C, block_size]."""

    def run(
        advancing: Sequence[Tensor], reading: Sequence[Tensor], at: IndexedPlan | Segments
    ) -> Tensor:
        (x,) = advancing
        return causal_conv1d(
            x,
            weight,
            None,
            cache["conv"],
            at.cu_seqlens,
            at.initial_indices,
            at.state_indices,
            activation="none",
            impl=plan.statics.impl("causal_conv1d"),
        )

    return walk(run, [x], [], plan, cache)


def pick(
    q: Tensor,
    keys: Tensor,
    spec: AnyIndexedSpec,
    plan: IndexedPlan,
    cache: LayerCache,
) -> Tensor:
    """Write keys [T, D] of completed blocks into the layer's pool, and pick blocks [T, top_k].

    ``q`` [T, H, D] are index queries.
    """
    return selection.select_blocks(
        q,
        keys,
        None,
        cache["block_keys"],
        plan.cu_seqlens,
        plan.seq_lens,
        plan.page_table,
        plan.slot_mapping,
        block_size=spec.block_size,
        top_k=spec.top_k,
        impl=plan.statics.impl("select_blocks"),
    )


def pick_pooled(
    q: Tensor,
    keys: Tensor,
    gates: Tensor,
    bias: Tensor,
    weights: Tensor,
    spec: IndexedLatentSpec,
    plan: IndexedPlan,
    cache: LayerCache,
) -> Tensor:
    """Pool keys and gates [T, D] of tokens into keys of blocks, and pick blocks [T, top_k]."""
    impl = plan.statics.impl("pooled_selection_step")
    records = None if plan.replay is None else cache[RECORDS]
    parts = Parts(impls=plan.statics.impls, replay=plan.replay, records=records)
    return selection_step.pooled_selection_step(
        q,
        keys,
        gates,
        bias,
        weights,
        cache["unpooled"],
        cache["block_keys"],
        plan.cu_seqlens,
        plan.seq_lens,
        plan.page_table,
        plan.slot_mapping,
        plan.initial_indices,
        plan.state_indices,
        top_k=spec.top_k,
        impl=impl,
        parts=parts,
    )


def attend_to_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    blocks: Tensor,
    spec: AnyIndexedSpec,
    plan: IndexedPlan,
    cache: LayerCache,
) -> Tensor:
    """Write k and v [T, Hkv, D] into the layer's pool, attend with q [T, Hq, D] -> [T, Hq, D].

    Without v, k holds latents [T, D]: keys and values of all heads.
    """
    return attention.block_attention(
        q,
        k,
        v,
        cache["latents" if v is None else "kv"],
        blocks,
        plan.cu_seqlens,
        plan.seq_lens,
        plan.page_table,
        plan.slot_mapping,
        block_size=spec.block_size,
        scale=spec.scale,
        impl=plan.statics.impl("block_attention"),
    )
