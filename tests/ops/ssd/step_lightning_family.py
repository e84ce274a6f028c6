"""The lightning mixer's decode step, its oracle and its inputs."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tests.ops.ssd.step_lightning_cases import CASES, make_inputs
from tests.ops.step_family import Family
from torch_hybrid.ops.ssd import lightning_step
from torch_hybrid.ops.ssd.op_step_lightning import IMPLEMENTATIONS, LightningStep
from torch_hybrid.ops.ssd.reference_step_lightning import lightning_step_reference


def reference(*tensors: Tensor | None, **options: Any) -> Tensor:
    return lightning_step_reference(LightningStep(*tensors, **options, impl="reference"))


FAMILY = Family(
    op=lightning_step,
    implementations=IMPLEMENTATIONS,
    reference=reference,
    cases=CASES,
    make_inputs=make_inputs,
)
