"""Ops have no backward: a forward with gradients on runs, and a backward says which op ends it."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import torch_hybrid as th
from tests.layers import (
    test_kimi_delta_attention,
    test_lightning_attention,
    test_mamba,
    test_mamba2,
    test_mlstm,
    test_rg_lru,
    test_rwkv,
)
from tests.ops.registered import public_ops
from torch_hybrid.backends.mode import MODES
from torch_hybrid.backends.step import forms_of
from torch_hybrid.layers import GatedDeltaNet, LatentAttention
from torch_hybrid.layers.fused_experts import FusedExperts
from torch_hybrid.ops.core.registration import REGISTERED
from torch_hybrid.ops.linear import linear
from torch_hybrid.ops.merge_states import merge_states
from torch_hybrid.specs import LayerSpec

DIM = 32
DELTA = th.DeltaRuleSpec(num_k_heads=2, num_v_heads=4, head_k_dim=16, head_v_dim=16, conv_width=4)
FULL = th.AttentionSpec(num_q_heads=2, num_kv_heads=1, head_dim=16, scale=0.25)
LATENT = th.LatentSpec(
    num_heads=2, latent_rank=32, nope_dim=16, rope_dim=16, v_dim=16, scale=32**-0.5
)
ALL_FORMS = {
    "absorbed": th.PrefixPolicy(absorbed="always"),
    "one shot": th.PrefixPolicy(absorbed="never"),
    "chunks": th.PrefixPolicy(absorbed="never", one_shot=False, token_budget=16),
}
Mix = Callable[[Tensor], Tensor]


def planned(spec: LayerSpec, mode: th.Mode, num_tokens: int, prefix: th.PrefixPolicy | None = None):
    """The plan and the pool of one sequence's first step in one layer."""
    table = th.LayerTable.from_specs([spec])
    cache = th.HybridCache(table, max_seqs=2, kv_tokens=128, page_size=16)
    options = th.Backends(prefix=prefix or th.PrefixPolicy())
    backends = th.make_backends(table, cache.sizes, options)
    batch = cache.make_batch(cache.allocate(1), [[0] * num_tokens])
    kind = spec.kind
    forms = forms_of(backends, [batch], mode)  # of the batch as it is: not padded
    return th.plan_all(backends, batch, mode, forms)[kind], cache.pools[kind][0]


def recurrent(layer: nn.Module, mode: th.Mode) -> Mix:
    layer.requires_grad_(True)

    def mix(x: Tensor) -> Tensor:
        rows = x[:1] if mode is th.Mode.DECODE else x
        return layer(rows, *planned(layer.spec, mode, len(rows)))

    return mix


def attention(x: Tensor) -> Tensor:
    q, k, v = x.view(len(x), -1, 16)[:, :1].expand(-1, 2, -1), x[:, None, :16], x[:, None, 16:]
    mix = th.layers.PagedAttention(FULL)
    return mix(q, k, v, *planned(FULL, th.Mode.EXTEND, len(x))).flatten(1)


def latent(form: str, *, which: str = "all") -> Mix:
    mix = LatentAttention(LATENT, nn.Linear(32, 64, bias=False))
    mix.requires_grad_(False)

    def run(x: Tensor) -> Tensor:
        given = x if which == "all" else x.detach()
        q = given[:, None].expand(-1, 2, -1)
        plan, pool = planned(LATENT, th.Mode.EXTEND, len(x), ALL_FORMS[form])
        return mix(q, x if which != "k_rope" else x.detach(), x[:, :16], plan, pool).flatten(1)

    return run


def experts(x: Tensor) -> Tensor:
    up, down = (nn.Parameter(torch.ones(3, *shape)) for shape in ((64, DIM), (DIM, 32)))
    ids = torch.zeros(len(x), 2, dtype=torch.int32)
    return FusedExperts(up, down)(x, ids, torch.full((len(x), 2), 0.5))


def products(x: Tensor) -> Tensor:
    return linear(x, [nn.Parameter(torch.ones(8, DIM))], [None], impl="torch")


def merged(x: Tensor) -> Tensor:
    rows, lse = x[:, None], x[:, :1].detach().contiguous()
    return merge_states(rows, lse, rows, lse, impl="torch")[0]


def layers() -> Iterator[tuple[str, Mix]]:
    torch.manual_seed(0)
    made = {
        "gated_delta_rule": GatedDeltaNet(DIM, DELTA),
        "kimi_delta_attention": test_kimi_delta_attention.make("low rank"),
        "ssd": test_mamba2.make(test_mamba2.SPEC),
        "selective_scan": test_mamba.make(test_mamba.SPEC),
        "lightning": test_lightning_attention.make(test_lightning_attention.PLAIN),
        "mlstm": test_mlstm.make(),
        "rg_lru": test_rg_lru.make(),
        "time_mix": test_rwkv.make_time_mix(),
    }
    for name, layer in made.items():
        for mode in MODES:
            yield f"{name}, {mode.name}", recurrent(layer, mode)
    for form in ALL_FORMS:
        yield f"latent_attention, {form}", latent(form)
        yield f"latent_attention, {form}, of what is stored", latent(form, which="latent")
        yield f"latent_attention, {form}, of keys that are stored", latent(form, which="k_rope")
    yield from {
        "paged_attention": attention,
        "fused_experts": experts,
        "linear": products,
        "merge_states": merged,
    }.items()


LAYERS = dict(layers())


