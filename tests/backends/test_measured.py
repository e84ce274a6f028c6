"""What was measured decides between implementations, and nothing else that it does not speak of."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torch_hybrid.backends import measured
from torch_hybrid.backends.select import select
from torch_hybrid.errors import UnsupportedError
from torch_hybrid.explain.sections import implementations
from torch_hybrid.ops.core.capability import Capability, Implementation, Need

DEVICE = "NVIDIA Imaginary 9"
BOTH = frozenset({"cuda"})


def implementation(**capability: object) -> Implementation:
    return Implementation(capability=Capability(devices=BOTH, **capability), launcher="no.such:f")


IMPLEMENTATIONS = {
    "absent": implementation(available=lambda: "package nonesuch is not installed"),
    "first": implementation(features=frozenset({"extend"})),
    "second": implementation(features=frozenset({"extend"})),
    "torch": implementation(features=frozenset({"extend"})),
}
ROW = {
    "op": "op",
    "form": "",
    "dtype": "bfloat16",
    "sizes": {"head_dim": 128},
    "features": [],
    "us": {"absent": 5.0, "second": 12.0, "first": 34.56},
}


@pytest.fixture(autouse=True)
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A table of one row, of the device that all CUDA devices are here."""
    monkeypatch.setattr(measured, "TABLES", tmp_path)
    monkeypatch.setattr(measured, "device_name", lambda d: DEVICE if d.type == "cuda" else "")
    write(ROW)
    yield tmp_path
    measured.table.cache_clear()


def write(row: dict[str, object]) -> None:
    measured.table_of(DEVICE).write_text(json.dumps({"device": DEVICE, "rows": [row]}))
    measured.table.cache_clear()


def need(**changes: object) -> Need:
    defaults = {"device": torch.device("cuda"), "dtype": torch.bfloat16}
    return Need(**defaults | {"sizes": {"head_dim": 128, "page_size": 16}} | changes)


def test_the_fastest_that_can_serve() -> None:
    choice = select("op", IMPLEMENTATIONS, need())
    assert choice.impl == "second"
    assert choice.measured == f"measured on {DEVICE} at head_dim 128: second 12 us, first 34.6 us"
    assert choice.refused == {
        "absent": ("package nonesuch is not installed",),
        "first": ("second is faster",),
        "torch": ("it was not measured here",),
    }


def test_of_two_that_are_as_fast_the_first() -> None:
    write(ROW | {"us": {"second": 33.9, "first": 34.5, "torch": 40.0}})
    choice = select("op", IMPLEMENTATIONS, need())
    assert choice.impl == "first"
    assert choice.refused["second"] == ("first is as fast, and comes first",)
    assert choice.refused["torch"] == ("first is faster",)


def test_what_is_taken_by_name_alone_is_never_chosen() -> None:
    second = replace(IMPLEMENTATIONS["second"], by_name="it rounds states")
    known = IMPLEMENTATIONS | {"second": second}
    choice = select("op", known, need())
    assert choice.impl == "first"
    assert choice.refused["second"] == ("it is taken by name alone: it rounds states",)
    assert select("op", known, need(), "second").impl == "second"
    with pytest.raises(UnsupportedError, match="second: it is taken by name alone: it rounds"):
        select("op", {"second": second}, need())


@pytest.mark.parametrize("impl", ["first", "torch"])
def test_a_name_overrides(impl: str) -> None:
    choice = select("op", IMPLEMENTATIONS, need(), impl)
    assert (choice.impl, choice.measured) == (impl, "")


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": torch.float16},
        {"sizes": {"head_dim": 256}},
        {"sizes": {}},
        {"features": frozenset({"extend"})},
    ],
    ids=str,
)
def test_what_was_not_measured_goes_by_order(other: dict[str, object]) -> None:
    for needs in (need(**other), [need(), need(**other)]):
        choice = select("op", IMPLEMENTATIONS, needs)
        assert (choice.impl, choice.measured) == ("first", "")
        assert choice.refused["second"] == ("first comes first",)
    assert select("another", IMPLEMENTATIONS, need()).impl == "first"


def test_a_row_is_of_one_execution_form() -> None:
    known = {f"chunk_{name}": each for name, each in IMPLEMENTATIONS.items()}
    us = {f"chunk_{name}": 1.0 for name in IMPLEMENTATIONS} | {"chunk_second": 0.5}
    for form, impl in (("chunk", "chunk_second"), ("recurrent", "chunk_first")):
        write(ROW | {"form": form, "us": us})
        assert select("op", known, need()).impl == impl


def test_a_cpu_has_no_table() -> None:
    on_both = {"plain": Implementation(capability=Capability(devices=frozenset({"cpu"})),
                                       launcher="no.such:f")}  # fmt: skip
    assert select("op", on_both, need(device=torch.device("cpu"))).measured == ""


def test_another_device_has_none_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "device_name", lambda _: "NVIDIA Imaginary 10")
    assert select("op", IMPLEMENTATIONS, need()).impl == "first"


def test_explain_shows_the_figures() -> None:
    choice = select("op", IMPLEMENTATIONS, need())
    runner: Any = SimpleNamespace(backends={}, choices=(choice,))
    [row] = implementations(runner).rows
    assert row[:3] == ("every", "op", f"second\n{choice.measured}")
