"""MLA prefill after a prefix: time and peak memory of each form.

    python -m benchmarks.latent_prefix [--tokens N] [--budget N] [--prefixes N ...] [--heads N ...]
    python -m benchmarks.latent_prefix --device cuda --heads 16 32 128

One attention layer with the sizes of DeepSeek-V3, 16 of its heads, takes new tokens of one sequence
after a prefix of 4k and 64k tokens. In chunks, memory must grow with the token budget and not with
the prefix. ``cost`` is what ``PrefixPolicy.absorbed_cost`` stands for: the time of a counted FLOP
of the absorbed form over one of the form in that line.

Peak memory is the resident set's high-water mark above what was resident before; on a GPU, in
bfloat16 and captured in a graph, the allocator's.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import torch_hybrid as th
from benchmarks.gpu.clock import time_of
from torch_hybrid.backends.latent_attention import Work
from torch_hybrid.layers import LatentAttention

POLICIES = {
    "absorbed": lambda budget: th.PrefixPolicy(absorbed="always"),
    "one shot": lambda budget: th.PrefixPolicy(absorbed="never", token_budget=None),
    "chunks": lambda budget: th.PrefixPolicy(absorbed="never", token_budget=budget, one_shot=False),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What one step took."""

    form: str
    seconds: float
    peak: float  # bytes
    work: Work


class Layer:
    """One layer, a pool full of latents, and steps over it."""

    def __init__(self, num_heads: int, capacity: int, device: torch.device) -> None:
        self.spec = th.LatentSpec(
            num_heads=num_heads,
            latent_rank=512,
            nope_dim=128,
            rope_dim=64,
            v_dim=128,
            scale=192**-0.5,
        )
        self.table = th.LayerTable.from_specs([self.spec])
        width = num_heads * (self.spec.nope_dim + self.spec.v_dim)
        self.device = device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        project = nn.Linear(512, width, bias=False, device=device, dtype=self.dtype)
        self.attention = LatentAttention(self.spec, project)
        self.cache = th.HybridCache(
            self.table,
            max_seqs=1,
            kv_tokens=capacity,
            page_size=64,
            dtype=self.dtype,
            device=device,
        )
        for pool in self.cache.pool_tensors():
            pool.normal_()

    @torch.inference_mode()
    def run(self, prefix: int, num_new: int, policy: th.PrefixPolicy) -> Taken:
        """A step of new tokens after a prefix."""
        spec = self.spec
        backends = th.make_backends(self.table, self.cache.sizes, th.Backends(prefix=policy))
        seqs = self.cache.allocate(1)
        self.cache.reserve(seqs, [prefix])
        self.cache.commit(seqs, [prefix])
        batch = self.cache.make_batch(seqs, [[0] * num_new])
        plan = th.plan_all(backends, batch, th.Mode.EXTEND)["latent_attention"]
        plan = tree_map_only(Tensor, lambda leaf: leaf.to(self.device), plan)
        like = {"dtype": self.dtype, "device": self.device}
        q = torch.randn(num_new, spec.num_heads, spec.qk_dim, **like)
        rows = torch.randn(num_new, spec.row_dim, **like).split([512, 64], dim=1)
        step = partial(self.attention, q, *rows, plan, self.cache.pools["latent_attention"][0])
        seconds, peak = (_on_gpu if self.device.type == "cuda" else _on_cpu)(step)
        self.cache.free(seqs)
        work = Work.of([batch], spec)
        return Taken(form=plan.statics.form, seconds=seconds, peak=peak, work=work)


def _on_cpu(step: Callable[[], Tensor]) -> tuple[float, float]:
    seconds, peaks = [], []
    for _ in range(3):
        gc.collect()
        before = _reset_peak()
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
        peaks.append(_status("VmHWM") - before)
    return min(seconds), max(peaks)


def _on_gpu(step: Callable[[], Tensor]) -> tuple[float, float]:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    peak = torch.cuda.max_memory_allocated() - before
    return time_of([step]).us * 1e-6, peak


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
    parser.add_argument("--heads", type=int, nargs="+", default=[16])
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    options = parser.parse_args()
    print(
        f"{'heads':>5} {'prefix':>8} {'new':>5} {'form':>12} {'ms':>9} {'peak MiB':>9} {'cost':>5}"
    )
    for heads in options.heads:
        layer = Layer(heads, max(options.prefixes) + max(options.tokens) + 64, options.device)
        for prefix in options.prefixes:
            for num_new in options.tokens:
                forms = [
                    layer.run(prefix, num_new, policy(options.budget))
                    for policy in POLICIES.values()
                ]
                absorbed = forms[0].seconds / forms[0].work.absorbed
                for taken in forms:
                    cost = absorbed / (taken.seconds / taken.work.expanded)
                    print(
                        f"{heads:>5} {prefix:>8} {num_new:>5} {taken.form:>12} "
                        f"{taken.seconds * 1e3:>9.3f} {taken.peak / 2**20:>9.0f} "
                        f"{'' if taken is forms[0] else f'{cost:.2f}':>5}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
