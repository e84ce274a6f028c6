"""The tables of what kernels take: every kernel is in one, and a change of one is seen."""

from __future__ import annotations

import importlib.metadata
from dataclasses import replace
from pathlib import Path

import expecttest
import pytest
import torch
from expecttest import assert_expected_inline

from tests.ops import triton_resources
from tests.ops.kernels import all_kernels
from tests.ops.triton_compile import (
    SHARED_LIMITS,
    Launch,
    Resources,
    compile_launch,
    digest_of,
    launches_on,
    needs_cross_compiler,
)
from tests.ops.triton_resources import assert_all_fit, resources_of
from torch_hybrid.ops.triton.devices import triton_missing

ROW = Resources(
    kernel="scan: Qwen3-Next",
    target="sm_90",
    num_warps=8,
    registers=168,
    stack=0,
    shared=163840,
    async_copies=12,
    tensor_copies=0,
    wgmma=84,
    tcgen05=0,
    mma=0,
    ir="0123456789ab",
)


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A table of one row, of the Triton that is installed."""
    pytest.importorskip("triton")
    path = tmp_path / "resources.txt"
    installed = importlib.metadata.version("triton")
    monkeypatch.setattr(triton_resources, "table_version", lambda: installed)
    with monkeypatch.context() as patch:
        patch.setattr(expecttest, "ACCEPT", True)
        assert_all_fit([ROW], path)
    monkeypatch.setattr(expecttest, "ACCEPT", False)
    return path


def test_every_kernel_is_in_a_table() -> None:
    """Of its family; those that families share in the table of any that launches them."""
    held = {
        (table.parent.name, line.partition(":")[0])
        for table in Path(__file__).parent.glob("*/resources*.txt")
        for line in table.read_text().splitlines()[2:]
    }
    shared = {(folder, kernel) for folder in ("triton", "flashinfer") for _, kernel in held}
    kernels = {(module.partition(".")[0], kernel) for module, kernel in all_kernels()}
    assert kernels <= held | shared
    assert len(all_kernels()) >= 20


def test_a_change_is_shown_with_what_accepts_it(table: Path) -> None:
    with pytest.raises(AssertionError) as error:
        assert_all_fit([replace(ROW, registers=255, wgmma=0, mma=512)], table)
    assert_expected_inline(
        str(error.value),
        """\
kernels take something else than their table says
 kernel: shape                                    target  warps registers spilled  shared cp.async  tma wgmma tcgen05   mma
--- resources.txt
+++ as compiled
@@ -3 +3 @@
-scan: Qwen3-Next                                 sm_90       8       168       0  163840       12    0    84       0     0
+scan: Qwen3-Next                                 sm_90       8       255       0  163840       12    0     0       0   512
if this is meant: EXPECTTEST_ACCEPT=1 python -m pytest tests/ops -k compiles_without_spills""",  # noqa: E501
    )
    assert_all_fit([ROW], table)


def test_no_row_comes_or_goes_unseen(table: Path) -> None:
    with pytest.raises(AssertionError, match="scan: MiniMax"):
        assert_all_fit([ROW, replace(ROW, kernel="scan: MiniMax")], table)
    with pytest.raises(AssertionError, match="scan: Qwen3-Next"):
        assert_all_fit([], table)
    table.unlink()
    with pytest.raises(AssertionError, match="scan: Qwen3-Next"):
        assert_all_fit([ROW], table)


def test_spills_and_limits_hold_with_any_triton(
    table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_resources, "table_version", lambda: "1.2.3")
    monkeypatch.setattr(expecttest, "ACCEPT", True)
    before = table.read_text()
    with pytest.warns(UserWarning, match=r"numbers of triton 1\.2\.3, .* looked for spills alone"):
        assert_all_fit([replace(ROW, registers=255)], table)
    assert table.read_text() == before
    with pytest.raises(AssertionError, match="spills 8 bytes"):
        assert_all_fit([replace(ROW, stack=8)], table)
    with pytest.raises(AssertionError, match="over 232448 bytes of shared memory"):
        assert_all_fit([replace(ROW, shared=232449)], table)


def test_kernels_that_changed_without_their_numbers_are_told(table: Path) -> None:
    with pytest.warns(UserWarning, match="their numbers did not: they are compiled each time"):
        assert_all_fit([replace(ROW, ir="ba9876543210")], table)


needs_triton_of_the_tables = pytest.mark.skipif(
    triton_missing() is not None
    or importlib.metadata.version("triton") != triton_resources.table_version(),
    reason="the tables are of another triton than is installed",
)


def top_k_launch(target: str) -> Launch:
    """A small kernel's."""
    from torch_hybrid.ops.top_k import _triton
    from torch_hybrid.ops.top_k.op import TopK

    with launches_on(target) as launches:
        _triton.top_k(TopK(torch.empty(64, 32, device="meta"), 2, impl="triton"))
    return launches["_top_k_kernel"]


@needs_cross_compiler
@pytest.mark.parametrize("target", SHARED_LIMITS)
def test_a_row_is_what_the_compiler_gives(target: str) -> None:
    launch = top_k_launch(target)
    held = resources_of(launch, target, "2 of 32")
    assert held == replace(compile_launch(launch, target, "2 of 32"), ir=held.ir)


@needs_cross_compiler
@needs_triton_of_the_tables
def test_what_changed_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    monkeypatch.setattr(triton_resources, "compile_launch", lambda *a: compiled.append(a) or ROW)
    monkeypatch.setattr(expecttest, "ACCEPT", False)
    launch = top_k_launch("sm_90")
    resources_of(launch, "sm_90", "as in the table")
    assert not compiled
    digests = {digest_of(launch, "sm_90")}
    for changed in ({"num_warps": 8}, {"E": 31}):
        other = replace(launch, kwargs=launch.kwargs | changed)
        digests.add(resources_of(other, "sm_90", "another").ir)
    assert (len(compiled), len(digests)) == (2, 3)
