"""The way from a checkpoint to a model that a runner can serve."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torch_hybrid.errors import CapacityError, UnsupportedError
from torch_hybrid.graphs.compiling.toolchain import make_cache_folder
from torch_hybrid.host.malloc import trim
from torch_hybrid.host.surroundings import in_isolation
from torch_hybrid.layers.ngram_embedding import NgramEmbedding
from torch_hybrid.models.adapt import adapted
from torch_hybrid.models.architecture import Architecture
from torch_hybrid.models.arguments import (
    check_ranks,
    check_tables,
    checked_device,
    checked_dtype,
    checked_path,
)
from torch_hybrid.models.checkpoint.files import Checkpoint, open_checkpoint
from torch_hybrid.models.checkpoint.folder import fetch_config, fetch_weights
from torch_hybrid.models.checkpoint.read import needed_bytes, read_weights
from torch_hybrid.models.checkpoint.together import Together, check_room_together
from torch_hybrid.models.families import family_of
from torch_hybrid.models.family import Family
from torch_hybrid.models.hybrid_model import HybridModel
from torch_hybrid.models.quantize import (
    EIGHT_BITS,
    KEPT,
    check_weights,
    plan_integers,
    quantize_unread,
)
from torch_hybrid.models.scaled_weights import hold_scales
from torch_hybrid.models.shard import Experts, check_can_be_cut, cut, ranks_of
from torch_hybrid.models.text_part import (
    check_has_tower,
    text_and_tower,
    warn_of_dropped,
)
from torch_hybrid.models.transformers_weights import make_unread, take_quantization


@in_isolation
def from_pretrained(
    path_or_id: str | Path,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "cpu",
    *,
    weights: str = "auto",
    group: int = 32,
    keep: Sequence[str] = KEPT,
    eight_bits: Sequence[str] = EIGHT_BITS,
    mtp: bool = False,
    ranks: dist.ProcessGroup | None = None,
    experts: Experts = "tensor",
    vision: bool = False,
    tables: str = "device",
) -> HybridModel:
    """Load a checkpoint of safetensors: a transformers model with our mixers.

    Weights in block-FP8 (``quant_method: fp8``), integers of compressed-tensors, GPTQ and AWQ, and
    MXFP4 and NVFP4 of compressed-tensors stay as small as they are stored, with their scales.

    Names, shapes and dtypes are checked before the first weight is read. Then several threads read
    the weights straight to where they are kept; each rank reads only its part of a shared model.

    Args:
        path_or_id: a folder as ``save_pretrained`` writes it, or a hub id.
        dtype: dtype of the weights; "auto" takes the checkpoint's. Names as torch has them, or
            "bf16", "fp16", "half" and the like.
        device: device that the weights go to.
        weights: "auto": as they are stored; "int8", "int4", "mxfp4" or "nvfp4": quantized as they
            are read, see ``quantize``. ``dtype`` is then that of the activations they multiply.
        group: numbers of a row that share a scale in INT4; see ``quantize``.
        keep, eight_bits: names of modules whose weights stay as they are, or become INT8 rather
            than INT4 or FP4; see ``quantize``.
        mtp: read the checkpoint's MTP head too, the first of several. It then drafts for the
            model: ``Speculation("mtp")``.
        ranks: the processes that share the model, as by ``shard``; each of them makes this call.
        experts: how the ranks share a mixture of experts; see ``shard``.
        vision: keep the tower of a multimodal checkpoint, as transformers has it, for images in
            prompts; every rank has all of it. Without ``vision``, the text part alone is loaded.
        tables: place of tables of n-gram embeddings (Qwen4-Exp's are tens of GiB): "device", or
            "host", pinned memory from which the GPU gathers the rows of a step in place.

    Raises:
        TypeError: ``path_or_id`` is neither a str nor a Path.
        UnsupportedError: the model type, a field of its config, the device or the dtype of stored
            weights is not known here; the ranks do not divide heads or widths; ``vision`` is asked
            of a model without a tower that is served, ``mtp`` of one without a known head, or both
            of one; or ``tables`` is "host" for a model without such tables.
        CapacityError: the device has no room for the weights, or the host for the tables.
        ValueError: ``weights``, ``group`` or ``tables`` is not known, or a group does not divide
            the rows of a weight; the checkpoint is missing, incomplete, unreadable or was changed
            meanwhile, has NaN weights, or no head where one is asked for; or another rank could not
            load it.
    """
    check_ranks(ranks)
    label = "loading" if ranks is None else f"loading, rank {dist.get_rank(ranks)}"
    with Together(ranks):
        path_or_id = checked_path(path_or_id)
        dtype, device = checked_dtype(dtype), checked_device(device)
        check_tables(tables)
        check_weights(weights, group)
        make_cache_folder()
        checkpoint, model = unread(path_or_id, dtype, device, vision=vision, mtp=mtp)
        if ranks is not None:
            check_can_be_cut(model, experts)
            cut(model, ranks_of(ranks), experts)
        hold_scales(model)
        if weights == "auto":
            plan, num_bytes = None, needed_bytes(model)
        else:
            plan = plan_integers(model, weights, group=group, keep=keep, eight_bits=eight_bits)
            replaced = [module for _, module in plan.modules]
            num_bytes = plan.num_bytes + needed_bytes(model, without=replaced)
        on_host = _tables_on_host(model, device) if tables == "host" else frozenset()
    limits = "their precision (dtype), or share the model among more ranks"
    if on_host:
        table_bytes = sum(table.nbytes for table in on_host)
        num_bytes -= table_bytes
        host = torch.device("cpu")
        check_room_together(ranks, table_bytes, host, what="the tables", limits=limits)
    check_room_together(ranks, num_bytes, device, what="the weights", limits=limits)
    with Together(ranks), _counted_room(device):
        if plan is not None:
            quantize_unread(model, plan, checkpoint, device, label=label)
        origins = read_weights(model, checkpoint, device, on_host=on_host, label=label)
        model.origins = origins if plan is None else None
    trim()
    return model


def _tables_on_host(model: nn.Module, device: torch.device) -> frozenset[Tensor]:
    """Find the tables that stay on the host; none where the device is the host."""
    found = [part.table for part in model.modules() if isinstance(part, NgramEmbedding)]
    if not found:
        raise UnsupportedError(
            "tables='host' is for models that embed n-grams, and this one has no table of them"
        )
    return frozenset(found if device.type != "cpu" else ())


@contextmanager
def _counted_room(device: torch.device) -> Iterator[None]:
    """Raise CapacityError where other processes took memory after it was counted."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        told = str(error).partition("\n")[0]
        raise CapacityError(
            f"{device.type} had no room left while weights were read: {told}"
        ) from error


def unread(
    path_or_id: str,
    dtype: torch.dtype | str,
    device: torch.device,
    *,
    vision: bool = False,
    mtp: bool = False,
) -> tuple[Checkpoint, HybridModel]:
    """Open a checkpoint by its headers, and make a model with unread weights."""
    if vision and mtp:
        raise UnsupportedError("a model that is given images cannot have its MTP head: load either")
    folder, fields = _read_config(path_or_id)
    checkpoint, architecture, hf_model = unread_model(
        path_or_id, folder, fields, dtype, device, vision=vision, mtp=mtp
    )
    tower = None
    if not vision:
        warn_of_dropped(architecture.config)
    else:
        hf_model, tower = text_and_tower(hf_model, architecture.family)
    return checkpoint, adapted(hf_model, architecture, tower)


def transformers_class(path_or_id: str) -> Any:
    """Return the class of transformers, or of ours in its form, that a checkpoint's model has.

    Raises:
        UnsupportedError, ValueError: as ``from_pretrained``.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    _, config = _transformers_config(path_or_id, _read_config(path_or_id)[1])
    return MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), AutoModelForCausalLM)


def unread_head(
    path_or_id: str, dtype: torch.dtype, device: torch.device
) -> tuple[Checkpoint, Architecture, Any]:
    """Open a checkpoint, and make a model of transformers with its MTP head, both unread."""
    folder, fields = _read_config(path_or_id)
    return unread_model(path_or_id, folder, fields, dtype, device, mtp=True)


def unread_model(
    path_or_id: str,
    folder: Path,
    fields: dict[str, Any],
    dtype: torch.dtype | str,
    device: torch.device,
    *,
    vision: bool = False,
    mtp: bool = False,
) -> tuple[Checkpoint, Architecture, Any]:
    """Open a checkpoint of transformers by its headers, and make a model with unread weights."""
    named = fields.get("transformers_weights")
    family, config = _transformers_config(path_or_id, fields)
    made_weights = take_quantization(config)
    architecture = Architecture.of(config, family, mtp=mtp)
    if vision:
        check_has_tower(architecture)
    checkpoint = open_checkpoint(fetch_weights(path_or_id, folder, named), named)
    if made_weights is not None:
        checkpoint = made_weights(checkpoint)
    hf_model = make_unread(checkpoint, architecture, dtype, device, vision=vision)
    return checkpoint, architecture, hf_model


def _read_config(path_or_id: str) -> tuple[Path, dict[str, Any]]:
    """Find the folder of a checkpoint, and read its config."""
    from transformers import PreTrainedConfig

    try:
        folder = fetch_config(path_or_id)
        config, _ = PreTrainedConfig.get_config_dict(folder)
    except (OSError, ValueError) as error:
        what = "" if Path(path_or_id).is_dir() else "there is no such folder, and as a hub id: "
        told = f"cannot read a model config from {path_or_id}: {what}{error}"
        raise ValueError(told) from error
    if not config:
        raise ValueError(f"cannot read a model config from {path_or_id}: it has no config.json")
    return folder, dict(config)


def _transformers_config(path_or_id: str, fields: dict[str, Any]) -> tuple[Family, Any]:
    from huggingface_hub.errors import StrictDataclassError

    model_type = fields.get("model_type")
    if not isinstance(model_type, str):
        raise ValueError(f"the config of {path_or_id} names no model_type, got {model_type!r}")
    family = family_of(model_type, fields.get("architectures"))
    family.register()
    known = fields.keys() - {*family.hf_kernel_fields}
    try:
        config = family.config_class(model_type).from_dict({name: fields[name] for name in known})
        return family, config
    except (
        OSError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        StrictDataclassError,
    ) as error:
        told = " ".join(str(error).split())
        raise ValueError(f"cannot read a model config from {path_or_id}: {told}") from error
