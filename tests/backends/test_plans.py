"""Plans are values: pure, frozen, made of tensors, and sharing nothing but their batch."""

from __future__ import annotations

import dataclasses
import inspect
from types import SimpleNamespace
from typing import Any, get_type_hints

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tests.backends import planning
from torch_hybrid.backends import step as step_module
from torch_hybrid.backends.mode import MODES, LayerForm, Mode
from torch_hybrid.backends.recurrences import RECURRENCES
from torch_hybrid.backends.select import Backends
from torch_hybrid.backends.step import LayerBackend, Step, chunk_grid, make_backends, plan_all
from torch_hybrid.batch import Batch
from torch_hybrid.caches.hybrid import HybridCache
from torch_hybrid.errors import UnsupportedError
from torch_hybrid.ops.core.capability import NO_FEATURES
from torch_hybrid.ops.core.recurrence import DEFAULT_CHUNK_SIZE
from torch_hybrid.ops.delta_rule import gated_delta_rule, kimi_delta_attention
from torch_hybrid.ops.paged_attention import op as paged_op
from torch_hybrid.ops.selective_scan import selective_scan
from torch_hybrid.ops.ssd import ssd
from torch_hybrid.specs import (
    AttentionSpec,
    BranchConvolutionSpec,
    ChannelMixSpec,
    ConvolvedProjectionSpec,
    DeltaRuleSpec,
    IndexedAttentionSpec,
    IndexedLatentSpec,
    JetBlockSpec,
    KimiDeltaSpec,
    LatentSpec,
    LayerSpec,
    LayerTable,
    LightningSpec,
    Mamba2Spec,
    MambaSpec,
    MlstmSpec,
    NgramSpec,
    PreviousHiddenSpec,
    RgLruSpec,
    ShortConvolutionSpec,
    TimeMixSpec,
)

FULL = AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=16, scale=0.25)
LINEAR = DeltaRuleSpec(num_k_heads=1, num_v_heads=2, head_k_dim=16, head_v_dim=16, conv_width=4)
TABLE = LayerTable.from_specs([LINEAR, FULL, LINEAR])
SPECS = [
    FULL,
    LINEAR,
    KimiDeltaSpec(num_heads=2, head_k_dim=16, head_v_dim=16, conv_width=4),
    JetBlockSpec(num_heads=2, head_k_dim=16, head_v_dim=16, conv_width=4, filter_rank=8),
    Mamba2Spec(num_heads=2, head_dim=16, state_dim=16, num_groups=1, conv_width=4),
    MambaSpec(channels=16, state_dim=8, dt_rank=2, conv_width=4),
    LightningSpec(num_heads=2, head_dim=16),
    ShortConvolutionSpec(channels=16, conv_width=3),
    ConvolvedProjectionSpec(
        num_q_heads=4, num_kv_heads=2, head_dim=16, channel_width=2, head_width=2
    ),
    BranchConvolutionSpec(num_kv_heads=2, head_dim=16, channels=16, conv_width=4),
    RgLruSpec(num_heads=2, head_dim=8, conv_width=4),
    TimeMixSpec(dim=16, channels=24),
    ChannelMixSpec(dim=16, width=32),
    MlstmSpec(num_heads=2, head_k_dim=16, head_v_dim=24, gate_softcap=15.0),
    NgramSpec(ngram_size=3, channels=16, conv_width=4),
    PreviousHiddenSpec(channels=16),
    IndexedAttentionSpec(
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=16,
        scale=0.25,
        num_index_heads=2,
        index_dim=16,
        rope_dim=8,
        block_size=4,
        top_k=2,
    ),
    IndexedLatentSpec(
        num_heads=2,
        latent_rank=32,
        nope_dim=16,
        v_dim=16,
        scale=0.25,
        num_index_heads=2,
        index_dim=16,
        block_size=4,
        top_k=2,
    ),
    LatentSpec(num_heads=2, latent_rank=32, nope_dim=16, rope_dim=16, v_dim=16, scale=0.2),
]


