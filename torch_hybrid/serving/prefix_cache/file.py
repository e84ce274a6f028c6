"""A safetensors file of kept prefixes, for a later process of the same model and sizes.

- metadata: names and values that must match on loading, and a digest of the tensors
- N.tokens: tokens of the N-th prefix
- N.count: number of tokens that its states and pages hold
- N.states.M: its state in the M-th pool of states
- N.pages.M: its pages in the M-th pool of pages
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_hybrid.caches.pool_copies import HostCopy

_FORMAT = "2"  # states in files of format 1 may be one token ahead of their count
_DIGEST = "digest"
_SAMPLES = 256  # values per weight that identify a model
Prefix = tuple[list[int], HostCopy]


def facts_of(model: Any, tables: object, **sizes: object) -> dict[str, str]:
    """Name the facts that a file of prefixes must match: model, pools and sizes.

    Weights are identified by their names, shapes, dtypes and a sample of their values.
    """
    content = hashlib.blake2b(repr(tables).encode(), digest_size=16)
    for name, weight in sorted(
        {**dict(model.named_parameters()), **dict(model.named_buffers())}.items()
    ):
        content.update(repr((name, weight.shape, weight.dtype)).encode())
        content.update(_bytes(_sample(weight.detach())))
    ranks = "1" if model.ranks is None else f"{model.ranks.rank} of {model.ranks.size}"
    facts = {"format": _FORMAT, "model": content.hexdigest(), "ranks": ranks}
    return facts | {name: str(size) for name, size in sizes.items()}


def save(path: Path, prefixes: Sequence[Prefix], facts: Mapping[str, str]) -> None:
    """Write prefixes to a file atomically: it is complete, or the old file stays.

    Raises:
        OSError: the file cannot be written.
    """
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    for at, (tokens, copy) in enumerate(prefixes):
        if copy.copied is not None:
            copy.copied.synchronize()
        tensors[f"{at}.tokens"] = torch.tensor(tokens, dtype=torch.int64, device="cpu")
        tensors[f"{at}.count"] = torch.tensor(copy.num_tokens, dtype=torch.int64, device="cpu")
        for kind, kept in (("states", copy.states), ("pages", copy.pages)):
            tensors |= {f"{at}.{kind}.{place}": tensor for place, tensor in enumerate(kept)}
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        save_file(tensors, partial, metadata={**facts, _DIGEST: _digest(tensors)})
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def load(path: Path, facts: Mapping[str, str]) -> list[Prefix]:
    """Read the prefixes of a file.

    Raises:
        OSError: there is no file, or it cannot be read.
        ValueError: the file is damaged, its ``facts`` differ, or a prefix has more or fewer tokens
            than its states and pages hold.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            found = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged, or has no prefixes: {error}") from error
    digest = found.pop(_DIGEST, None)
    others = [name for name in (*facts, *found) if facts.get(name) != found.get(name)]
    if others:
        raise ValueError(f"{path} has prefixes of another {', '.join(dict.fromkeys(others))}")
    if digest != _digest(tensors):
        raise ValueError(f"{path} is damaged: its contents are not those that were written")
    count = sum(name.endswith(".tokens") for name in tensors)
    prefixes = [_prefix(tensors, at) for at in range(count)]
    for at, (tokens, copy) in enumerate(prefixes):
        if copy.num_tokens != len(tokens):
            raise ValueError(
                f"{path} is damaged: prefix {at} has {len(tokens)} tokens, and keeps "
                f"{copy.num_tokens}"
            )
    return prefixes


def _prefix(tensors: Mapping[str, Tensor], at: int) -> Prefix:
    tokens = tensors[f"{at}.tokens"].tolist()
    states, pages = (
        tuple(tensors[f"{at}.{kind}.{place}"] for place in range(_count(tensors, f"{at}.{kind}.")))
        for kind in ("states", "pages")
    )
    num_tokens = int(tensors[f"{at}.count"])
    return tokens, HostCopy(num_tokens=num_tokens, states=states, pages=pages, copied=None)


def _count(tensors: Mapping[str, Tensor], start: str) -> int:
    return sum(name.startswith(start) for name in tensors)


def _digest(tensors: Mapping[str, Tensor]) -> str:
    content = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        content.update(repr((name, tensors[name].shape, tensors[name].dtype)).encode())
        content.update(_bytes(tensors[name]))
    return content.hexdigest()


def _sample(weight: Tensor) -> Tensor:
    """Sample values of a weight, from up to four rows."""
    if weight.ndim == 0 or not weight.numel():
        return weight
    last = len(weight) - 1
    values = weight[sorted({0, last // 3, 2 * last // 3, last})].reshape(-1)
    return values[:: -(-values.numel() // _SAMPLES)]


def _bytes(tensor: Tensor) -> bytes:
    flat = tensor.cpu().contiguous().reshape(-1)
    data: bytes = flat.view(torch.uint8).numpy().tobytes()
    return data
