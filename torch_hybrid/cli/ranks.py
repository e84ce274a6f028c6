"""The command line as one of several torchrun processes that share a model."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click

from torch_hybrid.cli.output import err
from torch_hybrid.host.progress import be_silent

if TYPE_CHECKING:
    import torch.distributed as dist


def join_ranks(device: str) -> tuple[dist.ProcessGroup, str]:
    """Join the processes of torchrun that share the model, until the command ends; twice is once.

    With "cuda", or "auto" where there are GPUs, each process takes the GPU of its local rank. Only
    rank 0 prints. Every rank takes rank 0's seed, so all draw the same numbers.

    Returns:
        The group of all processes, and this one's device.

    Raises:
        ValueError: torchrun has not started this process.
    """
    import torch
    import torch.distributed as dist

    if "LOCAL_RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise ValueError(
            "--ranks shares the model among the processes of torchrun: "
            "torchrun --nproc-per-node 2 --no-python torch-hybrid ... --ranks"
        )
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    if dist.is_initialized():  # by this command, in another thread
        assert dist.group.WORLD is not None
        return dist.group.WORLD, device
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo")
    click.get_current_context().call_on_close(dist.destroy_process_group)
    seeds = [torch.initial_seed()]
    dist.broadcast_object_list(seeds, src=0)
    torch.manual_seed(seeds[0])
    if dist.get_rank() != 0:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (open until the process ends)
        err.quiet = True
        be_silent()
    assert dist.group.WORLD is not None
    return dist.group.WORLD, device


def refuse_ranks_apart() -> None:
    """Refuse to load the whole model in each of several processes of torchrun.

    Raises:
        ValueError: torchrun has started several.
    """
    num_processes = int(os.environ.get("WORLD_SIZE", "1"))
    if num_processes > 1 and "LOCAL_RANK" in os.environ:
        raise ValueError(
            f"torchrun started {num_processes} processes, and each would serve all of the model by "
            f"itself: give --ranks to share it among them, or leave torchrun out"
        )
