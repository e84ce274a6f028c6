"""From a checkpoint or a transformers model to a model that a runner can serve."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torch_hybrid.errors import CapacityError, UnsupportedError
from torch_hybrid.host import keep_weights, trim
from torch_hybrid.layers.ngram_embedding import NgramEmbedding
from torch_hybrid.models.arguments import (
    check_tables,
    checked_device,
    checked_dtype,
    checked_path,
)
from torch_hybrid.models.bailing_hybrid import BAILING_HYBRID
from torch_hybrid.models.bamba import BAMBA
from torch_hybrid.models.checkpoint.files import Checkpoint, open_checkpoint
from torch_hybrid.models.checkpoint.read import needed_bytes, read_weights
from torch_hybrid.models.checkpoint.together import Together, check_room_together
from torch_hybrid.models.deepseek_v3 import DEEPSEEK_V3
from torch_hybrid.models.falcon_h1 import FALCON_H1
from torch_hybrid.models.family import Family, require
from torch_hybrid.models.glm5_next import GLM5_NEXT
from torch_hybrid.models.granitemoehybrid import GRANITEMOEHYBRID
from torch_hybrid.models.hybrid_model import HybridModel
from torch_hybrid.models.inkling import INKLING
from torch_hybrid.models.inkling2 import INKLING2
from torch_hybrid.models.jamba import JAMBA
from torch_hybrid.models.kimi_linear import KIMI_LINEAR
from torch_hybrid.models.lfm import LFM2, LFM3
from torch_hybrid.models.mamba import MAMBA
from torch_hybrid.models.mamba2 import MAMBA2
from torch_hybrid.models.merge_adapters import merge_adapters
from torch_hybrid.models.minimax import MINIMAX
from torch_hybrid.models.mtp import lengthened, take_head, with_previous_hidden
from torch_hybrid.models.nemotron_h import NEMOTRON_H
from torch_hybrid.models.olmo_hybrid import OLMO_HYBRID
from torch_hybrid.models.quantize import (
    EIGHT_BITS,
    KEPT,
    check_weights,
    plan_integers,
    quantize_unread,
)
from torch_hybrid.models.quantized import refuse_modules
from torch_hybrid.models.qwen3 import QWEN3
from torch_hybrid.models.qwen3_5 import QWEN3_5
from torch_hybrid.models.qwen3_next import QWEN3_NEXT
from torch_hybrid.models.qwen4_exp import QWEN4_EXP
from torch_hybrid.models.recurrent_gemma import RECURRENT_GEMMA
from torch_hybrid.models.ring_2_5 import (
    Ring25,
    Ring25Config,
    is_ring_2_5,
    make_unread_ring_2_5,
)
from torch_hybrid.models.scaled_weights import hold_scales
from torch_hybrid.models.shard import Experts, check_can_be_cut, cut, ranks_of
from torch_hybrid.models.taken_weights import check_weights_say_all
from torch_hybrid.models.tower import Tower
from torch_hybrid.models.transformers_hooks import (
    ATTENTION_NAME,
    hand_steps,
    join_latent_attention,
    path_of,
    refuse_as_transformers,
    register_attention,
)
from torch_hybrid.models.transformers_weights import make_unread, take_quantization
from torch_hybrid.models.xlstm import XLSTM
from torch_hybrid.models.zamba import ZAMBA
from torch_hybrid.models.zamba2 import ZAMBA2
from torch_hybrid.models.zaya import ZAYA
from torch_hybrid.specs import AttentionSpec, LatentSpec, LayerTable
from torch_hybrid.toolchain import make_cache_folder

FAMILIES: dict[str, Family] = {
    model_type: family
    for family in (
        BAILING_HYBRID,
        BAMBA,
        DEEPSEEK_V3,
        FALCON_H1,
        GLM5_NEXT,
        GRANITEMOEHYBRID,
        INKLING,
        INKLING2,
        JAMBA,
        KIMI_LINEAR,
        LFM2,
        LFM3,
        MAMBA,
        MAMBA2,
        MINIMAX,
        NEMOTRON_H,
        OLMO_HYBRID,
        QWEN3,
        QWEN3_5,
        QWEN3_NEXT,
        QWEN4_EXP,
        RECURRENT_GEMMA,
        XLSTM,
        ZAMBA,
        ZAMBA2,
        ZAYA,
    )
    for model_type in family.model_types
}

# Hybrids that transformers has and this package has no op for.
NOT_SERVED = {
    "nemo_speechlm": "speech to transcribe, of which its text part alone hears nothing",
    "rwkv": "RWKV's time mixing",
}


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
) -> HybridModel | Ring25:
    """Load a checkpoint of safetensors: into a transformers model whose mixers are ours, or into
    our own module.

    Weights in block-FP8 (``quant_method: fp8``), and integers of compressed-tensors, GPTQ and AWQ,
    stay as small as they are stored, with their scales.

    Names, shapes and dtypes are checked before the first weight is read. Then several threads read
    the weights straight to where they are kept: of a shared model, what this rank keeps of it.

    Args:
        path_or_id: a folder as ``save_pretrained`` writes it, or a hub id.
        dtype: of the weights; "auto" takes the checkpoint's.
        device: where the weights go.
        weights: "auto", as they are stored, or "int8" or "int4": made integers as they are read,
            see ``quantize``; ``dtype`` is then what they are multiplied with.
        group: of integers of 4 bits; see ``quantize``.
        keep, eight_bits: names of modules whose weights stay as they are, or have 8 bits rather
            than 4; see ``quantize``.
        mtp: read the checkpoint's head that predicts further tokens too, which then drafts for the
            model: ``Speculation("mtp")``. Of several heads, the first.
        ranks: the processes that share the model, as by ``shard``; each of them makes this call.
        experts: how they share a mixture of experts; see ``shard``.
        vision: keep the tower of a multimodal checkpoint, as transformers has it, for images in
            prompts; every rank has all of it. Without, the text part alone is loaded.
        tables: where tables of n-gram embeddings go (Qwen4-Exp's are tens of GiB): "device", or
            "host", to pinned memory of which a GPU reads the rows that a step names, in place.

    Raises:
        TypeError: ``path_or_id`` is neither a text nor a path.
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
    label = "loading" if ranks is None else f"loading, rank {dist.get_rank(ranks)}"
    with Together(ranks):
        path_or_id = checked_path(path_or_id)
        dtype, device = checked_dtype(dtype), checked_device(device)
        make_cache_folder()
        check_weights(weights, group)
        check_tables(tables)
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
    """The tables that are to be elsewhere than on the device."""
    found = [part.table for part in model.modules() if isinstance(part, NgramEmbedding)]
    if not found:
        raise UnsupportedError(
            "tables='host' is for models that embed n-grams, and this one has no table of them"
        )
    return frozenset(found if device.type != "cpu" else ())


@contextmanager
def _counted_room(device: torch.device) -> Iterator[None]:
    """Where there was room when it was counted, and others took it."""
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
) -> tuple[Checkpoint, HybridModel | Ring25]:
    """A checkpoint by its headers, and a model of its weights, of which none is read."""
    if vision and mtp:
        raise UnsupportedError("a model that is given images cannot have its MTP head: load either")
    fields = _read_config(path_or_id)
    if is_ring_2_5(fields):
        if vision:
            raise UnsupportedError(_no_tower(fields["model_type"]))
        if mtp:
            raise UnsupportedError("Ring-2.5 has no MTP head that is known here")
        sizes = Ring25Config.from_dict(fields)
        checkpoint = open_checkpoint(_folder_of(path_or_id))
        return checkpoint, make_unread_ring_2_5(checkpoint, sizes, fields, dtype, device)
    config = _transformers_config(path_or_id, fields)
    made_weights = take_quantization(config)
    layout, num_head = _family_of(config.model_type).mtp if mtp else None, 0
    if mtp:
        config, num_head = lengthened(config, layout)
    table = table_of(config)
    if vision:
        _check_has_tower(config)
    else:
        _warn_of_dropped(config)
    checkpoint = open_checkpoint(_folder_of(path_or_id))
    if made_weights is not None:
        checkpoint = made_weights(checkpoint)
    text_class = None if vision else _family_of(config.model_type).text_class
    hf_model = make_unread(
        checkpoint, config, dtype, device, text_class and text_class(), vision=vision, mtp=layout
    )
    tower = None
    if vision:
        hf_model, tower = _text_and_tower(hf_model)
    return checkpoint, adapted(hf_model, config.model_type, table, tower, num_head)


