"""The lightning mixer's decode step, its oracle and its inputs."""

from __future__ import annotations

from tests.ops.lightning_step.cases import CASES, make_inputs
from tests.ops.step_family import Family
from torch_hybrid.ops.lightning_step import lightning_step
from torch_hybrid.ops.lightning_step.op import IMPLEMENTATIONS
from torch_hybrid.ops.lightning_step.reference import lightning_step_reference

FAMILY = Family(
    op=lightning_step,
    implementations=IMPLEMENTATIONS,
    reference=lightning_step_reference,
    cases=CASES,
    make_inputs=make_inputs,
)
