"""One attention block that two layers call, with MLA between them, against dense attention."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_hybrid as th
from torch_hybrid.backends.step import LayerStep
from torch_hybrid.layers import LatentAttention, PagedAttention

DIM, WIDTH, RANK = 32, 16, 32
FULL = th.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=WIDTH, scale=WIDTH**-0.5)
LATENT = th.LatentSpec(num_heads=2, latent_rank=RANK, nope_dim=16, rope_dim=16, v_dim=16, scale=0.2)
TABLE = th.LayerTable.from_specs([FULL, LATENT, FULL])


class Grouped(nn.Module):
    """Attention that knows no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 8 * WIDTH, bias=False)
        self.out = nn.Linear(4 * WIDTH, DIM, bias=False)
        self.attention = PagedAttention(FULL)

    def forward(self, x: Tensor, step: LayerStep) -> Tensor:
        _, plan, cache = step.mixer()
        q, k, v = self.qkv(x).view(len(x), 8, WIDTH).split([4, 2, 2], dim=1)
        return x + self.out(self.attention(q, k, v, plan, cache).flatten(1))

    def dense(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(len(x), 8, WIDTH).transpose(0, 1).split([4, 2, 2])
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.out(o.transpose(0, 1).flatten(1))


class Latent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(DIM, 2 * LATENT.qk_dim, bias=False)
        self.row = nn.Linear(DIM, LATENT.row_dim, bias=False)
        self.attention = LatentAttention(LATENT, nn.Linear(RANK, 2 * 32, bias=False))
        self.out = nn.Linear(2 * LATENT.v_dim, DIM, bias=False)

    def forward(self, x: Tensor, step: LayerStep) -> Tensor:
        _, plan, cache = step.mixer()
        q = self.q(x).view(len(x), 2, LATENT.qk_dim)
        latent, k_rope = self.row(x).split([RANK, 16], dim=-1)
        return x + self.out(self.attention(q, latent, k_rope, plan, cache).flatten(1))

    def dense(self, x: Tensor) -> Tensor:
        q = self.q(x).view(len(x), 2, LATENT.qk_dim).transpose(0, 1)
        latent, k_rope = self.row(x).split([RANK, 16], dim=-1)
        k, v = self.attention.kv_b_proj(latent).view(len(x), 2, 32).transpose(0, 1).split(16, -1)
        k = torch.cat([k, k_rope.expand(2, -1, -1)], dim=-1)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=LATENT.scale)
        return x + self.out(o.transpose(0, 1).flatten(1))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        grouped = Grouped()
        self.layers = nn.ModuleList([grouped, Latent(), grouped])
        self.requires_grad_(False)

    def forward(self, x: Tensor, step: th.Step) -> Tensor:
        for layer_id, layer in enumerate(self.layers):
            x = layer(x, step.at(layer_id))
        return x

    def dense(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer.dense(x)
        return x


PIECES = {"eager": ([20, 7], [1, 1], [18, 21], [1, 1]), "compiled": ([20, 7],)}


@pytest.mark.parametrize("how", PIECES)
def test_each_call_has_a_pool_of_its_own(how: str):
    torch.manual_seed(0)
    model = Model()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    call = {"eager": model, "compiled": compiled}[how]
    texts = [torch.randn(sum(lengths), DIM) for lengths in zip(*PIECES[how], strict=True)]
    cache = th.HybridCache(TABLE, max_seqs=2, kv_tokens=128, page_size=16)
    backends = th.make_backends(TABLE, cache.sizes)
    seqs, done, outs = cache.allocate(2), [0, 0], [[], []]
    with torch.no_grad():
        for lengths in PIECES[how]:
            batch = cache.make_batch(seqs, [[0] * n for n in lengths])
            mode = th.Mode.DECODE if max(lengths) == 1 else th.Mode.EXTEND
            plans = th.plan_all(backends, batch, mode)
            x = torch.cat([t[a : a + n] for t, a, n in zip(texts, done, lengths, strict=True)])
            step = th.Step(plans=plans, caches=cache.pools, table=TABLE)
            parts = call(x, step).split(lengths)
            cache.commit(seqs, lengths)
            for row, part in enumerate(parts):
                outs[row].append(part)
                done[row] += len(part)
        for text, out in zip(texts, outs, strict=True):
            expected = model.dense(text)
            assert (torch.cat(out) - expected).abs().max() < 2e-5 * expected.abs().max()
    first, second = (pool["kv"] for pool in cache.pools["paged_attention"])
    assert not torch.equal(first, second)
