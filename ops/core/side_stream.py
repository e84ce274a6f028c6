"""The side stream of a device: ops that run beside what is launched after them.

Every op of this package has an overload ``on_side_stream`` with the op's own schema. It waits for
what was launched before it, launches on the side stream, and returns; ``join_side_stream`` makes
the current stream wait for that op alone. Captured in a CUDA graph, the two streams are branches.

What the op reads is held from the one to the other: memory freed on the current stream may be given
out there while the side stream still reads it. What it makes is freed after the join, so whoever is
given that memory, on the side stream, waits for the uses of it first. On a CPU the op runs at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

OVERLOAD = "on_side_stream"
JOIN = "torch_hybrid.join_side_stream"


@dataclass(slots=True)
class _SideStream:
    """``running`` has, by the address of an op's first result, when it ends and what it reads."""

    stream: torch.cuda.Stream
    running: dict[int, tuple[torch.cuda.Event, object]] = field(default_factory=dict)


_SIDE_STREAMS: dict[torch.device, _SideStream] = {}


def _side_stream(device: torch.device) -> _SideStream:
    if device not in _SIDE_STREAMS:
        # Its blocks are placed before those of a product that was launched earlier.
        _SIDE_STREAMS[device] = _SideStream(torch.cuda.Stream(device, priority=-1))
    return _SIDE_STREAMS[device]


def _first_tensor(values: object) -> Tensor:
    return next(leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor))


def on_side_stream(op: Callable[..., Any]) -> Callable[..., Any]:
    """What the overload of ``op`` does: start it on the side stream of its tensors' device."""

    def start(*args: Any, **options: Any) -> Any:
        device = _first_tensor(args).device
        if device.type != "cuda":
            return op(*args, **options)
        side = _side_stream(device)
        side.stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side.stream):
            results = op(*args, **options)
            ended = side.stream.record_event()
        side.running[_first_tensor(results).data_ptr()] = ended, (args, options)
        return results

    return start


def _join(results: Sequence[Tensor]) -> None:
    device = results[0].device
    if device.type == "cuda":
        ended, _ = _side_stream(device).running.pop(results[0].data_ptr())
        torch.cuda.current_stream(device).wait_event(ended)


_LIBRARY = torch.library.Library("torch_hybrid", "FRAGMENT")
# The results are declared as written, so that what reads them stays after the join.
_LIBRARY.define("join_side_stream(Tensor(a!)[] results) -> ()", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.impl("join_side_stream", _join, "CompositeExplicitAutograd")
torch.library.register_fake("torch_hybrid::join_side_stream", lambda results: None, lib=_LIBRARY)
join_side_stream: torch._ops.OpOverload = torch.ops.torch_hybrid.join_side_stream.default
