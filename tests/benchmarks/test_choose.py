"""``benchmarks.gpu.choose`` makes a table of a run, which selection reads."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks.gpu import choose
from benchmarks.gpu.__main__ import OPS
from benchmarks.gpu.case import Case, Cell, Line
from benchmarks.gpu.report import NOT_INSTALLED
from torch_hybrid.backends import latent_attention, measured, paged_attention, recurrent
from torch_hybrid.backends.mode import MODES, Mode
from torch_hybrid.backends.select import Choice
from torch_hybrid.backends.step import make_backends
from torch_hybrid.caches.sizes import PoolSizes
from torch_hybrid.ops.core.capability import Capability, Need
from torch_hybrid.specs import (
    AttentionSpec,
    DeltaRuleSpec,
    KimiDeltaSpec,
    LatentSpec,
    LayerTable,
    LightningSpec,
    Mamba2Spec,
)

DEVICE = "NVIDIA Imaginary 9"
SIZES = PoolSizes(
    num_pages=64, page_size=16, num_slots=4, dtype=torch.bfloat16, device=torch.device("cuda")
)
ATTENTION = AttentionSpec(num_q_heads=16, num_kv_heads=2, head_dim=256, scale=1.0)
DELTA_RULE = DeltaRuleSpec(
    num_k_heads=16, num_v_heads=32, head_k_dim=128, head_v_dim=128, conv_width=4
)
OTHERS = (
    KimiDeltaSpec(num_heads=2, head_k_dim=128, head_v_dim=128, conv_width=4),
    Mamba2Spec(num_heads=2, head_dim=64, state_dim=128, num_groups=1, conv_width=4),
    LightningSpec(num_heads=2, head_dim=128),
    LatentSpec(num_heads=16, latent_rank=512, nope_dim=128, rope_dim=64, v_dim=128, scale=1.0),
)


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where tables are found; a GPU of that name is there."""
    monkeypatch.setattr(measured, "TABLES", tmp_path)
    monkeypatch.setattr(measured, "device_name", lambda d: DEVICE if d.type == "cuda" else "")
    measured.table.cache_clear()
    yield tmp_path
    measured.table.cache_clear()


def line(op: str, shape: str = "1x1", **us: float | None) -> dict[str, object]:
    cells = {name: {"us": figure, "why_not": ""} for name, figure in us.items()}
    choice = {"op": op, "form": "", "sizes": {"head_dim": 128}, "features": []}
    return {"op": op, "model": "any", "shape": shape, "choice": choice, "own": cells}


def run(*lines: dict[str, object], **on: str) -> dict[str, object]:
    versions = dict.fromkeys(choose.VERSIONS, "1.0")
    return {"on": {"device": DEVICE, **versions, **on}, "ops": list(lines)}


def test_means_of_those_that_were_measured_everywhere(tables: Path) -> None:
    lines = [
        line("attention", "1x1", triton=100.0, flashinfer=50.0, other=1.0),
        line("attention", "1x2", triton=400.0, flashinfer=3.2, other=None),
        line("attention", "1x3", triton=25.0, flashinfer=50.0, other=1.0),
        line("alone", triton=3.0, flashinfer=None),
        line("not chosen", triton=1.0, torch=2.0) | {"choice": None},
    ]
    said = choose.write([run(*lines)], tables).splitlines()
    assert said[2:] == ["but attention any 1x3: flashinfer takes 50.0 us, triton 25.0"]
    [row] = measured.table(DEVICE)
    assert (row.op, row.dtype, row.sizes) == ("attention", "bfloat16", {"head_dim": 128})
    assert row.us == {"flashinfer": 20.0, "triton": 100.0}
    assert list(row.us) == ["flashinfer", "triton"]


def test_parts_that_were_run_apart_are_one_table(tables: Path) -> None:
    first = run(line("a", triton=1.0, cudnn=2.0), line("b", triton=9.0, cudnn=3.0))
    lines = line("b", triton=1.0, cudnn=3.0), line("c", triton=1.0, cudnn=4.0)
    again = run(*lines, **{"flashinfer-python": NOT_INSTALLED})
    choose.write([again, first, again], tables)
    content = json.loads(measured.table_of(DEVICE).read_text())
    assert content["versions"]["flashinfer-python"] == "1.0"  # of who had it
    assert {row.op: row.us for row in measured.table(DEVICE)} == {
        "a": {"triton": 1.0, "cudnn": 2.0},
        "b": {"triton": 1.0, "cudnn": 3.0},
        "c": {"triton": 1.0, "cudnn": 4.0},
    }


