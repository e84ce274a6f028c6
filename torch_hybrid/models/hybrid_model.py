"""A transformers model whose mixers are ours, called on packed ragged batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_hybrid.backends.step import Step
from torch_hybrid.errors import UnsupportedError
from torch_hybrid.layers.adapter_sites import AdapterKinds, AdapterSite, Factors
from torch_hybrid.layers.integers import dtype_of
from torch_hybrid.models.architecture import Architecture
from torch_hybrid.models.checkpoint.update import Origins, Weights, checked_update
from torch_hybrid.models.family import Logits
from torch_hybrid.models.mtp import MtpHead
from torch_hybrid.models.tower import Tower
from torch_hybrid.models.transformers_hooks import OURS_TO_RUN, refuse_generate, refuse_save
from torch_hybrid.ranks import Ranks


class HybridModel(nn.Module):
    """A transformers model with our mixers, and a forward over packed tokens for runners.

    Args:
        hf_model: a causal language model of transformers, with its mixers swapped already.
        architecture: architecture of the model.
        logits: size, scale and softcap of its logits.
        vision: the tower that embeds images, if it is kept.
        mtp: MTP head, whose layers follow the model's in the table.
    """

    def __init__(
        self,
        hf_model: Any,
        architecture: Architecture,
        logits: Logits,
        *,
        vision: Tower | None = None,
        mtp: MtpHead | None = None,
    ) -> None:
        super().__init__()
        self.hf_model = hf_model
        self.mtp = mtp
        family = architecture.family
        self.table = architecture.table
        self.mixer_names = {kind: swap.attribute for kind, swap in family.swaps.items()}
        self.num_position_axes = family.num_position_axes
        self.logits_scale, self.logits_softcap = logits.scale, logits.softcap
        self.vision = vision
        self.ranks: Ranks | None = None  # the ranks that share the model, after ``shard``
        self.origins: Origins | None = None  # of weights that were read from a checkpoint
        config = hf_model.config.get_text_config()
        self.vocab_size: int = hf_model.get_output_embeddings().out_features
        self.embed_dim: int = config.hidden_size
        # Tokens that a sequence can have, where the checkpoint says so.
        self.max_positions: int | None = getattr(config, "max_position_embeddings", None)
        self.eos_token_ids = _eos_token_ids(hf_model)
        types = (
            "full_attention",
            "linear_attention",
            "sliding_attention",
            "indexed_attention",
            "conv",
            "hybrid",
            "hybrid_sliding",
        )
        self._no_masks = dict.fromkeys(types) if family.hf_takes_masks else None
        self._step_argument = family.hf_step_argument
        self._token_arguments = family.hf_token_arguments

    def adapter_sites(self, kinds: AdapterKinds) -> list[AdapterSite]:
        """List the layers that adapters of these kinds may change."""
        from torch_hybrid.models.adapters import adapter_sites  # makes a model once more

        return adapter_sites(self, kinds)

    def read_adapter(
        self, source: Path | nn.Module, max_rank: int, kinds: AdapterKinds
    ) -> list[list[Factors]]:
        """Read an adapter of at most this rank, for each part of each site."""
        from torch_hybrid.models.adapters import read_for_sites

        return read_for_sites(self, source, max_rank, kinds)

    def new_weights(self, weights: Weights | nn.Module, *, partial: bool) -> Callable[[], None]:
        """Check new weights, and return the function that writes them.

        See ``checked_update``, and ``update_from`` for a model.
        """
        if isinstance(weights, nn.Module):
            from torch_hybrid.models.shared_weights import update_from

            return update_from(self, weights, partial=partial)
        return checked_update(self, self.origins, weights, partial=partial)

    @property
    def model_type(self) -> str:
        """The model type of its config."""
        return str(self.hf_model.config.model_type)

    @property
    def generation_config(self) -> dict[str, Any]:
        """The checkpoint's defaults for drawing tokens; see ``Sampling.of``."""
        config: dict[str, Any] = self.hf_model.generation_config.to_dict()
        return config

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers."""
        layers: nn.ModuleList = self.hf_model.base_model.layers
        return layers

    @property
    def all_layers(self) -> list[nn.Module]:
        """The decoder layers, and those of the head, in the order of the table."""
        return [*self.layers, *([] if self.mtp is None else self.mtp.layers)]

    @property
    def drafting(self) -> frozenset[str]:
        """The kinds of mixers of the head; none where there is no head."""
        return frozenset() if self.mtp is None else self.mtp.kinds

    @contextmanager
    def first_layers(self, count: int) -> Iterator[None]:
        """Limit the model to its first ``count`` layers while a step is traced."""
        inner = self.hf_model.base_model
        whole, inner.layers = inner.layers, inner.layers[:count]
        try:
            yield
        finally:
            inner.layers = whole

    @property
    def embedding(self) -> nn.Module:
        """The module from tokens to vectors."""
        embedding: nn.Module = self.hf_model.get_input_embeddings()
        return embedding

    @property
    def head(self) -> nn.Module:
        """The module from hidden states to the vocabulary."""
        head: nn.Module = self.hf_model.get_output_embeddings()
        return head

    def generate(self, *_args: object, **_options: object) -> None:
        """Raise UnsupportedError that names the runner and engine to call instead."""
        refuse_generate()

    def save_pretrained(self, *_args: object, **_options: object) -> None:
        """Raise UnsupportedError: transformers' own model must be saved before it is adapted."""
        refuse_save()

    def replace_vocabulary(self, embedding: nn.Module, head: nn.Module) -> None:
        """Replace ``embedding`` and ``head``."""
        self.hf_model.set_input_embeddings(embedding)
        self.hf_model.set_output_embeddings(head)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights, and of keys, values and convolution states."""
        return dtype_of(self.embedding)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        device: torch.device = self.hf_model.device
        return device

    def forward(
        self,
        tokens: Tensor | None = None,
        positions: Tensor | None = None,
        step: Step | None = None,
        *,
        embeds: Tensor | None = None,
        embed_rows: Tensor | None = None,
        input_ids: Tensor | None = None,
    ) -> Tensor:
        """Run the layers over the packed tokens of a step.

        Args:
            tokens: [T] int64.
            positions: [T] int64, or [3, T] where positions are 3-D.
            step: plans, caches and table. The caches are mutated as the plans say.
            embeds: [rows, dim] embeddings that replace those of some tokens; None: all keep theirs.
            embed_rows: [T] int32, row of ``embeds`` for each token; 0: the token's own embedding.
            input_ids: argument of transformers' models, which is refused.

        Returns:
            [T, dim] hidden states after the last norm.

        Raises:
            UnsupportedError: the model is called as transformers' models are, without a step.
        """
        if tokens is None or positions is None or step is None:
            raise UnsupportedError(OURS_TO_RUN)
        inputs = {"input_ids": tokens[None]}
        if embeds is not None and embed_rows is not None:
            own = self.embedding(tokens)
            is_given = (embed_rows > 0)[:, None]
            embedded = torch.where(is_given, F.embedding(embed_rows, embeds), own)
            inputs = {
                "inputs_embeds": embedded[None],
                **dict.fromkeys(self._token_arguments, tokens[None]),
            }
        outputs = self.hf_model.base_model(
            **inputs,
            position_ids=positions[None] if positions.ndim == 1 else positions[:, None],
            use_cache=False,
            **{"attention_mask": self._no_masks, self._step_argument: step},
        )
        hidden: Tensor = outputs.last_hidden_state[0]
        hidden = hidden.to(self.dtype)  # some models keep their residuals in float32
        if self.mtp is not None:
            before = self.mtp.before(hidden, tokens, step)
            if before is not None:  # fills the head's KV cache; its output is for drafts alone
                self._head(self.mtp, tokens, before, positions, step)
        return hidden

    def draft(self, tokens: Tensor, hidden: Tensor | None, positions: Tensor, step: Step) -> Tensor:
        """Run the MTP head on tokens, and return hidden states of drafts for ``logits``.

        Args:
            tokens: [T] int64; ``KEPT`` for those that the model has run.
            hidden: [T, dim] of the tokens before them, from the last call of ``draft``; None where
                the model ran those tokens.
            positions: [T] int64, or [3, T].
            step: step with the plans of ``drafting``.

        Returns:
            [T, dim].
        """
        assert self.mtp is not None
        if hidden is None:
            tokens, hidden = self.mtp.kept(tokens, step)
        return self._head(self.mtp, tokens, hidden, positions, step)

    def _head(
        self, head: MtpHead, tokens: Tensor, hidden: Tensor, positions: Tensor, step: Step
    ) -> Tensor:
        """Run the head on the hidden states of the tokens before: [T, dim]."""
        embedded = self.embedding(tokens)
        position_ids = positions[None] if positions.ndim == 1 else positions[:, None]
        rotary = getattr(self.hf_model.base_model, "rotary_emb", None)
        rotations = None if rotary is None else rotary(embedded[None], position_ids)
        out: Tensor = head(
            embedded,
            hidden,
            step=step,
            position_embeddings=rotations,
            position_ids=position_ids,
            attention_mask=None,
        )
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """Map [R, dim] hidden states to [R, vocab_size] logits."""
        logits: Tensor = self.head(hidden)
        if self.logits_scale != 1.0:
            logits = logits * self.logits_scale
        if self.logits_softcap:
            logits = self.logits_softcap * torch.tanh(logits / self.logits_softcap)
        return logits


def _eos_token_ids(hf_model: Any) -> tuple[int, ...]:
    """Return the tokens that end a sequence, as the checkpoint says."""
    eos = hf_model.generation_config.eos_token_id
    if eos is None:
        eos = hf_model.config.get_text_config().eos_token_id
    tokens = () if eos is None else (eos,) if isinstance(eos, int | str) else tuple(eos)
    if not all(isinstance(token, int) for token in tokens):
        raise ValueError(f"eos_token_id of the generation config must be tokens, got {eos!r}")
    return tokens
