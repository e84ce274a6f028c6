"""A delta rule's decode step and the parts that it is made of: what tests and benchmarks call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from tests.ops import step_family
from tests.ops.delta_rule.step_cases import Case, Inputs
from torch_hybrid.ops.causal_conv1d import causal_conv1d


@dataclass(frozen=True, kw_only=True, eq=False)
class Family(step_family.Family):
    """A step, and the parts that it is made of.

    ``recurrence`` and ``activations`` are the parts that
    it is made of: the recurrent op, and what a layer makes of inputs: the log decays and step
    sizes, and the norm of outputs gated by z.
    """

    cases: Mapping[str, Case]
    make_inputs: Callable[..., Inputs]
    recurrence: Callable[..., Tensor]
    gates: Callable[[Inputs], tuple[Tensor, Tensor]]
    gated_norm: Callable[[Inputs, Tensor], Tensor]

    def by_parts(self, inputs: Inputs, impl: str) -> Tensor:
        """The ops of a convolution and of the recurrence, and between them what a layer does."""
        num_tokens, (_, num_heads, v_dim, k_dim) = len(inputs.qkv), inputs.state.shape
        index = (inputs.cu_seqlens, inputs.initial_indices, inputs.state_indices)
        weights = (inputs.conv_weight, inputs.conv_bias, inputs.conv_state)
        activation = inputs.activation
        mixed = causal_conv1d(inputs.qkv, *weights, *index, activation=activation, impl=impl)
        k_size = (mixed.shape[1] - num_heads * v_dim) // 2
        q, k, v = mixed.split([k_size, k_size, num_heads * v_dim], 1)
        o = self.recurrence(
            q.view(num_tokens, -1, k_dim),
            k.view(num_tokens, -1, k_dim),
            v.view(num_tokens, -1, v_dim),
            *self.gates(inputs),
            inputs.state,
            *index,
            scale=inputs.scale,
            qk_l2norm=True,
            impl=f"recurrent_{impl}",
        )
        return self.gated_norm(inputs, o).flatten(1)