def make_cache(table: LayerTable = TABLE) -> HybridCache:
    return HybridCache(
        table,
        max_seqs=4,
        kv_tokens=64,
        page_size=8,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


@pytest.fixture
def backends() -> dict[str, LayerBackend]:
    return make_backends(TABLE, make_cache().sizes)


def make_batch(cache: HybridCache, lengths: list[int]) -> Batch:
    return cache.make_batch(cache.allocate(len(lengths)), [[1] * n for n in lengths])


def tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def storages(tree: object) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors(tree)}


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_every_leaf_is_a_tensor_and_the_rest_is_structure(
    backends: dict[str, LayerBackend], mode: Mode
):
    plans = plan_all(backends, make_batch(make_cache(), [3, 1]), mode)
    leaves, structure = pytree.tree_flatten(plans)
    assert all(isinstance(leaf, Tensor) for leaf in leaves)
    rebuilt = pytree.tree_unflatten(leaves, structure)
    assert rebuilt.keys() == plans.keys() == set(TABLE.kinds)
    for kind, plan in plans.items():
        assert rebuilt[kind].statics == plan.statics
        with pytest.raises(dataclasses.FrozenInstanceError):
            plan.statics = None


def test_a_mode_that_no_backend_was_made_for_is_named(backends: dict[str, LayerBackend]):
    batch = make_batch(make_cache(), [3, 1])
    with pytest.raises(
        ValueError, match=r"mode must be one of \['decode'.* got Mode\(name='verify'"
    ):
        plan_all(backends, batch, Mode.verify(2))


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_planning_is_pure(backends: dict[str, LayerBackend], mode: Mode):
    batch = make_batch(make_cache(), [3, 1])
    before = [leaf.clone() for leaf in tensors(batch)]
    attributes = {kind: dict(vars(backend)) for kind, backend in backends.items()}
    first, second = (plan_all(backends, batch, mode) for _ in range(2))
    assert pytree.tree_structure(first) == pytree.tree_structure(second)
    for a, b in zip(tensors(first), tensors(second), strict=True):
        assert torch.equal(a, b)
    for leaf, copy in zip(tensors(batch), before, strict=True):
        assert torch.equal(leaf, copy)
    assert {kind: dict(vars(backend)) for kind, backend in backends.items()} == attributes


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_two_plans_share_nothing_but_their_batch(backends: dict[str, LayerBackend], mode: Mode):
    cache = make_cache()
    batch, other = make_batch(cache, [3, 1]), make_batch(cache, [2, 2])
    first, again, second = (plan_all(backends, b, mode) for b in (batch, batch, other))
    assert not storages(first) & storages(second)
    assert storages(first) & storages(again) <= storages(batch)


def test_modes_and_sizes_have_the_structure_that_they_should(backends: dict[str, LayerBackend]):
    cache = make_cache()
    batch, other = make_batch(cache, [3, 1]), make_batch(cache, [1])
    decode, extend = (plan_all(backends, batch, mode) for mode in MODES)
    assert pytree.tree_structure(decode) != pytree.tree_structure(extend)
    larger = plan_all(backends, other, Mode.DECODE)
    assert pytree.tree_structure(decode) == pytree.tree_structure(larger)


def test_new_sequences_start_from_zeros(backends: dict[str, LayerBackend]):
    cache = make_cache()
    seqs = cache.allocate(2)
    cache.reserve(seqs[:1], [5])
    cache.commit(seqs[:1], [5])
    batch = cache.make_batch(seqs, [[1], [2, 3]])
    plan = plan_all(backends, batch, Mode.EXTEND)["gated_delta_rule"]
    assert plan.initial_indices.tolist() == [cache.slot(seqs[0]), 0]
    assert plan.state_indices.tolist() == list(map(cache.slot, seqs))


def test_a_step_finds_each_layer_by_its_id(backends: dict[str, LayerBackend]):
    cache = make_cache()
    plans = plan_all(backends, make_batch(cache, [1]), Mode.DECODE)
    step = Step(plans=plans, caches=cache.pools, table=TABLE)
    for layer_id, spec in enumerate([LINEAR, FULL, LINEAR]):
        entry, plan, pool = step.layer(layer_id)
        assert entry.spec is spec
        assert plan is plans[spec.kind]
        assert pool is cache.pools[entry.kind][entry.index]


