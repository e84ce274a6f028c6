"""Where our mixers join a transformers model: its attention functions and its linear layers."""

from __future__ import annotations

from typing import Any, Self

from torch import Tensor, nn

from torch_hybrid.backends.hybrid import Step
from torch_hybrid.backends.paged_attention import attend
from torch_hybrid.errors import UnsupportedError
from torch_hybrid.layers.latent_attention import LatentAttention
from torch_hybrid.parallel.ranks import Ranks
from torch_hybrid.specs import LatentSpec

# Names of our attention functions in transformers, by the kind of layer that they serve.
ATTENTION_NAMES = {
    "paged_attention": "torch_hybrid",
    "latent_attention": "torch_hybrid_latent",
}

_OURS_TO_RUN = (
    "a model with the attention of torch_hybrid is run by torch_hybrid alone: use "
    "th.Engine(th.Runner(th.adapt(hf_model))).generate(prompts), or th.from_pretrained(path)"
)


def register_attention() -> None:
    """Make our attention functions known to transformers."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAMES["paged_attention"], _attention)
    AttentionInterface.register(ATTENTION_NAMES["latent_attention"], _latent_attention)


def refuse_as_transformers(hf_model: Any) -> None:
    """Make the model's own ``generate`` and ``save_pretrained`` say what to use instead."""
    hf_model.generate = _refused_generate
    hf_model.save_pretrained = _refused_save


def _refused_generate(*_args: Any, **_options: Any) -> None:
    raise UnsupportedError(_OURS_TO_RUN)


def _refused_save(*_args: Any, **_options: Any) -> None:
    raise UnsupportedError(
        "an adapted model cannot be saved: its mixers keep their weights in another order, and "
        "nothing could load them. Call save_pretrained before adapt"
    )


def _given(step: Step | None) -> Step:
    """The step of a runner: transformers' own forward and generate have none."""
    if step is None:
        raise UnsupportedError(_OURS_TO_RUN)
    return step


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    step: Step | None = None,
    **_options: Any,  # transformers passes every option to every attention function
) -> tuple[Tensor, None]:
    """Full attention as transformers calls it: q, k and v [1, heads, T, head_dim]."""
    entry, plan, cache = _given(step).layer(module.layer_idx, "paged_attention")
    q, k, v = (states[0].transpose(0, 1).contiguous() for states in (query, key, value))
    return attend(q, k, v, entry.spec, plan, cache["kv"])[None], None  # type: ignore[arg-type]


def join_latent_attention(module: Any, spec: LatentSpec) -> None:
    """Make an MLA module of transformers hand its latents to us.

    The module calls ``expand_kv`` to make keys and values of its latents, and hands those to the
    attention function. Left as they are, latents arrive there.
    """
    module.latent_attention = LatentAttention(spec, module.kv_b_proj)
    module.expand_kv = _keep_latents


def _keep_latents(latent: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
    return latent, k_rope


def _latent_attention(
    module: Any,
    query: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    attention_mask: None,
    *,
    step: Step | None = None,
    **_options: Any,
) -> tuple[Tensor, None]:
    """MLA: query [1, heads, T, nope + rope], latent [1, 1, T, rank], k_rope [1, 1, T, rope]."""
    _, plan, cache = _given(step).layer(module.layer_idx, "latent_attention")
    q = query[0].transpose(0, 1)
    out: Tensor = module.latent_attention(q, latent[0, 0], k_rope[0, 0], plan, cache)
    return out[None], None


class LinearAttentionAdapter(nn.Module):
    """Stands where a transformers model has its linear attention."""

    def __init__(self, mixer: nn.Module, layer_id: int, kind: str) -> None:
        super().__init__()
        self.mixer = mixer
        self.layer_id, self.kind = layer_id, kind

    def forward(
        self,
        hidden_states: Tensor,
        *,
        step: Step | None = None,
        cache_params: None = None,
        attention_mask: None = None,
        position_embeddings: object = None,
        use_cache: bool = False,
    ) -> Tensor:
        """[1, T, dim] -> [1, T, dim], the rows packed as the step's plan says."""
        _, plan, cache = _given(step).layer(self.layer_id, self.kind)
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
    """The same where the decoder layer calls all its mixers as it calls full attention."""

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        *,
        step: Step | None = None,
        past_key_values: None = None,
        attention_mask: None = None,
        position_embeddings: object = None,
        position_ids: object = None,
        use_cache: bool = False,
    ) -> tuple[Tensor, None]:
        """[1, T, dim] -> [1, T, dim] and no attention weights."""
        return super().forward(hidden_states, step=step), None
