"""The layer table: a bijection, with numbers of its own for each kind."""

from __future__ import annotations

import pytest
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st

from torch_hybrid.specs import AttentionSpec, DeltaRuleSpec, LayerEntry, LayerTable

FULL = AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=16, scale=0.25)
LINEAR = DeltaRuleSpec(num_k_heads=2, num_v_heads=4, head_k_dim=16, head_v_dim=24, conv_width=4)


def entry(index: int, spec: AttentionSpec | DeltaRuleSpec = LINEAR) -> LayerEntry:
    return LayerEntry(index=index, spec=spec)


@given(st.lists(st.sampled_from([FULL, LINEAR])))
def test_numbering(specs: list[AttentionSpec | DeltaRuleSpec]):
    table = LayerTable.from_specs(specs)
    assert len(table) == len(specs)
    for layer_id, spec in enumerate(specs):
        assert table[layer_id].spec is spec
        assert table[layer_id].kind == spec.kind
        assert table[layer_id].index == specs[:layer_id].count(spec)
    assert sum(len(table.of_kind(kind)) for kind in table.kinds) == len(specs)


@pytest.mark.parametrize(
    "specs",
    [[LINEAR, FULL], [FULL, LINEAR], [LINEAR, LINEAR, FULL, LINEAR], [FULL, FULL], [LINEAR]],
    ids=["first linear", "last linear", "one full", "all full", "all linear"],
)
def test_dense_indices_are_not_layer_ids(specs: list[AttentionSpec | DeltaRuleSpec]):
    table = LayerTable.from_specs(specs)
    for kind in table.kinds:
        assert [e.index for e in table.of_kind(kind)] == list(range(len(table.of_kind(kind))))


def test_of_kind_is_ordered_by_index():
    table = LayerTable(((entry(1),), (entry(0, FULL),), (entry(0),)))
    assert [e.index for e in table.of_kind("gated_delta_rule")] == [0, 1]
    assert table[0].index == 1


@pytest.mark.parametrize("indices", [(0, 0), (1, 2), (0, 2), (-1, 0)])
def test_not_a_bijection(indices: tuple[int, ...]):
    with pytest.raises(ValueError, match=r"^layer table is not a bijection: gated_delta_rule"):
        LayerTable(tuple((entry(i),) for i in indices))


def test_text_of_a_refusal():
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        LayerTable(((entry(0), entry(1, FULL)), (entry(2),), (entry(2),)))
    assert_expected_inline(
        str(caught.value),
        """layer table is not a bijection: gated_delta_rule layers must have the indices [0, 1, 2], got [0, 2, 2]""",  # noqa: E501
    )


def test_a_draft_model_counts_from_zero_in_a_table_of_its_own():
    target = LayerTable.from_specs([LINEAR, LINEAR, LINEAR, FULL])
    draft = LayerTable.from_specs([FULL, LINEAR])
    assert (draft[0].kind, draft[0].index) == ("paged_attention", 0)
    assert (draft[1].kind, draft[1].index) == ("gated_delta_rule", 0)
    assert (target[0].kind, target[3].index) == ("gated_delta_rule", 0)


def test_a_layer_may_have_no_mixer_or_several():
    table = LayerTable.from_specs([(FULL, LINEAR), (), LINEAR, (LINEAR, FULL)])
    assert len(table) == 4
    assert [e.index for e in table.entries] == [0, 0, 1, 2, 1]
    assert table.find(3, "paged_attention").index == 1
    assert table.find(3, "gated_delta_rule").index == 2
    with pytest.raises(ValueError, match=r"^layer 1 has no paged_attention, it has \[\]$"):
        table.find(1, "paged_attention")
    with pytest.raises(ValueError, match=r"^layer 2 has no paged_attention, it has \['gated_de"):
        table.find(2, "paged_attention")
    with pytest.raises(ValueError, match="layer 0 must have one mixer, it has"):
        table[0]


def test_one_mixer_of_a_kind_in_a_layer():
    with pytest.raises(ValueError, match="layer 1 must have one mixer of a kind"):
        LayerTable.from_specs([FULL, (FULL, FULL)])


def test_tables_are_values():
    assert LayerTable.from_specs([LINEAR, FULL]) == LayerTable.from_specs([LINEAR, FULL])
    assert hash(LayerTable.from_specs([LINEAR])) == hash(LayerTable.from_specs([LINEAR]))
    assert LayerTable.from_specs([LINEAR, FULL]) != LayerTable.from_specs([FULL, LINEAR])


def test_heads_must_divide():
    with pytest.raises(ValueError, match="multiple of num_kv_heads, got 4 and 3"):
        AttentionSpec(num_q_heads=4, num_kv_heads=3, head_dim=16, scale=1.0)
    with pytest.raises(ValueError, match="multiple of num_k_heads, got 4 and 0"):
        DeltaRuleSpec(num_k_heads=0, num_v_heads=4, head_k_dim=8, head_v_dim=8, conv_width=4)


def test_channels():
    assert (LINEAR.k_channels, LINEAR.v_channels, LINEAR.conv_channels) == (32, 96, 160)
