"""Rows that stand in the place of tokens' own embeddings: of images, from a model's tower.

    given    [1 + max_tokens, dim] on the device, at a fixed address; row 0 is null
    index    [T] of a step's batch: which given row a token takes, 0 where it has its own embedding

A step with rows is the same graph as one without: it looks both up and takes one. Rows are copied
in before the step, and nothing is where there are none. Steps that decode have no index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from torch_hybrid.errors import UnsupportedError
from torch_hybrid.graphs.step import GIVEN, Caches, Model


@dataclass(frozen=True, slots=True, kw_only=True)
class Embeds:
    """Rows in the place of some tokens' own embeddings.

    Attributes:
        rows: [K, dim] of the model's dtype, on its device.
        places: [K] which of a step's packed tokens take them, ascending.
    """

    rows: Tensor
    places: Sequence[int]


class GivenRows:
    """Where the steps of a runner find the rows that they are given.

    Args:
        max_tokens: of a step.
        dim: of a row.
        dtype: of the model.
        device: of the model.
    """

    @torch.inference_mode(mode=False)
    def __init__(
        self, max_tokens: int, dim: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._rows = torch.zeros(1 + max_tokens, dim, dtype=dtype, device=device)

    @classmethod
    def of(cls, model: Model, max_tokens: int, takes_embeds: bool | None) -> GivenRows | None:
        """Those of a runner; None where its steps are given none.

        Args:
            model: of the runner.
            max_tokens: of a step.
            takes_embeds: whether steps are given rows; None: where the model has a tower.

        Raises:
            UnsupportedError: the model's forward takes none.
        """
        if takes_embeds is None:
            takes_embeds = getattr(model, "vision", None) is not None
        if not takes_embeds:
            return None
        dim: int | None = getattr(model, "embed_dim", None)
        if dim is None:
            raise UnsupportedError(
                f"takes_embeds=True needs a model that says its embed_dim, got a "
                f"{type(model).__name__}"
            )
        return cls(max_tokens, dim, dtype=model.dtype, device=model.device)

    @property
    def caches(self) -> Caches:
        """As what steps are handed them."""
        return {GIVEN: ({"rows": self._rows},)}

    def check(self, embeds: Embeds, num_tokens: int) -> None:
        """Raise ValueError unless these rows can stand in a step of so many tokens."""
        rows, own = embeds.rows, self._rows
        expected = f"[{len(embeds.places)}, {own.shape[1]}] in {own.dtype} on {own.device}"
        is_alike = rows.dtype == own.dtype and rows.device == own.device
        if [*rows.shape] != [len(embeds.places), own.shape[1]] or not is_alike:
            raise ValueError(
                f"rows of embeds must be {expected}, got {[*rows.shape]} in {rows.dtype} on "
                f"{rows.device}"
            )
        bounds = (-1, *embeds.places, num_tokens)
        if any(before >= after for before, after in pairwise(bounds)):
            raise ValueError(
                f"places of embeds must ascend within 0 and {num_tokens - 1}, got "
                f"{[*embeds.places]}"
            )

    def write(self, embeds: Embeds) -> None:
        """Give these rows to the next step, which has been checked; after the one before it."""
        self._rows[1 : 1 + len(embeds.places)].copy_(embeds.rows)
