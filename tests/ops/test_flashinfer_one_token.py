"""What is planned for FlashInfer's recurrences: which states are read, and where they are."""

from __future__ import annotations

import pytest
import torch

from tests.ops.step_lengths import step_lengths
from torch_hybrid.ops.core.planning import Lengths
from torch_hybrid.ops.flashinfer.one_token import APART, IN_PLACE, plan


def step(
    initial: tuple[int, ...],
    final: tuple[int, ...],
    *,
    new: tuple[int, ...] = (1, 1, 0),
    num_tokens: int = 3,
) -> Lengths:
    return step_lengths(
        torch.tensor([0, *new]).cumsum(0, dtype=torch.int32),
        num_tokens,
        initial_indices=torch.tensor(initial, dtype=torch.int32),
        state_indices=torch.tensor(final, dtype=torch.int32),
    )


@pytest.mark.parametrize(
    ("initial", "final", "place", "slots"),
    [
        ((4, 2, 0), (4, 2, 0), IN_PLACE, [4, 2, -1]),
        ((4, 4, 7), (3, 2, 7), IN_PLACE, [4, 4, -1]),  # the third is empty, whatever its slots
        ((0, 2, 0), (4, 2, 0), APART, [0, 1, -1]),
        ((4, 2, 0), (4, 0, 0), APART, [0, 1, -1]),
    ],
    ids=["carried on", "forked", "one begins", "one is not kept"],
)
def test_where_states_are(
    initial: tuple[int, ...], final: tuple[int, ...], place: int, slots: list[int]
):
    planned = plan(step(initial, final), head_k_dim=128)
    assert planned.values == (place,)
    assert planned.tensors[0].tolist() == slots
    assert planned.tensors[0].dtype == torch.int32


@pytest.mark.parametrize(
    ("new", "num_tokens"),
    [((2, 1, 0), 3), ((1, 0, 1), 3), ((1, 1, 0), 4)],
    ids=["two tokens", "an empty sequence before another", "more rows than sequences"],
)
def test_other_steps_are_refused(new: tuple[int, ...], num_tokens: int):
    with pytest.raises(ValueError, match="takes a row for each sequence, one token in each"):
        plan(step((1, 2, 3), (1, 2, 3), new=new, num_tokens=num_tokens))
