"""The Mamba2 mixer's decode step, its oracle and its inputs."""

from __future__ import annotations

from tests.ops.ssd_step.cases import CASES, make_inputs
from tests.ops.step_family import Family
from torch_hybrid.ops.ssd_step import ssd_step
from torch_hybrid.ops.ssd_step.op import IMPLEMENTATIONS
from torch_hybrid.ops.ssd_step.reference import ssd_step_reference

FAMILY = Family(
    op=ssd_step,
    implementations=IMPLEMENTATIONS,
    reference=ssd_step_reference,
    cases=CASES,
    make_inputs=make_inputs,
)
