"""Captured steps: fixed addresses in, one memory pool, and the same code on a CPU."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

from tests.devices import needs_cuda
from torch_hybrid.graphs.capturing.cuda_graph import CapturedSteps
from torch_hybrid.graphs.capturing.static_inputs import StaticInputs

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    ),
]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


class Loop:
    """An engine's loop in small: buckets of 4 and 16 numbers, and a total that is kept."""

    def __init__(self, device: torch.device) -> None:
        self.inputs = StaticInputs({"x": torch.zeros(16)}, device)
        self.total = torch.zeros(1, device=device)
        self.steps = CapturedSteps(device)

    def run(self, numbers: list[float]) -> float:
        bucket = 4 if len(numbers) <= 4 else 16
        if bucket not in self.steps:
            null = self.inputs.refresh({"x": torch.zeros(bucket)})
            self.steps.capture(bucket, lambda: self.step(null["x"]))
        padded = torch.zeros(bucket)
        padded[: len(numbers)] = torch.tensor(numbers)
        self.inputs.refresh({"x": padded})
        return float(self.steps.replay(bucket))

    def step(self, x: Tensor) -> Tensor:
        self.total += x.sum()
        return x.square().sum()


def test_replay_reads_what_was_refreshed(device: torch.device):
    loop = Loop(device)
    assert loop.run([1.0, 2.0]) == 5.0
    assert loop.run([3.0] * 10) == 90.0
    assert loop.run([4.0]) == 16.0
    assert loop.run([1.0, 1.0, 1.0]) == 3.0
    assert float(loop.total) == 3.0 + 30.0 + 4.0 + 3.0
    assert loop.steps.names == ("4", "16")
    assert len(loop.steps) == 2


def test_nothing_of_a_larger_step_is_left_over(device: torch.device):
    loop = Loop(device)
    assert loop.run([9.0] * 16) == 16 * 81.0
    assert loop.run([1.0] * 5) == 5.0


def test_capture_changes_no_state(device: torch.device):
    loop = Loop(device)
    loop.run([1.0])
    assert float(loop.total) == 1.0


def test_errors(device: torch.device):
    steps = CapturedSteps(device)
    steps.capture("a", lambda: torch.zeros(1, device=device))
    with pytest.raises(ValueError, match="a was captured before"):
        steps.capture("a", lambda: torch.zeros(1, device=device))
    with pytest.raises(KeyError, match="b"):
        steps.replay("b")


@needs_cuda
def test_nothing_is_collected_while_a_step_is_captured():
    """A pool of other graphs that is freed then ends the process."""
    collects = []

    def step() -> Tensor:
        collects.append(gc.isenabled())
        return torch.zeros(1, device="cuda")

    CapturedSteps(torch.device("cuda")).capture("step", step)
    assert collects == [True, False]
    assert gc.isenabled()


@needs_cuda
def test_all_graphs_share_one_pool():
    """A second graph of the same step takes next to no memory of its own."""
    device = torch.device("cuda")
    x = torch.zeros(1 << 20, device=device)
    steps = CapturedSteps(device)
    taken = []
    for key in range(3):
        steps.capture(key, lambda: (x + 1).square() - x)
        taken.append(steps.nbytes)
    assert taken[2] - taken[0] < taken[0] + (8 << 20)
