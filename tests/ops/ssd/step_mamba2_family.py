"""The Mamba2 mixer's decode step, its oracle and its inputs."""

from __future__ import annotations

from tests.ops.ssd.step_mamba2_cases import CASES, make_inputs
from tests.ops.step_family import Family
from torch_hybrid.ops.ssd import ssd_step
from torch_hybrid.ops.ssd.op_step_mamba2 import IMPLEMENTATIONS, SsdStep
from torch_hybrid.ops.ssd.reference_step_mamba2 import ssd_step_reference

FAMILY = Family(
    op=ssd_step,
    value=SsdStep,
    implementations=IMPLEMENTATIONS,
    reference=ssd_step_reference,
    cases=CASES,
    make_inputs=make_inputs,
)
