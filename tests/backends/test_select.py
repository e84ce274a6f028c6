"""Choosing an implementation: from data, with every reason of every candidate."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline

from torch_hybrid.backends.select import Choice, select
from torch_hybrid.errors import UnsupportedError
from torch_hybrid.ops.core.capability import Capability, Implementation, Need

CPU = torch.device("cpu")


def implementation(**capability: object) -> Implementation:
    """Its launcher does not exist: choosing must not load it."""
    defaults = {"devices": frozenset({"cpu"})}
    return Implementation(capability=Capability(**{**defaults, **capability}), launcher="no.such:f")


IMPLEMENTATIONS = {
    "gpu": implementation(devices=frozenset({"cuda"}), available=lambda: "must not be asked"),
    "absent": implementation(available=lambda: "package nonesuch is not installed"),
    "narrow": implementation(
        dtypes=frozenset({torch.bfloat16}), multiples={"head_dim": 16}, limits={"page_size": 32}
    ),
    "plain": implementation(features=frozenset({"softcap"})),
    "other": implementation(features=frozenset({"softcap"})),
}


def need(**changes: object) -> Need:
    return Need(**{"device": CPU, "dtype": torch.float32, **changes})


def test_a_size_that_is_none_of_those_that_are_made():
    capability = Capability(devices=frozenset({"cpu"}), one_of={"head_dim": (64, 128)})
    assert capability.why_not(need(sizes={"head_dim": 96})) == [
        "head_dim 96 is not one of [64, 128]"
    ]
    assert capability.why_not(need(sizes={"head_dim": 64, "page_size": 3})) == []


def test_the_first_that_can_serve_with_the_reasons_of_the_others():
    choice = select("op", IMPLEMENTATIONS, need(sizes={"head_dim": 80, "page_size": 16}))
    assert choice == Choice(
        op="op",
        impl="plain",
        refused={
            "gpu": ("device cpu is not in ['cuda']",),
            "absent": ("package nonesuch is not installed",),
            "narrow": ("dtype torch.float32 is not in ['torch.bfloat16']",),
            "other": ("plain comes first",),
        },
    )


def test_exact_passes_over_what_rounds_states():
    both = {"rounded": implementation(exact=False), "exact": implementation()}
    assert select("op", both, need()).impl == "rounded"
    chosen = select("op", both, need(exact=True))
    assert chosen.impl == "exact"
    assert chosen.refused == {"rounded": ("it rounds states to 16 bits, and exact=True",)}


def test_a_name_that_can_serve_is_taken():
    choice = select("op", IMPLEMENTATIONS, need(), "other")
    assert choice.impl == "other"
    assert choice.refused["plain"] == ("other was asked for by name",)


def test_none_can_serve():
    with pytest.raises(UnsupportedError) as caught:
        select(
            "op",
            IMPLEMENTATIONS,
            need(sizes={"head_dim": 24, "page_size": 64}, features=frozenset({"lse", "softcap"})),
        )
    assert_expected_inline(
        str(caught.value),
        """\
no implementation of op can serve:
  gpu: device cpu is not in ['cuda']; it has no lse; it has no softcap
  absent: package nonesuch is not installed; it has no lse; it has no softcap
  narrow: dtype torch.float32 is not in ['torch.bfloat16']; head_dim 24 is not a multiple of 16; page_size 64 is over the limit 32; it has no lse; it has no softcap
  plain: it has no lse
  other: it has no lse""",  # noqa: E501
    )


def test_a_name_that_cannot_serve_is_not_replaced():
    with pytest.raises(UnsupportedError) as caught:
        select("op", IMPLEMENTATIONS, need(), "narrow")
    assert_expected_inline(
        str(caught.value),
        """\
no implementation of op can serve:
  narrow: dtype torch.float32 is not in ['torch.bfloat16']
  gpu: device cpu is not in ['cuda']
  absent: package nonesuch is not installed
  plain: narrow was asked for by name
  other: narrow was asked for by name""",
    )


def test_unknown_name():
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        select("op", IMPLEMENTATIONS, need(), "nonesuch")
    assert_expected_inline(
        str(caught.value),
        """op has no implementation 'nonesuch'; it has ['auto', 'gpu', 'absent', 'narrow', 'plain', 'other']""",  # noqa: E501
    )
