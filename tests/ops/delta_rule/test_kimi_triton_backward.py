"""Backward of Kimi delta attention in Triton: interpreted, compiled for other GPUs, and on one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.devices import needs_cuda
from tests.ops.delta_rule import backward
from tests.ops.packed_backward import check, check_single, gradients, moved
from tests.ops.triton_compile import SHARED_LIMITS, launches_on, needs_cross_compiler
from tests.ops.triton_interpreter import Interpreter, needs_interpreter, needs_triton
from tests.ops.triton_resources import assert_all_fit, resources_of

make_backward = partial(backward.make_backward, by_channel=True)
# Four warps with sums [C, 32] in registers take 1514 us of 1x8192 on an H200, eight 2690. The
# systems have 168 registers, for three programs on an SM.
MAY_SPILL = {"systems": 48, "inputs": 40}


@needs_triton
def test_in_the_interpreter(
    interpreter: Interpreter, record_property: Callable[[str, object], None]
):
    interpreter.run(record_property, Path(__file__), "in_interpreter")


@needs_interpreter
@pytest.mark.parametrize("most", [1.0, 40.0])
def test_gradients_in_interpreter(most: float):
    """Decays of 16 tokens are e^-640 at most: no factor may overflow."""
    check(make_backward(heads=(1, 1), dims=(40, 24), most=most, qk_l2norm=True), 1e-6)


@needs_interpreter
def test_bfloat16_in_interpreter():
    """The interpreter rounds to bfloat16 towards 0, which doubles what a GPU's rounding costs."""
    lengths = (70, 0, 1, 65)
    check(make_backward(lengths, heads=(1, 1), dtype=torch.bfloat16, has_states=False), 2e-2)


@needs_interpreter
@pytest.mark.parametrize("by_channel", [False, True])
def test_short_sequences_in_interpreter(by_channel: bool):
    """States stand where no other does, however sequences lie to multiples of a chunk."""
    lengths = (1, 1, 33, 0, 1, 64, 1, 1)
    heads = (1, 1)
    check(backward.make_backward(lengths, heads=heads, dims=(16, 16), by_channel=by_channel), 1e-6)


@needs_cuda
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 8e-3)], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize("dims", [(128, 128), (64, 96), (256, 256)], ids=str)
@pytest.mark.parametrize("most", [1.0, 40.0])
def test_on_a_gpu(dims: tuple[int, int], dtype: torch.dtype, tolerance: float, most: float):
    x = make_backward(heads=(2, 2), dims=dims, dtype=dtype, device="cuda", most=most)
    check(x, tolerance)
    assert all(map(torch.equal, gradients(x), gradients(x)))


@needs_cuda
def test_packed_is_single_on_a_gpu():
    check_single(
        make_backward(
            (70, 300, 64), heads=(2, 2), dims=(128, 128), dtype=torch.bfloat16, device="cuda",
            num_padding_tokens=0,
        )
    )  # fmt: skip


@needs_cross_compiler
@pytest.mark.parametrize("by_channel", [False, True])
def test_no_table_grows_with_room_for_sequences(by_channel: bool) -> None:
    from torch_hybrid.ops.delta_rule.training import _triton_gated, _triton_kimi

    def sizes_of_tables(num_seqs: int) -> list[list[int]]:
        lengths = (300, *[0] * (num_seqs - 1))
        x = backward.make_backward(
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


@needs_cross_compiler
def test_compiles_without_spills() -> None:
    from torch_hybrid.ops.delta_rule.training import _triton_kimi

    rows = []
    for label, lengths in {"Kimi-Linear": (8192,), "eight of them": (1024,) * 8}.items():
        x = make_backward(
            lengths, heads=(32, 32), dims=(128, 128), dtype=torch.bfloat16, num_padding_tokens=0
        )
        for target in SHARED_LIMITS:
            with launches_on(target) as launches:
                _triton_kimi.kimi_delta_attention_backward(moved(x, "meta"))
            rows += [resources_of(launch, target, label) for launch in launches.values()]
    assert_all_fit(
        rows, Path(__file__).with_name("resources_kimi_backward.txt"), may_spill=MAY_SPILL
    )
