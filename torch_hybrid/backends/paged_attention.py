"""Full attention to paged keys and values: step plans, and calls of the op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_hybrid.backends.mode import LayerForm, Mode, OneForm
from torch_hybrid.backends.planned import (
    PlannedTensors,
    plan_layers,
    planned_for,
    shape_name,
)
from torch_hybrid.backends.select import Backends, Choice, impls_of, select
from torch_hybrid.backends.statics import Statics
from torch_hybrid.batch import Batch
from torch_hybrid.caches.pools import LayerCache
from torch_hybrid.caches.sizes import PoolSizes
from torch_hybrid.ops.core.capability import Need
from torch_hybrid.ops.formats import fp8_kv
from torch_hybrid.ops.paged_attention.op import (
    IMPLEMENTATIONS,
    RELATIVE_BIAS,
    paged_attention,
    paged_attention_with_lse,
)
from torch_hybrid.pytrees import register_value
from torch_hybrid.specs import SCALES, AttentionSpec, LayerEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedAttentionPlan:
    """Plan of a step: where its N sequences keep keys and values; see ``paged_attention``."""

    cu_seqlens: Tensor  # [N + 1]
    seq_lens: Tensor  # [N]
    page_table: Tensor  # [N, max_pages]
    slot_mapping: Tensor  # [T]
    planned: dict[str, PlannedTensors]  # by shape of the layers, where the implementation plans
    statics: Statics


register_value(PagedAttentionPlan)


class PagedAttentionBackend(OneForm):
    """Planner of steps for the full-attention layers of one model."""

    chunk_size = 0

    def __init__(
        self,
        entries: tuple[LayerEntry, ...],
        sizes: PoolSizes,
        backends: Backends,
        modes: Sequence[Mode],
    ) -> None:
        """Choose an implementation for each of ``modes`` that serves every layer in ``entries``."""
        self.choices = {mode: (self._choose(entries, sizes, backends, mode),) for mode in modes}
        self._statics = {mode: Statics(impls_of(each)) for mode, each in self.choices.items()}
        self._planners = {
            mode: IMPLEMENTATIONS[choice.impl].load_planner()
            for mode, (choice,) in self.choices.items()
        }
        specs: list[AttentionSpec] = [entry.spec for entry in entries]  # type: ignore[misc]
        self._layers = {shape_name(_sizes(spec)): _facts(spec, sizes) for spec in specs}

    @staticmethod
    def _choose(
        entries: tuple[LayerEntry, ...], sizes: PoolSizes, backends: Backends, mode: Mode
    ) -> Choice:
        features = frozenset[str]() if mode.tokens_per_seq == 1 else frozenset({"extend"})
        specs: set[AttentionSpec] = {entry.spec for entry in entries}  # type: ignore[misc]
        needs = [
            Need(
                device=sizes.device,
                dtype=sizes.dtype,
                sizes={
                    "num_q_heads": spec.num_q_heads,
                    "num_kv_heads": spec.num_kv_heads,
                    "head_dim": spec.head_dim,
                    "page_size": sizes.page_size,
                },
                features=features
                | backends.features
                | ({"sliding_window"} if spec.window else set())
                | ({"softcap"} if spec.softcap else set())
                | ({RELATIVE_BIAS} if spec.reach else set())
                | ({"lse"} if spec.sinks else set())
                | fp8_kv.features_of(spec.kv_dtype),
            )
            for spec in specs
        ]
        preferred = backends.named("paged_attention", backends.full, mode)
        return select("paged_attention", IMPLEMENTATIONS, needs, preferred)

    def plan(self, batch: Batch, mode: Mode, form: LayerForm) -> PagedAttentionPlan:
        """Plan one step. Pure: the plan has the batch's tensors, and schedules made from them."""
        return PagedAttentionPlan(
            **batch.tensors_for(PagedAttentionPlan),
            planned=plan_layers(self._planners[mode], batch, self._layers),
            statics=self._statics[mode],
        )


def _sizes(spec: AttentionSpec) -> dict[str, int]:
    """Collect a layer's sizes: layers of equal sizes, window included, share planned tensors."""
    return {
        "num_q_heads": spec.num_q_heads,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "window": spec.window,
    }


def _facts(spec: AttentionSpec, sizes: PoolSizes) -> dict[str, Any]:
    """Collect what a planner is told about layers of one shape; their softcaps may differ."""
    return {
        **_sizes(spec),
        "page_size": sizes.page_size,
        "softcap": spec.softcap,
        "dtype": sizes.dtype,
        "device": sizes.device,
    }


def positions_of(plan: PagedAttentionPlan, num_tokens: int) -> Tensor:
    """Compute the positions [T] of a step's tokens in their sequences; padding gets any."""
    token = torch.arange(num_tokens, dtype=torch.int32, device=plan.cu_seqlens.device)
    seq = torch.searchsorted(plan.cu_seqlens[:-1], token, right=True) - 1
    return plan.seq_lens[seq] - plan.cu_seqlens[1:][seq] + token


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    plan: PagedAttentionPlan,
    cache: LayerCache,
    *,
    relative_bias: Tensor | None = None,
) -> Tensor:
    """Write k and v [T, Hkv, D] into the layer's pool, attend with q [T, Hq, D] -> [T, Hq, D].

    ``relative_bias`` [T, Hq, reach] is for a layer with biases by distance (``spec.reach``).
    """
    return paged_attention(
        *_tensors(q, k, v, spec, plan, cache),
        **_options(spec, plan, cache),
        relative_bias=relative_bias,
        planned=planned_for(plan.planned, _sizes(spec)),
    )


def attend_with_sinks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    spec: AttentionSpec,
    plan: PagedAttentionPlan,
    cache: LayerCache,
    *,
    relative_bias: Tensor | None = None,
) -> Tensor:
    """Attend as ``attend`` does, with a sink for each query: a logit [T, Hq] whose value is zero.

    Returns:
        [T, Hq, D] float32.
    """
    out, lse = paged_attention_with_lse(
        *_tensors(q, k, v, spec, plan, cache),
        **_options(spec, plan, cache),
        relative_bias=relative_bias,
    )
    return out.float() * torch.sigmoid(lse - sinks.float())[..., None]


def _tensors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    plan: PagedAttentionPlan,
    cache: LayerCache,
) -> tuple[Tensor, ...]:
    if q.shape[1:] != torch.Size((spec.num_q_heads, spec.head_dim)):
        raise ValueError(
            f"q must have shape [T, {spec.num_q_heads}, {spec.head_dim}], got {list(q.shape)}"
        )
    places = (plan.cu_seqlens, plan.seq_lens, plan.page_table, plan.slot_mapping)
    return (q, k, v, cache["kv"], *places)


def _options(spec: AttentionSpec, plan: PagedAttentionPlan, cache: LayerCache) -> dict[str, Any]:
    return {
        "scale": spec.scale,
        "window": spec.window,
        "softcap": spec.softcap,
        "kv_scales": cache.get(SCALES),
        "impl": plan.statics.impl("paged_attention"),
    }
