"""Both delta rules to train with: inputs, their definition, and the chunks of transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from tests.functional.recurrence import Recurrence, Results, Tensors
from torch_hybrid.functional import gated_delta_rule, kimi_delta_attention
from torch_hybrid.ops.delta_rule.reference import delta_rule_step


@dataclass(frozen=True, kw_only=True, eq=False)
class Rule(Recurrence):
    """A rule and its sizes."""

    by_channel: bool
    num_k_heads: int = 2
    num_v_heads: int = 4
    k_dim: int = 16
    v_dim: int = 24
    names: tuple[str, ...] = ("q", "k", "v", "g", "beta", "initial_state")
    like: int = 2
    decay: str = "g"
    decays: tuple[float, ...] = (0.0, -20.0, -torch.inf)

    def inputs(self, lengths: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensors:
        """Make q, k, v, g, beta and initial states; decays from 1 to e^-20, some exactly 1."""
        T, H, HV, K, V = (
            sum(lengths), self.num_k_heads, self.num_v_heads, self.k_dim, self.v_dim
        )  # fmt: skip
        work = torch.promote_types(dtype, torch.float32)
        g = -torch.randn(T, HV, *[K] * self.by_channel).exp() / 8
        g = torch.where(torch.rand_like(g) < 0.2, 0.0, g)
        g = torch.where(torch.rand_like(g) < 0.05, -20.0, g)
        rows = [
            torch.randn(T, H, K),
            normalize(torch.randn(T, H, K), dim=-1),
            torch.randn(T, HV, V),
        ]
        states = torch.randn(len(lengths), HV, V, K)
        wide = [g, torch.rand(T, HV), states]
        return [x.to(dtype) for x in rows] + [x.to(work) for x in wide]

    def walk(self, rows: Tensors, shared: Tensors, state: Tensor | None) -> Results:
        """Walk through ``delta_rule_step``."""
        q, k, v, g, beta = rows
        if self.options.get("qk_l2norm"):
            q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        group = self.num_v_heads // self.num_k_heads
        q, k = (x.repeat_interleave(group, 1) for x in (q * self.k_dim**-0.5, k))
        out = []
        for t in range(len(q)):
            state, o = delta_rule_step(state, q[t], k[t], v[t], g[t], beta[t])
            out.append(o)
        return torch.stack(out), state

    def chunks(self) -> Callable[..., tuple[Tensor, Tensor | None]]:
        """Find transformers' chunks in torch."""
        if self.by_channel:
            from transformers.models.kimi_linear import modeling_kimi_linear

            return modeling_kimi_linear.chunk_kimi_delta_attention
        from transformers.models.qwen3_next import modeling_qwen3_next

        return modeling_qwen3_next.torch_chunk_gated_delta_rule

    def their_walk(self, rows: Tensors, shared: Tensors, state: Tensor | None) -> Results:
        """Run transformers' chunks in torch: their states are [K, V]."""
        named = dict(zip(("query", "key", "value", "g", "beta"), rows, strict=True))
        o, final = self.chunks()(
            **{name: x[None] for name, x in named.items()},
            initial_state=state.mT[None],
            output_final_state=True,
            use_qk_l2norm_in_kernel=self.options.get("qk_l2norm", False),
        )
        return o[0], final[0].mT

    def op_arguments(self, xs: Tensors, cu_seqlens: Tensor) -> tuple[Tensors, dict[str, object]]:
        return [*xs[:-1], cu_seqlens, xs[-1]], {"scale": 0.5, "qk_l2norm": True}


GATED = Rule(function=gated_delta_rule, op="gated_delta_rule", by_channel=False)
KIMI = Rule(
    function=kimi_delta_attention, op="kimi_delta_attention", by_channel=True,
    num_k_heads=3, num_v_heads=3,
)  # fmt: skip
RULES = {"gated": GATED, "kimi": KIMI}
