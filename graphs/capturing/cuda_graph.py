"""Steps captured as CUDA graphs, one for each bucket, and replayed.

Capture is manual: whoever runs the step (a runner, or a loop of your own) keeps its inputs at fixed
addresses (``StaticInputs``), captures each bucket once on inputs that change no state, refreshes
the inputs, and replays. On a CPU a replay calls the step on the same static inputs, so that all
around it runs alike.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import cache
from threading import Lock

import torch
from torch import Tensor

from torch_hybrid.ops.registration import REGISTERED

_CAPTURING = Lock()  # of the process: steps of all runners are captured on one stream


@dataclass(frozen=True, slots=True)
class _Captured:
    """A graph and where it leaves its result; on a CPU there is only the step."""

    name: str
    step: Callable[[], Tensor]
    graph: torch.cuda.CUDAGraph | None = None
    output: Tensor | None = None


class CapturedSteps:
    """Captured steps by key, all in one memory pool.

    The result of a replay is overwritten by the next replay of any key: read it, or copy it, first.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps: dict[Hashable, _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._nbytes = 0

    def __contains__(self, key: Hashable) -> bool:
        return key in self._steps

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def names(self) -> tuple[str, ...]:
        """What was captured, in order."""
        return tuple(step.name for step in self._steps.values())

    @property
    def nbytes(self) -> int:
        """Device memory that capturing took, for all graphs together."""
        return self._nbytes

    def capture(
        self, key: Hashable, step: Callable[[], Tensor], *, name: str | None = None
    ) -> None:
        """Capture ``step``, which must read static inputs that hold a step of padding now.

        The step runs once before it is captured, to load kernels and choose their settings: it
        must change no state that anybody owns. ``name`` is for reports; the key's text by default.

        Raises:
            ValueError: ``key`` was captured before.
        """
        if key in self._steps:
            raise ValueError(f"{key} was captured before")
        name = str(key) if name is None else name
        if self._pool is None:
            self._steps[key] = _Captured(name, step)
            return
        with _CAPTURING, torch.cuda.device(self._device):
            stream = _capture_stream(self._device)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                step()
            torch.cuda.current_stream().wait_stream(stream)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # as torch.cuda.graph does: what is freed there is not counted
            free_before, _ = torch.cuda.mem_get_info()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=stream):
                output = step()
            torch.cuda.synchronize()
            self._nbytes += max(0, free_before - torch.cuda.mem_get_info()[0])
        self._steps[key] = _Captured(name, step, graph, output)

    def replay(self, key: Hashable) -> Tensor:
        """Run a captured step on what its static inputs hold now.

        Raises:
            KeyError: ``key`` was not captured.
        """
        captured = self._steps[key]
        if captured.graph is None or captured.output is None:
            return captured.step()
        captured.graph.replay()
        return captured.output


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Where all steps run before they are captured, and are: cuBLAS keeps memory for each stream
    that it was ever called on, 32 MiB on Hopper."""
    return torch.cuda.Stream(device)


def why_not_capturable(calls: Iterable[str]) -> tuple[str, ...]:
    """Which of a compiled step's ops, as ``op[implementation]``, a CUDA graph cannot hold."""
    reasons = []
    for call in calls:
        op, _, impl = call.rstrip("]").partition("[")
        if not REGISTERED[op][impl].capability.cuda_graph:
            reasons.append(f"{op}: {impl} reads lengths on the host")
    return tuple(dict.fromkeys(reasons))
