"""Mixers in a module that runs under autocast: they compute in the dtype of their own."""

from __future__ import annotations

import pytest
import torch

from tests.layers import test_lightning_attention
from tests.ops.test_autograd import DELTA, DIM, LAYERS, planned
from torch_hybrid.backends.mode import Mode
from torch_hybrid.layers import GatedDeltaNet


@pytest.mark.parametrize(
    "name", [name for name in LAYERS if name not in ("linear", "merge_states")]
)
@torch.no_grad()
def test_a_mixer_keeps_its_dtype(name: str):
    """Whether the layer before it gave the dtype of autocast or not."""
    x = torch.randn(20, DIM).bfloat16().float()
    expected = LAYERS[name](x)
    with torch.autocast("cpu", torch.bfloat16):
        for given in (x, x.bfloat16()):
            out = LAYERS[name](given)
            assert torch.is_autocast_enabled("cpu")
            assert out.dtype is torch.float32
            assert torch.equal(out, expected)


@torch.no_grad()
def test_states_stay_float32_under_a_layer_of_bfloat16():
    layer = test_lightning_attention.make(test_lightning_attention.PLAIN).bfloat16()
    plan, cache = planned(layer.spec, Mode.EXTEND, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(4, DIM), plan, cache).dtype is torch.bfloat16
    assert cache["state"].dtype is torch.float32
    assert cache["state"].abs().sum() > 0


@torch.no_grad()
def test_compiled_with_autocast_around():
    layer = GatedDeltaNet(DIM, DELTA)
    plan, cache = planned(DELTA, Mode.EXTEND, 4)
    x = torch.randn(4, DIM)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    expected = layer(x, plan, cache)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(compiled(x, plan, cache), expected)
    torch.testing.assert_close(compiled(x, plan, cache), expected)
