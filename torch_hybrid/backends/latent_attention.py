"""Multi-head latent attention (MLA): step plans, and calls of the ops.

A step runs in one of three forms, chosen when it is planned:

- absorbed: queries attend to the latents themselves (decode, and a few new tokens after a prefix);
- one shot: all rows of a sequence are expanded to keys and values, and attended to at once;
- chunked: new tokens attend to themselves, then to their prefix chunk by chunk, and the results
  are merged by their log-sum-exp. The number of chunks is rounded up, so that a few graphs serve
  every length. Rows are spread over the chunks evenly.

A plan is made from lengths and pages, so it is the same for a plain MLA model and for a hybrid.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torch_hybrid.backends.mode import LayerForm, Mode
from torch_hybrid.backends.planned import (
    PlannedTensors,
    plan_layers,
    planned_for,
    shape_name,
)
from torch_hybrid.backends.prefix import (
    PrefixChunks,
    chunk_tables,
    plan_prefix_chunks,
)
from torch_hybrid.backends.select import Backends, Choice, impls_of, select
from torch_hybrid.backends.statics import Statics
from torch_hybrid.batch import Batch
from torch_hybrid.caches.pools import LayerCache
from torch_hybrid.caches.sizes import PoolSizes
from torch_hybrid.ops.core.capability import NO_FEATURES, Implementation, Need
from torch_hybrid.ops.core.planning import Planner
from torch_hybrid.ops.formats import fp8_kv
from torch_hybrid.ops.head_linear.op import IMPLEMENTATIONS as HEAD_IMPLEMENTATIONS
from torch_hybrid.ops.head_linear.op import head_linear, is_faster_than_bmm
from torch_hybrid.ops.latent_attention import op as latent_op
from torch_hybrid.ops.merge_states import op as merge_op
from torch_hybrid.ops.ragged_attention import op as ragged_op
from torch_hybrid.pytrees import register_value
from torch_hybrid.specs import SCALES, LatentSpec, LayerEntry

_ABSORBED = LayerForm(name="absorbed")
_ONE_SHOT = "one shot"
_CHUNK_STEP = 4  # a form has this many times the chunks of the form before it
_ROW_STEP = 64  # rows of a chunk are a multiple of it, which bounds the number of layouts


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentPlan:
    """Plan of a step: where its N sequences keep latents, and which latents are expanded."""

    cu_seqlens: Tensor  # [N + 1]
    seq_lens: Tensor  # [N]
    page_table: Tensor  # [N, max_pages]
    slot_mapping: Tensor  # [T]
    prefix: PrefixChunks | None  # None in the absorbed form
    planned: dict[str, PlannedTensors]  # by shape of the layers, where the implementation plans
    statics: Statics


register_value(LatentPlan)

_ABSORBED_OPS: Mapping[str, Mapping[str, Implementation]] = {
    "latent_attention": latent_op.IMPLEMENTATIONS,
}
# Batch-invariant steps call it, and those where it is faster; others call torch's batched GEMM.
_HEAD_OPS: Mapping[str, Mapping[str, Implementation]] = {"head_linear": HEAD_IMPLEMENTATIONS}
_ROW_OPS: Mapping[str, Mapping[str, Implementation]] = {
    "store_latents": latent_op.STORE_IMPLEMENTATIONS,
    "gather_latents": latent_op.GATHER_IMPLEMENTATIONS,
}
_EXPANDED_OPS: Mapping[str, Mapping[str, Implementation]] = {
    "ragged_attention_with_lse": ragged_op.IMPLEMENTATIONS,
    "merge_states": merge_op.IMPLEMENTATIONS,
}


class LatentAttentionBackend:
    """Planner of steps for the MLA layers of one model."""

    chunk_size = 0  # its chunks are of prefix rows, so a step may be cut anywhere

    def __init__(
        self,
        entries: tuple[LayerEntry, ...],
        sizes: PoolSizes,
        backends: Backends,
        modes: Sequence[Mode],
    ) -> None:
        """Choose an implementation for each of ``modes`` that serves every layer in ``entries``.

        Raises:
            ValueError: the policy's token budget is smaller than a page.
        """
        self._specs: list[LatentSpec] = [entry.spec for entry in entries]  # type: ignore[misc]
        self._sizes, self._policy = sizes, backends.prefix
        if backends.batch_invariant:  # the form must not depend on lengths
            self._policy = replace(self._policy, absorbed="always")
        budget = self._policy.token_budget
        if budget is not None and budget < sizes.page_size:
            raise ValueError(
                f"token_budget must hold at least one page of {sizes.page_size} tokens, "
                f"got {budget}"
            )
        needs = [
            Need(
                device=sizes.device,
                dtype=sizes.dtype,
                sizes={**_sizes(spec), "page_size": sizes.page_size},
                features=fp8_kv.features_of(spec.kv_dtype) | backends.features,
            )
            for spec in set(self._specs)
        ]

        self._forms = {mode: self._make_forms(mode) for mode in modes}
        self.choices = {mode: self._choose(mode, needs, backends) for mode in modes}
        self._planners = {mode: _planners(choices) for mode, choices in self.choices.items()}
        self._layers = {shape_name(_sizes(spec)): _facts(spec, sizes) for spec in self._specs}

    def _choose(self, mode: Mode, needs: Sequence[Need], backends: Backends) -> tuple[Choice, ...]:
        """Choose implementations of the ops that steps of a mode call."""

        def choose(
            ops: Mapping[str, Mapping[str, Implementation]], wanted: Sequence[Need]
        ) -> list[Choice]:
            return [
                select(op, known, wanted, backends.named(op, backends.full, mode))
                for op, known in ops.items()
            ]

        extend = frozenset[str]() if mode.tokens_per_seq == 1 else latent_op.EXTEND
        absorbed = [replace(need, features=need.features | extend) for need in needs]
        choices = choose(_ABSORBED_OPS, absorbed)
        if backends.batch_invariant or is_faster_than_bmm(self._sizes.device, self._sizes.dtype):
            own = [replace(need, sizes={}, features=backends.features) for need in needs]
            choices += choose(_HEAD_OPS, own)
        if self._forms[mode] != (_ABSORBED,):
            choices += choose(_ROW_OPS, needs)
            choices += choose(
                _EXPANDED_OPS, [replace(need, features=NO_FEATURES) for need in needs]
            )
        return tuple(choices)

    def forms(self, mode: Mode) -> tuple[LayerForm, ...]:
        """List the forms that steps of a mode may take, each with its largest number of rows."""
        return self._forms[mode]

    def _make_forms(self, mode: Mode) -> tuple[LayerForm, ...]:
        policy, capacity = self._policy, self._sizes.num_pages * self._sizes.page_size
        if mode.tokens_per_seq is not None or policy.absorbed == "always":
            return (_ABSORBED,)
        budget = min(policy.token_budget or capacity, capacity)
        forms = [] if policy.absorbed == "never" else [_ABSORBED]
        if policy.one_shot:
            forms.append(
                LayerForm(name=_ONE_SHOT, num_chunks=1, num_rows=budget, takes_adapters=False)
            )
        if not policy.one_shot and policy.token_budget is None:
            return tuple(forms)
        if budget < capacity or not policy.one_shot:
            count = 2 if policy.one_shot else 1
            while count < -(-capacity // budget):
                forms.append(_chunked(count, budget))
                count *= _CHUNK_STEP
            forms.append(_chunked(count, budget))
        return tuple(forms)

    def form_of(self, batches: Sequence[Batch], mode: Mode) -> LayerForm:
        """Choose the cheapest form for a step, from its lengths and the policy alone.

        The form's tables have room for each of several batches.
        """
        forms = self.forms(mode)
        # Rows that are expanded have no adapters, which sequences have.
        has_adapters = any(batch.adapter_slots is not None for batch in batches)
        if forms == (_ABSORBED,):
            return _ABSORBED
        if _ABSORBED in forms and (has_adapters or self._absorbed_is_cheaper(batches)):
            return _ABSORBED
        total = max(int(batch.seq_lens.sum()) for batch in batches)
        prefix = max(int(batch.seq_lens.sum() - batch.cu_seqlens[-1]) for batch in batches)
        for form in forms:
            rows = total if form.name == _ONE_SHOT else prefix
            if form is not _ABSORBED and rows <= form.num_chunks * form.num_rows:
                even = -(-max(1, rows) // (form.num_chunks * _ROW_STEP)) * _ROW_STEP
                return replace(form, num_rows=min(even, form.num_rows))
        return _ABSORBED  # the policy has no chunks, and one shot does not fit

    def plan(self, batch: Batch, mode: Mode, form: LayerForm) -> LatentPlan:
        """Plan one step from lengths and pages on the host; pure."""
        op, prefix, num_keys = "latent_attention", None, batch.seq_lens
        if form.name != _ABSORBED.name:
            op, expanded = "ragged_attention_with_lse", batch.seq_lens
            if form.name != _ONE_SHOT:  # its causal call attends to new tokens alone
                num_keys = batch.cu_seqlens.diff()
                expanded = expanded - num_keys
            prefix = chunk_tables(
                plan_prefix_chunks(expanded.tolist(), form.num_rows),
                batch.page_table,
                page_size=self._sizes.page_size,
                num_chunks=form.num_chunks,
                num_rows=form.num_rows,
            )
        return LatentPlan(
            **batch.tensors_for(LatentPlan),
            prefix=prefix,
            planned=plan_layers(
                self._planners[mode][op], replace(batch, seq_lens=num_keys), self._layers
            ),
            statics=Statics(impls_of(self.choices[mode]), form=form.name),
        )

    def _absorbed_is_cheaper(self, batches: Sequence[Batch]) -> bool:
        """Tell whether the absorbed form takes less time, by FLOPs and the policy's cost of one."""
        work = Work.of(batches, self._specs[0])
        return work.absorbed * self._policy.cost_on(self._sizes.device) < work.expanded


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Multiply-adds of a head in a step's two forms, projections included."""

    absorbed: float
    expanded: float

    @classmethod
    def of(cls, batches: Sequence[Batch], spec: LatentSpec) -> Work:
        query_lens = torch.cat([batch.cu_seqlens.diff() for batch in batches]).double()
        context = torch.cat([batch.seq_lens for batch in batches]).double()
        pairs = float((query_lens * (context - query_lens / 2)).sum())
        row = spec.latent_rank * (spec.nope_dim + spec.v_dim)  # projected to queries, keys, values
        return cls(
            absorbed=pairs * (2 * spec.latent_rank + spec.rope_dim) + float(query_lens.sum()) * row,
            expanded=pairs * (spec.qk_dim + spec.v_dim) + float(context.sum()) * row,
        )


