"""How Triton kernels of recurrences and of their steps are tested, interpreted and on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from tests.ops.contract import rows_apart
from tests.ops.recurrent_contract import Expected

Run = Callable[[Any], Tensor]


def tensors(inputs: Any) -> dict[str, Tensor]:
    """List the tensors of a call, by name."""
    given = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    return {name: x for name, x in given.items() if isinstance(x, Tensor)}


def on_device(inputs: Any, device: str = "cuda") -> Any:
    """Copy to a device; rows of what a projection gives lie apart."""
    moved = {name: x.to(device) for name, x in tensors(inputs.copy()).items()}
    of_projection = getattr(inputs, "per_token", ("q", "k", "v", "x", "z"))
    rows = {name: rows_apart(moved[name]) for name in of_projection if name in moved}
    return replace(inputs, **moved | rows)


def check(run: Run, reference: Run, inputs: Any, device: str = "cuda") -> None:
    """Check that a kernel is as exact as the reference, and touches no other slot."""
    moved = on_device(inputs, device)
    out = run(moved)
    Expected.of(reference, inputs).check(out.cpu(), moved.state.cpu())


def check_captured(run: Run, reference: Run, first: Any, others: Iterable[Any]) -> None:
    """Check that a graph captured with some inputs computes others of the same shapes."""
    replay = captured(run, first)
    for other in others:
        out, moved = replay(other)
        Expected.of(reference, other).check(out.cpu(), moved.state.cpu())


def captured(run: Run, first: Any) -> Callable[[Any], tuple[Tensor, Any]]:
    """Capture a call; what is returned copies inputs into the call's, and replays it."""
    moved = on_device(first)
    run(moved)  # compiles the kernels, which cannot be done while capturing
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(moved)

    def replay(other: Any) -> tuple[Tensor, Any]:
        for name, x in tensors(moved).items():
            x.copy_(getattr(other, name))
        graph.replay()
        return out, moved

    return replay
