"""A process group over a slow link of a chosen speed, which keeps a trace of its messages.

Processes of one machine show how long steps would take over another network, and how much of that
their schedule hides. The processes exchange a message at once; it arrives when the link would have
delivered it. No core is busy meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_BACKEND = "torch_hybrid_link"


@dataclass(slots=True)
class Message:
    """A collective of one rank; times are seconds of ``time.perf_counter``."""

    name: str
    num_bytes: int
    start: float
    arrival: float
    wait_start: float = 0.0
    wait_end: float = 0.0

    @property
    def in_flight(self) -> float:
        """Seconds from the start of the message to its arrival."""
        return self.arrival - self.start

    @property
    def waited(self) -> float:
        """Seconds in which the rank did nothing but wait for the message."""
        return self.wait_end - self.wait_start


def hidden_share(messages: Sequence[Message]) -> float:
    """Compute the share of the time in flight in which the rank did other work."""
    in_flight = sum(message.in_flight for message in messages)
    waited = sum(message.waited for message in messages)
    return 1 - waited / in_flight if in_flight else 1.0


class LinkedGroup(dist.ProcessGroup):
    """A Gloo group over a link that carries one message after another.

    ``seconds_per_byte`` and ``latency_s`` may be changed between steps; with both 0 a message
    arrives as soon as the processes have exchanged it. ``messages`` is the trace; clear it at will.
    """

    def __init__(self, gloo: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._gloo = gloo
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, gloo)
        self._free = 0.0  # the time at which the link has carried all messages
        self.seconds_per_byte = self.latency_s = 0.0
        self.messages: list[Message] = []

    def getBackendName(self) -> str:
        """Name the backend for ``torch.distributed``."""
        return _BACKEND

    def allreduce(  # type: ignore[override]
        self, tensors: list[Tensor], options: Any
    ) -> dist.Work:
        """Sum over the ranks, in place."""
        return self._send("all_reduce", tensors[0].nbytes, self._gloo.allreduce(tensors, options))

    def alltoall_base(  # type: ignore[override]
        self,
        output: Tensor,
        input: Tensor,
        output_splits: list[int],
        input_splits: list[int],
        options: Any,
    ) -> dist.Work:
        """Send a part of ``input`` to each rank; receive one from each into ``output``."""
        work = self._gloo.alltoall_base(output, input, output_splits, input_splits, options)
        return self._send("all_to_all", input.nbytes, work)

    def _send(self, name: str, num_bytes: int, work: dist.Work) -> dist.Work:
        start = time.perf_counter()
        self._free = max(self._free, start) + num_bytes * self.seconds_per_byte
        message = Message(name, num_bytes, start, self._free + self.latency_s)
        self.messages.append(message)
        return _Delivery(work, message)


class _Delivery(dist.Work):
    """The arrival of a message: exchanged by the processes, and carried by the link."""

    def __init__(self, work: dist.Work, message: Message) -> None:
        super().__init__()
        self._work, self._message = work, message

    def wait(self, timeout: timedelta | None = None) -> bool:  # type: ignore[override]
        """Wait until the message has arrived."""
        message, is_late = self._message, not self._work.is_completed()
        message.wait_start = time.perf_counter()
        self._work.wait()
        now = time.perf_counter()
        if is_late:  # the other ranks or the machine are late: it arrives now
            message.arrival = max(message.arrival, now)
        time.sleep(max(0.0, message.arrival - now))
        message.wait_end = time.perf_counter()
        return True


def _make(store: Any, rank: int, size: int, timeout: timedelta) -> LinkedGroup:
    gloo = dist.ProcessGroupGloo(store, rank, size, timeout)  # type: ignore[attr-defined]
    return LinkedGroup(gloo, rank, size)


def linked_group(*, timeout_s: float = 60.0) -> LinkedGroup:
    """Make a group of all ranks over a new link, for ``shard``; every rank calls it."""
    group: LinkedGroup = dist.new_group(backend=_BACKEND, timeout=timedelta(seconds=timeout_s))
    return group


dist.Backend.register_backend(_BACKEND, _make, devices=["cpu"])
