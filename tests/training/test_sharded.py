"""A twin has the losses of one rank under FSDP2, after a checkpoint too, and under DDP."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.models.mtp_checkpoint import make_checkpoint
from tests.parallel.processes import results, run_ranks
from tests.training.sharded import train, train_each
from tests.training.twins import FAMILIES

STEPS = 4


@pytest.fixture(scope="module")
def alone() -> list[float]:
    return results(run_ranks(train, 1, 0, STEPS))[0]


@pytest.mark.parametrize("by", ["FSDP2", "FSDP2 of compiled layers", "DDP"])
def test_two_ranks_have_the_losses_of_one(alone: list[float], by: str):
    assert alone[-1] < alone[0]
    for losses in results(run_ranks(partial(train, by=by), 2, 0, STEPS)):
        assert losses == pytest.approx(alone, rel=1e-5)


def test_two_ranks_have_the_losses_of_one_in_each_family(tmp_path: Path):
    make_checkpoint("qwen3_next_dense", tmp_path)
    given = (FAMILIES, str(tmp_path))
    (one,) = results(run_ranks(train_each, 1, *given))
    for losses in results(run_ranks(train_each, 2, *given)):
        assert losses == {name: pytest.approx(each, rel=1e-5) for name, each in one.items()}


def test_a_checkpoint_resumes_on_any_number_of_ranks(alone: list[float], tmp_path: Path):
    """The optimizer's moments too: steps after the break are those without it."""
    folder = str(tmp_path)
    before = results(run_ranks(train, 2, 0, 2, "", folder))
    for num_ranks in (1, 2):
        after = results(run_ranks(train, num_ranks, 2, STEPS, folder))
        for losses in after:
            assert before[0] + losses == pytest.approx(alone, rel=1e-5)
