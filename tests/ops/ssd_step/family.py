"""The Mamba2 mixer's decode step, its oracle and its inputs."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tests.ops.ssd_step.cases import CASES, make_inputs
from tests.ops.step_family import Family
from torch_hybrid.ops.ssd_step import ssd_step
from torch_hybrid.ops.ssd_step.op import IMPLEMENTATIONS, SsdStep
from torch_hybrid.ops.ssd_step.reference import ssd_step_reference


def reference(*tensors: Tensor | None, **options: Any) -> Tensor:
    return ssd_step_reference(SsdStep(*tensors, **options, impl="reference"))


FAMILY = Family(
    op=ssd_step,
    implementations=IMPLEMENTATIONS,
    reference=reference,
    cases=CASES,
    make_inputs=make_inputs,
)
