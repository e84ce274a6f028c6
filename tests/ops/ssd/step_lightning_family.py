"""The lightning mixer's decode step, its oracle and its inputs."""

from __future__ import annotations

from tests.ops.ssd.step_lightning_cases import CASES, make_inputs
from tests.ops.step_family import Family
from torch_hybrid.ops.ssd import lightning_step
from torch_hybrid.ops.ssd.op_step_lightning import IMPLEMENTATIONS, LightningStep
from torch_hybrid.ops.ssd.reference_step_lightning import lightning_step_reference

FAMILY = Family(
    op=lightning_step,
    value=LightningStep,
    implementations=IMPLEMENTATIONS,
    reference=lightning_step_reference,
    cases=CASES,
    make_inputs=make_inputs,
)
