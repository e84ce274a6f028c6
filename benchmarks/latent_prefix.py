"""MLA prefill after a prefix: time and peak memory of each form.

    python -m benchmarks.latent_prefix [--tokens N] [--budget N] [--prefixes N ...]

One attention layer with the sizes of DeepSeek-V3, 16 of its heads, takes new tokens of one sequence
after a prefix of 4k and 64k tokens. In chunks, memory must grow with the token budget and not with
the prefix. Peak memory is the resident set's high-water mark above what was resident before.
"""

from __future__ import annotations

import argparse
import gc
import time
from pathlib import Path

import torch
from torch import nn

import torch_hybrid as th
from torch_hybrid.layers import LatentAttention

SPEC = th.LatentSpec(
    num_heads=16, latent_rank=512, nope_dim=128, rope_dim=64, v_dim=128, scale=192**-0.5
)
TABLE = th.LayerTable.from_specs([SPEC])
POLICIES = {
    "absorbed": lambda budget: th.PrefixPolicy(absorbed="always"),
    "one shot": lambda budget: th.PrefixPolicy(absorbed="never", token_budget=None),
    "chunks": lambda budget: th.PrefixPolicy(absorbed="never", token_budget=budget, one_shot=False),
}


class Layer:
    """One layer, a pool full of latents, and steps over it."""

    def __init__(self, capacity: int) -> None:
        width = SPEC.num_heads * (SPEC.nope_dim + SPEC.v_dim)
        self.attention = LatentAttention(SPEC, nn.Linear(SPEC.latent_rank, width, bias=False))
        self.cache = th.HybridCache(TABLE, max_seqs=1, kv_tokens=capacity, page_size=64)
        for pool in self.cache.pool_tensors():
            pool.normal_()

    @torch.inference_mode()
    def run(self, prefix: int, num_new: int, policy: th.PrefixPolicy) -> tuple[str, float, float]:
        """The form, the seconds of a step, and the bytes that it took at its peak."""
        names = th.Backends(prefix=policy)
        backends = th.make_backends(TABLE, self.cache.sizes, names)
        seqs = self.cache.allocate(1)
        self.cache.reserve(seqs, [prefix])
        self.cache.commit(seqs, [prefix])
        batch = self.cache.make_batch(seqs, [[0] * num_new])
        plans = th.plan_all(backends, batch, th.Mode.EXTEND)
        plan = plans["latent_attention"]
        q = torch.randn(num_new, SPEC.num_heads, SPEC.qk_dim)
        rows = torch.randn(num_new, SPEC.row_dim).split([SPEC.latent_rank, SPEC.rope_dim], dim=1)
        (pool,) = self.cache.pool_tensors()
        seconds, peaks = [], []
        for _ in range(3):
            gc.collect()
            before = _reset_peak()
            start = time.perf_counter()
            self.attention(q, *rows, plan, pool)
            seconds.append(time.perf_counter() - start)
            peaks.append(_status("VmHWM") - before)
        self.cache.free(seqs)
        return plan.statics.form, min(seconds), max(peaks)


def _reset_peak() -> float:
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024.0


def main() -> None:
    """Print a line for each prefix and form."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 512], help="new tokens")
    parser.add_argument("--budget", type=int, default=4096, help="token budget of a chunk")
    parser.add_argument("--prefixes", type=int, nargs="+", default=[4096, 65536])
    options = parser.parse_args()
    layer = Layer(max(options.prefixes) + max(options.tokens) + 64)
    print(f"{'prefix':>8} {'new':>5} {'form':>12} {'ms':>9} {'peak MiB':>9}")
    for prefix in options.prefixes:
        for num_new in options.tokens:
            for policy in POLICIES.values():
                form, seconds, peak = layer.run(prefix, num_new, policy(options.budget))
                cells = f"{prefix:>8} {num_new:>5} {form:>12} {seconds * 1e3:>9.1f}"
                print(f"{cells} {peak / 2**20:>9.0f}", flush=True)


if __name__ == "__main__":
    main()
