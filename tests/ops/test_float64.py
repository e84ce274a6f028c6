"""float64, in the torch form of the ops where it is exact, and refused by the others."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import torch_hybrid as th
from torch_hybrid.layers import LatentAttention, PagedAttention
from torch_hybrid.ops.causal_conv1d import causal_conv1d
from torch_hybrid.ops.linear import linear

EXACT = {"rtol": 0.0, "atol": 1e-13}
FULL = th.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=16, scale=0.25)
LATENT = th.LatentSpec(
    num_heads=2, latent_rank=32, nope_dim=16, rope_dim=16, v_dim=16, scale=32**-0.5
)
DELTA = th.DeltaRuleSpec(num_k_heads=2, num_v_heads=4, head_k_dim=16, head_v_dim=16, conv_width=4)


def planned(spec: th.AttentionSpec | th.LatentSpec | th.DeltaRuleSpec, num_tokens: int):
    """The plan and the pool of one sequence's first step, its cache in float64."""
    table = th.LayerTable.from_specs([spec])
    cache = th.HybridCache(table, max_seqs=1, kv_tokens=64, page_size=16, dtype=torch.float64)
    prefix = th.Backends(prefix=th.PrefixPolicy(absorbed="always"))
    backends = th.make_backends(table, cache.sizes, prefix)
    batch = cache.make_batch(cache.allocate(1), [[0] * num_tokens])
    (plan,) = th.plan_all(backends, batch, th.Mode.EXTEND).values()
    return plan, next(iter(cache.pools.values()))[0]


def double(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def test_linear():
    x, weight, bias = double(3, 8), double(5, 8), double(5)
    assert torch.equal(linear(x, [weight], [bias], impl="torch"), F.linear(x, weight, bias))


def test_causal_conv1d():
    x, weight, bias = double(9, 6), double(6, 4), double(6)
    offsets, slots = (torch.tensor(values, dtype=torch.int32) for values in ([0, 9], [1]))
    state = double(2, 3, 6)
    out = causal_conv1d(
        x, weight, bias, state, offsets, slots * 0, slots, activation="silu", impl="torch"
    )
    padded = F.pad(x.T, (3, 0))[None]
    exact = F.silu(F.conv1d(padded, weight[:, None], bias, groups=6))[0].T
    torch.testing.assert_close(out, exact, **EXACT)


def test_paged_attention():
    q, k, v = double(9, 4, 16), double(9, 2, 16), double(9, 2, 16)
    out = PagedAttention(FULL)(q, k, v, *planned(FULL, 9))
    heads = [tensor.transpose(0, 1) for tensor in (q, k, v)]
    exact = F.scaled_dot_product_attention(*heads, is_causal=True, scale=0.25, enable_gqa=True)
    torch.testing.assert_close(out, exact.transpose(0, 1), **EXACT)


def test_latent_attention():
    layer = LatentAttention(LATENT, torch.nn.Linear(32, 64, bias=False).double())
    q, latent, k_rope = double(9, 2, 32), double(9, 32), double(9, 16)
    with torch.no_grad():
        out = layer(q, latent, k_rope, *planned(LATENT, 9))
        k, v = layer._expand(latent, k_rope)
    heads = [tensor.transpose(0, 1) for tensor in (q, k, v)]
    exact = F.scaled_dot_product_attention(*heads, is_causal=True, scale=LATENT.scale)
    torch.testing.assert_close(out, exact.transpose(0, 1), **EXACT)


def test_recurrent_layers_refuse_it():
    """Their states are float32."""
    with pytest.raises(th.UnsupportedError, match=r"dtype torch.float64 is not in"):
        planned(DELTA, 9)
