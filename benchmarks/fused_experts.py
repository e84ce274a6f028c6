"""The fused experts against their torch form and transformers' experts.

    python -m benchmarks.fused_experts [--threads N] [--seconds S]

Calls alternate between two sets of weights, each larger than the caches. With one thread, time is
that of the thread, not of the clock.
"""

from __future__ import annotations

import argparse
import time

import torch
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextExperts

from benchmarks.linear import fastest
from torch_hybrid.ops.fused_experts import fused_experts

NUM_EXPERTS, TOP_K, DIM, WIDTH = 64, 8, 1024, 512
NUM_TOKENS = (1, 4, 8, 32, 128, 512)


def make_experts(dtype: torch.dtype) -> Qwen3NextExperts:
    """One layer's experts with random weights."""
    config = Qwen3NextConfig(num_experts=NUM_EXPERTS, hidden_size=DIM, moe_intermediate_size=WIDTH)
    experts = Qwen3NextExperts(config).to(dtype)
    for weight in experts.parameters():
        torch.nn.init.normal_(weight, std=0.03)
    return experts.requires_grad_(False)


def compare(layers: list[Qwen3NextExperts], num_tokens: int, seconds: float) -> str:
    """One line of the table."""
    dtype = layers[0].down_proj.dtype
    x = torch.randn(num_tokens, DIM).to(dtype)
    ids = torch.rand(num_tokens, NUM_EXPERTS).argsort(1)[:, :TOP_K].contiguous()
    weights = torch.rand(num_tokens, TOP_K).to(dtype)

    def ours(turn: int, impl: str) -> torch.Tensor:
        layer = layers[turn % 2]
        return fused_experts(
            x, ids, weights, layer.gate_up_proj, layer.down_proj, activation="silu", impl=impl
        )

    torch.testing.assert_close(ours(0, "cpp"), layers[0](x, ids, weights), rtol=2e-2, atol=2e-2)
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    best = fastest(
        {
            "cpp": lambda i: ours(i, "cpp"),
            "torch": lambda i: ours(i, "torch"),
            "transformers": lambda i: layers[i % 2](x, ids, weights),
        },
        seconds,
        clock,
    )
    num_hit = ids.unique().numel()
    moved = num_hit * 3 * WIDTH * DIM * dtype.itemsize
    flops = 6 * num_tokens * TOP_K * WIDTH * DIM
    cells = [str(dtype)[6:], num_tokens, num_hit, *(f"{t * 1e6:.0f}" for t in best.values())]
    cells += [f"{moved / best['cpp'] / 1e9:.1f}", f"{flops / best['cpp'] / 1e9:.0f}"]
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    """Print the table; times in microseconds."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=2.0, help="per line of the table")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print("| dtype | T | hit | cpp | torch | transformers | cpp GB/s | cpp GFLOP/s |")
    print("|---|---|---|---|---|---|---|---|")
    for dtype in (torch.float32, torch.bfloat16):
        layers = [make_experts(dtype) for _ in range(2)]
        for num_tokens in NUM_TOKENS:
            print(compare(layers, num_tokens, options.seconds), flush=True)


if __name__ == "__main__":
    main()
