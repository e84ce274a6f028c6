"""Both delta rules to train with: inputs, their definition, and the chunks of transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

import torch_hybrid as th
from tests.ops.contract import assert_same_bits, assert_within_budget, skip_reason
from torch_hybrid.functional import gated_delta_rule, kimi_delta_attention
from torch_hybrid.ops.core.registration import REGISTERED
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


def on_a_cpu(op: str) -> Iterator[object]:
    """List the implementations of an op that run on a CPU, as parameters of a test."""
    for name, each in REGISTERED[op].items():
        if "cpu" in each.capability.devices:
            why = skip_reason(each, "cpu")
            yield pytest.param(name, marks=pytest.mark.skipif(bool(why), reason=why or ""))


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


def assert_all_within_budget(
    names: Sequence[str], made: Tensors, exact: Tensors, other: Tensors
) -> None:
    """Compare results and gradients, by name, as ``assert_within_budget`` does."""
    for name, a, b, c in zip(names, made, exact, other, strict=True):
        try:
            assert_within_budget(a, b, c)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def assert_packed_is_single(
    run: Callable[[Tensors, Sequence[int] | None], tuple[Tensor, Tensor]],
    xs: Tensors,
    weights: Tensors,
    lengths: Sequence[int],
    by_token: Sequence[int],
) -> None:
    """Compare a packing with its sequences alone; the last of ``xs`` are their initial states.

    Gradients of what all sequences share are sums of theirs within rounding.
    """
    y, final, *grads = with_gradients(lambda x: run(x, lengths), xs, weights)
    shared = [torch.zeros_like(x) for x in xs]
    for n, (start, end) in enumerate(pairwise(offsets(lengths).tolist())):
        rows, seq = slice(start, end), slice(n, n + 1)
        own = [x[rows] if at in by_token else x for at, x in enumerate(xs[:-1])] + [xs[-1][seq]]
        alone = with_gradients(lambda x: run(x, None), own, [weights[0][rows], weights[1][seq]])
        assert_same_bits(alone[0], y[rows])
        assert_same_bits(alone[1], final[seq])
        for at, grad in enumerate(alone[2:]):
            if at in by_token:
                assert_same_bits(grad, grads[at][rows])
            elif at == len(xs) - 1:
                assert_same_bits(grad, grads[at][seq])
            else:
                shared[at] += grad
    for at in range(len(xs) - 1):
        if at not in by_token:
            torch.testing.assert_close(shared[at], grads[at], rtol=1e-5, atol=1e-4)


def assert_rounds_once(
    run: Callable[[Tensors], tuple[Tensor, Tensor]], xs: Tensors, weights: Tensors
) -> None:
    """Compare bfloat16 with results from float32 arithmetic on the rounded inputs."""
    w = [x.bfloat16().float() for x in weights]
    made, wide = (with_gradients(run, each, w) for each in (xs, [x.float() for x in xs]))
    for a, b in zip(made, wide, strict=True):
        torch.testing.assert_close(a.float(), b, rtol=2**-7, atol=1e-5 * b.abs().max().item())


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
