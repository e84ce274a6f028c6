"""Two launches side by side, and in how many segments; without a GPU, one after the other."""

from __future__ import annotations

import pytest
import torch

from tests.ops.step_lengths import step_lengths
from tests.ops.triton_interpreter import needs_triton
from torch_hybrid.ops.triton.segments import side_by_side


@pytest.mark.parametrize(("num_blocks", "num_segments"), [(7, 1), (7, 3), (2, 4)])
def test_each_block_is_prepared_and_then_walked(num_blocks: int, num_segments: int):
    prepared: list[int] = []
    walked: list[int] = []

    def walk(first: int, last: int) -> None:
        walked.extend(range(first, last))
        assert prepared[: len(walked)] == walked

    def prepare(first: int, last: int) -> None:
        prepared.extend(range(first, last))

    side_by_side(prepare, walk, num_blocks, num_segments, torch.device("cpu"))
    assert walked == list(range(num_blocks))


@needs_triton
@pytest.mark.parametrize(
    ("num_tokens", "num_seqs", "segments"),
    [(8192, 1, 4), (8192, 2, 1), (8192, 8, 1), (4096, 1, 4), (2048, 1, 2), (64, 1, 1)],
)
def test_steps_of_few_long_sequences_are_cut(
    num_tokens: int, num_seqs: int, segments: int, monkeypatch: pytest.MonkeyPatch
):
    from torch_hybrid.ops.delta_rule import _triton_scan as delta_scan

    def cut(dtype: torch.dtype) -> int:
        v = torch.empty(num_tokens, 32, 128, dtype=dtype, device="meta")
        walks = delta_scan.ScanSegments.of(v, num_seqs)
        assert walks.is_even is None
        return walks.num_segments

    assert cut(torch.bfloat16) == 1
    monkeypatch.setattr(delta_scan, "is_hopper", lambda device: True)
    assert cut(torch.bfloat16) == segments
    assert cut(torch.float32) == 1


@needs_triton
@pytest.mark.parametrize(
    ("new", "num_tokens", "segments", "is_even"),
    [
        ((8192, 0, 0, 0), 8192, 4, False),
        ((0, 5000, 0, 0), 8192, 4, False),
        ((8000, 100, 0, 7), 8192, 4, False),  # as good as one
        ((6144, 0, 2048, 0), 8192, 2, False),
        ((4096, 4096), 8192, 1, False),
        ((1024,) * 8, 8192, 1, True),
        ((2048, 0), 2048, 2, False),
        ((2047, 0), 2047, 1, None),
        ((64, 64), 512, 1, None),
        ((0, 0), 2048, 2, False),
    ],
)
def test_a_step_is_cut_by_the_sequences_that_it_has(
    new: tuple[int, ...],
    num_tokens: int,
    segments: int,
    is_even: bool | None,
    monkeypatch: pytest.MonkeyPatch,
):
    from torch_hybrid.ops.delta_rule import _triton_scan as delta_scan

    lengths = step_lengths(torch.tensor([0, *new]).cumsum(0).int(), num_tokens)
    layer = {"num_v_heads": 32, "head_v_dim": 128, "head_k_dim": 128}
    v = torch.empty(num_tokens, 32, 128, device="meta")

    def planned(
        device: str = "cuda", dtype: torch.dtype = torch.bfloat16
    ) -> delta_scan.ScanSegments:
        made = delta_scan.plan(lengths, **layer, dtype=dtype, device=torch.device(device))
        assert made.tensors == ()
        return delta_scan.ScanSegments.of(v, len(new), [torch.tensor(made.values)])

    monkeypatch.setattr(delta_scan, "is_hopper", lambda device: device.type == "cuda")
    assert planned() == delta_scan.ScanSegments(num_segments=segments, is_even=is_even)
    of_others = delta_scan.ScanSegments(num_segments=1)
    assert planned("cpu") == planned(dtype=torch.float32) == of_others


@needs_triton
@pytest.mark.parametrize(
    ("num_seqs", "num_pieces", "rows"),
    [(1, 2, [64]), (8, 2, [64]), (9, 2, [64, 128]), (9, 3, [64])],
)
def test_rows_of_a_program_are_left_to_the_device_where_it_matters(
    num_seqs: int, num_pieces: int, rows: list[int]
):
    from torch_hybrid.ops.delta_rule._triton_scan import EVERY, scan_configs

    v = torch.empty(8192, 32, 128, dtype=torch.bfloat16, device="meta")
    forms = scan_configs(v, 32 * num_seqs, hopper=True, num_pieces=num_pieces)
    assert [form.block_v for form in forms] == rows
    assert len({form.steps for form in forms}) == len(forms)
    assert (forms[0].steps == EVERY.value) == (len(forms) == 1)


@needs_triton
@pytest.mark.parametrize(
    ("num_pieces", "is_even", "rows"), [(2, True, 128), (2, False, 64), (3, True, 64)]
)
def test_rows_of_a_program_are_what_was_planned(num_pieces: int, is_even: bool, rows: int):
    from torch_hybrid.ops.delta_rule._triton_scan import EVERY, scan_configs

    v = torch.empty(8192, 32, 128, dtype=torch.bfloat16, device="meta")
    (form,) = scan_configs(v, 32 * 16, hopper=True, num_pieces=num_pieces, is_even=is_even)
    assert (form.block_v, form.steps) == (rows, EVERY.value)
