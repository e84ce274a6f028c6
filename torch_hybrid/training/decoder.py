"""Hook before a decoder of transformers: one packing for all of its layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.utils.output_capturing import maybe_install_capturing_hooks

from torch_hybrid.packing import Packing
from torch_hybrid.training.boundaries import (
    STATED,
    check_positions_go_on,
    named,
    packing_of,
)
from torch_hybrid.training.packed_attention import packed_attention

ATTENTION = "torch_hybrid_packed"  # of our attention function in transformers
COLLECTED = ("output_hidden_states", "output_router_logits")


def hand_down_packing(
    decoder: Any, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[()], dict[str, Any]]:
    """Make the packing of a call, and hand it to the layers in place of masks.

    A call that makes or has a cache runs as transformers has it: ``use_cache`` is True, or in
    evaluation nothing says otherwise and no boundaries are given.

    Raises:
        ValueError: boundaries contradict each other, or are given beside a cache; or the attention
            was changed since.
    """
    inputs = named(decoder, args, options, last="use_cache")
    for place in ("attention_mask", "state"):  # of models that hand down no more
        if isinstance(inputs.get(place), Packing):
            inputs["packing"] = inputs.pop(place)
    if keeps_a_cache(decoder, inputs):
        check_says_nothing(inputs)
        return (), inputs
    inputs["use_cache"] = False
    if any(inputs.get(name) for name in COLLECTED):
        install_capturing_hooks(decoder)
    if has_attention(decoder) and decoder.config._attn_implementation != ATTENTION:
        raise ValueError(
            f"attention that keeps sequences apart is {ATTENTION!r}, "
            f"got attn_implementation {decoder.config._attn_implementation!r}"
        )
    packing = packing_of(inputs)
    if inputs.get("position_ids") is None:
        x = inputs.get("input_ids")
        x = inputs["inputs_embeds"] if x is None else x
        inputs["position_ids"] = packing.positions.view(x.shape[:2])
    inputs["attention_mask"] = packing if hands_masks_alone(decoder) else None
    if hands_masks_of_kinds(decoder):
        kinds = {*decoder.config.layer_types, "full_attention", "sliding_attention"}
        mask = None if attends_to_picked_blocks(decoder) else packing  # Qwen4-Exp reads its own
        masks = {"linear_attention": mask, "conv": mask}
        inputs["attention_mask"] = {**dict.fromkeys(kinds), **masks}
    inputs["state" if hands_states_down(decoder) else "packing"] = packing
    return (), {k: v for k, v in inputs.items() if k not in STATED}


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def install_capturing_hooks(decoder: Any) -> None:
    """Install the hooks by which transformers collects what layers make, if need be while tracing.

    Transformers does so in the first call that asks, which no graph can have. Layers with these
    hooks are not compiled one by one, so other models go without.
    """
    maybe_install_capturing_hooks(decoder)


def hands_states_down(decoder: Any) -> bool:
    """Tell whether layers are handed a state and nothing else, as RWKV's are."""
    kind: str = decoder.config.model_type
    return kind == "rwkv"


def attends_to_picked_blocks(decoder: Any) -> bool:
    """Tell whether layers attend to the blocks that an indexer picks."""
    return has_attention(decoder) and "indexed_attention" in decoder.config.layer_types


def has_attention(decoder: Any) -> bool:
    """Tell whether any layer attends by a function that is exchanged; those of Mamba2 do not."""
    attends: bool = decoder._supports_sdpa
    return attends


def hands_masks_of_kinds(decoder: Any) -> bool:
    """Tell whether layers may be handed masks by their kinds; Inkling-2 exchanges no function."""
    kind: str = decoder.config.model_type
    return has_attention(decoder) or kind in ("inkling2_text", "inkling2_loop_text")


def hands_masks_alone(decoder: Any) -> bool:
    """Tell whether a decoder without attention hands its layers a mask, and no other keyword."""
    return decoder.config.model_type in ("mamba", "falcon_mamba")


def asks_for_a_cache(inputs: dict[str, Any]) -> bool:
    """Tell whether a call has a cache, or says that it wants one."""
    caches = (inputs.get(name) for name in ("cache", "past_key_values", "cache_params", "state"))
    given = any(cache is not None and not isinstance(cache, Packing) for cache in caches)
    return given or bool(inputs.get("use_cache"))


def keeps_a_cache(decoder: Any, inputs: dict[str, Any]) -> bool:
    """Tell whether a call of a decoder makes or has a cache."""
    if asks_for_a_cache(inputs):
        return True
    if decoder.training or inputs.get("use_cache") is not None:
        return False
    states = any(inputs.get(name) is not None for name in ("packing", "position_ids", *STATED))
    # Inkling's config has no such field: its forward makes no cache that nobody asks for.
    return not states and bool(getattr(decoder.config, "use_cache", False))


def check_says_nothing(inputs: dict[str, Any]) -> None:
    """Raise ValueError if a call with a cache says where sequences begin: it would drop that.

    Positions that restart say so too.
    """
    if stated := [name for name in ("packing", *STATED) if inputs.get(name) is not None]:
        raise ValueError(
            f"a call with a cache keeps no packed sequences apart, got {', '.join(stated)}: "
            "leave use_cache and past_key_values out"
        )
    check_positions_go_on(inputs)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packing: Packing | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend within sequences if there is a packing, else as transformers' SDPA does.

    Args:
        query: [B, H, T, K]. key [B, HKV, T, K] and value [B, HKV, T, V].

    Returns:
        [B, T, H, V], and no weights.
    """
    if packing is None:
        out, _ = sdpa_attention_forward(
            *(module, query, key, value, attention_mask),
            scaling=scaling,
            dropout=dropout,
            **options,
        )
        return out, None
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = packed_attention(
        q, k, v, packing.cu_seqlens, scale=scale, window=sliding_window, dropout=dropout
    )
    return out.unflatten(0, (query.shape[0], query.shape[2])), None


def register_attention() -> None:
    """Make the attention known to transformers by its name."""
    AttentionInterface.register(ATTENTION, attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
