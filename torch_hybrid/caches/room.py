"""Checks that pools fit into a device's free memory, before any of it is allocated."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from torch_hybrid.caches.sizes import PoolCost, PoolSizes
from torch_hybrid.errors import CapacityError

_LISTED_BYTES = 12  # per page in the allocator: an entry of the free list, and its holds

_CGROUP = Path("/sys/fs/cgroup")
# Files of limit, use and statistics, and the field of reclaimable memory; cgroup v2, then v1.
_CGROUP_FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)


def check_room(num_bytes: int, device: torch.device, *, what: str, limits: str) -> None:
    """Refuse an allocation that exceeds the device's free memory.

    Args:
        num_bytes: bytes to allocate.
        device: target device; devices other than CPU and CUDA are not checked.
        what: what is to be allocated, for the message.
        limits: arguments that make it smaller, for the message.

    Raises:
        CapacityError: with the bytes that it needs and the bytes that are free.
    """
    free = free_bytes(device)
    if free is not None and num_bytes > free:
        raise CapacityError(
            f"{what} need {num_bytes:,} bytes ({_gib(num_bytes)}), and {device.type} has "
            f"{free:,} bytes ({_gib(free)}) free: lower {limits}"
        )


def check_pools(sizes: PoolSizes, costs: Iterable[PoolCost]) -> None:
    """Refuse sizes of pools that do not fit, before anything is allocated.

    Args:
        sizes: sizes of all pools.
        costs: costs of each layer's pools.

    Raises:
        CapacityError: the device has no memory for the pools, or the host for the page tables.
    """
    num_slots = sizes.num_slots + sizes.num_snapshots + 1
    num_pages = sizes.num_pages + 1
    num_tokens = num_pages * sizes.page_size
    costs = list(costs)
    tokens = num_tokens * sum(cost.per_token for cost in costs)
    states = num_slots * sum(cost.per_sequence for cost in costs)
    pools = tokens + states + sum(cost.per_layer for cost in costs)
    limits = (
        f"kv_tokens, now {num_tokens - sizes.page_size}, or max_seqs, now {sizes.num_slots} "
        f"({byte_count(tokens)} are for tokens, {byte_count(states)} for states of "
        f"{_holders(sizes)})"
    )
    check_room(pools, sizes.device, what="the pools", limits=limits)
    tables = num_pages * (4 * (sizes.num_slots + 1) + _LISTED_BYTES)
    check_room(tables, torch.device("cpu"), what="the page tables", limits=limits)


def _holders(sizes: PoolSizes) -> str:
    """Name the holders of state slots, for the message."""
    if not sizes.num_snapshots:
        return "sequences"
    return f"sequences and of {sizes.num_snapshots} snapshots"


def free_bytes(device: torch.device) -> int | None:
    """Count the bytes that can still be allocated on ``device``; None if that is unknown."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + kept)
    if device.type != "cpu":
        return None
    known = [free for free in (_free_of_machine(), _free_of_container()) if free is not None]
    return min(known, default=None)


def _free_of_machine() -> int | None:
    """Read Linux's estimate of the memory available without swapping."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    fields = (line.split() for line in lines)
    return next((1024 * int(size) for name, size, *_ in fields if name == "MemAvailable:"), None)


def _free_of_container() -> int | None:
    """Read the memory left under the limit of this process's control group."""
    for limit, used, stat, reclaimable in _CGROUP_FILES:
        try:
            limit_bytes = int((_CGROUP / limit).read_text())  # "max": none, a ValueError
            used_bytes = int((_CGROUP / used).read_text())
            counts = dict(line.split() for line in (_CGROUP / stat).read_text().splitlines())
        except (OSError, ValueError):
            continue
        return max(0, limit_bytes - used_bytes + int(counts.get(reclaimable, 0)))
    return None


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB"


def byte_count(count: int) -> str:
    """Format a number of bytes: 1536 is "1.5 KiB"."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"
