"""What torch's operations make of an unread weight, read: the same as of the tensor in memory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from torch_hybrid.models.checkpoint.files import open_checkpoint
from torch_hybrid.models.checkpoint.read import read_weights
from torch_hybrid.ranks import Ranks

CPU = torch.device("cpu")
Weights = dict[str, Tensor]


def heads_apart(w: Weights) -> Tensor:
    """As Qwen3-Next's rows, sorted by kind."""
    parts = w["a"].unflatten(0, (2, -1)).split([3, 1, 2], dim=1)
    return torch.cat([part.flatten(0, 1) for part in parts])


def stacked_and_cut(w: Weights) -> Tensor:
    """Experts of gate and up rows, of which a rank has a part."""
    gate_up = torch.cat([torch.stack([w["a"], w["a"]]), torch.stack([w["c"], w["a"]])], dim=1)
    return Ranks(rank=1, size=2, group_name="").cut(gate_up, [(12, 1), (12, 1)], dim=1)


def seam_within_a_head(w: Weights) -> Tensor:
    parts = torch.cat([w["a"][:7], w["a"][7:], w["c"]])
    return Ranks(rank=2, size=4, group_name="").cut(parts, [(4, 4), (4, 2)])


def columns(w: Weights) -> Tensor:
    return Ranks(rank=1, size=4, group_name="").cut(w["a"], [(4, 2)], dim=1)


def scaled(w: Weights) -> Tensor:
    rows = torch.arange(24, dtype=torch.float64)[:, None]
    folded = (torch.cat([w["a"], w["c"]]).double() * 0.3 * rows).to(torch.bfloat16)
    return Ranks(rank=1, size=2, group_name="").cut(folded, [(12, 1), (6, 2)])


CASES: dict[str, Callable[[Weights], Tensor]] = {
    "whole": lambda w: w["a"],
    "cast twice": lambda w: w["a"].to(torch.bfloat16).float(),
    "squeezed": lambda w: w["conv"].squeeze(1),
    "squeezed in vain": lambda w: w["conv"].squeeze(0),
    "transposed": lambda w: w["a"].transpose(0, 1).flatten(),
    "interleaved": lambda w: w["a"].unflatten(0, (2, 3, 2)).transpose(0, 1).flatten(0, 2),
    "chunked": lambda w: torch.cat([part[1:] for part in w["a"].chunk(4, dim=1)], dim=0),
    "joined along both": lambda w: torch.stack([w["a"], w["c"]], dim=1).flatten(0, 1),
    "transposed after a join": lambda w: (
        torch.cat([w["a"], w["c"]]).transpose(0, 1).narrow(1, 9, 8)
    ),
    "of two dtypes": lambda w: torch.cat([w["a"][:, :4], w["conv"].squeeze(1)]),
    "no rows": lambda w: torch.cat([w["a"][:0], w["c"][:0]]),
    "one number": lambda w: w["one"],
    "heads apart": heads_apart,
    "stacked and cut": stacked_and_cut,
    "a seam within a head": seam_within_a_head,
    "columns": columns,
    "scaled": scaled,
}


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Path, Weights]:
    weights = {
        "a": torch.randn(12, 8),
        "c": torch.randn(12, 8),
        "conv": torch.randn(6, 1, 4).bfloat16(),
        "one": torch.randn(()).half(),
    }
    save_file(weights, tmp_path / "model.safetensors")
    return tmp_path, weights


