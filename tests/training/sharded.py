"""Steps of a twin on one rank, or on several under FSDP2 or DDP: sent to processes of a group."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import torch_hybrid as th
from tests.training.twins import flattened, make_rows, make_twin

BATCHES = 2  # of a step


def train(
    start: int,
    stop: int,
    resume_from: str = "",
    save_to: str = "",
    *,
    by: str = "FSDP2",
    family: str = "qwen3_next_dense",
    mtp: str | None = None,
) -> list[float]:
    """Take steps on two packings each, every rank on its share; return the mean losses.

    Args:
        start: first step.
        stop: step not to take any more.
        resume_from: folder of a checkpoint of model and optimizer; else both are new.
        save_to: folder for a checkpoint after the last step.
        by: "FSDP2", "FSDP2 of compiled layers" or "DDP".
        family: of the model.
        mtp: folder of a checkpoint whose head trains too.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    twin = th.make_trainable(make_twin(family, seed=1 if resume_from else 0), mtp=mtp)
    if num_ranks > 1:
        twin = spread(twin, by)
    optimizer = torch.optim.AdamW(twin.parameters(), lr=0.01)
    if resume_from:
        load(twin, optimizer, resume_from)
    seen = []
    for step in range(start, stop):
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
    if save_to:
        dcp.save(states(twin, optimizer), checkpoint_id=save_to)
    return seen


def train_each(families: tuple[str, ...], mtp: str) -> dict[str, list[float]]:
    """Take two steps with a twin of each family, and with one and its head."""
    losses = {family: train(0, 2, family=family) for family in families}
    if dist.get_world_size() > 1:
        check_bits_of_a_server()
    picking = train(0, 2, by="DDP", family="qwen4_exp")
    return {**losses, "with a head": train(0, 2, mtp=mtp), "DDP of picked blocks": picking}


def check_bits_of_a_server() -> None:
    """Check that a batch-invariant twin has the bits of one on one rank, after a step too."""
    whole, twin = (
        th.make_trainable(make_twin(), batch_invariant={"compile": False}) for _ in range(2)
    )
    spread(twin, "FSDP2")
    rows = make_rows([20, 9], seed=dist.get_rank())
    before = whole(**flattened(rows)).logits
    assert torch.equal(twin(**flattened(rows)).logits, before)
    twin(**flattened(rows)).loss.backward()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    with torch.no_grad():
        for own, shard in zip(whole.parameters(), twin.parameters(), strict=True):
            own.copy_(shard.full_tensor())
        after = whole(**flattened(rows)).logits
        assert torch.equal(twin(**flattened(rows), use_cache=False).logits, after)
    assert not torch.equal(before, after)


def spread(twin: Any, by: str) -> Any:
    """Spread a twin over all ranks; what several layers share goes with the rest of the model."""
    if by == "DDP":
        picks = any("indexer" in name for name, _ in twin.named_parameters())
        return DistributedDataParallel(twin, static_graph=picks)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layers = next(each for each in twin.modules() if isinstance(each, nn.ModuleList))
    for layer in layers if "compiled" in by else ():
        layer.compile(fullgraph=True, backend="aot_eager")
    is_tied = twin.lm_head.weight is twin.get_input_embeddings().weight
    uses = Counter(parameter for layer in layers for parameter in layer.parameters())
    own = [layer for layer in layers if all(uses[each] == 1 for each in layer.parameters())]
    for module in (*own, *[twin.lm_head] * (not is_tied), twin):
        fully_shard(module, mesh=mesh)
    return twin


def states(twin: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Collect a rank's shards of what a checkpoint holds."""
    model, of_optimizer = get_state_dict(twin, optimizer)
    return {"model": model, "optimizer": of_optimizer}


def load(twin: Any, optimizer: torch.optim.Optimizer, folder: str) -> None:
    """Read a checkpoint of any number of ranks."""
    held = states(twin, optimizer)
    dcp.load(held, checkpoint_id=folder)
    set_state_dict(
        twin,
        optimizer,
        model_state_dict=held["model"],
        optim_state_dict=held["optimizer"],
    )
