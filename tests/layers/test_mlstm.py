"""The mLSTM layer as a module of one's own, without a model or a runner."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torch_hybrid as th
from tests.layers.one_layer import assert_every_parameter_matters, run
from torch_hybrid.layers import Mlstm

DIM = 32
SPEC = th.MlstmSpec(num_heads=3, head_k_dim=8, head_v_dim=20, gate_softcap=15.0)


def make(spread: float = 1.0) -> Mlstm:
    """Gates lie ``spread`` times as far apart as the others' outputs."""
    torch.manual_seed(0)
    layer = Mlstm(DIM, SPEC).requires_grad_(False)
    layer.norm_weight.uniform_(0.5, 1.5)
    layer.in_proj.weight.normal_(std=DIM**-0.5)
    layer.in_proj.weight[-6:].mul_(spread)
    layer.gate_bias.normal_()
    layer.gate_bias[3:].add_(3.0)
    return layer


def by_definition(layer: Mlstm, x: Tensor, eps: float = 1e-6) -> Tensor:
    """As it is published, in float64: memory and normalizer over e^m, m the largest exponent."""
    layer, x, spec = copy.deepcopy(layer).double(), x.double(), layer.spec
    keys, values, heads = spec.k_channels, spec.v_channels, spec.num_heads
    widths = [keys, keys, values, values, heads, heads]
    *qkv, gate, i, f = layer.in_proj(x).split(widths, dim=-1)
    q, k, v = (part.unflatten(-1, (heads, -1)) for part in qkv)
    i, f = (
        spec.gate_softcap * torch.tanh((part + bias) / spec.gate_softcap)
        for part, bias in zip((i, f), layer.gate_bias.chunk(2), strict=True)
    )
    memory, m, out = x.new_zeros(heads, spec.head_v_dim, spec.head_k_dim), x.new_zeros(heads), []
    n = x.new_zeros(heads, spec.head_k_dim)
    for t in range(len(x)):
        kept = F.logsigmoid(f[t]) + m
        m = torch.maximum(kept, i[t])
        decay, weight = (kept - m).exp(), (i[t] - m).exp()
        added = v[t][:, :, None] * k[t][:, None, :]
        memory = decay[:, None, None] * memory + weight[:, None, None] * added
        n = decay[:, None] * n + weight[:, None] * k[t]
        scaled = q[t] * spec.head_k_dim**-0.5
        below = torch.maximum((n * scaled).sum(-1).abs(), (-m).exp()) + eps
        out.append(torch.einsum("hvk,hk->hv", memory, scaled) / below[:, None])
    h = torch.stack(out)
    h = (h - h.mean(-1, keepdim=True)) / (h.var(-1, keepdim=True, correction=0) + 1e-6).sqrt()
    return layer.out_proj(h.flatten(1) * layer.norm_weight * gate.sigmoid())


@pytest.mark.parametrize("spread", [1.0, 30.0], ids=["gates", "gates at their bounds"])
def test_whole_in_chunks_and_token_by_token(spread: float):
    layer, x = make(spread), torch.randn(90, DIM)
    exact = by_definition(layer, x)
    for lengths in ([90], [70, 1, 1, 18], [1] * 90):
        error = (run(layer, x, lengths) - exact).abs().max() / exact.abs().max()
        assert error < 1e-5, f"pieces of {lengths[:4]}: {error:.1e}"


@pytest.mark.parametrize(("spread", "most"), [(None, 1e-6), (0.1, 1e-7), (1.0, 1e-7), (30.0, 1e-7)])
def test_the_norm_leaves_next_to_nothing_of_the_published_eps(spread: float | None, most: float):
    """Which is added to what the memory is divided by: the layer does without.

    The gates of a new layer write so little that the norm's own eps is all that it divides by.
    """
    layer = Mlstm(DIM, SPEC).requires_grad_(False) if spread is None else make(spread)
    x = torch.randn(300, DIM)
    exact = by_definition(layer, x)
    change = (by_definition(layer, x, eps=0.0) - exact).abs().max() / exact.abs().max()
    assert change < most


def test_both_sides_of_the_bound_below_are_met():
    """Normalizers on either side of 1, below which they are not divided by."""
    layer, x = make(), torch.randn(90, DIM)
    with torch.no_grad():
        expected = run(layer, x, [90])
        layer.gate_bias[:3].sub_(20.0)  # memories of next to nothing
        assert (run(layer, x, [90]) - by_definition(layer, x)).abs().max() < 1e-5
        assert (run(layer, x, [90]) - expected).abs().max() > 0.1


def test_half_precision_holds_what_exponential_gates_weigh():
    layer, x = make(30.0), torch.randn(40, DIM)
    exact = by_definition(layer.half(), x.half())
    error = (run(layer, x.half(), [20, *[1] * 20]) - exact).square().mean().sqrt()
    assert error < 0.02 * exact.square().mean().sqrt()


def test_every_parameter_matters():
    assert_every_parameter_matters(make(), DIM)


def test_what_it_keeps():
    """Values and, for the normalizer, ones up to a multiple of 16."""
    table = th.LayerTable.from_specs([SPEC])
    cache = th.HybridCache(table, max_seqs=2, kv_tokens=16, page_size=16)
    assert [list(pool.shape) for pool in cache.pool_tensors()] == [[3, 3, 32, 8]]
    assert [cost.per_token for cost in cache.costs()] == [0]
    assert replace(SPEC, head_v_dim=512).memory_dim == 528


def test_gates_of_a_new_layer_are_as_published():
    i, f = Mlstm(DIM, SPEC).gate_bias.chunk(2)
    assert i.tolist() == [-10.0] * 3
    assert f.tolist() == [3.0, 4.5, 6.0]


def test_facts_that_do_not_fit_are_refused():
    message = "the number of ranks must divide num_heads, got 2 ranks and 3"
    with pytest.raises(th.UnsupportedError, match=message):
        SPEC.divided(2)
    with pytest.raises(ValueError, match=r"gate_softcap must be above 0 and at most 40\.0, got 0"):
        replace(SPEC, gate_softcap=0)
