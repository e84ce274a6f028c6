"""What every implementation of a step that verifies drafts is held to, of Mamba2 and of lightning
attention."""

from __future__ import annotations

from functools import partial

from tests.ops.ssd.step_lightning_cases import FAMILY as LIGHTNING
from tests.ops.ssd.step_mamba2_cases import FAMILY as MAMBA2
from tests.ops.verify_contract import VerifyContract
from torch_hybrid.ops.ssd._torch_step_mamba2 import verify_by_ssd_steps


class TestMamba2(VerifyContract):
    family = MAMBA2
    by_reference = partial(verify_by_ssd_steps, MAMBA2.reference)


class TestLightning(VerifyContract):
    family = LIGHTNING
    records_are_inputs = False
    by_reference = LIGHTNING.reference
