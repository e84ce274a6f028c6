"""Weights and pools in huge pages: the same values, storages of their own, nothing mapped."""

from __future__ import annotations

import copy
import sys
from array import array
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import torch_hybrid as th
from tests.tiny_models import make_model
from torch_hybrid.host.ints import int_tensor, packed_ints, plain_ints
from torch_hybrid.host.memory import keep_weights, zeros

CPU = torch.device("cpu")


@pytest.mark.parametrize("shape", [(0,), (3, 5), (1 << 20, 3), (4, 0, 9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_zeros_are_those_of_torch(shape: tuple[int, ...], dtype: torch.dtype):
    made = zeros(shape, dtype=dtype, device=CPU)
    assert torch.equal(made, torch.zeros(shape, dtype=dtype))
    assert made.is_contiguous()
    made.fill_(1)
    assert not zeros(shape, dtype=dtype, device=CPU).any()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "values",
    [[], [7], [-1, 2**31 - 1, -(2**31)], list(range(-100, 100))],
    ids=["none", "one", "extremes", "many"],
)
def test_int_tensors_are_those_of_torch(values: list[int], dtype: torch.dtype):
    for given in (values, iter(values)):
        made = int_tensor(given, dtype)
        assert made.dtype == dtype
        assert torch.equal(made, torch.tensor(values, dtype=dtype))


@pytest.mark.parametrize("count", [1, 1000])
def test_what_is_no_integer_or_too_large_is_told_however_many_there_are(count: int):
    for wrong, error in ((2**31, OverflowError), (0.5, TypeError), ("7", TypeError)):
        with pytest.raises(error):
            packed_ints([3] * count + [wrong], "i")


def test_large_tensors_start_at_a_huge_page():
    made = zeros((1 << 20,), dtype=torch.float32, device=CPU)
    if sys.platform == "linux":
        assert made.data_ptr() % (2 << 20) == 0


def test_kept_weights_are_equal_and_apart():
    module = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3), nn.Linear(3, 0))
    module[1].weight = nn.Parameter(torch.randn(5, 3).T)  # strides of its own
    module.append(nn.Linear(7, 5))
    module[3].weight = module[0].weight  # tied
    expected = copy.deepcopy(module.state_dict())
    originals = [weight.data_ptr() for weight in module.parameters() if weight.numel()]
    keep_weights(module)
    for name, weight in module.state_dict().items():
        assert torch.equal(weight, expected[name])
        assert weight.is_contiguous()
        assert weight.data_ptr() % 64 == 0
    assert module[3].weight is module[0].weight
    kept = [weight for weight in module.parameters() if weight.numel()]
    assert not {weight.data_ptr() for weight in kept} & set(originals)
    storages = {weight.untyped_storage().data_ptr() for weight in kept}
    assert len(storages) == len(kept)
    assert torch.equal(copy.deepcopy(module)[0].bias, module[0].bias)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc says what is mapped")
@pytest.mark.parametrize("family", ["qwen3_next_dense", "qwen3"])
def test_no_checkpoint_stays_mapped(family: str, tmp_path: Path):
    make_model(family).save_pretrained(tmp_path)
    model = th.from_pretrained(tmp_path)
    assert "model.safetensors" not in Path("/proc/self/maps").read_text()
    assert all(weight.isfinite().all() for weight in model.parameters())


@pytest.mark.parametrize("count", [3, 300])
def test_ints_are_told_from_all_else(count: int):
    ints = [0, 1, *range(5, count + 3)]
    assert plain_ints(ints) == array("q", ints)
    others = [True, 1.0, None, "2", [3], 1 << 63, torch.tensor(4), torch.tensor([4]), np.int64(4)]
    for other in [*others, np.bool_(True)]:
        assert plain_ints([*ints, other]) is None
        assert plain_ints([other, *ints]) is None
