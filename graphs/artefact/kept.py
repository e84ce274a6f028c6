"""Artefacts that nobody named: the user's cache keeps them by their facts, so that the next process
with these starts from one too.

They are used where torch's own caches are; ``TORCH_HYBRID_STEP_CACHE=0`` switches them off alone.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch

from torch_hybrid.ops.native.build import cache_folder

_MOST = 64  # files, of one to five megabytes; those that were used last are kept


def kept_path(facts: Mapping[str, str]) -> Path | None:
    """Name the file of a process with these facts; None where none is kept.

    Its folder is made. The file is marked as used, if it is there.
    """
    is_off = os.environ.get("TORCH_HYBRID_STEP_CACHE") == "0"
    if is_off or torch.compiler.config.force_disable_caches:
        return None
    name = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]
    path = cache_folder() / "steps" / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            path.touch()
    except OSError:  # a cache that cannot be written
        return None
    return path


def drop_oldest(folder: Path) -> None:
    """Delete the files that were not used for the longest time, beyond those that are kept."""
    with suppress(OSError):  # another process deletes too
        used = sorted(folder.iterdir(), key=lambda file: file.stat().st_mtime, reverse=True)
        for file in used[_MOST:]:
            file.unlink()
