"""The places where our mixers join a transformers model: attention functions, linear layers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from torch import Tensor, nn

from torch_hybrid.backends.paged_attention import attend
from torch_hybrid.backends.step import LayerStep, Step
from torch_hybrid.caches.pools import LayerCache
from torch_hybrid.errors import UnsupportedError
from torch_hybrid.layers.latent_attention import LatentAttention
from torch_hybrid.ranks import Ranks
from torch_hybrid.specs import AttentionSpec, LatentSpec

AnyStep = TypeVar("AnyStep", Step, LayerStep)

ATTENTION_NAME = "torch_hybrid"  # of our attention function in transformers

OURS_TO_RUN = (
    "a model with the attention of torch_hybrid is run by torch_hybrid alone: use "
    "th.Engine(th.Runner(th.adapt(hf_model))).generate(prompts), or th.from_pretrained(path)"
)


def register_attention() -> None:
    """Make our attention function known to transformers."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, _attention)


@dataclass(frozen=True, slots=True)
class _HandStep:
    """A hook of a decoder layer that hands the layer its own part of the step."""

    layer_id: int
    model_argument: str
    layer_arguments: tuple[str, ...]

    def __call__(
        self, _layer: nn.Module, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        step: Step | None = options.get(self.model_argument)
        own = _given(step).at(self.layer_id)
        names = (name for name in self.layer_arguments if name in options)
        return args, {**options, **dict.fromkeys(names, own)}


def hand_steps(
    layers: Iterable[nn.Module],
    model_argument: str = "step",
    layer_arguments: tuple[str, ...] = ("step",),
) -> None:
    """Let each decoder layer hand the step to its modules by the layer's own id.

    A module that several layers share finds in each of them another plan and cache.

    Args:
        layers: decoder layers of a model.
        model_argument: argument by which the model hands the step to its layers.
        layer_arguments: arguments by which a layer hands the step to its modules, where the model
            hands them to the layer.
    """
    for layer_id, layer in enumerate(layers):
        hand_step = _HandStep(layer_id, model_argument, layer_arguments)
        layer.register_forward_pre_hook(hand_step, with_kwargs=True)


def refuse_as_transformers(hf_model: Any) -> None:
    """Make the model's own ``generate`` and ``save_pretrained`` raise UnsupportedError."""
    hf_model.generate = refuse_generate
    hf_model.save_pretrained = refuse_save


def refuse_generate(*_args: Any, **_options: Any) -> None:
    """Raise UnsupportedError that names the runner and engine to call instead."""
    raise UnsupportedError(OURS_TO_RUN)


def refuse_save(*_args: Any, **_options: Any) -> None:
    """Raise UnsupportedError: transformers' own model must be saved before it is adapted."""
    raise UnsupportedError(
        "an adapted model cannot be saved: its mixers keep their weights in another order, and "
        "nothing could load them. Call save_pretrained before adapt"
    )


def _given(step: AnyStep | None) -> AnyStep:
    """Return the step; raise UnsupportedError without one, as in transformers' own generate."""
    if step is None:
        raise UnsupportedError(OURS_TO_RUN)
    return step


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    step: LayerStep | None = None,  # the runner's; None where transformers itself calls the model
    **_options: Any,  # transformers passes every option to every attention function
) -> tuple[Tensor, None]:
    """Run full attention of the kind that the layer has, called by transformers."""
    entry, plan, cache = _given(step).mixer(*_ATTENTIONS)
    attend_as = _ATTENTIONS[entry.kind]
    return attend_as(module, query, key, value, entry.spec, plan, cache)[None], None


def _paged_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, spec: Any, plan: Any, cache: LayerCache
) -> Tensor:
    """Attend with q, k and v [1, heads, T, head_dim]."""
    q, k, v = (states[0].transpose(0, 1).contiguous() for states in (query, key, value))
    return attend(q, k, v, spec, plan, cache)


def _latent_attention(
    module: Any,
    query: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    spec: Any,
    plan: Any,
    cache: LayerCache,
) -> Tensor:
    """Attend with query [1, heads, T, nope + rope], latent [1, 1, T, rank] and k_rope
    [1, 1, T, rope]: MLA."""
    q = query[0].transpose(0, 1)
    out: Tensor = module.latent_attention(q, latent[0, 0], k_rope[0, 0], plan, cache)
    return out


# The kinds that join as an attention function; all others are swapped for modules of ours.
_ATTENTIONS = {AttentionSpec.kind: _paged_attention, LatentSpec.kind: _latent_attention}


def join_latent_attention(module: Any, spec: LatentSpec) -> None:
    """Make an MLA module of transformers hand its latents to us.

    The module calls ``expand_kv`` to make keys and values of its latents, and hands those to the
    attention function. Left as they are, latents arrive there.
    """
    module.latent_attention = LatentAttention(spec, module.kv_b_proj)
    module.expand_kv = _keep_latents


def _keep_latents(latent: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
    return latent, k_rope


class LinearAttentionAdapter(nn.Module):
    """A mixer of ours in the place of a transformers model's linear attention."""

    def __init__(self, mixer: nn.Module, kind: str) -> None:
        super().__init__()
        self.mixer, self.kind = mixer, kind

    def forward(self, hidden_states: Tensor, *, step: LayerStep, **_options: object) -> Tensor:
        """Map [1, T, dim] to [1, T, dim], the rows packed as the step's plan says."""
        _, plan, cache = step.mixer(self.kind)
        output: Tensor = self.mixer(hidden_states[0], plan, cache)  # type: ignore[arg-type]
        return output[None]

    def shard(self, ranks: Ranks) -> Self:
        """Keep this rank's heads.

        Raises:
            UnsupportedError: the ranks do not divide the heads.
        """
        mixer: Any = self.mixer
        self.mixer = mixer.shard(ranks)
        return self


class LinearAttentionPairAdapter(LinearAttentionAdapter):
    """A mixer of ours that the decoder layer calls as it calls full attention."""

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, *, step: LayerStep, **_options: object
    ) -> tuple[Tensor, None]:
        """Map [1, T, dim] to [1, T, dim] and no attention weights."""
        return super().forward(hidden_states, step=step), None
