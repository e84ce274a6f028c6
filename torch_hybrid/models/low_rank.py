"""Low-rank factors of one layer, as an adapter's files and config (peft) have them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torch_hybrid.errors import UnsupportedError

_OF_TEXT = re.compile(r"^model\.(?:language_model|llm)\.|^language_model\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """Factors of one layer: a [rank, inputs], and b [outputs, rank] with the adapter's scale."""

    a: Tensor
    b: Tensor


def named(name: str) -> str:
    """Name a module or weight as the text model has it by itself."""
    return _OF_TEXT.sub("model.", name)


def check_pair(name: str, halves: Mapping[str, Tensor], path: object) -> tuple[Tensor, Tensor]:
    """Return both factors of a layer.

    Raises:
        ValueError: one of them is missing.
        UnsupportedError: they are no matrices of one rank.
    """
    if halves.keys() != {"A", "B"}:
        raise ValueError(f"{path} has one of two factors of {name} alone")
    a, b = halves["A"], halves["B"]
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
        raise UnsupportedError(
            f"{path} has factors {[*a.shape]} and {[*b.shape]} of {name}, which are no matrices "
            f"of one rank"
        )
    return a, b


def read_factors(
    name: str, halves: Mapping[str, Tensor], config: Mapping[str, Any], path: object, max_rank: int
) -> LowRank:
    """Check and scale the factors of a linear layer or embedding.

    Raises:
        ValueError, UnsupportedError: as ``read_adapter`` does.
    """
    a, b = check_pair(name, halves, path)
    rank = a.shape[0]
    check_rank(name, rank, path, max_rank)
    if rank != rank_of(config, name):
        raise UnsupportedError(
            f"{path} has rank {rank} in {name}, and its config says {rank_of(config, name)}: "
            f"other stacks than those of experts are not served"
        )
    return LowRank(a=a, b=b.double() * scale_of(config, name))


def check_rank(name: str, rank: int, path: object, max_rank: int) -> None:
    """Raise ValueError for a rank that is larger than a runner's."""
    if rank > max_rank:
        raise ValueError(
            f"{path} has rank {rank} in {name}, and the runner's max_lora_rank is {max_rank}"
        )


def rank_of(config: Mapping[str, Any], name: str) -> int:
    """Return the rank that a config gives a layer."""
    return int(_chosen(config.get("rank_pattern"), name, config["r"]))


def scale_of(config: Mapping[str, Any], name: str) -> float:
    """Return the factor that a config puts on the product of a layer's factors."""
    rank = rank_of(config, name)
    alpha = float(_chosen(config.get("alpha_pattern"), name, config["lora_alpha"]))
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _chosen(pattern: Mapping[str, Any] | None, name: str, otherwise: Any) -> Any:
    """Look up a layer in a pattern of names, as peft does."""
    for key, value in (pattern or {}).items():
        if re.match(rf"(.*\.)?({key})$", name):
            return value
    return otherwise
