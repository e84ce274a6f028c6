"""Attention over blocks that an indexer picks, to keys and values or to latents: what a step needs,
and how a layer runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from torch_hybrid.backends.mode import ONLY_FORM, LayerForm, Mode
from torch_hybrid.backends.recurrent import PARTS, OpChoice, or_parts
from torch_hybrid.backends.replay import Replay, Segments, plan_replay, walk
from torch_hybrid.backends.select import Backends, Choice, impls_of, select
from torch_hybrid.backends.statics import Statics
from torch_hybrid.batch import Batch
from torch_hybrid.caches.pools import LayerCache
from torch_hybrid.caches.sizes import PoolSizes
from torch_hybrid.ops.block_attention import op as attention
from torch_hybrid.ops.causal_conv1d.op import causal_conv1d
from torch_hybrid.ops.core.capability import Implementation, Need
from torch_hybrid.ops.gated_pooling import op as pooling
from torch_hybrid.ops.head_linear import op as head_linear
from torch_hybrid.ops.pooled_selection_step import op as selection_step
from torch_hybrid.ops.select_blocks import op as selection
from torch_hybrid.pytrees import register_value
from torch_hybrid.specs import IndexedAttentionSpec, IndexedLatentSpec, LayerEntry

AnyIndexedSpec = IndexedAttentionSpec | IndexedLatentSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedPlan:
    """Where the N sequences of a step keep their keys, values and parts of blocks."""

    cu_seqlens: Tensor  # [N + 1]
    seq_lens: Tensor  # [N]
    page_table: Tensor  # [N, max_pages]
    slot_mapping: Tensor  # [T]
    initial_indices: Tensor  # [N] slots that they start from; 0: from nothing
    state_indices: Tensor  # [N] slots of theirs
    statics: Statics
    replay: Replay | None = None  # of a step that verifies drafts


register_value(IndexedPlan)

# Of the ops that make a block's key of its tokens'; the convolution is another.
GATED_POOLING = OpChoice(
    name="gated_pooling",
    implementations=pooling.IMPLEMENTATIONS,
    sizes=lambda spec: {"block_size": spec.block_size},
    preferred=lambda backends: backends.full,
)
# What stands in for that and ``select_blocks`` where each sequence has one new token.
POOLED_SELECTION_STEP = OpChoice(
    name="pooled_selection_step",
    implementations=or_parts(selection_step.IMPLEMENTATIONS),
    sizes=lambda spec: {
        "block_size": spec.block_size,
        "index_dim": spec.index_dim,
        "num_index_heads": spec.num_index_heads,
    },
    preferred=lambda backends: backends.full,
)


class IndexedAttentionBackend:
    """Plans steps for the layers of one model that attend to blocks which an indexer picks.

    ``key_of_block`` is the op that makes a block's key, and ``whole``, if there is one, what makes
    and picks in decode: it stands in where it is able to and neither part was asked for by name.
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
            by_name = whole.preferred if asked_for == ("auto", "auto") else lambda _: PARTS
            chosen = replace(whole, preferred=by_name).choose(set(specs), sizes, backends, mode)
            return (*parts(mode), chosen) if chosen.impl == PARTS else (chosen,)

        self.choices = {
            mode: (*(choose(op, impls, mode) for op, impls in ops.items()), *indexer(mode))
            for mode in modes
        }

    def forms(self, mode: Mode) -> tuple[LayerForm, ...]:
        """Steps of a mode all run in one form."""
        return (ONLY_FORM,)

    def form_of(self, batches: Sequence[Batch], mode: Mode) -> LayerForm:
        """As ``forms`` says."""
        return ONLY_FORM

    def plan(self, batch: Batch, mode: Mode, form: LayerForm) -> IndexedPlan:
        """The plan of one step. Pure: the batch's own tensors, and what is made of them."""
        return IndexedPlan(
            cu_seqlens=batch.cu_seqlens,
            seq_lens=batch.seq_lens,
            page_table=batch.page_table,
            slot_mapping=batch.slot_mapping,
            initial_indices=batch.initial_indices,
            state_indices=batch.state_indices,
            statics=Statics(impls_of(self.choices[mode])),
            replay=plan_replay(batch, mode) if mode.num_drafts else None,
        )


def over_block(x: Tensor, weight: Tensor, plan: IndexedPlan, cache: LayerCache) -> Tensor:
    """Sums of each channel of x [T, C], weighed, over the tokens of a block up to each token."""

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


def pooled(
    keys: Tensor, gates: Tensor, bias: Tensor, plan: IndexedPlan, cache: LayerCache
) -> Tensor:
    """Keys [T, D] of the blocks that tokens complete, of the keys and gates [T, D] of tokens."""

    def run(
        advancing: Sequence[Tensor], reading: Sequence[Tensor], at: IndexedPlan | Segments
    ) -> Tensor:
        keys, gates = advancing
        return pooling.gated_pooling(
            keys,
            gates,
            bias,
            cache["unpooled"],
            at.cu_seqlens,
            at.seq_lens,
            at.initial_indices,
            at.state_indices,
            impl=plan.statics.impl("gated_pooling"),
        )

    return walk(run, [keys, gates], [], plan, cache)


def pick(
    q: Tensor,
    keys: Tensor,
    spec: AnyIndexedSpec,
    plan: IndexedPlan,
    cache: LayerCache,
    weights: Tensor | None = None,
) -> Tensor:
    """The blocks [T, top_k] for index queries [T, H, D], whose heads have ``weights`` [T, H] or
    count alike, after keys [T, D] of blocks that are now complete were written into the layer's
    pool."""
    return selection.select_blocks(
        q,
        keys,
        weights,
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
    """As ``pick``, with keys [T, D] of blocks that are ``pooled`` of the tokens' keys and gates."""
    impl = dict(plan.statics.impls).get("pooled_selection_step", PARTS)
    if impl == PARTS:
        return pick(q, pooled(keys, gates, bias, plan, cache), spec, plan, cache, weights)
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

    Without v, k are latents [T, D], which are keys and values of all heads.
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
