"""Sums over the ranks of one host by one kernel that reads the memory of all.

Over NVLink a sum of few rows takes NCCL 10 to 12 us, such a kernel 7. A decode step has two sums in
each layer. One of many rows is NCCL's: of R ranks, each reads the parts of all others.
"""

from __future__ import annotations

import os
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, distributed_c10d
from torch.fx import Graph

from torch_hybrid.graphs.passes.marks import half_of, maker
from torch_hybrid.graphs.passes.ordered_sums import is_sum
from torch_hybrid.ops.core.registration import NAMESPACE
from torch_hybrid.ranks import Ranks

SHORT_BYTES = 1 << 20  # a rank's part

_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_LIBRARY.define(
    "sum_at_once(Tensor part, str group_name) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)
_SUM_AT_ONCE: Any = torch.ops.torch_hybrid.sum_at_once


def short_sums(graph: Graph) -> None:
    """Replace each sum over the ranks, and its wait, by one call that returns the sum.

    Contract: the graph computes the same values, up to rounding. Sums of halves stay, since other
    work lies between their start and their wait.
    """
    for node in list(graph.nodes):
        if not is_sum(node.target, node.args) or half_of(node) is not None:
            continue
        part, _, group_name = node.args
        for wait in list(node.users):
            with graph.inserting_before(wait):
                total = maker(graph, wait)(_SUM_AT_ONCE.default, part, group_name)
            wait.replace_all_uses_with(total)
            graph.erase_node(wait)
        graph.erase_node(node)


def can_sum_at_once(ranks: Ranks | None, device: torch.device) -> bool:
    """Tell whether the ranks' GPUs read each other's memory; all ranks ask together."""
    is_off = os.environ.get("NCCL_P2P_DISABLE") == "1"
    if ranks is None or ranks.size == 1 or device.type != "cuda" or is_off:
        return False
    host = zlib.crc32(Path("/proc/sys/kernel/random/boot_id").read_bytes())
    if ranks.least(host, device) != -ranks.least(-host, device):
        return False
    others = (i for i in range(torch.cuda.device_count()) if i != device.index)
    reads_others = all(torch.cuda.can_device_access_peer(device, i) for i in others)
    return ranks.least(reads_others, device) == 1


@cache
def _shared_bytes(group: ProcessGroup) -> Tensor:
    """Make scratch memory that all ranks of a group read, on this rank's device.

    They call it together. What a sum leaves there nobody reads.
    """
    from torch.distributed import _symmetric_memory

    memory: Any = _symmetric_memory  # its annotations differ between versions of torch
    shared: Tensor = memory.empty(SHORT_BYTES, dtype=torch.uint8, device="cuda")
    memory.rendezvous(shared, group.group_name)
    return shared


def _sum_at_once(part: Tensor, group_name: str) -> Tensor:
    if part.nbytes > SHORT_BYTES or not part.is_cuda:
        started = torch.ops._c10d_functional.all_reduce(part, "sum", group_name)
        total: Tensor = torch.ops._c10d_functional.wait_tensor(started)
        return total
    groups: Any = distributed_c10d
    group = groups._resolve_process_group(group_name)  # another one may have had this name
    shared = _shared_bytes(group)[: part.nbytes].view(part.dtype).view(part.shape)
    args = (shared, part.contiguous(), "sum", group_name)
    summed: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(*args)
    return summed


def _like(part: Tensor, group_name: str) -> Tensor:
    return part.new_empty(part.shape)


_LIBRARY.impl("sum_at_once", _sum_at_once, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::sum_at_once", _like, lib=_LIBRARY)
_SUM_AT_ONCE.direct = _sum_at_once  # as ``define_op`` gives each op one
