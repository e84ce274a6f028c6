"""A state advanced in streams: the same bits as with its rows in turn."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType

import pytest
import torch

from tests.ops.delta_rule.step_gated_cases import FAMILY as GATED_DELTA
from tests.ops.delta_rule.step_kimi_cases import FAMILY as KIMI_DELTA
from tests.ops.ssd.step_mamba2_cases import FAMILY as SSD
from tests.ops.step_contract import assert_same_pools
from tests.ops.step_family import Family
from torch_hybrid.ops.native import compiler_missing, cpu_tuning

pytestmark = pytest.mark.skipif(compiler_missing() is not None, reason=str(compiler_missing()))


@dataclass(frozen=True, slots=True)
class Form:
    """What a step asks of the forms."""

    state_streams: int


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
# With K a row at a time, two, four, and in parts; V beyond what is taken at once, or no multiple of
# the streams.
@pytest.mark.parametrize(("k_dim", "v_dim"), [(192, 64), (128, 64), (96, 100), (64, 37), (19, 70)])
@pytest.mark.parametrize(
    ("family", "caller"),
    [(SSD, cpu_tuning), (GATED_DELTA, cpu_tuning), (KIMI_DELTA, cpu_tuning)],
    ids=["ssd", "gated_delta", "kimi_delta"],
)
def test_streams_change_no_bit(
    family: Family,
    caller: ModuleType,
    k_dim: int,
    v_dim: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = replace(family.cases["mixed"], k_dim=k_dim, v_dim=v_dim)
    inputs = family.make_inputs(case, dtype)
    made = []
    for streams in (1, 8):
        monkeypatch.setattr(caller, "tuning", lambda dtype, form=Form(streams): form)
        own = inputs.copy()
        made.append((family.run(own, "cpp"), own))
    (in_turn, pools), (in_streams, pools_of_streams) = made
    assert torch.equal(in_turn, in_streams)
    assert_same_pools(pools_of_streams, pools)
