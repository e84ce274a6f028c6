"""The published model of whole_model.py cut over the GPUs of one host, by tensor parallelism.

    python -m benchmarks.whole_model_ranks [--ranks 2] [--layers 48] [--overlap off auto]

Each rank makes the weights of its part, in 8 bits. A step's time is the middle one of a few, by the
clock of rank 0, the host's time within; all ranks begin it together.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from benchmarks.fp8_models import make_fp8_model
from benchmarks.gpu.steps import CONFIG, decoding, random_prompts
from benchmarks.whole_model import CONTEXT, MAX_TOKENS, NUM_LAYERS, PREFILLS, ROOM, prefill
from torch_hybrid import HybridModel, Runner
from torch_hybrid.models.shard import ranks_of

BATCHES = (1, 8, 32)
ROUNDS = 11


def make_part(num_layers: int) -> HybridModel:
    """This rank's part of the model, of random weights."""
    from transformers import Qwen3NextConfig

    config = Qwen3NextConfig(**CONFIG | {"num_hidden_layers": num_layers})
    device = torch.device("cuda", torch.cuda.current_device())
    return make_fp8_model(config, device, ranks_of(None))


def milliseconds(run: Callable[[], Any]) -> float:
    run()
    taken = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return 1e3 * statistics.median(taken)


def measure(model: HybridModel, overlap: Any, say: Callable[[str], None]) -> None:
    sizes = {"max_seqs": BATCHES[-1], "max_tokens": MAX_TOKENS}
    kv_tokens = BATCHES[-1] * (CONTEXT + ROOM) + PREFILLS[-1]
    runner = Runner(model, **sizes, kv_tokens=kv_tokens, two_batch_overlap=overlap)
    for count in BATCHES:
        seqs, prompts = decoding(runner, count)
        decode = partial(runner.extend, seqs, [prompt[:1] for prompt in prompts])
        say(f"overlap {overlap}: decode {count}: {milliseconds(decode):.2f} ms")
        runner.free(seqs)
    for length in PREFILLS:
        [prompt] = random_prompts(1, length, runner.vocab_size)
        took = milliseconds(partial(prefill, runner, prompt))
        say(f"overlap {overlap}: prefill {length}: {took:.1f} ms")
    trials = "; ".join(str(trial) for trial in runner.report().overlap_trials)
    say(f"overlap {overlap}: {runner.report().overlap} {trials}")


def run_rank(rank: int, options: argparse.Namespace, store: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=store, rank=rank, world_size=options.ranks)

    def say(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    model = make_part(options.layers)
    num_bytes = sum(weight.nbytes for weight in model.parameters())
    say(f"{num_bytes / 1e9:.1f} GB of weights on each of {options.ranks} ranks")
    for overlap in options.overlap:
        measure(model, overlap, say)
    dist.barrier()
    os._exit(0)  # captured graphs hold the communicator, which would be waited for


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.whole_model_ranks", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=NUM_LAYERS)
    parser.add_argument("--overlap", nargs="+", default=["off", "auto"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (options, f"file://{folder}/store")
        torch.multiprocessing.spawn(run_rank, args=arguments, nprocs=options.ranks)


if __name__ == "__main__":
    main()
