"""A thread's own default dtype and device are those that torch has for the whole process."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from torch_hybrid.host.defaults import Defaults, on_meta

WHOLE = torch.arange(6)
MAKERS: dict[str, Callable[[], Tensor]] = {
    "zeros": lambda: torch.zeros(2),
    "full": lambda: torch.full((2,), 0.1),
    "full of integers": lambda: torch.full((2,), 1),
    "tensor": lambda: torch.tensor([0.1, 0.2]),
    "array": lambda: torch.tensor(np.array([0.1])),
    "arange": lambda: torch.arange(0, 1, 0.1),
    "quotient": lambda: WHOLE / 3,
    "power": lambda: 10000.0 ** (WHOLE / 6),
    "root": lambda: WHOLE.sqrt(),
    "bool": lambda: (WHOLE > 2) * 0.5,
    "where": lambda: torch.where(WHOLE > 2, 0.1, 0.5),
    "double": lambda: WHOLE.double(),
    "to": lambda: WHOLE.to(torch.float32),
    "explicit": lambda: torch.ones(2, dtype=torch.float64) / 3,
    "parameter": lambda: torch.nn.LayerNorm(3).weight.detach(),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("of_process", [torch.float32, torch.bfloat16, torch.float64])
def test_same_bits_as_the_default_of_the_process(
    of_process: torch.dtype, dtype: torch.dtype, make: Callable[[], Tensor]
) -> None:
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        expected = make()
        torch.set_default_dtype(of_process)
        with Defaults(dtype=dtype):
            made = make()
        assert torch.get_default_dtype() is of_process
    finally:
        torch.set_default_dtype(before)
    assert made.dtype is expected.dtype
    assert torch.equal(made, expected)


def test_no_memory_but_where_a_device_is_named() -> None:
    with on_meta():
        assert torch.nn.Linear(2, 3).weight.is_meta
        assert torch.zeros(1, device="cpu").device.type == "cpu"
        assert torch.utils._device.CURRENT_DEVICE is None
