"""Every benchmark, one after the other, and one Markdown page of their tables.

python -m benchmarks.run_all [--quick] [--models NAME ...] [--page FILE]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.models import FAMILIES

# Benchmarks that say something about each family, and those that one family answers.
EACH = ("decode", "prefill")
ONCE = ("serve", "overhead", "compile_time", "memory")


def _jobs(models: list[str], only: list[str], dtypes: list[str]) -> list[list[str]]:
    jobs = [
        [name, "--model", model, "--dtype", dtype]
        for model in models
        for dtype in dtypes
        for name in EACH
    ]
    jobs += [[name, "--model", models[0]] for name in ONCE]
    return [job for job in jobs if job[0] in only]


def main() -> None:
    """Run them in fresh processes; a failed one is named and the others go on."""
    parser = argparse.ArgumentParser(description="Every benchmark.")
    parser.add_argument("--models", nargs="+", choices=FAMILIES, default=["qwen3_next"])
    parser.add_argument("--dtypes", nargs="+", default=["float32"], metavar="DTYPE")
    parser.add_argument("--only", nargs="+", choices=EACH + ONCE, default=list(EACH + ONCE))
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that they run")
    parser.add_argument("--page", type=Path, help="where the Markdown goes")
    options = parser.parse_args()
    pages, failed = [], []
    with tempfile.TemporaryDirectory() as folder:
        for job in _jobs(options.models, options.only, options.dtypes):
            page = Path(folder, "page.md")
            page.unlink(missing_ok=True)
            command = [sys.executable, "-m", f"benchmarks.{job[0]}", *job[1:]]
            quick = ["--quick"] if options.quick else []
            done = subprocess.run([*command, *quick, "--markdown", str(page)], check=False)
            if done.returncode:
                failed.append(" ".join(job))
                continue
            shown = f"`python -m benchmarks.{' '.join([*job, *quick])}`"
            pages.append(f"{page.read_text()}\n{shown}\n")
    if options.page:
        options.page.write_text("\n".join(pages))
    if failed:
        raise SystemExit(f"failed: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
