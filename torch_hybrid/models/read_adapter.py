"""Reading of adapters (LoRA), from folders as peft writes them or from a model of peft.

What peft knows beside plain low-rank products is refused by name: a field of the config that
changes what is computed, and a tensor that is no factor.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_hybrid.errors import UnsupportedError
from torch_hybrid.layers.adapter_sites import Factors
from torch_hybrid.models.adapter_places import Part, Places
from torch_hybrid.models.low_rank import LowRank, check_rank, named, read_factors
from torch_hybrid.models.merge_adapters import check_of_transformers
from torch_hybrid.models.read_experts import take_experts

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Fields of peft's config that change nothing of what an adapter computes once it is trained, or
# that are read here.
_HARMLESS = frozenset(
    {"task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path"}
    | {"revision", "inference_mode", "r", "target_modules", "exclude_modules", "lora_alpha"}
    | {"lora_dropout", "use_rslora", "layers_to_transform", "layers_pattern", "rank_pattern"}
    | {"alpha_pattern", "megatron_core", "eva_config", "qalora_group_size", "runtime_config"}
    | {"ensure_weight_tying", "loftq_config", "lora_ga_config", "corda_config", "velora_config"}
    | {"modules_to_save", "target_parameters"}  # what they name shows in the tensors
)
# Starts of training that leave the base as it is.
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
_FACTOR = re.compile(r"base_model\.model\.(.+)\.lora_(?:embedding_([AB])|([AB])\.weight)")
_OF_EXPERTS = re.compile(r"experts\.|\.(?:gate|router)\.lora_")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadWeights:
    """Weights of an adapter.

    Attributes:
        factors: by the names of the layers of transformers that they adapt.
        experts: by the names of weights of transformers' experts: a [E, rank, inputs] and
            b [E, outputs, rank].
        saved: weights that take the place of the base's, by their names in transformers.
    """

    factors: Mapping[str, LowRank]
    experts: Mapping[str, LowRank]
    saved: Mapping[str, Tensor]


def read_adapter(
    source: Path | nn.Module, max_rank: int, stacks: Mapping[str, tuple[int, ...]]
) -> ReadWeights:
    """Read an adapter's weights.

    Args:
        source: the folder of an adapter; or a model of peft, or of transformers with an adapter.
        max_rank: largest rank of a factor.
        stacks: shapes of the weights of transformers' experts, as ``Places`` has them.

    Raises:
        ValueError: there is no adapter, its files are damaged or incomplete, numbers are not
            finite, or a rank is larger than ``max_rank``.
        UnsupportedError: the adapter is none of plain low-rank products.
    """
    if isinstance(source, nn.Module):
        where: object = f"a {type(source).__name__}"
        config, tensors = _of_model(source)
    else:
        where = source / _WEIGHTS
        config, tensors = _read_config(source), _read_tensors(source)
    halves: dict[str, dict[str, Tensor]] = {}
    saved: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"{name} in {where} has NaN or infinite values")
        found = _FACTOR.fullmatch(name)
        if found is None:
            if ".base_layer." in name:  # peft writes the base's beside embeddings
                continue
            if config.get("modules_to_save"):
                saved[named(name.removeprefix("base_model.model."))] = tensor
                continue
            raise UnsupportedError(
                f"{name} in {where} is no factor of a linear layer or an embedding: only those "
                f"are served"
            )
        halves.setdefault(named(found[1]), {})[found[2] or found[3]] = tensor
    experts = take_experts(halves, stacks, config, where, max_rank)
    factors = {n: read_factors(n, own, config, where, max_rank) for n, own in halves.items()}
    return ReadWeights(factors=factors, experts=experts, saved=saved)


def saves_modules(folder: Path) -> bool:
    """Tell from an adapter's config whether it has weights in the place of the base's.

    Raises:
        ValueError, UnsupportedError: as ``read_adapter`` does.
    """
    return bool(_read_config(folder).get("modules_to_save"))


def adapts_experts(folder: Path) -> bool:
    """Tell from the names of an adapter's weights whether some are of experts or their routers.

    Raises:
        ValueError: there are no weights, or they are damaged.
    """
    return any(_OF_EXPERTS.search(name) for name in _read_tensors(folder))


def _of_model(model: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Find config and tensors of a model's active adapter, named as in its files, on the host."""
    from peft import PeftModel, get_peft_model_state_dict
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [each for each in model.modules() if isinstance(each, BaseTunerLayer)]
    active = {name for each in layers for name in each.active_adapters}
    if len(active) != 1:
        raise ValueError(
            f"a model must have one active adapter, got {type(model).__name__} with "
            f"{sorted(active)}"
        )
    check_of_transformers(model)
    [name] = active
    inner = model.base_model.model if isinstance(model, PeftModel) else model
    config = _checked(inner.peft_config[name].to_dict(), f"the adapter {name!r}")
    named = get_peft_model_state_dict(inner, adapter_name=name, save_embedding_layers=False)
    return config, {f"base_model.model.{key}": each.cpu() for key, each in named.items()}


def largest_rank(folder: Path) -> int:
    """Read the largest rank of an adapter's factors from its config.

    Raises:
        ValueError, UnsupportedError: as ``read_adapter`` does.
    """
    config = _read_config(folder)
    return max(map(int, [config["r"], *(config.get("rank_pattern") or {}).values()]))