def test_what_was_not_measured_again_stays(tables: Path) -> None:
    """But not beside other versions' figures."""
    ops = {"a": {"triton": 1.0, "cudnn": 2.0}, "b": {"cudnn": 1.0, "triton": 9.0}}
    choose.write([run(*(line(op, **us) for op, us in ops.items()))], tables)
    again, new = {"triton": 3.0, "cudnn": 4.0}, {"triton": 5.0, "cudnn": 6.0}
    choose.write([run(line("b", **again), line("c", **new))], tables)
    rows = json.loads(measured.table_of(DEVICE).read_text())["rows"]
    assert {row["op"]: row["us"] for row in rows} == {"a": ops["a"], "b": again, "c": new}
    assert [row["op"] for row in rows] == ["a", "b", "c"]
    choose.write([run(line("c", **new), triton="2.0")], tables)
    [row] = measured.table(DEVICE)
    assert row.op == "c"


@pytest.mark.parametrize("name", ["device", "triton"])
def test_runs_of_several_devices_or_versions_are_refused(tables: Path, name: str) -> None:
    runs = [run(line("a", triton=1.0, cudnn=2.0)), run(**{name: "2.0"})]
    with pytest.raises(ValueError, match=f"^runs must be of one {name}, got "):
        choose.write(runs, tables)


def test_nothing_is_written_where_there_is_nothing_to_choose(tmp_path: Path) -> None:
    said = choose.write([run(line("alone", triton=3.0))], tmp_path / "tables")
    assert said == "NVIDIA Imaginary 9: no op was measured with two implementations: no table"
    assert not (tmp_path / "tables").exists()


def test_from_a_run_to_what_a_runner_takes(tables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file that a run writes, with every case of the benchmark in it, through the command to a
    model's choices: what is fastest at its heads, but what is taken by name alone."""
    monkeypatch.setattr(Capability, "why_not", lambda *_: [])
    order = {"flashinfer": 1.0, "cudnn": 2.0, "triton": 3.0}
    lines = [
        asdict(Line(
            op=case.op, model=case.model, shape=case.shape, floor_us=1.0, bound="bytes",
            own={name: Cell(us=order[name]) for name in case.own if name in order},
            others={}, choice=case.choice,
        ))
        for make in OPS.values() for case in make()
    ]  # fmt: skip
    file = tables / "run.json"
    file.write_text(json.dumps(run(*lines)))
    monkeypatch.setattr(sys, "argv", ["choose", str(file), "--folder", str(tables)])
    choose.main()
    made, of_other_heads = (
        make_backends(LayerTable.from_specs([attention, DELTA_RULE]), SIZES)
        for attention in (ATTENTION, replace(ATTENTION, num_q_heads=24))
    )
    for mode in MODES:
        [choice] = made["paged_attention"].choices[mode]
        assert choice.impl == "flashinfer"
        said = f"measured on {DEVICE} at head_dim 256, num_kv_heads 2, num_q_heads 16, page_size 16"
        assert choice.measured.startswith(said)
        [choice] = of_other_heads["paged_attention"].choices[mode]
        assert choice.measured == ""  # nothing was measured there
    rule = made["gated_delta_rule"].choices[Mode.EXTEND][0]
    assert rule.refused["chunk_flashinfer"][0].startswith(
        "it is taken by name alone: its states are"
    )


def test_what_a_case_measures_is_what_a_runner_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that no runner asks for would change nothing, in silence."""
    asked: dict[str, list[Need]] = defaultdict(list)

    def note(
        op: str, known: Mapping[str, object], needs: object, preferred: str = "auto"
    ) -> Choice:
        asked[op] += [needs] if isinstance(needs, Need) else list(needs)
        return Choice(op=op, impl=next(iter(known)))

    for module in (latent_attention, paged_attention, recurrent):
        monkeypatch.setattr(module, "select", note)
    make_backends(LayerTable.from_specs([ATTENTION, DELTA_RULE, *OTHERS]), SIZES)
    cases: Iterator[Case] = chain.from_iterable(make() for make in OPS.values())
    for case in cases:
        if (choice := case.choice) is not None and choice.op in asked:
            needs = [need for need in asked[choice.op] if need.features == set(choice.features)]
            assert needs, f"{case}: no runner asks for {choice.op} with {choice.features}"
            unknown = set(choice.sizes) - set(needs[0].sizes)
            assert not unknown, f"{case}: no runner says {unknown}"
            if any(need.features for need in asked[choice.op]):
                num_new = int(case.shape.split()[0].split("x")[1])
                assert (num_new > 1) == ("extend" in choice.features), case


def test_shipped_tables_are_of_runs() -> None:
    for file in measured.TABLES.glob("*.json"):
        content = json.loads(file.read_text())
        assert file.name == measured.table_of(content["device"]).name
        assert set(content["versions"]) == set(choose.VERSIONS)
        assert all(len(row.us) > 1 for row in measured.table(content["device"]))
