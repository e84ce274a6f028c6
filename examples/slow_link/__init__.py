"""A process group over a slow link, of a chosen speed, which keeps a trace of its messages.

It shows what steps would take over another network, and how much of that their schedule hides,
with processes of one machine: a message is exchanged at once, and arrives when the link would have
delivered it. No processor is busy meanwhile.
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
    """One collective of one rank; times are seconds of ``time.perf_counter``."""

    name: str
    num_bytes: int
    start: float
    arrival: float
    wait_start: float = 0.0
    wait_end: float = 0.0

    @property
    def in_flight(self) -> float:
        """Seconds from its start until it was there."""
        return self.arrival - self.start

    @property
    def waited(self) -> float:
        """Seconds in which the rank did nothing but wait for it."""
        return self.wait_end - self.wait_start


def hidden_share(messages: Sequence[Message]) -> float:
    """Which part of the time that messages were in flight the rank did something else."""
    in_flight = sum(message.in_flight for message in messages)
    waited = sum(message.waited for message in messages)
    return 1 - waited / in_flight if in_flight else 1.0


class LinkedGroup(dist.ProcessGroup):
    """Gloo, over a link that carries one message after another.

    ``seconds_per_byte`` and ``latency_s`` may be changed between steps; with both 0 a message is
    there as soon as the processes have exchanged it. ``messages`` is the trace; clear it at will.
    """

    def __init__(self, gloo: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._gloo = gloo
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, gloo)
        self._free = 0.0  # when the link has carried all that it was given
        self.seconds_per_byte = self.latency_s = 0.0
        self.messages: list[Message] = []

    def getBackendName(self) -> str:
        """As ``torch.distributed`` asks for it."""
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
        """A part of ``input`` to each rank, and one from each into ``output``."""
        work = self._gloo.alltoall_base(output, input, output_splits, input_splits, options)
        return self._send("all_to_all", input.nbytes, work)

    def _send(self, name: str, num_bytes: int, work: dist.Work) -> dist.Work:
        start = time.perf_counter()
        self._free = max(self._free, start) + num_bytes * self.seconds_per_byte
        message = Message(name, num_bytes, start, self._free + self.latency_s)
        self.messages.append(message)
        return _Delivery(work, message)


class _Delivery(dist.Work):
    """The arrival of a message: when it was exchanged, and the link has carried it."""

    def __init__(self, work: dist.Work, message: Message) -> None:
        super().__init__()
        self._work, self._message = work, message

    def wait(self, timeout: timedelta | None = None) -> bool:  # type: ignore[override]
        """Until it is there."""
        message, is_late = self._message, not self._work.is_completed()
        message.wait_start = time.perf_counter()
        self._work.wait()
        now = time.perf_counter()
        if is_late:  # the other ranks or the machine are: it is under way until now
            message.arrival = max(message.arrival, now)
        time.sleep(max(0.0, message.arrival - now))
        message.wait_end = time.perf_counter()
        return True


def _make(store: Any, rank: int, size: int, timeout: timedelta) -> LinkedGroup:
    gloo = dist.ProcessGroupGloo(store, rank, size, timeout)  # type: ignore[attr-defined]
    return LinkedGroup(gloo, rank, size)


def linked_group(*, timeout_s: float = 60.0) -> LinkedGroup:
    """A group of all ranks over a link of its own, for ``shard``. Every rank calls it."""
    group: LinkedGroup = dist.new_group(backend=_BACKEND, timeout=timedelta(seconds=timeout_s))
    return group


dist.Backend.register_backend(_BACKEND, _make, devices=["cpu"])
