"""A part of ``make sanitize``: it sees an overrun, and the kernels that once had one are clean."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hostile.sanitize import run_python, run_tests, runtime
from torch_hybrid.ops.native import compiler_missing

needs_runtime = pytest.mark.skipif(
    compiler_missing() is not None or not runtime(),
    reason=compiler_missing() or "the C++ compiler has no AddressSanitizer runtime (libasan.so)",
)
OVERRUN = """
import sys, torch
from pathlib import Path
from torch_hybrid.ops.native.call import kernel
fill = kernel("fill", Path(sys.argv[1]), tensors="x", integers="count")
x = torch.zeros(8, dtype=torch.float32, device="cpu")
fill(x, 8)
print("within", flush=True)
fill(x, 25)
print("past it")
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
def test_a_write_past_a_tensor_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_HYBRID_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "fill.cpp"
    source.write_text(FILL)
    done = run_python("-c", OVERRUN, str(source))
    assert done.stdout.strip() == "within"
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr


@needs_runtime
def test_the_scalar_decay_kernels_are_clean() -> None:
    suite = ["tests/ops/ssd/test_contract.py", "tests/hostile/test_indices.py"]
    done = run_tests(*suite, "-k", "(cpp and ragged) or (ssd and hostile and not step)")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
