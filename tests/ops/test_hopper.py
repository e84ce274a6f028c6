"""Where kernels written in Gluon are launched, and where their Triton forms are."""

from __future__ import annotations

import importlib.metadata

import pytest
import torch

from tests.ops.triton_interpreter import needs_triton
from torch_hybrid.ops.triton.devices import gluon_missing, rows_are_aligned, runs_gluon


@needs_triton
@pytest.mark.parametrize(
    ("version", "known"),
    [("3.5.1", False), ("3.6.0", True), ("3.7.1+cu130", True), ("3.10.0", False), ("main", False)],
)
def test_only_the_known_gluon_is_taken(
    version: str, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", {"triton": version}.__getitem__)
    why = gluon_missing.__wrapped__()
    assert (why is None) == known
    assert known or (version in why and "3.6 and 3.7" in why)


def test_a_cpu_runs_no_gluon() -> None:
    assert not runs_gluon(torch.device("cpu"))


def test_rows_that_copies_would_cut_are_refused() -> None:
    rows = torch.empty(4, 6, 320)
    assert rows_are_aligned(rows)
    assert rows_are_aligned(rows[..., 192:])
    assert rows_are_aligned(rows.transpose(0, 1))
    assert not rows_are_aligned(torch.empty(4, 6, 328))
    assert not rows_are_aligned(rows[..., ::2])
