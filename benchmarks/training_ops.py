"""Forward and backward of the delta rules on a CPU, beside the chunks in torch of transformers.

    python -m benchmarks.training_ops [--repeats N]

Heads are those of the 225M models (models.py); q and k are normalised within. Times are CPU times
of one thread, user and system together, the least of a few runs by turns: other work on the machine
moves them little. Gradients of both are compared first.
"""

from __future__ import annotations

import argparse
import resource
from collections.abc import Callable

import torch
from torch import Tensor

from tests.functional.rules import GATED, KIMI, Rule, packing

# 2 x 512 and 8 x 128 tokens; heads of Qwen3-Next and of Kimi-Linear.
LENGTHS = ((512,) * 2, (128,) * 8)
RULES = {
    "gated delta rule, 8/16 x 128": Rule(
        function=GATED.function, by_channel=False,
        num_k_heads=8, num_v_heads=16, k_dim=128, v_dim=128,
    ),
    "Kimi delta attention, 8 x 128": Rule(
        function=KIMI.function, by_channel=True,
        num_k_heads=8, num_v_heads=8, k_dim=128, v_dim=128,
    ),
}  # fmt: skip
Step = Callable[[], list[Tensor]]


def cpu_ms(step: Step) -> float:
    before = resource.getrusage(resource.RUSAGE_SELF)
    step()
    after = resource.getrusage(resource.RUSAGE_SELF)
    return 1e3 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def steps(rule: Rule, lengths: tuple[int, ...], dtype: torch.dtype) -> dict[str, Step]:
    """Make a step of each contestant: transformers' takes sequences of one length as a batch."""
    xs = [x.requires_grad_() for x in rule.inputs(lengths, dtype)[:5]]
    weight = torch.randn(xs[2].shape).to(dtype)
    packed = packing(lengths)

    def ours() -> list[Tensor]:
        o, _ = rule.function(*xs, packed, qk_l2norm=True, output_final_state=False)
        return list(torch.autograd.grad((o * weight).sum(), xs))

    def theirs() -> list[Tensor]:
        batch = [x.unflatten(0, (len(lengths), -1)) for x in xs]
        o, _ = rule.chunks()(*batch, use_qk_l2norm_in_kernel=True)
        return list(torch.autograd.grad((o.flatten(0, 1) * weight).sum(), xs))

    return {"torch_hybrid": ours, "transformers": theirs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print("| rule | tokens | dtype | torch_hybrid, ms | transformers, ms | ratio |")
    print("|---|---|---|---|---|---|")
    for name, rule in RULES.items():
        for lengths in LENGTHS:
            for dtype in (torch.float32, torch.bfloat16):
                each = steps(rule, lengths, dtype)
                rtol = 1e-3 if dtype == torch.float32 else 3e-2
                for a, b in zip(*(step() for step in each.values()), strict=True):
                    torch.testing.assert_close(a, b, rtol=rtol, atol=rtol * b.abs().max().item())
                times: dict[str, list[float]] = {who: [] for who in each}
                for _ in range(repeats):
                    for who, step in each.items():
                        times[who].append(cpu_ms(step))
                a, b = (min(times[who]) for who in each)
                tokens, short = f"{len(lengths)} x {lengths[0]}", str(dtype).removeprefix("torch.")
                print(f"| {name} | {tokens} | {short} | {a:.0f} | {b:.0f} | {b / a:.1f} |")


if __name__ == "__main__":
    main()