def _planners(choices: Sequence[Choice]) -> dict[str, Planner | None]:
    """Load the planner of each chosen implementation, by op; None where it plans nothing."""
    ops = {**_ABSORBED_OPS, **_HEAD_OPS, **_ROW_OPS, **_EXPANDED_OPS}
    return {choice.op: ops[choice.op][choice.impl].load_planner() for choice in choices}


def _chunked(num_chunks: int, num_rows: int) -> LayerForm:
    plural = "" if num_chunks == 1 else "s"
    name = f"{num_chunks} chunk{plural}"
    return LayerForm(name=name, num_chunks=num_chunks, num_rows=num_rows, takes_adapters=False)


def _sizes(spec: LatentSpec) -> dict[str, int]:
    """Collect a layer's sizes: layers of equal sizes share planned tensors."""
    return {
        "num_heads": spec.num_heads,
        "rank": spec.latent_rank,
        "rope_dim": spec.rope_dim,
        "head_dim": spec.qk_dim,
        "v_head_dim": spec.v_dim,
    }


def _facts(spec: LatentSpec, sizes: PoolSizes) -> dict[str, Any]:
    """Collect what a planner is told about layers of one shape."""
    return {**_sizes(spec), "dtype": sizes.dtype, "device": sizes.device}


def by_head(x: Tensor, weight: Tensor, statics: Statics) -> Tensor:
    """Multiply each head of x [T, H, K] by its own weight of [H, N, K] -> [T, H, N]."""
    impls = dict(statics.impls)
    if "head_linear" in impls:
        return head_linear(x, weight, impl=impls["head_linear"])
    return torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)


