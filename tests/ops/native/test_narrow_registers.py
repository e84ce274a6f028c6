"""The C++ ops as a CPU without AVX-512 has them, wherever one with AVX-512 can stand in for it.

Their bits are those of a token alone, however it comes, and no hot loop keeps its sums in memory.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.spills import MOST, hot_loops, objdump_missing
from tests.hostile.sanitize import FAMILIES
from torch_hybrid.ops.native.build import (
    MARCH,
    compiler_missing,
    library_of,
    native_instructions,
)
from torch_hybrid.ops.native.wheel import sources

AVX2 = "x86-64-v3"
# What torch and its libraries take of the CPU, beside what the kernels are built for.
ENVIRONMENT = {
    MARCH: AVX2,
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}
SAME_BITS = (
    *("bits", "bit_for_bit", "depend", "neighbours", "see_the_others", "order_of_sequences"),
    *("page_order", "steps_one_after_the_other", "segments", "another_slot", "padding_changes"),
)
MODELS = ("bailing_hybrid", "falcon_h1", "inkling", "jamba", "lfm2", "qwen3_next", "zaya")

pytestmark = [
    pytest.mark.skipif(compiler_missing() is not None, reason=str(compiler_missing())),
    pytest.mark.skipif(
        "AVX512F" not in (native_instructions() or ()), reason="no AVX-512: all tests run by AVX2"
    ),
]


def libraries(march: str) -> list[Path]:
    """Build all kernels for a target, as many at once as there are cores."""
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(os.cpu_count()) as threads:
        patch.setenv(MARCH, march)
        return list(threads.map(lambda source: library_of(source.parent.name, source), sources()))


@pytest.fixture(scope="module", autouse=True)
def built_for_avx2() -> None:
    """Tests in other processes find them in the cache."""
    libraries(AVX2)


def test_what_runs_there_is_right() -> None:
    """Headers and the peak are; ops and models keep the bits of a token alone. In one process:
    starting one takes longer than most of it."""
    families = [f"tests/ops/{family}" for family in FAMILIES]
    others = (
        "tests/ops/native/test_headers.py",
        "tests/benchmarks/test_ceilings.py",
        "tests/graphs/test_batch_invariant.py",
    )
    names = " or ".join(f"test_any_cut_in_any_company_has_the_same_bits[{m}-" for m in MODELS)
    of_all = f"cpp and not inductor and ({' or '.join(SAME_BITS)})"
    selected = f"{of_all} or test_headers or test_ceilings or float32 and ({names})"
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *families, *others]
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    done = subprocess.run(
        [*command, "-k", selected],
        env=environment | ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-2_000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > 300, done.stdout


@pytest.mark.skipif(objdump_missing(), reason="no objdump")
@pytest.mark.parametrize("march", [AVX2, "native"])
def test_hot_loops_hold_their_sums_in_registers(march: str) -> None:
    """A vector of two registers once lay in memory: 751 moves for 70 multiply-adds."""
    loops = [loop for library in libraries(march) for loop in hot_loops(library)]
    assert len(loops) > 100
    assert [loop for loop in loops if loop.ratio > MOST] == []


@pytest.mark.skipif(objdump_missing(), reason="no objdump")
def test_bytes_are_widened_eight_at_a_time() -> None:
    """One by one, INT8 weights took five times as long."""
    pairs = zip(sources(), libraries(AVX2), strict=True)
    for library in (built for source, built in pairs if "integers" in source.name):
        command = ["objdump", "-d", str(library)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert "vpmovsxbd" in text
        functions = text.split("\n\n")  # those of FP4 load a block's two scales together so
        assert not [each for each in functions if "vpinsrd" in each and "multiply_fp4" not in each]
