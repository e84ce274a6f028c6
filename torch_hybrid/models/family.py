"""What an adapter of a transformers family says, and the parts that several families share."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from torch_hybrid.errors import UnsupportedError
from torch_hybrid.host.defaults import on_meta
from torch_hybrid.layers.fused_experts import FusedExperts
from torch_hybrid.layers.gated_delta_net import GatedDeltaNet
from torch_hybrid.models.mtp import MtpLayout
from torch_hybrid.models.tower import Modality
from torch_hybrid.models.transformers_hooks import LinearAttentionAdapter
from torch_hybrid.specs import (
    AttentionSpec,
    DeltaRuleSpec,
    LatentSpec,
    LayerSpec,
)

S = TypeVar("S")

# Frequencies that depend on the present length would need a new graph for each length.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def _gated_experts(module: Any) -> FusedExperts:
    return FusedExperts(module.gate_up_proj, module.down_proj)


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """Where a decoder layer has its mixer of one kind, and how ours is made of it.

    ``make(module, spec)`` takes the family's module, whose weights ours keeps. ``adapter`` wraps
    it in the interface that the decoder layer calls. ``attribute`` is of the layer, or else of one
    of its children.
    """

    attribute: str
    make: Callable[[Any, Any], nn.Module]
    adapter: Callable[[nn.Module, str], nn.Module] = LinearAttentionAdapter


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family of transformers models.

    ``specs(config)`` gives the mixers of each layer, from the text config. ``swaps`` has an entry
    for every kind of linear attention; full attention, latent attention too, joins as a function
    that transformers lets us register. ``vocab_size(config)`` is how many rows of the head are of
    tokens: those after them are padding. ``num_position_axes`` is 3 where rotary positions are 3-D
    (mrope). ``logits_scale(config)`` is a factor on the logits, ``logits_softcap(config)`` their
    bound (0: none). ``experts(module)`` makes ours of the family's experts. ``takes_masks`` says
    whether the model takes a mask for each type of layer. ``step_names`` are the options of a
    decoder layer as which it is handed the step: a module that it hands no others finds it in one
    of those. ``prepare(model)`` changes what else is to be changed in the model without its head,
    before mixers are swapped; of modules whose names end as in ``taken`` it takes the weights.
    ``base(model)`` is what stands in for that model then, where it does not hand its layers the
    step; ``layers_name`` is the name that it has for them. ``kernel_fields`` are fields of its
    config that name kernels, of packages that transformers may want to be installed: they are left
    out of a checkpoint's.
    ``text_class()`` is the class of the text part with a head, where transformers has that inside
    of a multimodal model alone, or does not know its weights by all their names. ``given_as`` is
    the option of the model as which it hands the step to its layers. ``token_names`` are options of
    the model as which it is handed tokens where it is handed embeddings. ``vision`` is what its
    tower takes, if it has one. ``mtp`` says where its checkpoints have a head that predicts further
    tokens.
    """

    model_types: tuple[str, ...]
    specs: Callable[[Any], Sequence[LayerSpec | tuple[LayerSpec, ...]]]
    swaps: Mapping[str, Swap] = field(default_factory=dict)
    vocab_size: Callable[[Any], int] = lambda config: config.vocab_size
    num_position_axes: int = 1
    logits_scale: Callable[[Any], float] = lambda config: 1.0
    logits_softcap: Callable[[Any], float] = lambda config: 0.0
    experts: Callable[[Any], FusedExperts] = _gated_experts
    takes_masks: bool = True
    step_names: tuple[str, ...] = ("step",)
    text_class: Callable[[], Any] | None = None
    prepare: Callable[[Any], None] = lambda model: None
    base: Callable[[Any], nn.Module] | None = None
    layers_name: str = "layers"
    kernel_fields: tuple[str, ...] = ()
    taken: tuple[str, ...] = ()
    given_as: str = "step"
    token_names: tuple[str, ...] = ()
    vision: tuple[Modality, ...] = ()
    mtp: MtpLayout | None = None


def require(config: Any, name: str, value: object, allowed: Collection[object]) -> None:
    """Raise UnsupportedError, naming the config's field, unless ``value`` is one we know."""
    if value not in allowed:
        raise UnsupportedError(
            f"{config.model_type}: config field {name} must be one of {sorted(map(str, allowed))}, "
            f"got {value!r}"
        )


def head_dim_of(config: Any) -> int:
    """The width of an attention head, for configs that may leave it out."""
    given: int | None = config.to_dict().get("head_dim")
    return given or config.hidden_size // config.num_attention_heads


def specs_by_layer_type(
    config: Any, linear: LayerSpec | None, *, head_dim: int, scale: float | None = None
) -> list[LayerSpec]:
    """The facts of each layer, for configs that list ``layer_types``.

    ``scale`` is attention's factor on q k, by default the usual one.
    """
    rope = config.rope_parameters or {}
    require(config, "hidden_act", config.hidden_act, ["silu"])
    require(config, "rope_parameters.rope_type", rope.get("rope_type", "default"), ROPE_TYPES)
    known = attention_specs(config, head_dim=head_dim, scale=scale)
    if linear is not None:
        known["linear_attention"] = linear
    return listed(config, known)


