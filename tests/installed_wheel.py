"""Tests a wheel for one platform as users have it: installed, on a machine without a compiler.

    python -m tests.installed_wheel WHEEL

Its dependencies are those of the python that runs this. The demo is served by the wheel's kernels.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import time
import venv
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

from torch_hybrid.ops.native.build import name_prebuilt
from torch_hybrid.ops.native.targets import TARGETS
from torch_hybrid.ops.native.wheel import PLATFORM, sources

MOST_BYTES = 6_000_000
SECONDS_TO_FIRST_TOKEN = 10.0
KERNELS = "torch_hybrid/ops/native/prebuilt"
EVERY_KERNEL = """
from torch_hybrid.ops.native.build import HEADERS, PREBUILT, library_of
sources = list(HEADERS.parent.rglob("*.cpp"))
assert {library_of(source.parent.name, source).parent for source in sources} == {PREBUILT}
"""
# Everything up to the first token, in a process of its own.
FIRST_TOKEN = """
from torch_hybrid import Engine, Sampling, from_pretrained
from torch_hybrid.demo import serve
from torch_hybrid.demo.task import checkpoint_path, make_prompts
from torch_hybrid.ops.native.build import PREBUILT, loaded_libraries
prompts = make_prompts(4, 0)
runner = serve.make_runner(from_pretrained(str(checkpoint_path())), prompts, compile=False)
with Engine(runner) as engine:
    [output, *_] = engine.generate([prompts[0].tokens], Sampling(max_new_tokens=1))
assert output.tokens == prompts[0].answer[:1], output.tokens
files = loaded_libraries().values()
assert files and {file.parent for file in files} == {PREBUILT}, files
print("kernels:", *sorted(loaded_libraries()))
"""


def check_content(wheel: Path) -> None:
    """Assert that every kernel is there for every kind of CPU, and that the wheel is small."""
    found = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")}
    of_targets = [
        {f"{KERNELS}/{name_prebuilt(source, target.march)}" for source in sources()}
        for target in TARGETS
    ]
    # A target's are left out where they are those of the next one, which its machines take too.
    assert of_targets[-1] <= found <= set().union(*of_targets)
    assert wheel.name.endswith(f"-py3-none-{PLATFORM}.whl")
    assert wheel.stat().st_size < MOST_BYTES, wheel.stat().st_size


def install(wheel: Path, folder: Path) -> Path:
    """Install the wheel in a new environment, and return its python."""
    venv.create(folder, with_pip=False, symlinks=True)
    [site] = folder.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    install = ["install", "--quiet", "--no-deps", "--target", str(site), str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", *install], check=True)
    return folder / "bin" / "python"


def run_without_compiler(python: Path, cache: Path, *arguments: str) -> str:
    """Run a process that finds no compiler and builds no kernel, and return what it prints."""
    nothing = cache / "no-programs"
    nothing.mkdir(parents=True, exist_ok=True)
    environment = {
        **{name: value for name, value in os.environ.items() if name != "CXX"},
        "PATH": str(nothing),
        "TORCH_HYBRID_CACHE": str(cache),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
    }
    command = [str(python), *arguments]
    done = subprocess.run(command, env=environment, cwd=cache, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not list(cache.glob("*.so"))
    return done.stdout + done.stderr


def seconds_of_children() -> float:
    """Read processor time: about what a machine at rest takes, however busy this one is."""
    times = os.times()
    return times.children_user + times.children_system


def main() -> None:
    wheel = Path(sys.argv[1]).resolve()
    check_content(wheel)
    with TemporaryDirectory() as folder:
        python, cache = install(wheel, Path(folder, "env")), Path(folder, "cache")
        where = "import torch_hybrid.ops as o; print(o.__file__)"
        assert folder in run_without_compiler(python, cache, "-c", where)
        run_without_compiler(python, cache, "-c", EVERY_KERNEL)
        start, before = time.perf_counter(), seconds_of_children()
        print(run_without_compiler(python, cache, "-c", FIRST_TOKEN))
        seconds = seconds_of_children() - before
        print(f"first token after {time.perf_counter() - start:.1f} s, {seconds:.1f} of them ours")
        assert seconds < SECONDS_TO_FIRST_TOKEN, seconds
        shown = run_without_compiler(python, cache, "-m", "torch_hybrid.cli", "demo")
        print(shown)
        assert "steps run uncompiled: no C++ compiler" in shown
        assert "kernels are not used" not in shown


if __name__ == "__main__":
    main()
