"""The C++ forms: the same bits whatever a row's company, and on every instruction set."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.ops.contract import assert_draws_within_budget
from tests.ops.integers import FORMATS
from tests.ops.linear.cases import (
    CASES,
    Case,
    Inputs,
    draws_of_integers,
    make_fp8_inputs,
    make_inputs,
    make_integer_inputs,
)
from tests.ops.linear.test_contract import assert_as_exact, expected_of
from torch_hybrid.ops.linear import _cpu
from torch_hybrid.ops.native import build, compiler_missing
from torch_hybrid.ops.native.call import kernel
from torch_hybrid.ops.native.cpu_tuning import CpuTuning

pytestmark = pytest.mark.skipif(compiler_missing() is not None, reason=str(compiler_missing()))

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
OWN = CpuTuning(
    streams=4,
    by_hardware=False,
    state_streams=1,
    many_by_torch=False,
    in_turn_rate=1.0,
    four_rate=1.0,
    eight_rate=1.0,
    kernel_rate=1.0,
    hardware_rate=1.0,
    state_rate=1.0,
    state_streams_rate=1.0,
    ours_rate=1.0,
    torch_rate=1.0,
)


@pytest.fixture(autouse=True)
def own_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is there in C++ runs, whatever was measured on this machine."""
    monkeypatch.setattr(_cpu, "tuning", lambda dtype: OWN)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_fp8_is_the_same_in_every_batch_and_with_any_threads(threads: None) -> None:
    case = Case(num_rows=40, depth=300, widths=(500, 40))
    for dtype in DTYPES.values():
        inputs = make_fp8_inputs(case, dtype=dtype)
        for few in ((1, 2, 3, 4), (17, 33, 40)):
            assert_same_bits_with_any_threads(inputs, few)


@pytest.mark.parametrize("stored", FORMATS)
def test_integers_give_the_same_bits_in_every_batch_and_with_any_threads(
    stored: str, threads: None
) -> None:
    case = Case(num_rows=40, depth=300, widths=(500, 40))
    for dtype in DTYPES.values():
        inputs = make_integer_inputs(case, stored, dtype=dtype)
        for few in ((1, 2, 3, 4), (5, 6, 8, 9, 16), (17, 33, 40)):
            assert_same_bits_with_any_threads(inputs, few)


def assert_same_bits_with_any_threads(inputs: Inputs, few: Sequence[int]) -> None:
    whole = rows_of(inputs, slice(max(few)))
    for count, num_rows in enumerate(few, 1):
        torch.set_num_threads(count)
        assert torch.equal(rows_of(inputs, slice(num_rows)), whole[:num_rows]), num_rows


def rows_of(inputs: Inputs, rows: slice) -> Tensor:
    """Compute some rows alone, and read their bits."""
    return bits(replace(inputs, x=inputs.x[rows]).run("cpp"))


def bits(out: Tensor) -> Tensor:
    return out.view(torch.int32 if out.dtype is torch.float32 else torch.int16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "few", [(1, 2, 3, 4), (5, 6, 8), (9, 11, 12, 16), (17, 33, 64, 65, 200, 700)]
)
def test_a_row_has_the_same_bits_in_every_batch(few: tuple[int, ...], dtype: str) -> None:
    case = Case(num_rows=max(few), depth=1101, widths=(70, 33), biased=frozenset({0}))
    inputs = make_inputs(case, dtype=DTYPES[dtype])
    whole = bits(inputs.run("cpp"))
    for num_rows in few:
        for rows in (slice(num_rows), slice(-num_rows, None)):
            assert torch.equal(rows_of(inputs, rows), whole[rows]), num_rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 7, 30, 600])
def test_threads_and_neighbours_change_no_bit(num_rows: int, dtype: str, threads: None) -> None:
    case = Case(num_rows=num_rows, depth=300, widths=(500, 40))
    inputs = make_inputs(case, dtype=DTYPES[dtype])
    outs = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        outs.append(inputs.run("cpp"))
    alone = [replace(inputs, weights=[w], biases=[None]).run("cpp") for w in inputs.weights]
    outs.append(torch.cat(alone, dim=1))
    assert all(torch.equal(bits(out), bits(outs[0])) for out in outs[1:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("depth", [70, 1101, 2600])  # the last has rows of more than a page
@pytest.mark.parametrize("num_rows", [1, 2, 5, 8, 16])
def test_the_measured_form_changes_no_bit(
    num_rows: int, depth: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(num_rows=num_rows, depth=depth, widths=(70, 33, 2), biased=frozenset({0}))
    inputs = make_inputs(case, dtype=DTYPES[dtype])
    expected = inputs.run("cpp")
    for form in (replace(OWN, streams=1), replace(OWN, streams=8), replace(OWN, by_hardware=True)):
        monkeypatch.setattr(_cpu, "tuning", lambda dtype, form=form: form)
        assert torch.equal(bits(inputs.run("cpp")), bits(expected)), form


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("depth", [64, 70, 100, 101])
def test_many_rows_by_torch_see_nothing_beside_them(
    depth: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_cpu, "tuning", lambda dtype: replace(OWN, many_by_torch=True))
    inputs = make_inputs(Case(num_rows=100, depth=depth, widths=(50,)), dtype=DTYPES[dtype])
    expected = inputs.run("cpp")  # x has NaN beside its rows
    assert expected.isfinite().all()
    inputs.x[1:] = torch.nan
    assert torch.equal(inputs.run("cpp")[0], expected[0])


@pytest.mark.skipif(platform.machine() != "x86_64", reason="builds for x86-64 without AVX-512")
def test_a_cpu_with_avx2_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(build.MARCH, "x86-64-v3")
    compiler = build._find_compiler()
    assert compiler is not None
    assert "__AVX512F__" not in build._target(compiler)
    build.load_library.cache_clear()
    monkeypatch.setattr(_cpu, "_RUN", kernel("linear", _cpu.SOURCE, **_cpu.FIELDS))
    of_integers = kernel("linear_of_integers", _cpu.INTEGERS, **_cpu.FIELDS)
    monkeypatch.setattr(_cpu, "_RUN_INTEGERS", of_integers)
    for name, case in CASES.items():
        for dtype in DTYPES.values():
            assert_as_exact("cpp", make_inputs(case, dtype=dtype))
            assert_as_exact("cpp", make_fp8_inputs(case, dtype=dtype))
            for stored in FORMATS:
                draws = draws_of_integers(name, stored, dtype=dtype)
                assert_draws_within_budget(
                    [(each.run("cpp"), *expected_of(each, "cpp")) for each in draws]
                )
    build.load_library.cache_clear()
