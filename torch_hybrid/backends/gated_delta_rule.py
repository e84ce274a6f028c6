"""The gated delta rule with its convolution: what a step needs, and how a layer runs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.utils import _pytree as pytree

from torch_hybrid.backends.mode import Mode
from torch_hybrid.backends.select import Backends, select
from torch_hybrid.batch import Batch
from torch_hybrid.caches.recurrent_state import RecurrentState
from torch_hybrid.caches.sizes import PoolSizes
from torch_hybrid.ops.capability import Need
from torch_hybrid.ops.causal_conv1d import op as conv
from torch_hybrid.ops.gated_delta_rule import op as rule
from torch_hybrid.specs import DeltaRuleSpec, LayerEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaRuleStatics:
    """What is part of the graph: the form of the recurrence and the implementations."""

    chunked: bool
    rule_impl: str
    conv_impl: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaRulePlan:
    """Where the N sequences of a step keep their states; see ``chunk_gated_delta_rule``."""

    cu_seqlens: Tensor  # [N + 1]
    state_indices: Tensor  # [N]
    has_initial_state: Tensor  # [N] bool
    statics: DeltaRuleStatics


pytree.register_constant(DeltaRuleStatics)
pytree.register_dataclass(DeltaRulePlan)


class DeltaRuleBackend:
    """Plans steps for the gated-delta-rule layers of one model.

    Decode takes the recurrent form, extend the chunk form.
    """

    def __init__(
        self, entries: tuple[LayerEntry, ...], sizes: PoolSizes, backends: Backends
    ) -> None:
        """Choose an implementation for each mode that serves every layer in ``entries``."""
        specs: set[DeltaRuleSpec] = {entry.spec for entry in entries}  # type: ignore[misc]

        def needs(sizes_of: Callable[[DeltaRuleSpec], dict[str, int]]) -> list[Need]:
            return [
                Need(device=sizes.device, dtype=sizes.dtype, sizes=sizes_of(spec)) for spec in specs
            ]

        conv_needs = needs(lambda spec: {"conv_width": spec.conv_width})
        rule_needs = needs(
            lambda spec: {"head_k_dim": spec.head_k_dim, "head_v_dim": spec.head_v_dim}
        )
        convolution = select("causal_conv1d", conv.IMPLEMENTATIONS, conv_needs, backends.conv)
        recurrent = select(
            "recurrent_gated_delta_rule",
            rule.RECURRENT_IMPLEMENTATIONS,
            rule_needs,
            backends.linear,
        )
        chunk = select(
            "chunk_gated_delta_rule", rule.CHUNK_IMPLEMENTATIONS, rule_needs, backends.linear
        )
        self.choices = {
            Mode.DECODE: (recurrent, convolution),
            Mode.EXTEND: (chunk, convolution),
        }

    def plan(self, batch: Batch, mode: Mode) -> DeltaRulePlan:
        """The plan of one step. Pure."""
        rule_choice, conv_choice = self.choices[mode]
        query_lens = batch.cu_seqlens[1:] - batch.cu_seqlens[:-1]
        return DeltaRulePlan(
            cu_seqlens=batch.cu_seqlens,
            state_indices=batch.state_indices,
            has_initial_state=batch.seq_lens > query_lens,
            statics=DeltaRuleStatics(
                chunked=mode is Mode.EXTEND,
                rule_impl=rule_choice.impl,
                conv_impl=conv_choice.impl,
            ),
        )


def convolve(
    x: Tensor, weight: Tensor, spec: DeltaRuleSpec, plan: DeltaRulePlan, cache: RecurrentState
) -> Tensor:
    """Causal convolution and activation of x [T, C] -> [T, C]; advances ``cache.conv``."""
    return conv.causal_conv1d(
        x,
        weight,
        None,
        cache.conv,
        plan.cu_seqlens,
        plan.state_indices,
        plan.has_initial_state,
        activation=spec.activation,
        impl=plan.statics.conv_impl,
    )


def apply_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    spec: DeltaRuleSpec,
    plan: DeltaRulePlan,
    cache: RecurrentState,
) -> Tensor:
    """The rule over q, k [T, H, K] and v [T, HV, V] -> [T, HV, V]; advances ``cache.state``."""
    form = rule.chunk_gated_delta_rule if plan.statics.chunked else rule.recurrent_gated_delta_rule
    return form(
        q,
        k,
        v,
        g,
        beta,
        cache.state,
        plan.cu_seqlens,
        plan.state_indices,
        plan.has_initial_state,
        scale=spec.head_k_dim**-0.5,
        qk_l2norm=True,
        impl=plan.statics.rule_impl,
    )
