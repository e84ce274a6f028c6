"""Ceilings bound what is measured beneath them, and count what they do."""

from __future__ import annotations

import pytest
import torch

from benchmarks.ceilings import Peak, best_streams, reader
from benchmarks.timing import interleave
from torch_hybrid.ops.native import compiler_missing

pytestmark = pytest.mark.skipif(compiler_missing() is not None, reason=str(compiler_missing()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_product_is_faster_than_multiply_adds(dtype: torch.dtype) -> None:
    peak, x = Peak(dtype), torch.randn(512, 512).to(dtype)
    times = interleave({"peak": peak, "product": lambda: x @ x}, rounds=15)
    peak_rate = peak.flops / times["peak"].best
    assert 2 * 512**3 / times["product"].best < 1.5 * peak_rate  # of turns on a busy machine


def test_a_read_takes_all_of_its_memory() -> None:
    memory = torch.ones(1 << 16)
    assert best_streams(memory.data_ptr(), memory.numel(), 1) in (1, 2, 4, 8)
    times = interleave({"small": reader(4 << 20), "large": reader(64 << 20)}, rounds=5)
    assert times["large"].best > 4 * times["small"].best