def listed(config: Any, known: Mapping[str, S]) -> list[S]:
    """What is known of each of the config's ``layer_types``."""
    for layer_type in config.layer_types:
        require(config, "layer_types", layer_type, known)
    return [known[layer_type] for layer_type in config.layer_types]


def attention_specs(
    config: Any, *, head_dim: int, scale: float | None = None
) -> dict[str, LayerSpec]:
    """The facts of attention by layer type: to all keys, and to those of a window."""
    full = AttentionSpec(
        num_q_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5 if scale is None else scale,
    )
    if "sliding_attention" not in config.layer_types:
        return {"full_attention": full}
    if not config.sliding_window:
        raise UnsupportedError(
            f"{config.model_type}: config field sliding_window must be a number of keys where "
            f"layer_types has sliding_attention, got {config.sliding_window!r}"
        )
    return {
        "full_attention": full,
        "sliding_attention": replace(full, window=config.sliding_window),
    }


def delta_rule_spec(
    config: Any, *, norm_eps: float, beta_scale: float = 1.0, gate: str = "silu"
) -> DeltaRuleSpec:
    """The facts of the linear layers, whose fields all families name alike."""
    return DeltaRuleSpec(
        num_k_heads=config.linear_num_key_heads,
        num_v_heads=config.linear_num_value_heads,
        head_k_dim=config.linear_key_head_dim,
        head_v_dim=config.linear_value_head_dim,
        conv_width=config.linear_conv_kernel_dim,
        activation=config.hidden_act,
        norm_eps=norm_eps,
        beta_scale=beta_scale,
        gate=gate,
    )


def gated_delta_rule_specs(config: Any) -> list[LayerSpec]:
    """The facts of each layer of the Qwen families, whose norms share one eps."""
    linear = delta_rule_spec(config, norm_eps=config.rms_norm_eps)
    return specs_by_layer_type(config, linear, head_dim=config.head_dim)


def mixer_from(
    module: Any, spec: DeltaRuleSpec, rows: Sequence[Tensor], *, norm: nn.Module, out: nn.Linear
) -> GatedDeltaNet:
    """Our mixer with the weights of a transformers module.

    ``rows`` are the rows of the projections to q, k, v, z, b and a, in that order.
    """
    in_weight = torch.cat(list(rows))
    with on_meta():
        mixer = GatedDeltaNet(in_weight.shape[1], spec)
    mixer.in_proj.weight = nn.Parameter(in_weight, requires_grad=False)
    mixer.out_proj = out
    mixer.conv_weight = nn.Parameter(module.conv1d.weight.squeeze(1), requires_grad=False)
    mixer.A_log, mixer.dt_bias = module.A_log, module.dt_bias
    mixer.norm_weight = norm.weight  # type: ignore[assignment]
    return mixer


def weights_of(*projections: nn.Linear) -> list[Tensor]:
    """The weights of several projections, outside autograd."""
    return [projection.weight.detach() for projection in projections]


def parameter(weight: Tensor) -> nn.Parameter:
    """A weight, as a module keeps it."""
    return nn.Parameter(weight, requires_grad=False)


def joined_projection(rows: Sequence[Tensor]) -> nn.Linear:
    """Projections of one input as one, without a bias."""
    weight = torch.cat(list(rows))
    width, dim = weight.shape
    joined = nn.Linear(dim, width, bias=False, dtype=weight.dtype, device="meta")
    joined.weight = parameter(weight)
    return joined


def latent_spec(config: Any, rope: Mapping[str, Any]) -> LatentSpec:
    """The facts of MLA layers, whose fields all families name alike.

    ``rope`` are the parameters of the rotary embedding, empty where the model has none.
    """
    require(config, "rope_parameters.rope_type", rope.get("rope_type", "default"), ROPE_TYPES)
    qk_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    mscale = yarn_mscale(rope)
    return LatentSpec(
        num_heads=config.num_attention_heads,
        latent_rank=config.kv_lora_rank,
        nope_dim=config.qk_nope_head_dim,
        rope_dim=config.qk_rope_head_dim,
        v_dim=config.v_head_dim,
        scale=qk_dim**-0.5 * mscale * mscale,
    )


def require_fields(config: Any, **fields: object) -> None:
    """Refuse a config in which a field that transformers does not read says something else."""
    given = config.to_dict()
    for name, value in fields.items():
        require(config, name, given.get(name, value), [value])


def yarn_mscale(rope: Mapping[str, Any]) -> float:
    """What YaRN's ``mscale_all_dim`` multiplies queries and keys by, each; 1 without it."""
    factor: float = rope.get("factor", 1.0)
    mscale: float = rope.get("mscale_all_dim", 0)
    if rope.get("rope_type", "default") == "default" or not mscale or factor <= 1:
        return 1.0
    return 0.1 * mscale * math.log(factor) + 1.0
