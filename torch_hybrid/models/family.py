"""The base class of transformers families, and the parts that several of them share."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from torch_hybrid.errors import UnsupportedError
from torch_hybrid.host.defaults import on_meta
from torch_hybrid.layers.fused_experts import FusedExperts
from torch_hybrid.layers.gated_delta_net import GatedDeltaNet
from torch_hybrid.models.backbone import Backbone
from torch_hybrid.models.mtp import MtpLayout
from torch_hybrid.models.tower import Modality
from torch_hybrid.models.transformers_hooks import LinearAttentionAdapter
from torch_hybrid.ranks import linear_of
from torch_hybrid.specs import (
    AttentionSpec,
    DeltaRuleSpec,
    LatentSpec,
    LayerSpec,
)

S = TypeVar("S")

# Frequencies that depend on the present length would need a new graph for each length.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """The replacement of a decoder layer's mixer of one kind by our mixer.

    Attributes:
        attribute: name of the module that is replaced, in the layer or in one of its children.
        make: function of the module and its spec that makes our mixer with the module's weights.
        adapter: class that wraps our mixer in the interface that the decoder layer calls.
    """

    attribute: str
    make: Callable[[Any, Any], nn.Module]
    adapter: Callable[[nn.Module, str], nn.Module] = LinearAttentionAdapter


@dataclass(frozen=True, slots=True, kw_only=True)
class Logits:
    """The size, scale and softcap of a model's logits.

    Attributes:
        vocab_size: rows of the head that are of tokens; the rows after them are padding.
        scale: factor on the logits.
        softcap: bound of the logits, ``softcap * tanh(logits / softcap)``; 0: no bound.
    """

    vocab_size: int
    scale: float = 1.0
    softcap: float = 0.0


class Family:
    """A family of transformers models; a subclass overrides what is peculiar to it.

    Full attention and latent attention join as a function that transformers lets us register; every
    other kind of mixer needs a swap. ``hf_*`` are names in the family's modeling file.

    Attributes:
        model_types: values of the configs' ``model_type``.
        swaps: replacements of mixers, by kind of mixer.
        num_position_axes: 3 where rotary positions are 3-D (mrope).
        vision: modalities of its tower; empty where it has none.
        mtp: place of the MTP head in checkpoints; None: no head is known.
        hf_architecture: class that configs name, where another family has their model type.
        hf_layers: attribute of the headless model that has the decoder layers.
        hf_num_layers: field of the config that counts them.
        hf_takes_masks: whether the model takes a mask for each type of layer.
        hf_step_argument: argument by which the model hands the step to its layers.
        hf_layer_step_arguments: arguments by which a decoder layer gets the step, and hands it to
            modules that it hands no further options.
        hf_token_arguments: arguments that take the tokens where the model is handed embeddings.
        hf_taken_modules: endings of the names of modules whose weights ``backbone`` takes.
        hf_kernel_fields: fields of the config that name kernels of packages that need not be there.
    """

    model_types: tuple[str, ...]
    swaps: ClassVar[Mapping[str, Swap]] = {}
    num_position_axes: int = 1
    vision: tuple[Modality, ...] = ()
    mtp: MtpLayout | None = None
    hf_architecture: str | None = None
    hf_layers: str = "layers"
    hf_num_layers: str = "num_hidden_layers"
    hf_takes_masks: bool = True
    hf_step_argument: str = "step"
    hf_layer_step_arguments: tuple[str, ...] = ("step",)
    hf_token_arguments: tuple[str, ...] = ()
    hf_taken_modules: tuple[str, ...] = ()
    hf_kernel_fields: tuple[str, ...] = ()

    def specs(self, config: Any) -> Sequence[LayerSpec | tuple[LayerSpec, ...]]:
        """Return the mixers of each layer, from the text config."""
        raise NotImplementedError

    def backbone(self, model: Any) -> Backbone | None:
        """Change a model without its head before its mixers are swapped.

        Returns:
            The replacement of the model, where its layers are not handed the step; else None.
        """

    def experts(self, module: Any) -> FusedExperts:
        """Make our experts of the family's."""
        return FusedExperts(module.gate_up_proj, module.down_proj)

    def logits(self, config: Any) -> Logits:
        """Return how logits are made, from the text config."""
        return Logits(vocab_size=config.vocab_size)

    def register(self) -> None:
        """Register the family's classes with transformers, where it has none."""

    def config_class(self, model_type: str) -> Any:
        """Return the class of the config of a model type."""
        from transformers import CONFIG_MAPPING

        return CONFIG_MAPPING[model_type]

    def text_class(self) -> Any:
        """Return the class of the text part with its head; None where transformers has one that
        knows all names of its weights."""
        return None


