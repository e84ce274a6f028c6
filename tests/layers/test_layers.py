"""The mixers in a module of one's own, compiled whole, without a model or a runner."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import torch_hybrid as th
from torch_hybrid.layers import GatedDeltaNet, PagedAttention
from torch_hybrid.layers.fused_experts import FusedExperts

DIM, WIDTH = 32, 16
FULL = th.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=WIDTH, scale=WIDTH**-0.5)
LINEAR = th.DeltaRuleSpec(
    num_k_heads=2, num_v_heads=4, head_k_dim=WIDTH, head_v_dim=WIDTH, conv_width=4
)
TABLE = th.LayerTable.from_specs([LINEAR, FULL])


class TwoLayers(nn.Module):
    """What a user would write."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = GatedDeltaNet(DIM, LINEAR)
        self.qkv = nn.Linear(DIM, (4 + 2 + 2) * WIDTH, bias=False)
        self.out = nn.Linear(4 * WIDTH, DIM, bias=False)
        self.full = PagedAttention(FULL)
        self.requires_grad_(False)

    def forward(self, x: Tensor, step: th.Step) -> Tensor:
        _, plan, cache = step.layer(0)
        x = x + self.linear(x, plan, cache)
        _, plan, kv = step.layer(1)
        qkv = self.qkv(x).view(x.shape[0], -1, WIDTH)
        q, k, v = qkv.split([4, 2, 2], dim=1)
        return x + self.out(self.full(q, k, v, plan, kv).flatten(1))


class Server:
    """A cache, and steps over it by hand."""

    def __init__(self, module: nn.Module, call: Any, backends: th.Backends | None = None) -> None:
        self.module, self.call = module, call
        self.cache = th.HybridCache(
            TABLE,
            max_seqs=8,
            kv_tokens=512,
            page_size=16,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        self.backends = th.make_backends(TABLE, self.cache.sizes, backends)

    def extend(self, seqs: list[th.Sequence], inputs: list[Tensor]) -> list[Tensor]:
        lengths = [len(x) for x in inputs]
        mode = th.Mode.DECODE if max(lengths) == 1 else th.Mode.EXTEND
        batch = self.cache.make_batch(seqs, [[0] * n for n in lengths])
        plans = th.plan_all(self.backends, batch, mode)
        step = th.Step(plans=plans, caches=self.cache.pools, table=TABLE)
        out = self.call(torch.cat(inputs), step)
        self.cache.commit(seqs, lengths)
        return list(out.split(lengths))


@pytest.fixture(scope="module")
def module() -> TwoLayers:
    torch.manual_seed(0)
    return TwoLayers()


def drive(server: Server) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randn(n, DIM, generator=generator) for n in (40, 33, 70)]
    seqs = server.cache.allocate(3)
    outs: list[list[Tensor]] = [[], [], []]
    steps = ({0: 37, 1: 1, 2: 20}, {2: 49, 1: 30}, {0: 1, 1: 1, 2: 1}, {0: 2, 1: 1})
    done = [0, 0, 0]
    for step in steps:
        inputs = [texts[row][done[row] : done[row] + n] for row, n in step.items()]
        for row, out in zip(step, server.extend([seqs[row] for row in step], inputs), strict=True):
            outs[row].append(out)
            done[row] += len(out)
    return [torch.cat(parts) for parts in outs]


def whole(module: TwoLayers) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randn(n, DIM, generator=generator) for n in (40, 33, 70)]
    server = Server(module, module)
    return [server.extend(server.cache.allocate(1), [text])[0] for text in texts]


def assert_alike(actual: list[Tensor], expected: list[Tensor]) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        assert (ours - theirs).abs().max() < 2e-5 * theirs.abs().max()


def test_ragged_steps_equal_whole_sequences(module: TwoLayers):
    assert_alike(drive(Server(module, module)), whole(module))


def test_one_full_graph_for_each_mode(module: TwoLayers):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, backend=counter, fullgraph=True, dynamic=True)
    with torch.no_grad():
        assert_alike(drive(Server(module, compiled)), whole(module))
        first = counter.frame_count
        assert_alike(drive(Server(module, compiled)), whole(module))
    assert counter.frame_count == first, "the same steps were compiled again"


def test_a_wrong_head_count_is_refused(module: TwoLayers):
    server = Server(module, lambda x, step: module.full(q, q, q, *step.layer(1)[1:]))
    q = torch.zeros(3, 3, WIDTH)
    with pytest.raises(ValueError, match=r"^q must have shape \[T, 4, 16\], got \[3, 3, 16\]$"):
        server.extend(server.cache.allocate(1), [torch.zeros(3, DIM)])


@pytest.mark.parametrize("impl", ["cpp", "torch"])
def test_a_decode_step_in_one_op_is_that_of_its_parts(module: TwoLayers, impl: str):
    whole, parts = (
        Server(module, module, th.Backends(ops={"gated_delta_step": name}))
        for name in (impl, "composed")
    )
    seqs = [server.cache.allocate(3) for server in (whole, parts)]
    torch.manual_seed(1)
    for lengths in ([5, 1, 3], [1, 1, 1], [1, 1, 1]):
        inputs = [torch.randn(n, DIM) for n in lengths]
        ours, theirs = whole.extend(seqs[0], inputs), parts.extend(seqs[1], inputs)
        for out, expected in zip(ours, theirs, strict=True):
            torch.testing.assert_close(out, expected)


def test_initial_decays_last_for_one_to_a_thousand_tokens():
    spec = th.DeltaRuleSpec(
        num_k_heads=64, num_v_heads=64, head_k_dim=4, head_v_dim=4, conv_width=4
    )
    layer = GatedDeltaNet(8, spec)
    time_constants = 1 / (layer.A_log.exp() * F.softplus(layer.dt_bias))
    assert time_constants.min() < 10
    assert time_constants.max() > 100
    assert all(weight.isfinite().all() for weight in layer.parameters())


def test_experts_equal_a_loop():
    num_experts, inner, taken = 5, 24, 2
    gate_up = nn.Parameter(torch.randn(num_experts, 2 * inner, DIM) / 8, requires_grad=False)
    down = nn.Parameter(torch.randn(num_experts, DIM, inner) / 8, requires_grad=False)
    x = torch.randn(7, DIM)
    weights, ids = torch.randn(7, num_experts).softmax(-1).topk(taken)
    expected = torch.zeros_like(x)
    for t in range(7):
        for weight, e in zip(weights[t], ids[t], strict=True):
            gate, up = (gate_up[e] @ x[t]).chunk(2)
            expected[t] += weight * (down[e] @ (F.silu(gate) * up))
    experts = FusedExperts(gate_up, down)
    compiled = torch.compile(experts, backend="aot_eager", fullgraph=True, dynamic=True)
    for call in (experts, compiled):
        assert (call(x, ids, weights) - expected).abs().max() < 1e-5
