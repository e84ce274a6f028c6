"""Peak memory of serving on a GPU, beside weights, pools and the largest step.

    python -m benchmarks.gpu_memory [--model NAME] [--kv-tokens N | auto] [--kv-dtype fp8]

The largest step is measured first: compiled and not captured, a prompt of as many tokens as a step
takes and a decode step of all sequences, as the rise of allocated memory. Then a runner as it
comes, with CUDA graphs, serves prompts and batches of many sizes, and the most that its process
ever reserved of the device counts: what the allocator keeps, and what graphs have of their own.
"""

from __future__ import annotations

import argparse
import gc
import random
from typing import Any

import torch

import torch_hybrid as th
from benchmarks.models import FAMILIES
from benchmarks.results import Target
from torch_hybrid.caches.room import byte_count
from torch_hybrid.graphs.capturing.cuda_graph import on_capture_stream

LARGE = {"num_hidden_layers": 8, "hidden_size": 2048, "vocab_size": 64_000}
MAX_SEQS, MAX_TOKENS = 32, 2048
LIMIT = 1.05


def make_model(family: str) -> Any:
    with torch.device("meta"):
        model = FAMILIES[family](LARGE).to(torch.bfloat16)
    model.to_empty(device="cuda")
    for weight in {*model.parameters(), *model.buffers()}:
        weight.data.normal_(std=0.02)
    return th.adapt(model)


def largest_step(runner: th.Runner) -> int:
    """Bytes that the largest steps take."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    serve(runner, [MAX_TOKENS], [MAX_SEQS])
    return torch.cuda.max_memory_allocated() - before


def serve(runner: th.Runner, prompts: list[int], batches: list[int]) -> None:
    """Prompts of these lengths, one after another, and decode steps of these batches."""
    rng = random.Random(0)
    for length in prompts:
        (seq,) = runner.new_sequences(1)
        runner.extend([seq], [[rng.randrange(runner.vocab_size) for _ in range(length)]])
        runner.free([seq])
    for count in batches:
        seqs = runner.new_sequences(count)
        for _ in range(3):
            runner.extend(seqs, [[1]] * count)
        runner.free(seqs)
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="qwen3_next_moe", choices=sorted(FAMILIES))
    parser.add_argument("--kv-tokens", default="65536")
    parser.add_argument("--kv-dtype", default="auto")
    chosen = parser.parse_args()
    model = make_model(chosen.model)
    weights = torch.cuda.memory_allocated()
    sizes: dict[str, Any] = {"max_seqs": MAX_SEQS, "max_tokens": MAX_TOKENS}
    sizes["kv_dtype"] = chosen.kv_dtype
    with on_capture_stream(model.device):  # whose memory of cuBLAS is there once
        plain = th.Runner(model, **sizes, kv_tokens=2 * MAX_TOKENS, cuda_graphs="off")
        plain.warm_up()
        step = largest_step(plain)
    del plain
    gc.collect()
    torch.cuda.empty_cache()

    torch.cuda.reset_peak_memory_stats()
    kv_tokens = "auto" if chosen.kv_tokens == "auto" else int(chosen.kv_tokens)
    runner = th.Runner(model, **sizes, kv_tokens=kv_tokens)
    pools = runner.report().pool_bytes
    runner.warm_up()
    torch.cuda.empty_cache()
    serve(runner, [1, 3, 17, 100, 256, 700, 1024, MAX_TOKENS], [1, 2, 3, 5, 9, 17, MAX_SEQS])
    peak, report = torch.cuda.max_memory_reserved(), runner.report()
    least = weights + pools + step
    shown = {"weights": weights, "pools": pools, "largest step": step, "peak": peak}
    print(", ".join(f"{name} {byte_count(count)}" for name, count in shown.items()))
    print(f"{len(report.captured_graphs)} graphs, {byte_count(report.captured_bytes)}")
    if runner.kv_room is not None:
        print(f"kv_tokens auto: {runner.kv_room.num_tokens:,}; {runner.kv_room}")
        print(f"free: {byte_count(torch.cuda.mem_get_info()[0])}")
    print(Target(name="peak / (weights + pools + step)", measured=peak / least, limit=LIMIT))


if __name__ == "__main__":
    main()