def _read_config(path_or_id: str | Path) -> dict[str, Any]:
    from transformers import PreTrainedConfig

    try:
        config, _ = PreTrainedConfig.get_config_dict(path_or_id)
    except (OSError, ValueError) as error:
        what = "" if Path(path_or_id).is_dir() else "there is no such folder, and as a hub id: "
        raise ValueError(f"cannot read a model config from {path_or_id}: {what}{error}") from error
    if not config:
        raise ValueError(f"cannot read a model config from {path_or_id}: it has no config.json")
    return dict(config)


def _transformers_config(path_or_id: str, fields: dict[str, Any]) -> Any:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING, AutoConfig

    model_type = fields.get("model_type")
    if not isinstance(model_type, str):
        raise ValueError(f"the config of {path_or_id} names no model_type, got {model_type!r}")
    kernel_fields = _family_of(model_type).kernel_fields
    try:
        if kernel_fields:
            known = {name: value for name, value in fields.items() if name not in kernel_fields}
            return CONFIG_MAPPING[model_type].from_dict(known)
        return AutoConfig.from_pretrained(path_or_id)
    except (OSError, ValueError, TypeError, AttributeError, StrictDataclassError) as error:
        told = " ".join(str(error).split())
        raise ValueError(f"cannot read a model config from {path_or_id}: {told}") from error


