"""Forms of kernels are measured once for a machine, and shown where an implementation is chosen."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from torch_hybrid.backends.select import select
from torch_hybrid.ops.core.capability import Need
from torch_hybrid.ops.linear.op import IMPLEMENTATIONS
from torch_hybrid.ops.native import build, compiler_missing, cpu_tuning
from torch_hybrid.ops.ssd import op_step_mamba2 as ssd_step

pytestmark = pytest.mark.skipif(compiler_missing() is not None, reason=str(compiler_missing()))
FOUND = cpu_tuning.CpuTuning(
    streams=1,
    by_hardware=True,
    state_streams=8,
    many_by_torch=False,
    in_turn_rate=40e9,
    four_rate=29e9,
    eight_rate=31e9,
    kernel_rate=13e9,
    hardware_rate=14.2e9,
    state_rate=11e9,
    state_streams_rate=14e9,
    ours_rate=234.4e9,
    torch_rate=98e9,
)


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """An empty cache, and the dtypes that were measured since."""
    dtypes: list[torch.dtype] = []

    def measure(dtype: torch.dtype) -> cpu_tuning.CpuTuning:
        dtypes.append(dtype)
        return FOUND

    monkeypatch.setattr(cpu_tuning, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(cpu_tuning, "_measure", measure)
    # As in one process after another.
    monkeypatch.setattr(cpu_tuning, "tuning", cpu_tuning.tuning.__wrapped__)
    return dtypes


def test_measured_once_for_each_dtype(measured: list[torch.dtype]) -> None:
    for _ in range(2):
        assert cpu_tuning.tuning(torch.float32) == cpu_tuning.tuning(torch.bfloat16) == FOUND
    assert measured == [torch.float32, torch.bfloat16]


def test_another_cpu_in_the_same_folder_measures_again(
    measured: list[torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu_tuning.tuning(torch.float32)
    monkeypatch.setattr(cpu_tuning, "_cpu", lambda: "another")
    cpu_tuning.tuning(torch.float32)
    assert len(measured) == 2


def test_a_file_that_was_cut_off_is_written_again(measured: list[torch.dtype]) -> None:
    cpu_tuning.tuning(torch.float32)
    cpu_tuning._file(torch.float32).write_text('{"streams": ')
    assert cpu_tuning.tuning(torch.float32) == FOUND
    assert cpu_tuning.tuning(torch.float32) == FOUND
    assert len(measured) == 2


def test_a_cache_that_cannot_be_written(
    measured: list[torch.dtype], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(cpu_tuning, "cache_folder", lambda: tmp_path / "file")
    assert cpu_tuning.tuning(torch.float32) == FOUND


def test_without_what_measures_them(
    measured: list[torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise build.BuildError("no compiler")

    monkeypatch.setattr(cpu_tuning, "load_library", fail)
    assert not cpu_tuning.tuning(torch.float32).many_by_torch
    assert cpu_tuning.figures(torch.float32).startswith("forms not measured")
    assert not measured


def test_a_choice_shows_the_forms(measured: list[torch.dtype]) -> None:
    need = Need(device=torch.device("cpu"), dtype=torch.float32)
    assert select("linear", IMPLEMENTATIONS, need).measured == (
        "one row: in turn (in turn 40 GB/s, four streams 29, eight streams 31)\n"
        "eight rows: fetched by the hardware (kernel 13 GB/s, hardware 14.2)\n"
        "many rows: own (own 234 GFLOP/s, torch 98)"
    )
    assert select("linear", IMPLEMENTATIONS, need, "torch").measured == ""
    assert select("ssd_step", ssd_step.IMPLEMENTATIONS, need).measured == (
        "states: eight streams (in turn 11 GB/s each way, eight streams 14)"
    )


def test_measures_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """On little memory: figures of caches, but all forms run."""
    monkeypatch.setattr(cpu_tuning, "_BYTES", 4 << 20)
    monkeypatch.setattr(cpu_tuning, "_TURNS", 2)
    found = cpu_tuning._measure(torch.float32)
    rates = {1: found.in_turn_rate, 4: found.four_rate, 8: found.eight_rate}
    gain = 1.0 if found.streams != 4 else cpu_tuning._STREAMS_GAIN
    assert gain * rates[found.streams] >= max(rates.values())
    assert found.by_hardware == (found.hardware_rate > found.kernel_rate)
    assert (found.state_streams == 8) == (found.state_streams_rate > found.state_rate)
    assert (
        min(
            *rates.values(),
            found.kernel_rate,
            found.hardware_rate,
            found.state_rate,
            found.state_streams_rate,
            found.ours_rate,
            found.torch_rate,
        )
        > 1e8
    )
    assert build.cache_folder().is_dir()


@pytest.mark.parametrize(("others", "streams"), [(0.99, 4), (0.9, 1)])
def test_another_form_than_four_streams_is_clearly_faster(
    monkeypatch: pytest.MonkeyPatch, others: float, streams: int
) -> None:
    def time(*contestants: object) -> list[float]:
        return [others, 1.0, others + 0.01] if len(contestants) == 3 else [1.0, 1.0]

    monkeypatch.setattr(cpu_tuning, "_fastest", time)
    assert cpu_tuning._measure(torch.float32).streams == streams
