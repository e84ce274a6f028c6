"""What is peculiar to the delta rules' backwards in Triton."""

from __future__ import annotations

import pytest
import torch

from tests.ops.delta_rule.backward import make_backward
from tests.ops.packed_backward import moved
from tests.ops.triton_compile import launches_on, needs_cross_compiler


@needs_cross_compiler
@pytest.mark.parametrize("by_channel", [False, True])
def test_no_table_grows_with_room_for_sequences(by_channel: bool) -> None:
    from torch_hybrid.ops.delta_rule.training import _triton_gated, _triton_kimi

    def sizes_of_tables(num_seqs: int) -> list[list[int]]:
        lengths = (300, *[0] * (num_seqs - 1))
        x = make_backward(
            lengths, dims=(64, 64), dtype=torch.bfloat16, by_channel=by_channel, has_states=False
        )
        launch = _triton_gated.gated_delta_rule_backward
        if by_channel:
            launch = _triton_kimi.kimi_delta_attention_backward
        with launches_on("sm_90") as launches:
            launch(moved(x, "meta"))
        tables = [[each for each in launched.args if isinstance(each, torch.Tensor)]
                  for launched in launches.values()]  # fmt: skip
        return [[each.numel() for each in of if each.dtype != torch.int32] for of in tables]

    assert sizes_of_tables(1) == sizes_of_tables(200)