def _folder_of(path_or_id: str) -> Path:
    """The folder of a checkpoint; that of a hub id is fetched, with its weights."""
    from huggingface_hub import snapshot_download

    if Path(path_or_id).is_dir():
        return Path(path_or_id)
    try:
        patterns = ["model*.safetensors", "*.json"]
        return Path(snapshot_download(path_or_id, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read the weights in {path_or_id}: {error}") from error


def adapt(hf_model: Any, *, vision: bool = False) -> HybridModel:
    """Swap the mixers of a transformers model in memory. The model is taken over and changed.

    Adapters of peft, in a PeftModel or in a transformers model, are merged into its weights. Of a
    multimodal model, the text part is taken; with ``vision``, its tower too.

    Raises:
        UnsupportedError: the model type, or a field of its config, is not known here; an adapter
            cannot be merged; a module whose weights are taken is quantized, wrapped or hooked; or
            ``vision`` is asked of a model without a tower that is served.
        ValueError: it is no causal language model, was adapted before, or has NaN weights.
    """
    hf_model = merge_adapters(hf_model)
    names = [base.__name__ for base in type(hf_model).__mro__]
    is_causal = any(name.endswith("ForCausalLM") for name in names)
    if not is_causal and "GenerationMixin" not in names:
        raise ValueError(
            f"hf_model must be a causal language model of transformers, got {type(hf_model)}"
        )
    model_type = hf_model.config.model_type
    family, table = _family_of(model_type), table_of(hf_model.config)
    tower = None
    if vision:
        _check_has_tower(hf_model.config)
        hf_model, tower = _text_and_tower(hf_model)
        _check_finite(tower)
    elif not is_causal:
        _warn_of_dropped(hf_model.config)
        hf_model = _text_part(hf_model, family)
    if hf_model.config._attn_implementation == ATTENTION_NAME:
        raise ValueError("hf_model was adapted before")
    refuse_modules(hf_model)
    _check_taken_weights(hf_model, family, table)
    _check_finite(hf_model)
    model = adapted(hf_model, model_type, table, tower)
    keep_weights(model)
    return model


def adapted(
    hf_model: Any,
    model_type: str,
    table: LayerTable,
    tower: Tower | None = None,
    num_head: int = 0,
) -> HybridModel:
    """The same of a model that is known to be one, and whose weights may be unread; its last
    ``num_head`` layers are those of its head."""
    family = _family_of(model_type)
    register_attention()
    hf_model.set_attn_implementation(ATTENTION_NAME)
    hf_model.eval().requires_grad_(False)
    family.prepare(hf_model.base_model)
    if family.base is not None:
        setattr(hf_model, hf_model.base_model_prefix, family.base(hf_model.base_model))
    _swap_mixers(hf_model.base_model.layers, family, table)
    hand_steps(hf_model.base_model.layers, family.step_names, family.given_as)
    _swap_experts(hf_model, family)
    _drop_padding(hf_model.lm_head, family.vocab_size(hf_model.config.get_text_config()))
    refuse_as_transformers(hf_model)
    head = None
    if num_head:
        dim = hf_model.config.get_text_config().hidden_size
        table = with_previous_hidden(table, num_head, dim)
        head = take_head(hf_model, table, num_head)
    return HybridModel(
        hf_model,
        table,
        mixer_names={kind: swap.attribute for kind, swap in family.swaps.items()},
        num_position_axes=family.num_position_axes,
        logits_scale=family.logits_scale(hf_model.config.get_text_config()),
        logits_softcap=family.logits_softcap(hf_model.config.get_text_config()),
        takes_masks=family.takes_masks,
        step_name=family.given_as,
        token_names=family.token_names,
        vision=tower,
        mtp=head,
    )


def _drop_padding(head: nn.Linear, vocab_size: int) -> None:
    """Leave the head its first rows, so many."""
    if vocab_size < head.out_features:
        head.weight = nn.Parameter(head.weight.detach()[:vocab_size], requires_grad=False)
        head.out_features = vocab_size


def _text_part(hf_model: Any, family: Family) -> Any:
    """The language model of a multimodal one, as transformers has it alone; weights are shared."""
    from transformers import AutoModelForCausalLM

    if text := dict(hf_model.named_children()).get("language_model"):
        text.generation_config = hf_model.generation_config
        return text
    config = hf_model.config.get_text_config()
    if "language_model" not in dict(hf_model.model.named_children()):
        raise ValueError("hf_model was adapted before")
    with torch.device("meta"):
        if family.text_class is None:
            text = AutoModelForCausalLM.from_config(config)
        else:
            text = family.text_class()(config)
    text.model = hf_model.model.language_model
    text.lm_head = hf_model.lm_head
    text.generation_config = hf_model.generation_config
    return text


def _check_has_tower(config: Any) -> None:
    """Refuse to keep the tower of a model that has none, or one of which nothing is known."""
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    has_tower = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if not (has_tower and _family_of(config.model_type).vision):
        raise UnsupportedError(_no_tower(config.model_type))


def _no_tower(model_type: str) -> str:
    seeing = sorted(name for name, family in FAMILIES.items() if family.vision)
    return (
        f"model type {model_type!r} has no tower that is served: vision=True is for the multimodal "
        f"ones of {seeing}"
    )


def _text_and_tower(hf_model: Any) -> tuple[Any, Tower]:
    """The language model of a multimodal one, and the rest of it."""
    family = _family_of(hf_model.config.model_type)
    text = _text_part(hf_model, family)
    rest = hf_model.model
    del rest.language_model
    rest.eval().requires_grad_(False)
    tower = Tower(rest, family.vision, has_positions=family.num_position_axes == 3)
    return text, tower


def _warn_of_dropped(config: Any) -> None:
    """Say that prompts are texts alone, where a checkpoint could see or hear."""
    given = config.to_dict()
    names = [name for name in config.sub_configs if name != "text_config" and given.get(name)]
    dropped = [name.removesuffix("_config") for name in names]
    if dropped:
        parts = " and ".join(sorted(dropped))
        warnings.warn(
            f"{config.model_type}: the text part alone is served, without the {parts} part",
            stacklevel=2,
        )


def _family_of(model_type: Any) -> Family:
    if model_type in NOT_SERVED:
        raise UnsupportedError(
            f"model type {model_type!r} is not supported: it has {NOT_SERVED[model_type]}"
        )
    if model_type not in FAMILIES:
        raise UnsupportedError(
            f"model type {model_type!r} is not supported; supported are {sorted(FAMILIES)}"
        )
    return FAMILIES[model_type]


def table_of(config: Any) -> LayerTable:
    """The mixers of a transformers config, before any weight is read.

    Raises:
        UnsupportedError: the model type, or a field of the config, is not known here.
    """
    family, text = _family_of(config.model_type), config.get_text_config()
    require(config, "text_config.model_type", text.model_type, family.model_types)
    return LayerTable.from_specs(family.specs(text))


def _check_taken_weights(hf_model: Any, family: Family, table: LayerTable) -> None:
    """Look at every module that is about to be swapped, or read by its weights."""
    layers = f"{hf_model.base_model_prefix}.{family.layers_name}"
    for layer_id, layer in enumerate(hf_model.get_submodule(layers)):
        for entry in table.layers[layer_id]:
            if entry.kind == "latent_attention":
                name = f"{layers}.{layer_id}.self_attn.kv_b_proj"
                check_weights_say_all(name, layer.self_attn.kv_b_proj)
            elif entry.kind in family.swaps:
                path = path_of(layer, family.swaps[entry.kind].attribute)
                check_weights_say_all(f"{layers}.{layer_id}.{path}", layer.get_submodule(path))
    for name, module in hf_model.named_modules():
        if name.endswith((".experts", *family.taken)):
            check_weights_say_all(name, module)


def _check_finite(hf_model: nn.Module) -> None:
    for name, weight in hf_model.named_parameters():
        # A sum is finite only if every term is (or by overflow, which the exact test settles).
        if not weight.sum().isfinite() and not weight.isfinite().all():
            count = int((~weight.isfinite()).sum())
            raise ValueError(f"weight {name} has {count} NaN or infinite values")


def _swap_mixers(layers: Iterable[Any], family: Family, table: LayerTable) -> None:
    """Put our mixers in the place of theirs; a module that several layers share stays one."""
    ours: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()
    for layer, entries in zip(layers, table.layers, strict=True):
        for entry in entries:
            match entry.spec:
                case AttentionSpec() if entry.kind not in family.swaps:
                    pass  # its module stays, and calls our attention function
                case LatentSpec() as spec:
                    join_latent_attention(layer.self_attn, spec)
                case spec:
                    swap = family.swaps[entry.kind]
                    path = path_of(layer, swap.attribute)
                    module = layer.get_submodule(path)
                    if module not in ours:
                        ours[module] = swap.adapter(swap.make(module, spec), entry.kind)
                    layer.set_submodule(path, ours[module])


def _swap_experts(hf_model: nn.Module, family: Family) -> None:
    for module in list(hf_model.modules()):
        for name, child in list(module.named_children()):
            if name == "experts":
                setattr(module, name, family.experts(child))
