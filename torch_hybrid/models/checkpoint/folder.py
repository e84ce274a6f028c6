"""The folder of a checkpoint: the files that are fetched of a hub repository, and that are read."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from torch_hybrid.errors import UnsupportedError

ONE_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_ADAPTER = "adapter_config.json"
# Files that are read beside weights.
_SAID = ("config.json", "generation_config.json")
# File names of weights in other formats: pickles for the most part.
_PICKLED = ("*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt", "*.distcp", "*.h5", "*.msgpack")


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """The files of weights that a folder lists, which need not be there.

    Attributes:
        names: of the files, in the order in which they are read.
        weight_map: file of each tensor, by the index; empty without one.
        index: the name of that index.
    """

    names: Sequence[str]
    weight_map: Mapping[str, str] = field(default_factory=dict)
    index: str = _INDEX


def listed(folder: Path, named: str | None = None) -> Listed:
    """Find the weight files of a folder.

    They are ``model.safetensors``, or those that the index names, or without either all
    ``*.safetensors``. An index that names ``model.safetensors`` among others is followed.

    Args:
        folder: folder of the checkpoint.
        named: a file of weights, or an index, that the config names instead of these.

    Raises:
        ValueError: there are no weight files, or the index is invalid.
        UnsupportedError: the weights are in GGUF alone.
    """
    if (found := _named(folder, named)) is not None:
        return found
    for name in (_INDEX, ONE_FILE):
        if (folder / name).is_symlink():
            raise ValueError(not_there(folder / name))
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if not names and (quantized := sorted(path.name for path in folder.glob("*.gguf"))):
        raise UnsupportedError(
            f"{folder} has its weights in GGUF alone, which is not read: "
            f"{', '.join(quantized[:4])}. AutoModelForCausalLM.from_pretrained(path, "
            f"gguf_file=...).save_pretrained(folder) of transformers makes safetensors of it, "
            f"where it knows the model"
        )
    if not names:
        pickled = sorted({path.name for kind in _PICKLED for path in folder.glob(kind)})
        got = f"; got {', '.join(pickled[:4])}" if pickled else ""
        raise ValueError(
            f"no safetensors file found; weights of another format are not read{got}. "
            "AutoModelForCausalLM.from_pretrained(path).save_pretrained(folder) of transformers "
            "makes safetensors of pickled ones"
        )
    return Listed(names=names)


def _named(folder: Path, named: str | None) -> Listed | None:
    """Return the files that a config or an index names; None where nothing does."""
    if named is not None:
        _check_inside(named, "the config's transformers_weights names")
        return _indexed(folder, named) if named.endswith(".json") else Listed(names=[named])
    has_one = (folder / ONE_FILE).is_file()
    if (folder / _INDEX).is_file():
        found = _indexed(folder, _INDEX)
        if not has_one or ONE_FILE in found.names:
            return found
    return Listed(names=[ONE_FILE]) if has_one else None


def _indexed(folder: Path, index: str) -> Listed:
    try:
        weight_map = json.loads((folder / index).read_text())["weight_map"]
        inside = PurePosixPath(index).parent
        files = {name: str(inside / file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is no index of tensors and their files: {error!r}") from error
    names = sorted(set(files.values()))
    for name in names:
        _check_inside(name, f"{index} names")
    return Listed(names=names, weight_map=files, index=index)


def _check_inside(name: str, who: str) -> None:
    if os.path.isabs(name) or ".." in PurePosixPath(name).parts:
        raise ValueError(f"{who} files outside of its folder: {name}")


def not_there(path: Path) -> str | None:
    """Write that a file, or the target of a link, is missing; return None if it is there."""
    if path.is_file():
        return None
    told = f"{path.name} is not there"
    if path.is_symlink():
        told = f"{path.name} is a link whose target {os.readlink(path)} is missing"
    return f"{told}{_how_to_fetch(path)}"


def _how_to_fetch(path: Path) -> str:
    """Say how to get a file back, where it belongs to a cache of the hub."""
    for snapshot in path.parents:
        repo = snapshot.parent.parent.name
        if snapshot.parent.name == "snapshots" and repo.startswith("models--"):
            owner_and_name = repo.removeprefix("models--").replace("--", "/")
            file = path.relative_to(snapshot).as_posix()
            return (
                f" (the cache has lost it; `hf download {owner_and_name} {file} --revision "
                f"{snapshot.name}` fetches it)"
            )
    return " (put it back, or fetch the checkpoint again)" if path.is_symlink() else ""


def fetch_config(path_or_id: str) -> Path:
    """Find a folder, or fetch the configs and indices of a hub id.

    Raises:
        UnsupportedError: the checkpoint has an adapter.
        ValueError: it cannot be fetched, or it is, or has, a link whose target is missing.
    """
    folder = Path(path_or_id)
    if not folder.is_dir():
        if folder.is_symlink():
            raise ValueError(not_there(folder))
        wanted = [*_SAID, _ADAPTER, "*.index.json"]
        folder = _fetched(path_or_id, wanted, None)
    if (folder / _ADAPTER).is_file():
        raise UnsupportedError(
            f"{path_or_id} is an adapter of peft, or a model with one: merge it, th.adapt("
            "AutoPeftModelForCausalLM.from_pretrained(path).merge_and_unload()), or move "
            f"{_ADAPTER} away"
        )
    for name in _SAID:
        if (folder / name).is_symlink() and (reason := not_there(folder / name)):
            raise ValueError(reason)
    return folder


def fetch_weights(path_or_id: str, folder: Path, named: str | None = None) -> Path:
    """Fetch the weights of a hub id that are read, beside what ``fetch_config`` brought.

    Returns:
        The same folder.

    Raises:
        ValueError: they cannot be fetched.
    """
    if Path(path_or_id).is_dir():
        return folder
    try:
        if named is None:
            _fetched(path_or_id, [ONE_FILE], folder)
        found = _named(folder, named)
        if found is None:
            _fetched(path_or_id, ["*.safetensors"], folder, ignored="*/*")
        elif [*found.names] != [ONE_FILE]:
            _fetched(path_or_id, [glob.escape(name) for name in found.names], folder)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read the weights in {path_or_id}: {error}") from error
    return folder


def _fetched(
    repo: str, wanted: Sequence[str], folder: Path | None, ignored: str | None = None
) -> Path:
    """Fetch files of a repository, of the revision that ``folder`` has.

    If the hub is out of reach and the cache is incomplete, return the incomplete folder.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import IncompleteSnapshotError

    revision = folder.name if folder is not None and folder.parent.name == "snapshots" else None
    try:
        return Path(
            snapshot_download(
                repo, revision=revision, allow_patterns=list(wanted), ignore_patterns=ignored
            )
        )
    except IncompleteSnapshotError as error:
        return Path(error.snapshot_path)
