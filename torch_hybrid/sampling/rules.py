"""Rules of one request on its logits, applied before the draw."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_hybrid.sampling.parameters import Sampling


@dataclass(eq=False)
class LogitsRules:
    """Penalties, bias, barred tokens and the caller's own processor, for one request."""

    sampling: Sampling  # options of the request
    num_prompt: int  # number of tokens of its prompt
    end_token_ids: frozenset[int]  # tokens barred until ``min_new_tokens`` are generated

    def __post_init__(self) -> None:
        self._end_token_ids = sorted(self.end_token_ids)
        self._num_counted = 0
        self._seen: Tensor | None = None  # [vocab_size] bool: in the prompt or the output
        self._counts: Tensor | None = None  # [vocab_size] float32: how often in the output
        self._bias: tuple[Tensor, Tensor] | None = None  # token ids and their biases

    @classmethod
    def of(
        cls, sampling: Sampling, *, num_prompt: int, end_token_ids: frozenset[int]
    ) -> LogitsRules | None:
        """Make the rules of a request; None if it has none."""
        has_rules = (
            sampling.repetition_penalty != 1
            or sampling.presence_penalty != 0
            or sampling.frequency_penalty != 0
            or sampling.logit_bias
            or sampling.min_new_tokens > 0
            or sampling.logits_processor is not None
        )
        if not has_rules:
            return None
        return cls(sampling, num_prompt=num_prompt, end_token_ids=end_token_ids)

    def apply(self, logits: Tensor, tokens: Sequence[int]) -> Tensor:
        """Apply the rules to the logits of the next token.

        Args:
            logits: [vocab_size], any float dtype; not changed.
            tokens: prompt and output so far; only ever longer than at the call before.

        Returns:
            [vocab_size] float32.

        Raises:
            TypeError, ValueError: the processor returned no logits of that shape. Other errors of
                the processor pass through.
        """
        sampling = self.sampling
        row = logits.to(torch.float32, copy=True)
        self._penalize(row, tokens)
        if sampling.logit_bias:
            ids, values = self._bias_on(row.device)
            row.index_add_(0, ids, values)
        if len(tokens) - self.num_prompt < sampling.min_new_tokens:
            row[self._end_token_ids] = -math.inf
        if sampling.logits_processor is None:
            return row
        return _checked(sampling.logits_processor(list(tokens), row), row.shape)

    def _penalize(self, row: Tensor, tokens: Sequence[int]) -> None:
        sampling = self.sampling
        repetition = sampling.repetition_penalty
        by_count = sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
        if repetition == 1 and not by_count:
            return
        seen, counts = self._count(row, tokens)
        if repetition != 1:
            row.copy_(
                torch.where(seen, torch.where(row < 0, row * repetition, row / repetition), row)
            )
        if by_count:
            row.sub_(counts, alpha=sampling.frequency_penalty)
            row.sub_((counts > 0).to(row.dtype), alpha=sampling.presence_penalty)

    def _count(self, row: Tensor, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Count the tokens that were added since the last call."""
        if self._seen is None or self._counts is None:
            self._seen = torch.zeros_like(row, dtype=torch.bool)
            self._counts = torch.zeros_like(row)
        new = torch.tensor(tokens[self._num_counted :], dtype=torch.int64, device=row.device)
        self._seen[new] = True
        generated = new[max(0, self.num_prompt - self._num_counted) :]
        ones = torch.ones_like(generated, dtype=row.dtype)
        self._counts.index_add_(0, generated, ones)
        self._num_counted = len(tokens)
        return self._seen, self._counts

    def _bias_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if self._bias is None:
            bias = self.sampling.logit_bias
            ids = torch.tensor(list(bias), dtype=torch.int64, device=device)
            values = torch.tensor(list(bias.values()), dtype=torch.float32, device=device)
            self._bias = ids, values
        return self._bias


def _checked(row: object, shape: torch.Size) -> Tensor:
    expected = f"logits_processor must return a float tensor of shape {list(shape)}"
    if not isinstance(row, Tensor) or not row.is_floating_point():
        raise TypeError(f"{expected}, got {row.dtype if isinstance(row, Tensor) else type(row)}")
    if row.shape != shape:
        raise ValueError(f"{expected}, got {list(row.shape)}")
    return row.float()