@pytest.mark.parametrize("piece_bytes", [16, 4 << 20])
@pytest.mark.parametrize("case", CASES)
def test_read_as_made_in_memory(
    stored: tuple[Path, Weights], case: str, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("torch_hybrid.models.checkpoint.pieces.PIECE_BYTES", piece_bytes)
    monkeypatch.setattr("torch_hybrid.models.checkpoint.pieces.LONG_RUN_BYTES", 8)
    folder, weights = stored
    checkpoint = open_checkpoint(folder)
    module = nn.Module()
    module.weight = nn.Parameter(CASES[case](checkpoint.unread(CPU)), requires_grad=False)
    expected = CASES[case](weights)
    assert module.weight.shape == expected.shape
    assert module.weight.dtype == expected.dtype
    read_weights(module, checkpoint, CPU)
    assert type(module.weight) is nn.Parameter
    assert torch.equal(module.weight, expected)


def assert_all_read(folder: Path, weights: Weights, dtype: torch.dtype | None = None) -> None:
    """As one model, whose floats are of this dtype."""

    def cast(weight: Tensor) -> Tensor:
        return weight.to(dtype or weight.dtype) if weight.is_floating_point() else weight

    checkpoint = open_checkpoint(folder)
    module = nn.Module()
    for name, weight in checkpoint.unread(CPU).items():
        module.register_buffer(name, cast(weight))
    read_weights(module, checkpoint, CPU)
    for name, weight in module.named_buffers():
        assert torch.equal(weight, cast(weights[name])), name


def test_what_follows_in_a_file_is_read_at_once(
    stored: tuple[Path, Weights], monkeypatch: pytest.MonkeyPatch
):
    calls, preadv = [], os.preadv

    def counted(descriptor: int, buffers: Any, offset: int) -> int:
        calls.append(len(buffers))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", counted)
    assert_all_read(*stored)
    assert calls == [len(stored[1])]
    calls.clear()
    monkeypatch.setattr("torch_hybrid.models.checkpoint.pieces.PIECE_BYTES", 500)
    assert_all_read(*stored)
    assert sorted(calls) == [1, 3]


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_a_file_that_gives_few_bytes_at_a_time(
    stored: tuple[Path, Weights], dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
):
    preadv = os.preadv

    def few(descriptor: int, buffers: Any, offset: int) -> int:
        return preadv(descriptor, [buffers[0][:7]], offset)

    monkeypatch.setattr(os, "preadv", few)
    assert_all_read(*stored, dtype)


def test_values_behind_an_odd_number_of_bytes(tmp_path: Path):
    weights = {"a": torch.tensor([1, 2, 3], dtype=torch.int8), "b": torch.randn(5)}
    header = json.dumps(
        {
            "a": {"dtype": "I8", "shape": [3], "data_offsets": [0, 3]},
            "b": {"dtype": "F32", "shape": [5], "data_offsets": [3, 23]},
        }
    ).encode()
    raw = b"".join(weight.numpy().tobytes() for weight in weights.values())
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + raw)
    assert_all_read(tmp_path, weights)
    assert_all_read(tmp_path, weights, torch.float64)


def test_a_weight_in_two_places_stays_one(stored: tuple[Path, Weights]):
    checkpoint = open_checkpoint(stored[0])
    module = nn.Sequential(nn.Linear(8, 12, bias=False), nn.Linear(8, 12, bias=False))
    module[0].weight = module[1].weight = nn.Parameter(checkpoint.unread(CPU)["a"])
    module.register_buffer("table", checkpoint.unread(CPU)["c"])
    read_weights(module, checkpoint, CPU)
    assert module[0].weight is module[1].weight
    assert torch.equal(module.table, stored[1]["c"])


def test_values_that_nobody_has_are_not_made_up(stored: tuple[Path, Weights]):
    checkpoint = open_checkpoint(stored[0])
    unread = checkpoint.unread(CPU)["a"]
    with pytest.raises(NotImplementedError, match="of a weight that has not been read"):
        unread.add_(1)
    module = nn.Module()
    module.weight = nn.Parameter(unread.exp())
    with pytest.raises(NotImplementedError, match="weight is made of values that are not read"):
        read_weights(module, checkpoint, CPU)
    assert (unread * 2 + torch.ones(12, 8)).is_meta  # of values that others have


def test_rows_that_cannot_be_joined_are_named(stored: tuple[Path, Weights]):
    unread = open_checkpoint(stored[0]).unread(CPU)
    with pytest.raises(ValueError, match=r"agree in all others: a \[12, 8\], conv \[6, 4\]"):
        torch.cat([unread["a"], unread["conv"].squeeze(1)])
