"""The formulas of ``torch.utils.flop_counter``: every op has one, and counts by shapes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import torch_hybrid as th
from tests.export.test_export import planned
from tests.layers.test_kimi_delta_attention import SPEC as KIMI
from tests.layers.test_mamba2 import SPEC as MAMBA2
from tests.ops.every_op import CALLS, call_of, op_of, torch_form
from tests.ops.test_autograd import DELTA, DIM, LAYERS
from torch_hybrid.ops.core.declare import DECLARED
from torch_hybrid.ops.core.registration import REGISTERED
from torch_hybrid.ops.linear import linear

# Of the layers of tests/ops/test_autograd.py on 20 tokens.
T = 20
CONV = 2 * T * DELTA.conv_channels * DELTA.conv_width
WIDTH_OF_PAGES = 2 * 16  # two pages hold 20 tokens
COUNTS = {
    "gated_delta_rule, extend": {
        "gated_delta_rule": 6 * T * 4 * 16 * 16,
        "causal_conv1d": CONV,
    },
    "gated_delta_rule, decode": {
        "gated_delta_step": 2 * DELTA.conv_channels * DELTA.conv_width + 6 * 4 * 16 * 16,
    },
    "kimi_delta_attention, decode": {
        "kimi_delta_step": 2 * KIMI.conv_channels * KIMI.conv_width + 6 * 3 * 12 * 20,
    },
    "ssd, decode": {
        "ssd_step": 2 * MAMBA2.conv_channels * MAMBA2.conv_width + 4 * 6 * 8 * 12,
    },
    "selective_scan, extend": {"selective_scan": 4 * T * 40 * 16},
    "selective_scan, decode": {"selective_scan": 4 * 40 * 16},
    "lightning, extend": {"ssd": 4 * T * 6 * 12 * 12},
    "mlstm, decode": {"ssd": 4 * 3 * 32 * 8},
    "paged_attention": {"paged_attention": 4 * T * 2 * 16 * WIDTH_OF_PAGES},
    "latent_attention, absorbed": {"latent_attention": 2 * T * 2 * WIDTH_OF_PAGES * (48 + 32)},
    "latent_attention, one shot": {"ragged_attention_with_lse": 2 * T * 2 * (32 + 16) * 64},
    "fused_experts": {"fused_experts": 2 * T * 2 * 3 * 32 * DIM},
    "linear": {"linear": 2 * T * DIM * 8},
}


@pytest.mark.parametrize("context", [nullcontext, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", COUNTS)
def test_counts(name: str, context: Callable[[], object]):
    counter = FlopCounterMode(display=False)
    x = torch.randn(T, DIM)
    with context(), counter:
        LAYERS[name](x)
    counts = {str(op): count for op, count in counter.get_flop_counts()["Global"].items()}
    ours = {name: counts.get(f"torch_hybrid.{name}") for name in COUNTS[name]}
    assert ours == COUNTS[name]


def test_scales_count_nothing():
    x, weight = torch.ones(2, 300), torch.ones(4, 300).to(torch.float8_e4m3fn)
    counter = FlopCounterMode(display=False)
    with counter:
        linear(x, [weight], [None], scales=[torch.ones(1, 3)], impl="cpp")
    assert counter.get_total_flops() == 2 * 2 * 4 * 300


@pytest.mark.parametrize("name", CALLS)
def test_an_op_counts_if_its_torch_form_multiplies(name: str):
    call, op = call_of(name), op_of(name)
    impl = torch_form(op)
    in_torch = DECLARED[op].cls(**{**call.given, "impl": impl})
    with FlopCounterMode(display=False) as ours, torch.no_grad():
        call.changed().run(impl)
    with FlopCounterMode(display=False) as torchs, torch.no_grad():
        REGISTERED[op][impl].load()(in_torch)
    assert (ours.get_total_flops() > 0) >= (torchs.get_total_flops() > 0)


def test_a_window_bounds_the_keys():
    spec = th.AttentionSpec(num_q_heads=2, num_kv_heads=1, head_dim=16, scale=0.25, window=8)
    _, step = planned(th.LayerTable.from_specs([spec]), th.Mode.EXTEND, [4])
    _, plan, kv = step.layer(0)
    q, k = torch.randn(4, 2, 16), torch.randn(4, 1, 16)
    counter = FlopCounterMode(display=False)
    with counter:
        th.layers.PagedAttention(spec)(q, k, k, plan, kv)
    assert counter.get_total_flops() == 4 * 4 * 2 * 16 * 8


def test_a_counter_that_is_imported_later_counts_too():
    code = """
import torch, torch_hybrid, sys
assert "torch.utils.flop_counter" not in sys.modules
from torch_hybrid.ops.linear import linear
from torch.utils.flop_counter import FlopCounterMode
with FlopCounterMode(display=False) as counter:
    linear(torch.ones(2, 3), [torch.ones(4, 3)], [None], impl="torch")
assert counter.get_total_flops() == 48
"""
    subprocess.run([sys.executable, "-c", code], check=True)