def test_a_layer_kind_that_is_absent_costs_nothing():
    table = LayerTable.from_specs([FULL])
    cache = make_cache(table)
    assert list(make_backends(table, cache.sizes)) == ["paged_attention"]
    assert list(cache.pools) == ["paged_attention"]


@pytest.mark.parametrize("kind", step_module._BACKENDS)
def test_a_backend_is_the_whole_protocol(kind: str):
    """No hook of the protocol is missing, and all take the same arguments."""
    table = LayerTable.from_specs(SPECS)
    entries, sizes = table.of_kind(kind), make_cache().sizes
    made = step_module._BACKENDS[kind](entries, sizes, Backends(), MODES)
    assert set(made.choices) == set(MODES)
    theirs, ours = inspect.signature(LayerBackend.plan), inspect.signature(type(made).plan)
    assert list(ours.parameters) == list(theirs.parameters)
    hints = get_type_hints(type(made).plan)
    assert (hints["batch"], hints["mode"], hints["form"]) == (Batch, Mode, LayerForm)
    public = {name for name in dir(made) if not name.startswith("_")}
    assert {"plan", "forms", "form_of", "choices"} <= public


def test_every_kind_of_layer_has_a_backend():
    assert set(step_module._BACKENDS) == {spec.kind for spec in SPECS}


def test_a_step_is_cut_where_no_chunk_is():
    made = make_backends(LayerTable.from_specs(SPECS), make_cache().sizes)
    assert chunk_grid(made) == DEFAULT_CHUNK_SIZE
    for op in (gated_delta_rule, kimi_delta_attention, ssd, selective_scan):
        assert inspect.signature(op).parameters["chunk_size"].default == DEFAULT_CHUNK_SIZE
    sizes = {kind: backend.chunk_size for kind, backend in made.items()}
    rules = {"gated_delta_rule", "kimi_delta_attention", "jet_block"}
    chunked = rules | {"mamba", "mamba2", "lightning_attention", "mlstm"}
    assert sizes == {spec.kind: 32 if spec.kind in chunked else 0 for spec in SPECS}
    unequal = {str(size): SimpleNamespace(chunk_size=size) for size in (32, 0, 48)}
    assert chunk_grid(unequal) == 96
    assert chunk_grid({}) == 1


@pytest.mark.parametrize("field", ["full", "linear", "conv"])
def test_names_are_for_their_own_kind(field: str):
    made = make_backends(TABLE, make_cache().sizes, Backends(**{field: "torch"}))
    ops = {"full": "paged_attention", "linear": "gated_delta_rule", "conv": "causal_conv1d"}
    choices = [
        choice
        for backend in made.values()
        for chosen in backend.choices.values()
        for choice in chosen
        if choice.op.endswith(ops[field])
    ]
    assert len(choices) == len(MODES)
    assert {choice.impl.split("_")[-1] for choice in choices} == {"torch"}
    with pytest.raises(ValueError, match="has no implementation 'nonesuch'"):
        make_backends(TABLE, make_cache().sizes, Backends(**{field: "nonesuch"}))


def test_a_size_that_a_named_implementation_cannot_serve():
    """Every layer decides, wherever in the table it stands and however wide the others are."""
    odd = dataclasses.replace(FULL, head_dim=24)
    wide = dataclasses.replace(FULL, head_dim=32)
    for specs in ([FULL, odd], [odd, FULL], [odd, wide]):
        table = LayerTable.from_specs(specs)
        with pytest.raises(UnsupportedError, match="head_dim 24 is not a multiple of 16"):
            make_backends(table, make_cache(table).sizes, Backends(full="cpp"))


