"""Two launches side by side, and in how many segments; without a GPU, one after the other."""

from __future__ import annotations

from typing import Any

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
    from torch_hybrid.ops.triton import delta_scan

    v = torch.empty(num_tokens, 32, 128, dtype=torch.bfloat16, device="meta")
    assert delta_scan.num_segments(v, num_seqs) == 1
    monkeypatch.setattr(delta_scan, "is_hopper", lambda device: True)
    assert delta_scan.num_segments(v, num_seqs) == segments
    assert delta_scan.num_segments(v.float(), num_seqs) == 1


@needs_triton
@pytest.mark.parametrize(
    ("new", "num_tokens", "segments"),
    [
        ((8192, 0, 0, 0), 8192, 4),
        ((0, 5000, 0, 0), 8192, 4),
        ((8000, 100, 0, 7), 8192, 4),  # as good as one
        ((4096, 4096), 8192, 1),
        ((1024,) * 8, 8192, 1),
        ((64, 0), 64, 1),
    ],
)
def test_a_step_is_cut_by_the_sequences_that_it_has(
    new: tuple[int, ...], num_tokens: int, segments: int, monkeypatch: pytest.MonkeyPatch
):
    from torch_hybrid.ops.triton import delta_scan

    cu_seqlens = torch.tensor([0, *new]).cumsum(0).int()
    lengths = step_lengths(cu_seqlens, num_tokens)
    layer = {"num_v_heads": 32, "head_v_dim": 128, "dtype": torch.bfloat16}

    def planned(**changes: Any) -> tuple[int, ...]:
        facts = {**layer, "device": torch.device("cuda"), "head_k_dim": 128, **changes}
        return delta_scan.plan(lengths, **facts).values

    monkeypatch.setattr(delta_scan, "is_hopper", lambda device: device.type == "cuda")
    assert planned() == (segments,)
    assert planned(dtype=torch.float32) == planned(device=torch.device("cpu")) == (1,)
    v = torch.empty(num_tokens, 32, 128, dtype=torch.bfloat16, device="meta")
    assert delta_scan.num_segments(v, len(new), [torch.tensor(planned())]) == segments


@needs_triton
@pytest.mark.parametrize(
    ("num_seqs", "num_pieces", "rows"),
    [(1, 2, [64]), (8, 2, [64]), (9, 2, [64, 128]), (9, 3, [64])],
)
def test_rows_of_a_program_are_left_to_the_device_where_it_matters(
    num_seqs: int, num_pieces: int, rows: list[int]
):
    from torch_hybrid.ops.triton.delta_scan import EVERY, scan_forms

    v = torch.empty(8192, 32, 128, dtype=torch.bfloat16, device="meta")
    forms = scan_forms(v, 32 * num_seqs, hopper=True, num_pieces=num_pieces)
    assert [form.block_v for form in forms] == rows
    assert len({form.steps for form in forms}) == len(forms)
    assert (forms[0].steps == EVERY.value) == (len(forms) == 1)
