"""Both delta rules to train with: inputs, their definition, and the chunks of transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import normalize

import torch_hybrid as th
from tests.ops.contract import assert_same_bits
from torch_hybrid.functional import gated_delta_rule, kimi_delta_attention
from torch_hybrid.ops.delta_rule.reference import delta_rule_step

Tensors = list[Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule and its sizes."""

    function: Callable[..., tuple[Tensor, Tensor | None]]
    by_channel: bool
    num_k_heads: int = 2
    num_v_heads: int = 4
    k_dim: int = 16
    v_dim: int = 24

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

    def exact(
        self, xs: Tensors, lengths: Sequence[int], *, qk_l2norm: bool
    ) -> tuple[Tensor, Tensor]:
        """Walk token by token through ``delta_rule_step``, in the dtype of the inputs."""
        q, k, v, g, beta, states = xs
        if qk_l2norm:
            q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        group = self.num_v_heads // self.num_k_heads
        q, k = (x.repeat_interleave(group, 1) for x in (q * self.k_dim**-0.5, k))
        out, final = [v.new_empty(0, *v.shape[1:])], []
        for S, (start, end) in zip(states, pairwise(offsets(lengths).tolist()), strict=True):
            for t in range(start, end):
                S, o = delta_rule_step(S, q[t], k[t], v[t], g[t], beta[t])
                out.append(o[None])
            final.append(S)
        return torch.cat(out), torch.stack(final)

    def chunks(self) -> Callable[..., tuple[Tensor, Tensor | None]]:
        """Find transformers' chunks in torch."""
        if self.by_channel:
            from transformers.models.kimi_linear import modeling_kimi_linear

            return modeling_kimi_linear.chunk_kimi_delta_attention
        from transformers.models.qwen3_next import modeling_qwen3_next

        return modeling_qwen3_next.torch_chunk_gated_delta_rule

    def theirs(
        self, xs: Tensors, lengths: Sequence[int], *, qk_l2norm: bool
    ) -> tuple[Tensor, Tensor]:
        """Run transformers' chunks in torch, sequence by sequence: their states are [K, V]."""
        out, final = [xs[2].new_empty(0, *xs[2].shape[1:])], []
        rows = zip(*(x.split(list(lengths)) for x in xs[:5]), strict=True)
        for S, parts in zip(xs[5], rows, strict=True):
            if len(parts[0]):
                named = dict(zip(("query", "key", "value", "g", "beta"), parts, strict=True))
                o, S_end = self.chunks()(
                    **{name: x[None] for name, x in named.items()},
                    initial_state=S.mT[None],
                    output_final_state=True,
                    use_qk_l2norm_in_kernel=qk_l2norm,
                )
                out.append(o[0])
                S = S_end[0].mT
            final.append(S)
        return torch.cat(out), torch.stack(final)


GATED = Rule(function=gated_delta_rule, by_channel=False)
KIMI = Rule(function=kimi_delta_attention, by_channel=True, num_k_heads=3, num_v_heads=3)
RULES = {"gated": GATED, "kimi": KIMI}


def offsets(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def packing(lengths: Sequence[int]) -> th.Packing:
    return th.Packing(offsets(lengths), capacity=len(lengths))


def with_gradients(
    run: Callable[[Tensors], tuple[Tensor, Tensor]], xs: Tensors, weights: Tensors
) -> Tensors:
    """Return the results of ``run``, and the gradients of their weighted sum by its inputs."""
    leaves = [x.detach().clone().requires_grad_() for x in xs]
    results = run(leaves)
    total = sum((y * w.to(y.dtype)).sum() for y, w in zip(results, weights, strict=True))
    return [*(y.detach() for y in results), *torch.autograd.grad(total, leaves)]


def weights(xs: Tensors) -> Tensors:
    """Make random weights of outputs and final states."""
    return [torch.randn(xs[2].shape), torch.randn(xs[5].shape)]


def assert_same_bits_on_threads(run: Callable[[], Tensors]) -> None:
    """Compare runs on one thread and on three with one on as many as there are."""
    before, first = torch.get_num_threads(), run()
    try:
        for num_threads in (1, 3):
            torch.set_num_threads(num_threads)
            for a, b in zip(run(), first, strict=True):
                assert_same_bits(a, b)
    finally:
        torch.set_num_threads(before)