def test_an_op_is_asked_for_by_its_own_name_before_that_of_its_kind():
    ops = {"extend gated_delta_rule": "torch", "extend paged_attention": "torch"}
    made = make_backends(TABLE, make_cache().sizes, Backends(full="cpp", linear="cpp", ops=ops))
    chosen = {
        (mode.name, choice.op): choice.impl
        for backend in made.values()
        for mode in MODES
        for choice in backend.choices[mode]
    }
    assert chosen["extend", "gated_delta_rule"] == "chunk_torch"
    assert chosen["decode", "gated_delta_rule"] == "recurrent_cpp"
    assert chosen["extend", "paged_attention"] == "torch"
    assert chosen["decode", "paged_attention"] == "cpp"
    with pytest.raises(ValueError, match="has no implementation 'chunk_torch'"):
        make_backends(TABLE, make_cache().sizes, Backends(ops={"gated_delta_rule": "chunk_torch"}))


@pytest.mark.parametrize(
    ("spec", "step"),
    [
        (LINEAR, "gated_delta_step"),
        (
            KimiDeltaSpec(num_heads=2, head_k_dim=16, head_v_dim=16, conv_width=4),
            "kimi_delta_step",
        ),
    ],
    ids=["gated", "kimi"],
)
@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ({}, "cpp"),
        ({"full": "torch", "ops": {"extend {kind}": "torch"}}, "cpp"),
        ({"ops": {"{step}": "torch"}}, "torch"),
        ({"ops": {"{step}": "composed"}}, "composed"),
        ({"linear": "torch"}, "composed"),
        ({"conv": "cpp"}, "composed"),
        ({"ops": {"decode causal_conv1d": "torch"}}, "composed"),
    ],
    ids=str,
)
def test_a_mixer_is_composed_where_an_op_of_it_is_asked_for(
    named: dict[str, Any], expected: str, spec: LayerSpec, step: str
):
    ops = {op.format(kind=spec.kind, step=step): n for op, n in named.get("ops", {}).items()}
    table = LayerTable.from_specs([spec])
    backends = make_backends(table, make_cache(table).sizes, Backends(**{**named, "ops": ops}))
    choices = backends[spec.kind].choices
    decode = {choice.op: choice for choice in choices[Mode.DECODE]}
    assert decode[step].impl == expected
    parts = {spec.kind, "causal_conv1d"}
    assert set(decode) - {step} == (parts if expected == "composed" else set())
    assert step not in {choice.op for choice in choices[Mode.EXTEND]}


@pytest.mark.parametrize(
    ("ops", "expected"),
    [
        ({}, "cpp"),
        ({"gated_delta_step": "torch"}, "torch"),
        ({"gated_delta_step": "composed"}, None),
    ],
    ids=str,
)
def test_one_call_verifies_drafts_or_a_composed_mixer_replays_them(
    ops: dict[str, str], expected: str | None
):
    table = LayerTable.from_specs([LINEAR])
    cache = make_cache(table)
    mode = Mode.verify(2)
    backend = make_backends(table, cache.sizes, Backends(ops=ops), (mode,))[LINEAR.kind]
    chosen = {choice.op: choice.impl for choice in backend.choices[mode]}
    assert chosen.pop("gated_delta_step", None) == expected
    assert set(chosen) == (set() if expected else {"gated_delta_rule", "causal_conv1d"})
    counts = torch.zeros(2, dtype=torch.int32)
    batch = dataclasses.replace(make_batch(cache, [3, 1]), accepted=counts, num_drafts=counts)
    plan = backend.plan(batch, mode, backend.form_of([batch], mode))
    assert (plan.replay is None) == (expected is not None)


def test_a_composed_mixer_replays_drafts_where_no_other_verifies():
    rule = RECURRENCES["gated_delta_rule"]
    step = rule.mixer
    able = {
        name: dataclasses.replace(
            each, capability=dataclasses.replace(each.capability, features=NO_FEATURES)
        )
        for name, each in step.implementations.items()
    }
    able["composed"] = step.implementations["composed"]
    rule = dataclasses.replace(rule, mixer=dataclasses.replace(step, implementations=able))
    sizes, mode = make_cache(LayerTable.from_specs([LINEAR])).sizes, Mode.verify(2)
    chosen = rule.choose({LINEAR}, sizes, Backends(), mode)
    assert [op.name for op, _ in chosen] == ["gated_delta_rule", "causal_conv1d"]
    with pytest.raises(UnsupportedError, match="cpp: it has no verify"):
        rule.choose({LINEAR}, sizes, Backends(ops={"gated_delta_step": "cpp"}), mode)


