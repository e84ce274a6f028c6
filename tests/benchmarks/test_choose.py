"""``benchmarks.gpu.choose`` makes a table of a run, which selection reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpu import choose
from torch_hybrid.backends import measured


def line(op: str, **us: float | None) -> dict[str, object]:
    cells = {name: {"us": figure, "why_not": ""} for name, figure in us.items()}
    return {"choice": {"op": op, "sizes": {"head_dim": 128}, "features": []}, "own": cells}


def run(*lines: dict[str, object]) -> dict[str, object]:
    versions = dict.fromkeys(choose.VERSIONS, "1.0")
    return {"on": {"device": "NVIDIA Imaginary 9", **versions}, "ops": list(lines)}


def test_means_of_those_that_were_measured_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [
        line("attention", triton=100.0, flashinfer=50.0, other=1.0),
        line("attention", triton=400.0, flashinfer=8.0, other=None),
        line("alone", triton=3.0, flashinfer=None),
        {"choice": None, "own": {"triton": {"us": 1.0}, "torch": {"us": 2.0}}},
    ]
    choose.write(run(*lines), tmp_path)
    monkeypatch.setattr(measured, "TABLES", tmp_path)
    measured.table.cache_clear()
    [row] = measured.table("NVIDIA Imaginary 9")
    measured.table.cache_clear()
    assert (row.op, row.dtype, row.sizes) == ("attention", "bfloat16", {"head_dim": 128})
    assert row.us == {"flashinfer": 20.0, "triton": 200.0}
    assert list(row.us) == ["flashinfer", "triton"]


def test_nothing_is_written_where_there_is_nothing_to_choose(tmp_path: Path) -> None:
    said = choose.write(run(line("alone", triton=3.0)), tmp_path / "tables")
    assert said == "NVIDIA Imaginary 9: no op was measured with two implementations: no table"
    assert not (tmp_path / "tables").exists()


def test_shipped_tables_are_of_runs() -> None:
    for file in measured.TABLES.glob("*.json"):
        content = json.loads(file.read_text())
        assert file.name == measured.table_of(content["device"]).name
        assert set(content["versions"]) == set(choose.VERSIONS)
        assert all(len(row.us) > 1 for row in measured.table(content["device"]))
