"""Forms for instructions that this CPU may lack: what the compiler makes of them for CPUs that have
them, and that they are right, with these instructions as functions.
"""

from __future__ import annotations

import platform
import re
import subprocess
from pathlib import Path

import pytest
import torch

from tests.ops.linear.cases import CASES, make_fp8_inputs, make_inputs
from tests.ops.linear.test_contract import assert_as_exact
from tests.ops.linear.test_cpu import OWN
from torch_hybrid.ops.linear import _cpu
from torch_hybrid.ops.native import build, compiler_missing, load_library
from torch_hybrid.ops.native.call import kernel

pytestmark = [
    pytest.mark.skipif(compiler_missing() is not None, reason=str(compiler_missing())),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="builds for CPUs of x86"),
]
PAIRS, TILES = "vdpbf16ps", "tdpbf16ps"
EMULATED = ("-O1", "-include", str(Path(__file__).with_name("emulated.h")))


@pytest.mark.parametrize(
    ("march", "expected"),
    [
        ("icelake-server", set()),
        ("cooperlake", {PAIRS}),
        ("sapphirerapids", {PAIRS, TILES}),
    ],
)
def test_the_flags_of_a_cpu_choose_its_instructions(
    march: str, expected: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In products of few rows and of many, of both dtypes."""
    monkeypatch.setenv(build.MARCH, march)
    compiler, assembly = build._find_compiler(), tmp_path / "forms.s"
    assert compiler is not None
    source = _cpu.SOURCE
    command = [compiler, *build._flags(), "-O0", f"-I{build.HEADERS}", "-S", str(source)]
    done = subprocess.run(
        [*command, "-o", str(assembly)], capture_output=True, text=True, check=False
    )
    if f"bad value ('{march}')" in done.stderr:
        pytest.skip(f"{compiler} does not know {march}")
    assert done.returncode == 0, done.stderr
    assert set(re.findall(f"{PAIRS}|{TILES}", assembly.read_text())) == expected


@pytest.mark.skipif(
    "AVX512BW" not in (build.native_instructions() or ()), reason="this CPU has no AVX-512"
)
@pytest.mark.parametrize("has_tiles", [False, True], ids=["pairs", "tiles"])
def test_products_in_pairs_and_in_tiles(has_tiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = (*build.FLAGS, *EMULATED, "-DEMULATED_TILES" if has_tiles else "-mno-amx-bf16")
    monkeypatch.setattr(build, "FLAGS", flags)
    monkeypatch.setattr(_cpu, "tuning", lambda dtype: OWN)
    build.load_library.cache_clear()
    monkeypatch.setattr(_cpu, "_RUN", kernel("linear", _cpu.SOURCE, **_cpu.FIELDS))
    try:
        for case in CASES.values():
            assert_as_exact("cpp", make_inputs(case, dtype=torch.bfloat16))
            assert_as_exact("cpp", make_fp8_inputs(case, dtype=torch.bfloat16))
        library = load_library("linear", _cpu.SOURCE)
        assert (library.tile_products() > 0) == has_tiles
    finally:
        build.load_library.cache_clear()
