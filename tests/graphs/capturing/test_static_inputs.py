"""One packed buffer: nothing of an earlier step is left in a later one."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from torch_hybrid.graphs.capturing.static_inputs import StaticInputs
from torch_hybrid.pytrees import OnHost, tensors_of

CPU = torch.device("cpu")


def value(num_tokens: int, num_seqs: int, num_pages: int, fill: int) -> dict[str, Any]:
    offsets = torch.full((num_seqs + 1,), fill, dtype=torch.int32)
    return {
        "tokens": torch.full((3, num_tokens), fill),
        "pages": torch.full((num_seqs, num_pages), fill, dtype=torch.int32),
        "offsets": offsets,
        "plan": [offsets, torch.full((num_seqs,), bool(fill % 2))],
    }


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5), st.integers(1, 7)), min_size=1))
def test_every_refresh_is_exact(sizes: list[tuple[int, int, int]]):
    inputs = StaticInputs(value(9, 5, 7, 0), CPU)
    for fill, (num_tokens, num_seqs, num_pages) in enumerate(sizes, start=1):
        given = value(num_tokens, num_seqs, num_pages, fill)
        static = inputs.refresh(given)
        assert torch.equal(static["tokens"], given["tokens"])
        assert torch.equal(static["pages"], given["pages"])
        assert torch.equal(static["plan"][1], given["plan"][1])
        assert torch.equal(static["offsets"], given["offsets"])
        assert static["tokens"].is_contiguous()


def test_a_small_step_after_a_large_one_keeps_nothing_of_it():
    inputs = StaticInputs(value(9, 5, 7, 0), CPU)
    large = inputs.refresh(value(9, 5, 7, 99))
    small = inputs.refresh(value(2, 1, 3, 1))
    for leaf in (small["tokens"], small["pages"], small["offsets"], small["plan"][1]):
        assert not (leaf == 99).any()
    assert inputs.refresh(value(9, 5, 7, 2)) is large


@pytest.mark.parametrize("sizes", [(9, 5, 7), (3, 2, 7), (1, 1, 1)])
def test_a_buckets_addresses_stay_and_its_leaves_are_packed(sizes: tuple[int, int, int]):
    inputs = StaticInputs(value(9, 5, 7, 0), CPU)
    first = inputs.refresh(value(*sizes, 1))
    addresses = {name: first[name].data_ptr() for name in ("tokens", "pages", "offsets")}
    inputs.refresh(value(9, 5, 7, 2))
    second = inputs.refresh(value(*sizes, 3))
    assert {name: second[name].data_ptr() for name in addresses} == addresses
    assert all(address % 64 == inputs._host.data_ptr() % 64 for address in addresses.values())
    leaves = [second["tokens"], second["pages"], *second["plan"]]
    spans = sorted((leaf.data_ptr(), leaf.data_ptr() + leaf.nbytes) for leaf in leaves)
    assert all(0 <= b[0] - a[1] < 64 for a, b in pairwise(spans))
    assert spans[0][0] == inputs._host.data_ptr()
    assert inputs.nbytes < 1024


def test_shared_leaves_stay_one_tensor():
    static = StaticInputs(value(9, 5, 7, 0), CPU).refresh(value(2, 2, 2, 1))
    assert static["offsets"] is static["plan"][0]


def test_strided_leaves_are_packed():
    inputs = StaticInputs(value(9, 5, 7, 0), CPU)
    given = value(4, 2, 2, 0)
    given["tokens"] = torch.arange(4).expand(3, 4)
    assert torch.equal(inputs.refresh(given)["tokens"], given["tokens"])


def test_refusals():
    inputs = StaticInputs(value(9, 5, 7, 0), CPU)
    with pytest.raises(ValueError, match="expected a value of structure"):
        inputs.refresh({"tokens": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"must be torch.int64 of at most 216 bytes, got .* 240"):
        inputs.refresh(value(10, 5, 7, 1))
    wrong = value(2, 2, 2, 1)
    wrong["tokens"] = wrong["tokens"].int()
    with pytest.raises(ValueError, match=r"must be torch.int64 .*, got torch.int32"):
        inputs.refresh(wrong)
    unshared = value(2, 2, 2, 1)
    unshared["plan"][0] = unshared["offsets"].clone()
    with pytest.raises(ValueError, match="must be the same tensor as leaf"):
        inputs.refresh(unshared)


def test_tensors_are_found_as_by_pytree():
    given = (value(2, 1, 3, 1), None, [torch.ones(1), "constant"], ())
    tensors, _ = tensors_of(given)
    leaves = [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor)]
    assert all(a is b for a, b in zip(tensors, leaves, strict=True))


def test_what_holds_tensors_is_told_apart():
    one = torch.ones(1)
    values = [(one,), [one], {"a": one}, {"b": one}, (one, None), (one, ()), (one, 1), ((one,),)]
    structures = [tensors_of(given)[1] for given in values]
    assert all(a != b for i, a in enumerate(structures) for b in structures[:i])
    assert tensors_of((torch.zeros(1),))[1] == structures[0]


def test_a_leaf_that_stays_on_the_host_is_refreshed_and_told():
    def held(*values: int) -> dict[str, Any]:
        return {"tokens": torch.tensor(values), "plan": [OnHost(torch.tensor(values[:2]))]}

    inputs = StaticInputs(held(0, 0, 0), CPU)
    first = inputs.refresh(held(1, 2, 3))
    address = first["plan"][0].value.data_ptr()
    second = inputs.refresh(held(4, 5, 6))
    assert second is first
    assert second["plan"][0].value.tolist() == [4, 5]
    assert second["plan"][0].value.data_ptr() == address
    assert inputs.host_values(held(7, 8, 9)) == ((7, 8),)
    assert StaticInputs(value(1, 1, 1, 0), CPU).host_values(value(1, 1, 1, 0)) == ()
