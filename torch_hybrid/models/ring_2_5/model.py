"""Ring-2.5 as a module of its own, called on packed ragged batches.

There are about seven lightning layers to one of multi-head latent attention. The first layers have
an MLP, the others a mixture of experts. Weights are on the meta device until they are loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from torch_hybrid.backends.latent_attention import LatentPlan
from torch_hybrid.backends.step import LayerStep, Step
from torch_hybrid.caches.pools import LayerCache
from torch_hybrid.errors import UnsupportedError
from torch_hybrid.layers.integers import dtype_of
from torch_hybrid.layers.latent_attention import LatentAttention
from torch_hybrid.layers.lightning_attention import LightningAttention, alibi_slopes
from torch_hybrid.layers.rotary import Rotary, rotate_pairs
from torch_hybrid.models.checkpoint.update import Origins, Weights, checked_update
from torch_hybrid.models.ring_2_5.config import Ring25Config
from torch_hybrid.models.ring_2_5.moe import MLP, MixtureOfExperts, linear
from torch_hybrid.models.ring_2_5.rotary import RotaryTable
from torch_hybrid.models.transformers_hooks import OURS_TO_RUN, refuse_generate, refuse_save
from torch_hybrid.ranks import Ranks

LATENT_NORM_EPS = 1e-6  # eps of MLA's norms: the model fixes it, whatever the config says


class Ring25(nn.Module):
    """Ring-2.5 as a runner needs it: its layers, and a forward over packed tokens.

    Args:
        config: the sizes.
        dtype: dtype of the weights.
        generation_config: the checkpoint's sampling and end tokens, which override ``config``; see
            ``Sampling.of``.
    """

    num_position_axes = 1
    model_type = "ring_2_5"
    mixer_names: ClassVar = {"lightning_attention": "mixer", "latent_attention": "mixer"}

    def __init__(
        self,
        config: Ring25Config,
        dtype: torch.dtype,
        generation_config: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        super().__init__()
        self.config, self.table = config, config.table()
        self.ranks: Ranks | None = None  # ranks that share the model, after ``shard``
        self.origins: Origins | None = None  # origins of weights read from a checkpoint
        self.vocab_size, self.generation_config = config.vocab_size, generation_config
        self.max_positions = config.max_position_embeddings
        eos = generation_config.get("eos_token_id", config.eos_token_id)
        self.eos_token_ids = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
        shape = config.vocab_size, config.hidden_size
        self.word_embeddings: nn.Module = nn.Embedding(*shape, dtype=dtype, device="meta")
        self.layers = nn.ModuleList(
            Ring25Layer(config, layer_id, dtype) for layer_id in range(config.num_hidden_layers)
        )
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device="meta")
        self.lm_head: nn.Module = linear(config.hidden_size, config.vocab_size, dtype)
        self.rotary = nn.ModuleDict(
            {kind: RotaryTable(spec) for kind, spec in config.rotary_specs.items()}
        )

    def new_weights(self, weights: Weights, *, partial: bool) -> Callable[[], None]:
        """Check new weights; return the function that writes them (``checked_update``)."""
        return checked_update(self, self.origins, weights, partial=partial)

    @property
    def embedding(self) -> nn.Module:
        """Embedding of the tokens."""
        return self.word_embeddings

    @property
    def head(self) -> nn.Module:
        """Projection of hidden states to the vocabulary."""
        return self.lm_head

    def replace_vocabulary(self, embedding: nn.Module, head: nn.Module) -> None:
        """Replace ``embedding`` and ``head``."""
        self.word_embeddings, self.lm_head = embedding, head

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights and of the cached latents."""
        return dtype_of(self.lm_head)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(self.lm_head.parameters()).device

    @property
    def all_layers(self) -> list[nn.Module]:
        """Decoder layers, in the order of the table."""
        return list(self.layers)

    @contextmanager
    def first_layers(self, count: int) -> Iterator[None]:
        """Keep only the first ``count`` layers, while a step is traced."""
        whole, self.layers = self.layers, self.layers[:count]
        try:
            yield
        finally:
            self.layers = whole

    def generate(self, *_args: object, **_options: object) -> None:
        """Refuse: the error names what generates instead."""
        refuse_generate()

    def save_pretrained(self, *_args: object, **_options: object) -> None:
        """Refuse: the error names what can be saved instead."""
        refuse_save()

    def forward(
        self,
        tokens: Tensor | None = None,
        positions: Tensor | None = None,
        step: Step | None = None,
        *,
        input_ids: Tensor | None = None,
    ) -> Tensor:
        """Run the layers over the packed tokens of a step.

        Args:
            tokens: [T] int64.
            positions: [T] int64.
            step: plans, caches and table. The caches are mutated at the rows that the plans name.
            input_ids: an argument of transformers' models, which is refused.

        Returns:
            [T, dim] hidden states after the last norm.

        Raises:
            UnsupportedError: the call is one of transformers' models, without a step.
        """
        if tokens is None or positions is None or step is None:
            raise UnsupportedError(OURS_TO_RUN)
        rotary = {kind: table(positions) for kind, table in self.rotary.items()}
        hidden = self.word_embeddings(tokens)
        for layer_id, layer in enumerate(self.layers):
            hidden = layer(hidden, rotary, step.at(layer_id))
        normed: Tensor = self.norm(hidden)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """Map hidden states [R, dim] to logits [R, vocab_size]."""
        logits: Tensor = self.lm_head(hidden)
        return logits


