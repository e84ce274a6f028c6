"""What only shows in a new process: imports that must not be needed, nor happen.

A compile that is the very first call of a process is in ``tests/test_examples.py``.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

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


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        *([command, "--help"] for command in ("demo", "generate", "chat", "explain")),
        ["generate", "--no-such-option"],
        ["generate", "nowhere"],
    ],
)
def test_the_command_line_shows_its_help_without_torch(arguments: list[str]):
    code = f"""
        import sys
        from torch_hybrid import cli
        sys.argv = ["torch-hybrid", *{arguments!r}]
        try:
            cli.main()
        except SystemExit:
            pass
        print(sorted(set(sys.modules) & {{"torch", "numpy", "transformers"}}))
    """
    assert run(code).splitlines()[-1] == "[]"


def test_the_package_is_whole_whether_torch_comes_before_or_after_it():
    """All names, and the ops of a package that calls them by name."""
    code = """
        import sys
        {first}
        import torch_hybrid as th
        assert ("torch" in sys.modules) == {is_loaded}
        {names}
        import torch
        print(torch.ops.torch_hybrid.causal_conv1d)
        assert th.Runner.__name__ == "Runner" and "Runner" in dir(th)
        from torch_hybrid import *
        assert Engine is th.Engine and th.specs.__name__ == "torch_hybrid.specs"
        try:
            th.nothing
        except AttributeError as error:
            print(error)
    """
    orders = (("import torch", True, ""), ("", False, "th.Runner"))
    for first, is_loaded, names in orders:
        printed = run(code.format(first=first, is_loaded=is_loaded, names=names)).splitlines()
        assert printed == [
            "torch_hybrid.causal_conv1d",
            "module 'torch_hybrid' has no attribute 'nothing'",
        ]


def test_import_takes_less_than_half_of_the_time_of_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """In time of the CPU: that of torch is some 1.5 s, whatever else the machine does. Both have
    bytecode, as installed packages do."""
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path))
    code = """
        from time import process_time
        start = process_time()
        import torch
        middle = process_time()
        import torch_hybrid
        print((process_time() - middle) / (middle - start))
    """
    assert any(float(run(code)) < 0.5 for _ in range(3))


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