def factors_of(read: ReadWeights, parts: tuple[Part, ...]) -> list[Factors]:
    """Bring the factors of layers of transformers into rows and columns of one of our layers."""
    found: list[Factors] = []
    for part in parts:
        own, whole = read.factors.get(part.source), read.saved.get(f"{part.source}.weight")
        if own is not None:
            rows = own.b[part.rows] * part.factors[:, None]
            found.append((own.a[:, part.columns], rows))
        elif whole is not None:
            found.append((None, whole.double()[part.rows] * part.factors[:, None]))
        else:
            found.append(None)
    return found


def factors_of_experts(
    read: ReadWeights,
    parts: Sequence[tuple[Part, ...]],
    stacks: Mapping[str, tuple[int, ...]],
    where: object,
    max_rank: int,
) -> list[Factors]:
    """Bring the factors of transformers' experts into rows and columns of parts of ours.

    Args:
        read: the adapter.
        parts: gate if there is one, up, down; each of the stacks that its experts come from.
        stacks: shapes of the stacks, by name.
        where: the adapter is.
        max_rank: largest rank of a factor.

    Raises:
        ValueError: a rank is larger than ``max_rank``.
    """
    found: list[Factors] = []
    for own in parts:
        pairs = [_of_stack(read, part, stacks[part.source][0]) for part in own]
        rank = max(a.shape[1] for a, _ in pairs)
        check_rank(own[0].source, rank, where, max_rank)
        a = torch.cat([F.pad(first, (0, 0, 0, rank - first.shape[1])) for first, _ in pairs])
        b = torch.cat([F.pad(second, (0, rank - second.shape[2])) for _, second in pairs])
        found.append((a, b) if rank else None)
    return found


def _of_stack(read: ReadWeights, part: Part, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return the factors of a part of the experts of a stack, of rank 0 if there are none.

    Ranks that are zero in all rows are left out, where gate and up were stacked.
    """
    own = read.experts.get(part.source)
    if own is None:
        a = torch.zeros(num_experts, 0, len(part.columns), dtype=torch.float32, device="cpu")
        return a, a.new_zeros(num_experts, part.width, 0)
    b = own.b[:, part.rows]
    is_used = b.count_nonzero(dim=(0, 1)) > 0
    return own.a[:, is_used][..., part.columns], b[..., is_used]


def check_saved(read: ReadWeights, shapes: Mapping[str, tuple[int, ...]], where: object) -> None:
    """Raise unless the weights that an adapter brings can take the place of a model's.

    Args:
        read: the adapter.
        shapes: shapes of the weights that it may bring, by name; none where none may be.
        where: the adapter is.

    Raises:
        ValueError: a weight has another shape.
        UnsupportedError: a weight cannot be replaced.
    """
    for name, weight in read.saved.items():
        if name not in shapes:
            raise UnsupportedError(
                f"{where} brings {name}, which is not served: "
                + ("only an output head and norms of the model's width are")
                if shapes
                else f"{where} brings {name}: the runner needs saved_modules=True"
            )
        if shapes[name] != (*weight.shape,):
            raise ValueError(
                f"{where} is of another base: it brings {name} of shape {[*weight.shape]}, and "
                f"the model has {[*shapes[name]]}"
            )


def check_targets(read: Mapping[str, LowRank], places: Places, where: object) -> None:
    """Raise unless a model has all layers that an adapter adapts, in the same shapes.

    Raises:
        ValueError: a layer is not there, or has another shape.
        UnsupportedError: a layer can have no adapter.
    """
    for name, own in read.items():
        refused = _refusal(name, places.refused)
        if refused is not None:
            raise UnsupportedError(f"{where} adapts {name}, which is not served: {refused}")
        if name not in places.shapes:
            raise ValueError(f"{where} adapts {name}, which the model does not have")
        shape = (own.b.shape[0], own.a.shape[1])
        if shape != places.shapes[name]:
            raise ValueError(
                f"{where} is of another base: it adapts {name} of shape {[*shape]}, and the model "
                f"has {[*places.shapes[name]]}"
            )


def _refusal(name: str, refused: Mapping[str, str]) -> str | None:
    """Find why a layer, or a weight of a module with weights, can have no adapter."""
    module = re.sub(r"(\.experts)\..*|(\.base_layer)+$", r"\1", name)
    is_of_experts = module.endswith(".experts")
    for each, reason in refused.items():
        if each == name or (is_of_experts and each.startswith(f"{module}.")):
            return reason
    return None


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / _CONFIG
    try:
        config: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read an adapter's config from {path}: {error}") from error
    return _checked(config, path)


def _checked(config: dict[str, Any], path: object) -> dict[str, Any]:
    """Raise UnsupportedError for a config that says more than is served."""
    if config.get("peft_type") != "LORA":
        raise UnsupportedError(
            f"{path} is of peft_type {config.get('peft_type')!r}: only LORA is served"
        )
    start = config.pop("init_lora_weights", True)
    if start not in _PLAIN_STARTS:
        raise UnsupportedError(
            f"{path} has init_lora_weights {start!r}, which changes the base's weights: convert "
            f"the adapter to a plain one by peft first"
        )
    if config.get("bias") == "none":
        del config["bias"]
    for name, value in config.items():
        if value and name not in _HARMLESS:
            raise UnsupportedError(f"{path} has {name} {value!r}, which is not served")
    return config


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = folder / _WEIGHTS
    if not path.is_file():
        raise ValueError(f"{folder} has no weights of an adapter: there is no {_WEIGHTS}")
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot read the adapter in {path}: {error}") from error
    return tensors
