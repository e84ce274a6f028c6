"""Steps of a twin on one rank, or under FSDP2 on several: sent to the processes of a group."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.training.twins import flattened, make_rows, make_twin

STEPS, BATCHES = 3, 2


def train() -> list[float]:
    """Train on two packings a step, each rank on its share; return the mean losses."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    twin = make_twin()
    if num_ranks > 1:
        mesh = init_device_mesh("cpu", (num_ranks,))
        for module in (*twin.model.layers, twin.lm_head, twin):
            fully_shard(module, mesh=mesh)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    seen = []
    for step in range(STEPS):
        seeds = range(BATCHES * step + rank, BATCHES * (step + 1), num_ranks)
        loss = torch.stack(
            [twin(**flattened(make_rows([20, 9], seed))).loss for seed in seeds]
        ).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach() / num_ranks
        dist.all_reduce(total)
        seen.append(float(total))
    return seen