@pytest.mark.parametrize("impl", ["cpp", "composed"])
def test_mamba2_is_composed_where_that_is_asked_for(impl: str):
    mamba2 = next(spec for spec in SPECS if isinstance(spec, Mamba2Spec))
    table = LayerTable.from_specs([mamba2])
    named = Backends(ops={"ssd_step": "composed"} if impl == "composed" else {})
    made = make_backends(table, make_cache(table).sizes, named)["mamba2"]
    decode = {choice.op: choice.impl for choice in made.choices[Mode.DECODE]}
    parts = {"ssd", "causal_conv1d"} if impl == "composed" else set()
    assert decode.pop("ssd_step") == impl
    assert set(decode) == parts
    assert {c.op for c in made.choices[Mode.EXTEND]} == {"ssd", "causal_conv1d"}


@pytest.mark.parametrize("impl", ["cpp", "torch", "composed"])
def test_lightning_is_composed_where_that_is_asked_for(impl: str):
    table = LayerTable.from_specs([LightningSpec(num_heads=2, head_dim=16)])
    named = Backends(ops={"lightning_step": impl} if impl != "cpp" else {})
    made = make_backends(table, make_cache(table).sizes, named)["lightning_attention"]
    decode = {choice.op: choice.impl for choice in made.choices[Mode.DECODE]}
    assert decode.pop("lightning_step") == impl
    assert set(decode) == ({"ssd"} if impl == "composed" else set())
    assert {c.op for c in made.choices[Mode.EXTEND]} == {"ssd"}


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ({}, "composed"),  # on a CPU
        ({"ops": {"pooled_selection_step": "torch"}}, "torch"),
        ({"ops": {"pooled_selection_step": "torch", "gated_pooling": "torch"}}, "torch"),
        ({"ops": {"pooled_selection_step": "composed", "select_blocks": "torch"}}, "composed"),
        ({"full": "torch"}, "composed"),
    ],
    ids=str,
)
def test_an_indexer_is_composed_on_a_cpu_and_where_a_part_is_asked_for(
    named: dict[str, Any], expected: str
):
    table = LayerTable.from_specs([next(x for x in SPECS if isinstance(x, IndexedLatentSpec))])
    modes = (*MODES, Mode.verify(2))
    made = make_backends(table, make_cache(table).sizes, Backends(**named), modes)
    choices = made["indexed_latent_attention"].choices
    decode = {choice.op: choice.impl for choice in choices[Mode.DECODE]}
    parts = {"block_attention", "select_blocks", "gated_pooling"}
    assert decode.pop("pooled_selection_step") == expected
    assert set(decode) == (parts if expected == "composed" else {"block_attention"})
    assert all({choice.op for choice in choices[mode]} == parts for mode in modes[1:])


def test_an_op_that_is_none_is_named():
    with pytest.raises(ValueError, match=r"ops must be among .*'ssd'.*got \['extend chunk_ssd'\]"):
        Backends(ops={"extend chunk_ssd": "torch", "decode ssd": "torch"})


def test_layers_of_other_windows_are_planned_apart(monkeypatch: pytest.MonkeyPatch):
    """A schedule of keys in a window leaves out the others."""
    monkeypatch.setitem(paged_op.IMPLEMENTATIONS, "planning", planning.PLANNING)
    specs = [FULL, dataclasses.replace(FULL, window=8), FULL]
    table = LayerTable.from_specs(specs)
    backends = make_backends(table, make_cache(table).sizes, Backends(full="planning"))
    plan = plan_all(backends, make_batch(make_cache(table), [3, 1]), Mode.EXTEND)["paged_attention"]
    assert len(plan.planned) == 2