@pytest.mark.parametrize("name", LAYERS)
def test_a_forward_runs_and_its_backward_names_an_op(name: str):
    x = torch.randn(20, DIM, requires_grad=True)
    torch.manual_seed(1)
    out = LAYERS[name](x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no other word about it
        with pytest.raises(NotImplementedError, match=r"torch_hybrid::\w+ is inference only"):
            out.square().sum().backward()
    assert x.grad is None
    for context in (torch.no_grad, torch.inference_mode):
        torch.manual_seed(1)
        with context():
            plain = LAYERS[name](x)
        assert torch.equal(plain, out)
        assert not plain.requires_grad


def test_pools_stay_without_history():
    x = torch.randn(4, DIM, requires_grad=True)
    plan, cache = planned(DELTA, th.Mode.EXTEND, 4)
    GatedDeltaNet(DIM, DELTA)(x, plan, cache)
    assert not cache["conv"].requires_grad
    assert not cache["state"].requires_grad
    assert cache["state"].abs().sum() > 0


def test_nothing_is_refused_where_nothing_asks_for_gradients():
    mix = recurrent(GatedDeltaNet(DIM, DELTA), th.Mode.EXTEND)
    head = nn.Linear(DIM, 1)
    with torch.no_grad():
        features = mix(torch.randn(4, DIM))
    head(features).sum().backward()
    assert head.weight.grad is not None


def forward_mode(mix: Mix, x: Tensor) -> Tensor:
    with torch.no_grad(), forward_ad.dual_level():
        return mix(forward_ad.make_dual(x, x))


TRANSFORMS: dict[str, Callable[[Mix, Tensor], object]] = {
    "checkpoint": lambda mix, x: checkpoint(mix, x, use_reentrant=False).sum().backward(),
    "reentrant checkpoint": lambda mix, x: (
        checkpoint(mix, x.requires_grad_(), use_reentrant=True).sum().backward()
    ),
    "grad": lambda mix, x: torch.func.grad(lambda x: mix(x).sum())(x),
    "vjp": lambda mix, x: torch.func.vjp(mix, x),
    "jvp": lambda mix, x: torch.func.jvp(mix, (x,), (x,)),
    "jacrev": lambda mix, x: torch.func.jacrev(mix)(x),
    "vmap": lambda mix, x: torch.vmap(mix)(x[None]),
    "forward mode": forward_mode,
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", ["gated_delta_rule, extend", "linear"])
def test_transforms_are_refused_by_name(name: str, transform: str):
    with pytest.raises(NotImplementedError, match=r"torch_hybrid::\w+ is inference only"):
        TRANSFORMS[transform](LAYERS[name], torch.randn(4, DIM))


def test_compiled_with_gradients_on():
    """The forward is one graph, and the refusal is raised when its backward runs."""
    layer = GatedDeltaNet(DIM, DELTA)
    plan, cache = planned(DELTA, th.Mode.EXTEND, 4)
    assert_refused_when_run(lambda x: layer(x, plan, cache), "aot_eager_decomp_partition")
    mix = LatentAttention(LATENT, nn.Linear(32, 64, bias=False)).requires_grad_(False)
    plan, pool = planned(LATENT, th.Mode.EXTEND, 4, ALL_FORMS["one shot"])
    q = torch.randn(4, 2, 32)
    assert_refused_when_run(lambda x: mix(q, x, x[:, :16], plan, pool), "aot_eager")


def assert_refused_when_run(mix: Mix, backend: str) -> None:
    x = torch.randn(4, DIM, requires_grad=True)
    out = torch.compile(mix, fullgraph=True, backend=backend)(x)
    torch.testing.assert_close(out, mix(x))
    with pytest.raises(NotImplementedError, match=r"torch_hybrid::\w+ is inference only"):
        out.sum().backward()


def test_every_op_is_registered_so():
    def has(name: str, key: str) -> bool:
        return torch._C._dispatch_has_kernel_for_dispatch_key(f"torch_hybrid::{name}", key)

    keys = ["AutogradCPU", "AutogradCUDA", "Autograd", "FuncTorchDynamicLayerFrontMode"]
    assert {name: [has(name, key) for key in keys] for name in public_ops()} == {
        # Those with a backward are registered by torch, under the one key.
        name: [not name.endswith("_forward")] * 2 + [True] * 2
        for name in REGISTERED
    }


def test_tensors_without_data_meet_the_fake():
    """Neither fake tensors nor those of the meta device reach an implementation."""
    q = torch.empty(1, 2, 16, device="meta", requires_grad=True)
    ids = torch.empty(2, dtype=torch.int32, device="meta")
    g = torch.empty(1, 2, device="meta")
    state = torch.empty(2, 2, 16, 16, device="meta")
    op = torch.ops.torch_hybrid.gated_delta_rule.default
    arguments = [q, q, q, g, g, state, ids, ids[:1], ids[:1]]
    options = {"scale": 1.0, "qk_l2norm": True, "chunk_size": 32, "impl": "chunk_torch"}
    assert str(op._schema).startswith("torch_hybrid::gated_delta_rule")
    out = op(*arguments, **options)
    assert out.device.type == "meta"
    assert out.requires_grad
    with torch.no_grad():
        assert not op(*arguments, **options).requires_grad


def test_the_message():
    out = products(torch.randn(1, DIM))
    message = (
        "torch_hybrid::linear is inference only: it has no backward. Run the forward under "
        "torch.no_grad() or torch.inference_mode(), or detach what goes into it"
    )
    with pytest.raises(NotImplementedError, match=f"^{re.escape(message)}$"):
        out.sum().backward()
