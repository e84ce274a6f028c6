"""Two-batch overlap, and the part of the communication that it hides from two processes.

The processes share a model: each holds half of the heads and of every MLP. They sum their parts
twice in a layer, over a link that takes as long as the model. One compiled step runs as two halves:
while the all-reduce of one is in flight, the other computes. The trace shows it.
"""

import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing
from slow_link import LinkedGroup, Message, hidden_share, linked_group
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

import torch_hybrid as th

PROMPTS = [[(7 * i + row) % 256 for i in range(128)] for row in range(2)]
SIZES = {"max_seqs": 2, "max_tokens": 256, "kv_tokens": 256}


def make_model() -> th.HybridModel:
    """Make a random Qwen3-Next of a linear layer and a full one, the same in each process."""
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        num_experts=0,
    )
    return th.adapt(Qwen3NextForCausalLM(config))


def prefill(runner: th.Runner) -> torch.Tensor:
    """Prefill the prompts; return the logits after them."""
    seqs = runner.new_sequences(len(PROMPTS))
    logits = runner.extend(seqs, PROMPTS).clone()
    runner.free(seqs)
    return logits


def slow_down(group: LinkedGroup, runner: th.Runner) -> None:
    """Let all messages of a step take as long as the step takes over a link without delay."""
    times = []
    for _ in range(3):
        group.messages.clear()
        start = time.perf_counter()
        prefill(runner)
        times.append(time.perf_counter() - start)
    seconds = torch.tensor(min(times), dtype=torch.float64)
    dist.broadcast(seconds, 0)
    num_bytes = sum(message.num_bytes for message in group.messages)
    group.seconds_per_byte = seconds.item() / num_bytes


def draw(messages: list[Message]) -> None:
    """Print a line for each message, 60 columns to a step."""
    first, last = messages[0].start, messages[-1].wait_end
    for message in messages:
        times = (message.start, message.wait_start, message.wait_end)
        begin, wait, end = (round(60 * (t - first) / (last - first)) for t in times)
        print(f"{message.name} " + " " * begin + "=" * (wait - begin) + "#" * (end - wait))


def run(rank: int, store: str) -> None:
    """Run one of the two processes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    alone = prefill(th.Runner(make_model(), **SIZES, compile=False))

    group = linked_group()
    model = th.shard(make_model(), group)
    agreement = th.Agreement()
    overlapped = th.Runner(model, **SIZES, two_batch_overlap="on", check_batch=agreement.check)
    prefill(overlapped)  # compiles
    slow_down(group, overlapped)
    group.messages.clear()
    shared = prefill(overlapped)
    if rank == 0:
        for stage in overlapped.report().graphs["extend, in halves"].schedule:
            print(stage)
        draw(group.messages)
        error = (shared - alone).abs().max() / alone.abs().max()
        share = hidden_share(group.messages)
        print(f"{share:.0%} of the time in flight was hidden (=), the rest waited for (#)")
        print(f"two processes against one: {error:.1e} of the largest logit")
        assert error < 1e-4
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Start the two processes."""
    with tempfile.TemporaryDirectory() as folder:
        # A fork before any thread starts is safe, and spares each process the imports.
        torch.multiprocessing.start_processes(
            run, args=(f"file://{folder}/store",), nprocs=2, start_method="fork"
        )


if __name__ == "__main__":
    main()
