"""What only shows in a new process: imports that must not be needed, nor happen.

A compile that is the very first call of a process is in ``tests/test_examples.py``.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[1]
OPTIONAL = ("triton", "flashinfer", "transformers", "numpy", "safetensors", "rich", "click")
BLOCK = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}} (blocked)", name=name)

sys.meta_path.insert(0, Blocked())
"""


def run(code: str, *, blocked: tuple[str, ...] = ()) -> str:
    """The output of ``code`` in a new interpreter."""
    source = BLOCK.format(names=set(blocked)) + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


def test_torch_alone_imports_and_runs_layers_and_names_what_loading_misses():
    code = """
        import torch, torch_hybrid as th
        print(sorted(set(sys.modules) & {"triton", "flashinfer", "transformers"}))
        from torch_hybrid.layers import GatedDeltaNet
        spec = th.DeltaRuleSpec(num_k_heads=1, num_v_heads=2, head_k_dim=16, head_v_dim=16,
                                conv_width=4)
        table = th.LayerTable.from_specs([spec])
        cache = th.HybridCache(table, max_seqs=1, kv_tokens=16, page_size=16,
                               dtype=torch.float32, device=torch.device("cpu"))
        backends = th.make_backends(table, cache.sizes)
        batch = cache.make_batch(cache.allocate(1), [[0] * 5])
        plan = th.plan_all(backends, batch, th.Mode.EXTEND)["gated_delta_rule"]
        with torch.no_grad():
            y = GatedDeltaNet(8, spec)(torch.randn(5, 8), plan, cache.pools["gated_delta_rule"][0])
        print(list(y.shape), bool(y.isfinite().all()))
        try:
            th.from_pretrained(".")
        except ImportError as error:
            print(error.name)
    """
    assert run(code, blocked=OPTIONAL).splitlines() == ["[]", "[5, 8] True", "transformers"]


def test_import_loads_no_optional_package_compiles_no_kernel_and_starts_no_compiler():
    """Where all of them are installed."""
    code = """
        import subprocess
        import torch  # which may look for CUDA's libraries by a process of its own
        def refuse(*args, **options):
            raise AssertionError(f"a process was started: {args}")
        subprocess.Popen.__init__ = refuse
        import torch_hybrid
        print(sorted(set(sys.modules) & {"transformers", "flashinfer", "rich", "click", "sympy"}))
        print("torch._inductor.compile_fx" in sys.modules)
    """
    assert run(code).splitlines() == ["[]", "False"]
