"""A part of ``make sanitize`` that fits the suite: the kernels that once wrote past their scratch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hostile.sanitize import run, runtime
from torch_hybrid.ops.native import compiler_missing

needs_runtime = pytest.mark.skipif(
    compiler_missing() is not None or runtime() is None,
    reason=compiler_missing() or "the C++ compiler has no AddressSanitizer runtime (libasan.so)",
)
OVERRUN = """
import torch
from pathlib import Path
from torch_hybrid.ops.native.call import kernel

def test_overrun():
    fill = kernel("fill", Path(__file__).with_name("fill.cpp"), tensors="x", integers="count")
    x = torch.zeros(8)
    assert fill(x, {count})
"""
FILL = """
#include "call.h"
TH_CALL(Call, float* x; int64_t count;);
TH_EXPORT_CALL(fill, Call) {
  for (int64_t i = 0; i < call->count; ++i) call->x[i] = 1;
  return true;
}
"""


@needs_runtime
@pytest.mark.parametrize(("count", "is_clean"), [(8, True), (9 + 64 // 4, False)])
def test_a_write_past_a_tensor_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, is_clean: bool
) -> None:
    monkeypatch.setenv("TORCH_HYBRID_CACHE", str(tmp_path / "cache"))
    (tmp_path / "fill.cpp").write_text(FILL)
    (tmp_path / "test_overrun.py").write_text(OVERRUN.format(count=count))
    done = run([str(tmp_path / "test_overrun.py")])
    assert ("AddressSanitizer: heap-buffer-overflow" in done.stderr) is not is_clean
    assert (done.returncode == 0) is is_clean


@needs_runtime
def test_the_scalar_decay_kernels_are_clean() -> None:
    suite = ["tests/ops/ssd/test_contract.py", "tests/hostile/test_indices.py"]
    done = run([*suite, "-k", "(cpp and ragged) or ssd and hostile"])
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