class Ring25Layer(nn.Module):
    """A mixer, then an MLP or experts, each behind a norm and with a residual."""

    def __init__(self, config: Ring25Config, layer_id: int, dtype: torch.dtype) -> None:
        super().__init__()
        dim, eps = config.hidden_size, config.rms_norm_eps
        self.input_norm = nn.RMSNorm(dim, eps, dtype=dtype, device="meta")
        self.mixer: nn.Module
        if config.is_latent(layer_id):
            self.mixer = MultiHeadLatentAttention(config, dtype)
        else:
            slopes = alibi_slopes(config.num_attention_heads) * layer_factor(config, layer_id)
            meta = torch.device("meta")
            self.mixer = LightningAttention(dim, config.lightning, slopes, dtype=dtype, device=meta)
        self.mlp_norm = nn.RMSNorm(dim, eps, dtype=dtype, device="meta")
        self.mlp: nn.Module = (
            MLP(dim, config.intermediate_size, dtype)
            if config.is_dense(layer_id)
            else MixtureOfExperts(config, dtype)
        )

    def forward(self, x: Tensor, rotary: dict[str, Rotary], step: LayerStep) -> Tensor:
        """Map [T, dim] to [T, dim]; the mixer mutates its cache."""
        entry, plan, cache = step.mixer()
        x = x + self.mixer(self.input_norm(x), plan, cache, rotary[entry.kind])
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class MultiHeadLatentAttention(nn.Module):
    """MLA: projections to queries and latents, attention over all latents so far, projection."""

    def __init__(self, config: Ring25Config, dtype: torch.dtype) -> None:
        super().__init__()
        dim, spec = config.hidden_size, config.latent
        self.spec = spec

        def norm(width: int) -> nn.RMSNorm:
            return nn.RMSNorm(width, LATENT_NORM_EPS, dtype=dtype, device="meta")

        q_width = spec.num_heads * spec.qk_dim
        rank = config.q_lora_rank
        if rank is None:
            self.q_proj: nn.Module = linear(dim, q_width, dtype)
        else:
            self.q_proj = nn.Sequential(
                linear(dim, rank, dtype), norm(rank), linear(rank, q_width, dtype)
            )
        self.kv_a_proj = linear(dim, spec.row_dim, dtype)
        self.kv_a_norm = norm(spec.latent_rank)
        kv_width = spec.num_heads * (spec.nope_dim + spec.v_dim)
        self.attention = LatentAttention(spec, linear(spec.latent_rank, kv_width, dtype))
        self.out_proj = linear(spec.num_heads * spec.v_dim, dim, dtype)

    def forward(self, x: Tensor, plan: LatentPlan, cache: LayerCache, rotary: Rotary) -> Tensor:
        """Map [T, dim] to [T, dim]; ``cache`` is mutated at the rows that the plan names."""
        spec = self.spec
        q = self.q_proj(x).unflatten(-1, (spec.num_heads, spec.qk_dim))
        q_nope, q_rope = q.split([spec.nope_dim, spec.rope_dim], dim=-1)
        q = torch.cat([q_nope, rotate_pairs(q_rope, rotary)], dim=-1)
        latent, k_rope = self.kv_a_proj(x).split([spec.latent_rank, spec.rope_dim], dim=-1)
        k_rope = rotate_pairs(k_rope[:, None], rotary)[:, 0]
        o = self.attention(q, self.kv_a_norm(latent), k_rope, plan, cache)
        out: Tensor = self.out_proj(o.flatten(1))
        return out

    def shard(self, ranks: Ranks) -> Self:
        """Keep this rank's heads, over all of the latents.

        Raises:
            UnsupportedError: the ranks do not divide the heads.
        """
        spec, q_proj = self.spec, self.q_proj
        self.spec = spec.divided(ranks.size)
        heads = [(spec.num_heads, spec.qk_dim)]
        if isinstance(q_proj, nn.Sequential):
            q_proj[-1] = ranks.rows(q_proj[-1], heads)  # type: ignore[arg-type]
        else:
            self.q_proj = ranks.rows(q_proj, heads)  # type: ignore[arg-type]
        self.attention = self.attention.shard(ranks)
        self.out_proj = ranks.summed_columns(self.out_proj, spec.num_heads)
        return self


def layer_factor(config: Ring25Config, layer_id: int) -> float:
    """Compute the factor on the decay rates of a layer: 1 in the first, nearly 0 in the last.

    Layers count from 0, as in the engines that serve the model. The model file that is published
    with the weights uses ``layer_id - 1`` here.
    """
    return 1 - layer_id / max(config.num_hidden_layers - 1, 1) + 1e-5
