"""The Triton form of the experts against the floors of its GPU and the torch form.

    python -m benchmarks.triton_experts

The floor of a call is the larger of two times: of the bytes of the experts that it hits, tokens in
and out, at the rate of a large pass through memory; and of its floating point operations, at the
rate of a bfloat16 product of 8192^3; both rates are measured first. A time is that of one call of
several in a captured graph, which hit other experts each, so that the L2 cache holds few of them;
the fastest replay counts. The torch form reads how many tokens each expert has, so its time is
from call to result. Nothing is printed for a shape unless the two agree.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.triton_extend import measure_ceilings, randn
from benchmarks.triton_kernels import BF16, ROUND_BYTES, Call, microseconds
from torch_hybrid.ops.fused_experts import fused_experts

NUM_TOKENS = (1, 8, 64, 512, 4096)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    name: str
    num_experts: int
    top_k: int
    dim: int
    width: int


MODELS = (
    Model(name="Qwen3-Next", num_experts=512, top_k=10, dim=2048, width=512),
    Model(name="Qwen3-30B-A3B", num_experts=128, top_k=8, dim=2048, width=768),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Calls that hit other experts each, and what one of them must move and compute."""

    calls: Sequence[Call]
    num_hit: float
    num_bytes: float
    flops: float


def make_task(model: Model, num_tokens: int, gate_up: Tensor, down: Tensor) -> Task:
    pairs = num_tokens * model.top_k
    expert_bytes = 2 * 3 * model.dim * model.width
    hit_at_most = min(pairs, model.num_experts)
    num_calls = max(2, math.ceil(ROUND_BYTES / (hit_at_most * expert_bytes)))
    choices = [
        torch.rand(num_tokens, model.num_experts, device="cuda").topk(model.top_k)
        for _ in range(num_calls)
    ]
    x = randn(num_tokens, model.dim)
    calls = [
        partial(fused_experts, x, ids, scores.to(BF16), gate_up, down, activation="silu")
        for scores, ids in choices
    ]
    num_hit = sum(ids.unique().numel() for _, ids in choices) / num_calls
    return Task(
        calls=calls,
        num_hit=num_hit,
        num_bytes=num_hit * expert_bytes + 4 * x.numel(),
        flops=6 * pairs * model.dim * model.width,
    )


def check(call: Call) -> None:
    out, expected = call(impl="triton"), call(impl="torch")
    error, scale = (out - expected).abs().max().item(), expected.abs().max().item()
    assert error <= 2e-2 * scale, f"error {error:.1e}, outputs up to {scale:.1e}"


def from_call_to_result(calls: Sequence[Callable[[], object]]) -> float:
    """Microseconds of the fastest call, waited for."""
    times = []
    for call in calls:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return min(times) * 1e6


def compare(model: Model, bytes_rate: float, flops_rate: float) -> None:
    """The lines of one model."""
    gate_up = randn(model.num_experts, 2 * model.width, model.dim) * model.dim**-0.5
    down = randn(model.num_experts, model.dim, model.width) * model.width**-0.5
    for num_tokens in NUM_TOKENS:
        task = make_task(model, num_tokens, gate_up, down)
        check(task.calls[0])
        ours = microseconds([partial(call, impl="triton") for call in task.calls])
        torch_form = from_call_to_result([partial(call, impl="torch") for call in task.calls[:4]])
        moving, computing = task.num_bytes / bytes_rate, task.flops / flops_rate
        print(f"| {model.name} | {num_tokens} | {task.num_hit:.0f} | {ours:.1f} | {moving:.1f} "
              f"| {computing:.1f} | {ours / max(moving, computing):.2f} | {torch_form:.0f} |",
              flush=True)  # fmt: skip


def main() -> None:
    bytes_rate, flops_rate = measure_ceilings()
    print("| bfloat16 | tokens | hit | us | bytes us | FLOPs us | ratio to the larger | torch us |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for model in MODELS:
        compare(model, bytes_rate, flops_rate)


if __name__ == "__main__":
    main()
