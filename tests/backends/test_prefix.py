"""How prefill reaches what sequences hold: chunks by tokens, and the form that a step takes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torch_hybrid as th
from torch_hybrid.backends.latent_attention import LatentAttentionBackend, LatentPlan
from torch_hybrid.backends.mode import LayerForm, Mode
from torch_hybrid.backends.prefix import PrefixPiece, PrefixPolicy, plan_prefix_chunks
from torch_hybrid.backends.step import forms_of, make_backends, plan_all

MLA = th.LatentSpec(num_heads=4, latent_rank=32, nope_dim=16, rope_dim=8, v_dim=16, scale=0.2)
LINEAR = th.KimiDeltaSpec(num_heads=2, head_k_dim=16, head_v_dim=16, conv_width=4)
PLAIN = th.LayerTable.from_specs([MLA, MLA])
HYBRID = th.LayerTable.from_specs([LINEAR, MLA, LINEAR])
PAGE, CAPACITY = 8, 512
EXPANDED = PrefixPolicy(absorbed="never", token_budget=64)


def make(
    table: th.LayerTable, policy: PrefixPolicy
) -> tuple[th.HybridCache, LatentAttentionBackend]:
    cache = th.HybridCache(
        table,
        max_seqs=8,
        kv_tokens=CAPACITY,
        page_size=PAGE,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    backends = make_backends(table, cache.sizes, th.Backends(prefix=policy))
    return cache, backends["latent_attention"]


def step(
    prefixes: list[int], new: list[int], policy: PrefixPolicy, table: th.LayerTable = PLAIN
) -> tuple[LayerForm, LatentPlan]:
    """The form and the plan of one extend step."""
    cache, backend = make(table, policy)
    seqs = cache.allocate(len(new))
    cache.reserve(seqs, prefixes)
    cache.commit(seqs, prefixes)
    batch = cache.make_batch(seqs, [[0] * n for n in new])
    form = backend.form_of([batch], Mode.EXTEND)
    return form, backend.plan(batch, Mode.EXTEND, form)


@given(st.lists(st.integers(0, 300), max_size=70), st.integers(1, 200))
def test_chunks_hold_every_position_once_and_in_order(lengths: list[int], budget: int):
    chunks = plan_prefix_chunks(lengths, budget)
    assert len(chunks) == -(-sum(lengths) // budget)
    assert all(piece.length > 0 for chunk in chunks for piece in chunk)
    assert all(sum(piece.length for piece in chunk) == budget for chunk in chunks[:-1])
    held = [0] * len(lengths)
    for piece in (piece for chunk in chunks for piece in chunk):
        assert piece.start == held[piece.sequence]
        held[piece.sequence] += piece.length
    assert held == lengths


def test_chunks_are_counted_by_tokens_not_by_sequences():
    assert len(plan_prefix_chunks([300_000, 10_000, 0], 131_072)) == 3
    assert plan_prefix_chunks([1] * 5, 2) == [
        [PrefixPiece(0, 0, 1), PrefixPiece(1, 0, 1)],
        [PrefixPiece(2, 0, 1), PrefixPiece(3, 0, 1)],
        [PrefixPiece(4, 0, 1)],
    ]
    assert plan_prefix_chunks([0, 0], 7) == []


@pytest.mark.parametrize("budget", [0, -1])
def test_a_budget_of_nothing(budget: int):
    with pytest.raises(ValueError, match=f"token_budget must be at least 1, got {budget}"):
        plan_prefix_chunks([5], budget)


def test_a_hybrid_plans_as_the_plain_model_does():
    for prefixes, new in (([0, 9], [7, 3]), ([200, 130], [16, 1]), ([400, 0], [50, 50])):
        for policy in (PrefixPolicy(), EXPANDED, dataclasses.replace(EXPANDED, one_shot=False)):
            (plain_form, plain), (form, hybrid) = (
                step(prefixes, new, policy, table) for table in (PLAIN, HYBRID)
            )
            assert plain_form == form
            assert torch.utils._pytree.tree_structure(plain) == (
                torch.utils._pytree.tree_structure(hybrid)
            )
            for a, b in zip(
                torch.utils._pytree.tree_leaves(plain),
                torch.utils._pytree.tree_leaves(hybrid),
                strict=True,
            ):
                assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("prefixes", "new", "form"),
    [
        ([0, 0], [20, 30], LayerForm(name="one shot", num_chunks=1, num_rows=64)),
        ([30], [30], LayerForm(name="one shot", num_chunks=1, num_rows=64)),
        ([30], [35], LayerForm(name="2 chunks", num_chunks=2, num_rows=64)),
        ([128, 0], [1, 2], LayerForm(name="2 chunks", num_chunks=2, num_rows=64)),
        ([128, 1], [1, 2], LayerForm(name="8 chunks", num_chunks=8, num_rows=64)),
        ([0], [65], LayerForm(name="2 chunks", num_chunks=2, num_rows=64)),
    ],
)
def test_forms_by_length(prefixes: list[int], new: list[int], form: LayerForm):
    chosen, plan = step(prefixes, new, EXPANDED)
    assert chosen == form
    assert plan.prefix is not None
    assert [len(rows) for rows in plan.prefix.rows] == [form.num_rows] * form.num_chunks


def test_rows_are_spread_over_the_chunks():
    policy = dataclasses.replace(EXPANDED, token_budget=128)
    form, _ = step([300], [8], policy)
    assert form == LayerForm(name="8 chunks", num_chunks=8, num_rows=64)


def test_one_shot_has_the_rows_of_the_step_and_no_more():
    policy = PrefixPolicy(absorbed="never", token_budget=None)
    form, plan = step([100], [8], policy)
    assert form == LayerForm(name="one shot", num_chunks=1, num_rows=128)
    assert plan.prefix is not None
    assert [len(rows) for rows in plan.prefix.rows] == [128]


def test_rows_name_the_pages_of_their_positions():
    cache, backend = make(PLAIN, EXPANDED)
    seqs = cache.allocate(3)
    cache.reserve(seqs, [50, 0, 41])
    cache.commit(seqs, [50, 0, 41])
    batch = cache.make_batch(seqs, [[0], [0, 0], [0, 0, 0]])
    plan = backend.plan(batch, Mode.EXTEND, backend.form_of([batch], Mode.EXTEND))
    rows = torch.cat(
        [
            rows[: offsets[-1]]
            for rows, offsets in zip(plan.prefix.rows, plan.prefix.cu_seqlens, strict=True)
        ]
    )
    expected = [
        int(batch.page_table[n, position // PAGE]) * PAGE + position % PAGE
        for n, length in enumerate([50, 0, 41])
        for position in range(length)
    ]
    assert rows.tolist() == expected
    assert 0 not in rows
    assert all(
        not rows[offsets[-1] :].any()
        for rows, offsets in zip(plan.prefix.rows, plan.prefix.cu_seqlens, strict=True)
    )


def test_few_new_tokens_after_a_prefix_are_absorbed():
    assert step([300], [1], PrefixPolicy())[0].name == "absorbed"
    assert step([0], [256], PrefixPolicy())[0].name == "one shot"
    assert step([300], [1], PrefixPolicy(absorbed_cost=1e6))[0].name == "one shot"
    assert step([0], [256], PrefixPolicy(absorbed="always"))[0].name == "absorbed"


@pytest.mark.parametrize(
    ("policy", "names"),
    [
        (PrefixPolicy(), ["absorbed", "one shot"]),
        (PrefixPolicy(absorbed="never"), ["one shot"]),
        (PrefixPolicy(absorbed="always"), ["absorbed"]),
        (PrefixPolicy(token_budget=None), ["absorbed", "one shot"]),
        (PrefixPolicy(token_budget=None, one_shot=False), ["absorbed"]),
        (PrefixPolicy(one_shot=False), ["absorbed", "1 chunk"]),
        (PrefixPolicy(token_budget=100), ["absorbed", "one shot", "2 chunks", "8 chunks"]),
        (EXPANDED, ["one shot", "2 chunks", "8 chunks"]),
    ],
)
def test_every_switch_leaves_forms_for_every_length(policy: PrefixPolicy, names: list[str]):
    _, backend = make(PLAIN, policy)
    forms = backend.forms(Mode.EXTEND)
    assert [form.name for form in forms] == names
    largest = {form.name: form for form in forms}
    for prefixes, new in (([0], [1]), ([0], [512]), ([511], [1]), ([100, 200], [50, 100])):
        form, plan = step(prefixes, new, policy)
        assert form.num_rows <= largest[form.name].num_rows
        expanded = [] if plan.prefix is None else plan.prefix.rows
        assert all(len(rows) <= (policy.token_budget or CAPACITY) for rows in expanded)
    assert [form.name for form in backend.forms(Mode.DECODE)] == ["absorbed"]


def test_no_way_left_is_refused_when_the_policy_is_made():
    with pytest.raises(th.UnsupportedError, match="no way is left to attend to a prefix"):
        PrefixPolicy(token_budget=None, one_shot=False, absorbed="never")


def test_policies_that_make_no_sense():
    with pytest.raises(ValueError, match="token_budget must be at least one page, got 0"):
        PrefixPolicy(token_budget=0)
    with pytest.raises(ValueError, match="must be 'auto', 'always' or 'never', got 'maybe'"):
        PrefixPolicy(absorbed="maybe")
    with pytest.raises(ValueError, match="at least one page of 8 tokens, got 7"):
        make(PLAIN, PrefixPolicy(token_budget=7))


def test_a_policy_that_never_expands_chooses_no_ops_for_it():
    _, backend = make(PLAIN, PrefixPolicy(absorbed="always"))
    assert [choice.op for choice in backend.choices[Mode.EXTEND]] == ["latent_attention"]


def test_plans_of_all_forms_are_alike_but_for_their_chunks():
    cache, _ = make(HYBRID, EXPANDED)
    backends = make_backends(HYBRID, cache.sizes, th.Backends(prefix=EXPANDED))
    batch = cache.make_batch(cache.allocate(1), [[0] * 9])
    plans = plan_all(backends, batch, Mode.EXTEND, forms_of(backends, [batch], Mode.EXTEND))
    assert list(plans) == ["kimi_delta_attention", "latent_attention"]
    assert plans["latent_attention"].slot_mapping is batch.slot_mapping
