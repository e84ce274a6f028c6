"""Kernels that Triton has built for this process, as files for processes that build none."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

_LOADED = {".cubin", ".json", ".so"}  # of what a folder of Triton's cache has; the rest is to read
_HERE = b"{folder of the kernel}"  # in place of its path, which the files of a folder name
_USED: set[Path] = set()


def note_kernels() -> None:
    """Note from now on which folders of its cache Triton uses; each has a kernel, or a launcher."""
    from triton import knobs
    from triton.runtime.cache import FileCacheManager

    class Noting(FileCacheManager):  # type: ignore[misc]
        def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
            super().__init__(key, override, dump)
            if not (override or dump):
                _USED.add(Path(self.cache_dir))

    if knobs.cache.manager_class is None:  # else a user's own, which may keep no files
        knobs.cache.manager_class = Noting


def noted_kernels() -> set[str]:
    """Name the folders that Triton has used."""
    return {folder.name for folder in _USED}


def read_kernels() -> dict[str, bytes]:
    """Read what is loaded of these folders, by folder and file."""
    return {
        f"{folder.name}/{file.name}": file.read_bytes().replace(os.fsencode(folder), _HERE)
        for folder in sorted(_USED)
        for file in sorted(folder.glob("*"))
        if file.suffix in _LOADED
    }


def bring_kernels(files: Mapping[str, bytes]) -> set[str]:
    """Put such files into Triton's cache, where it lacks their folder.

    Returns:
        The names of the folders.
    """
    folders: dict[str, dict[str, bytes]] = {}
    for path, data in files.items():
        name, file = path.split("/")
        folders.setdefault(name, {})[file] = data
    for name, kept in folders.items():
        _bring(name, kept)
    return {*folders}


def _bring(name: str, files: Mapping[str, bytes]) -> None:
    from triton import knobs

    cache = Path(knobs.cache.dir)
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / name
    if folder.is_dir() and any(folder.iterdir()):
        return
    with TemporaryDirectory(dir=cache) as parent:
        whole = Path(parent, name)
        whole.mkdir()
        for file, data in files.items():
            whole.joinpath(file).write_bytes(data.replace(_HERE, os.fsencode(folder)))
        with suppress(OSError):  # another process has brought it
            whole.rename(folder)