def attend_absorbed(
    q_latent: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    spec: LatentSpec,
    plan: LatentPlan,
    cache: LayerCache,
) -> Tensor:
    """Write latent [T, R] and k_rope [T, P] into the layer's pool, then attend to the latents.

    Queries are [T, H, R] and [T, H, P], results [T, H, R].
    """
    return latent_op.latent_attention(
        q_latent,
        q_rope,
        latent,
        k_rope,
        cache["latents"],
        plan.cu_seqlens,
        plan.seq_lens,
        plan.page_table,
        plan.slot_mapping,
        scale=spec.scale,
        pool_scale=cache.get(SCALES),
        planned=planned_for(plan.planned, _sizes(spec)),
        impl=plan.statics.impl("latent_attention"),
    )


def attend_expanded(
    q: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    expand: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    spec: LatentSpec,
    plan: LatentPlan,
    prefix: PrefixChunks,
    cache: LayerCache,
) -> Tensor:
    """Write latent [T, R] and k_rope [T, P] into the layer's pool, then attend to expanded rows.

    ``expand`` makes keys [n, H, D] and values [n, H, V] from rows [n, R] and [n, P] of the pool.
    Queries are [T, H, D], results [T, H, V].
    """
    statics, pool, pool_scale = plan.statics, cache["latents"], cache.get(SCALES)

    def attend(rows: tuple[Tensor, Tensor], offsets: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        return ragged_op.ragged_attention_with_lse(
            q,
            *expand(*rows),
            plan.cu_seqlens,
            offsets,
            causal=causal,
            scale=spec.scale,
            planned=planned_for(plan.planned, _sizes(spec)),
            impl=statics.impl("ragged_attention_with_lse"),
        )

    def gather(rows: Tensor) -> tuple[Tensor, Tensor]:
        held = latent_op.gather_latents(
            pool,
            rows,
            pool_scale=pool_scale,
            dtype=None if pool_scale is None else latent.dtype,
            impl=statics.impl("gather_latents"),
        )
        held = latent_op.made_of_stored(held, [latent, k_rope])
        return held[:, : spec.latent_rank], held[:, spec.latent_rank :]

    latent_op.store_latents(
        latent,
        k_rope,
        pool,
        plan.slot_mapping,
        plan.cu_seqlens,
        pool_scale=pool_scale,
        impl=statics.impl("store_latents"),
    )
    if statics.form == _ONE_SHOT:
        return attend(gather(prefix.rows[0]), prefix.cu_seqlens[0], True)[0]
    # FP8 rows are read back as stored: later steps attend to the rounded rows too.
    new = (latent, k_rope) if pool_scale is None else gather(plan.slot_mapping)
    out, lse = attend(new, plan.cu_seqlens, True)
    for rows, offsets in zip(prefix.rows, prefix.cu_seqlens, strict=True):
        chunk, chunk_lse = attend(gather(rows), offsets, False)
        out, lse = merge_op.merge_states(
            out, lse, chunk, chunk_lse, impl=statics.impl("merge_states")
        )
    return out
