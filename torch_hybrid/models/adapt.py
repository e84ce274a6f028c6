"""The adaptation of a transformers model for runners: our mixers replace its own."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from torch_hybrid.host.memory import keep_weights, replace_inference_tensors
from torch_hybrid.host.surroundings import in_isolation
from torch_hybrid.models.architecture import Architecture
from torch_hybrid.models.families import architecture_of
from torch_hybrid.models.family import Family
from torch_hybrid.models.hybrid_model import HybridModel
from torch_hybrid.models.merge_adapters import check_of_transformers, merge_adapters
from torch_hybrid.models.mtp import MtpHead, put_back, take_head
from torch_hybrid.models.quantized import refuse_modules
from torch_hybrid.models.taken_weights import check_weights_say_all
from torch_hybrid.models.text_part import (
    check_has_tower,
    text_and_tower,
    text_part,
    warn_of_dropped,
)
from torch_hybrid.models.tower import Tower
from torch_hybrid.models.transformers_hooks import (
    ATTENTION_NAME,
    hand_steps,
    join_latent_attention,
    refuse_as_transformers,
    register_attention,
)
from torch_hybrid.specs import LatentSpec
from torch_hybrid.training.make_trainable import undo_make_trainable


@in_isolation
def adapt(hf_model: Any, *, vision: bool = False) -> HybridModel:
    """Swap the mixers of a transformers model in memory. The model is taken over and changed.

    Adapters of peft, in a PeftModel or in a transformers model, are merged into its weights. Of a
    multimodal model, the text part is taken; with ``vision``, its tower too. An MTP head that was
    trained beside the model is the adapted model's. Weights that were made in inference mode are
    replaced by plain copies.

    Raises:
        UnsupportedError: the model type, or a field of its config, is not known here; an adapter
            cannot be merged; a module whose weights are taken is quantized, wrapped or hooked; or
            ``vision`` is asked of a model without a tower that is served.
        ValueError: the model is no causal language model, was adapted before, has other layers than
            its config says, or NaN weights.
    """
    model = adapt_where_it_lies(hf_model, vision=vision)
    keep_weights(model)
    return model


def adapt_where_it_lies(hf_model: Any, *, vision: bool = False) -> HybridModel:
    """Adapt a model, and leave weights that are taken as they are in their memory."""
    if isinstance(hf_model, nn.Module):
        replace_inference_tensors(hf_model)
    hf_model = merge_adapters(hf_model)
    if isinstance(hf_model, nn.Module):
        undo_make_trainable(hf_model)
        _stop_recording(hf_model)
    check_of_transformers(hf_model)
    names = (base.__name__ for base in type(hf_model).__mro__)
    is_causal = any(name.endswith("ForCausalLM") for name in names)
    trained = dict(hf_model.named_children()).get("mtp")
    head = trained if isinstance(trained, MtpHead) else None
    architecture = architecture_of(hf_model.config, mtp=head is not None)
    if head is not None:
        put_back(hf_model, head)
    tower = None
    if vision:
        check_has_tower(architecture)
        hf_model, tower = text_and_tower(hf_model, architecture.family)
        _check_finite(tower)
    elif not is_causal:
        warn_of_dropped(hf_model.config)
        hf_model = text_part(hf_model, architecture.family)
    if hf_model.config._attn_implementation == ATTENTION_NAME:
        raise ValueError("hf_model was adapted before")
    refuse_modules(hf_model)
    _check_taken_weights(hf_model, architecture)
    _check_finite(hf_model)
    return adapted(hf_model, architecture, tower)


def _stop_recording(model: nn.Module) -> None:
    """Remove hooks that a call with, say, ``output_hidden_states`` has had transformers install."""
    for module in model.modules():
        vars(module).pop("_output_capturing_hooks_installed", None)
        for number, hook in list(module._forward_hooks.items()):
            if hook.__module__ == "transformers.utils.output_capturing":
                del module._forward_hooks[number]


def adapted(hf_model: Any, architecture: Architecture, tower: Tower | None = None) -> HybridModel:
    """Swap the mixers of a model that was checked, and whose weights may be unread."""
    family, base = architecture.family, hf_model.base_model
    register_attention()
    if (backbone := family.backbone(base)) is None:
        hf_model.set_attn_implementation(ATTENTION_NAME)
    else:  # its layers call no attention function, and transformers would warn where one is set
        setattr(hf_model, hf_model.base_model_prefix, backbone)
        hf_model.config._attn_implementation = ATTENTION_NAME
    hf_model.eval().requires_grad_(False)
    layers, logits = hf_model.base_model.layers, family.logits(hf_model.config.get_text_config())
    _swap_mixers(layers, architecture)
    hand_steps(layers, family.hf_step_argument, family.hf_layer_step_arguments)
    refuse_as_transformers(hf_model)
    _swap_experts(hf_model, family)
    _drop_padding(hf_model.get_output_embeddings(), logits.vocab_size)
    head = None
    if architecture.num_head:
        head = take_head(hf_model, architecture.table, architecture.num_head)
    return HybridModel(hf_model, architecture, logits, vision=tower, mtp=head)


def _check_taken_weights(hf_model: Any, architecture: Architecture) -> None:
    """Check every module that is swapped, or of which only the weights are taken."""
    family = architecture.family
    layers = f"{hf_model.base_model_prefix}.{family.hf_layers}"
    expected = getattr(architecture.config.get_text_config(), family.hf_num_layers)
    found = len(hf_model.get_submodule(layers))
    if found != expected:
        raise ValueError(f"{layers} must have the {expected} layers of its config, got {found}")
    for layer_id, layer in enumerate(hf_model.get_submodule(layers)):
        for entry in architecture.table.layers[layer_id]:
            if entry.kind == LatentSpec.kind:
                name = f"{layers}.{layer_id}.self_attn.kv_b_proj"
                check_weights_say_all(name, layer.self_attn.kv_b_proj)
            elif swap := family.swaps.get(entry.kind):
                path = _path_of(layer, swap.attribute)
                check_weights_say_all(f"{layers}.{layer_id}.{path}", layer.get_submodule(path))
    for name, module in hf_model.named_modules():
        if name.endswith((".experts", *family.hf_taken_modules)):
            check_weights_say_all(name, module)


def _check_finite(hf_model: nn.Module) -> None:
    named = dict(hf_model.named_parameters())
    device = next(iter(named.values())).device
    sums = [weight.sum().to(device, torch.float64) for weight in named.values()]
    for (name, weight), total in zip(named.items(), torch.stack(sums).tolist(), strict=True):
        # A finite sum has finite terms alone; a sum that overflowed is settled by the exact test.
        if not math.isfinite(total) and not weight.isfinite().all():
            count = int((~weight.isfinite()).sum())
            raise ValueError(f"weight {name} has {count} NaN or infinite values")


def _swap_mixers(layers: Iterable[Any], architecture: Architecture) -> None:
    """Replace the model's mixers by ours; a module that several layers share stays one.

    Modules of plain attention stay, and call our attention function.
    """
    ours: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()
    for layer, entries in zip(layers, architecture.table.layers, strict=True):
        for entry in entries:
            if isinstance(entry.spec, LatentSpec):
                join_latent_attention(layer.self_attn, entry.spec)
            elif swap := architecture.family.swaps.get(entry.kind):
                path = _path_of(layer, swap.attribute)
                module = layer.get_submodule(path)
                if module not in ours:
                    ours[module] = swap.adapter(swap.make(module, entry.spec), entry.kind)
                layer.set_submodule(path, ours[module])


def _path_of(layer: nn.Module, attribute: str) -> str:
    """Find the mixer of this name in a decoder layer, or else in one of its children."""
    if attribute in layer._modules:
        return attribute
    holders = [name for name, child in layer.named_children() if attribute in child._modules]
    if not holders:
        raise ValueError(
            f"a {type(layer).__name__} must have a {attribute}, as the model's config says, got "
            f"{[*layer._modules]}"
        )
    return f"{holders[0]}.{attribute}"


def _swap_experts(hf_model: nn.Module, family: Family) -> None:
    for module in list(hf_model.modules()):
        for name, child in list(module.named_children()):
            if name == "experts":
                setattr(module, name, family.experts(child))


def _drop_padding(head: nn.Linear, vocab_size: int) -> None:
    """Trim the head to the rows of tokens, without padding."""
    if vocab_size < head.out_features:
        head.weight = nn.Parameter(head.weight.detach()[:vocab_size], requires_grad=False)
        head.out_features = vocab_size
