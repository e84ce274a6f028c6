"""Ranks that load together: an error on one rank ends the load on all."""

from __future__ import annotations

import platform
from collections import defaultdict
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from torch_hybrid.caches.room import byte_count, check_room, free_bytes
from torch_hybrid.errors import CapacityError


class Together:
    """A context that every rank of a group enters; all leave it together, or all with an error.

    Args:
        group: the ranks; None for a single process.

    Raises:
        ValueError: the body failed on another rank; the message names the rank and its error.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._group is None:
            return
        own = None if kind is None else f"{kind.__name__}: {error}"
        told: list[str | None] = [None] * self._group.size()
        try:
            dist.all_gather_object(told, own, group=self._group)
        except RuntimeError:  # a rank is gone
            if error is None:
                raise
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(told) if text is not None]
        if error is None and failed:
            raise ValueError(f"the model was not loaded on every rank; {'; '.join(failed)}")


def check_room_together(
    group: dist.ProcessGroup | None, num_bytes: int, device: torch.device, *, what: str, limits: str
) -> None:
    """Check that a host's or a device's memory has room for all ranks that share it.

    Every rank of the group makes this call, and all raise alike.

    Args:
        group: the ranks; None for a single process.
        num_bytes: bytes that this rank will allocate.
        device: the device of that memory.
        what: the thing to allocate, for the message.
        limits: the arguments that make it smaller.

    Raises:
        CapacityError: there is no room; it names the bytes that each rank needs and those that are
            free.
    """
    if group is None:
        check_room(num_bytes, device, what=what, limits=limits)
        return
    told: list[Any] = [None] * group.size()
    dist.all_gather_object(told, (_memory_of(device), num_bytes, free_bytes(device)), group=group)
    sharing: dict[str, dict[int, int]] = defaultdict(dict)
    least: dict[str, int] = {}
    for rank, (memory, needed, free) in enumerate(told):
        sharing[memory][rank] = needed
        if free is not None:
            least[memory] = min(free, least.get(memory, free))
    for memory, needs in sharing.items():
        total = sum(needs.values())
        if memory in least and total > least[memory]:
            ranks = ", ".join(f"rank {rank} {byte_count(n)}" for rank, n in needs.items())
            raise CapacityError(
                f"{what} need {total:,} bytes on one {device.type} ({ranks}), which has "
                f"{least[memory]:,} bytes free: lower {limits}"
            )


def _memory_of(device: torch.device) -> str:
    """Name a device's memory alike in all processes that share it."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_properties(device).uuid)
    return f"{device.type} of {platform.node()}"