class TextModel:
    """Base of a ``text_class`` that a function makes: models are pickled by their model type."""

    config: Any

    def __reduce__(self) -> tuple[Any, ...]:
        return _new_text_model, (self.config.model_type,), self.__getstate__()


def _new_text_model(model_type: str) -> Any:
    """Make an empty text model to unpickle into."""
    from torch_hybrid.models.families import family_of

    text_class = family_of(model_type).text_class()
    return text_class.__new__(text_class)


def require(config: Any, name: str, value: object, allowed: Collection[object]) -> None:
    """Raise UnsupportedError, naming the config's field, unless ``value`` is one we know."""
    if value not in allowed:
        raise UnsupportedError(
            f"{config.model_type}: config field {name} must be one of {sorted(map(str, allowed))}, "
            f"got {value!r}"
        )


def head_dim_of(config: Any) -> int:
    """Return the width of an attention head, for configs that may leave it out."""
    given: int | None = config.to_dict().get("head_dim")
    return given or config.hidden_size // config.num_attention_heads


def specs_by_layer_type(
    config: Any, linear: LayerSpec | None, *, head_dim: int, scale: float | None = None
) -> list[LayerSpec]:
    """Return the specs of each layer, for configs that list ``layer_types``.

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
    """Look up each of the config's ``layer_types``."""
    for layer_type in config.layer_types:
        require(config, "layer_types", layer_type, known)
    return [known[layer_type] for layer_type in config.layer_types]


def attention_spec(config: Any, *, head_dim: int, scale: float | None = None) -> AttentionSpec:
    """Return the spec of attention to all keys, by the usual scale if none is given."""
    return AttentionSpec(
        num_q_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5 if scale is None else scale,
    )


def attention_specs(
    config: Any, *, head_dim: int, scale: float | None = None
) -> dict[str, LayerSpec]:
    """Return the specs of attention by layer type: to all keys, and to those of a window."""
    full = attention_spec(config, head_dim=head_dim, scale=scale)
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
    """Return the spec of the linear layers, whose fields all families name alike."""
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


def mixer_from(
    module: Any, spec: DeltaRuleSpec, rows: Sequence[Tensor], *, norm: nn.Module, out: nn.Linear
) -> GatedDeltaNet:
    """Make our mixer with the weights of a transformers module.

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
    """Return the weights of several projections, outside autograd."""
    return [projection.weight.detach() for projection in projections]


def parameter(weight: Tensor) -> nn.Parameter:
    """Wrap a weight as a module keeps it."""
    return nn.Parameter(weight, requires_grad=False)


def joined_projection(rows: Sequence[Tensor]) -> nn.Linear:
    """Join projections of one input to one, without a bias."""
    return linear_of(torch.cat(list(rows)))


def latent_spec(config: Any, rope: Mapping[str, Any]) -> LatentSpec:
    """Return the spec of MLA layers, whose fields all families name alike.

    ``rope`` are the parameters of the rotary embedding, empty where the model has none.
    """
    require(config, "rope_parameters.rope_type", rope.get("rope_type", "default"), ROPE_TYPES)
    qk_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    factor, slope = rope.get("factor", 1.0), rope.get("mscale_all_dim")  # of YaRN
    mscale = 0.1 * slope * math.log(factor) + 1.0 if slope and factor > 1 else 1.0
    return LatentSpec(
        num_heads=config.num_attention_heads,
        latent_rank=config.kv_lora_rank,
        nope_dim=config.qk_nope_head_dim,
        rope_dim=config.qk_rope_head_dim,
        v_dim=config.v_head_dim,
        scale=qk_dim**-0.5 * mscale**2,
    )


def require_fields(config: Any, **fields: object) -> None:
    """Refuse a config in which a field that transformers does not read says something else."""
    given = config.to_dict()
    for name, value in fields.items():
        require(config, name, given.get(name, value), [value])
