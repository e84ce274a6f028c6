"""The fuzz for a few rounds; ``python -m tests.hostile.fuzz_threads`` runs it for longer."""

from __future__ import annotations

from pathlib import Path

from tests.hostile.fuzz_threads import ThreadsFuzz


def test_threads_load_and_serve_beside_each_other(tmp_path: Path) -> None:
    fuzz = ThreadsFuzz(0, tmp_path)
    for _ in range(3):
        fuzz.round()
    assert fuzz.counts["loaded"] > 12
    assert all(fuzz.counts[what] > 0 for what in ("refused", "served", "looked"))
