"""Rows that replace token embeddings: of images, for example, from a model's vision tower.

    given    [1 + max_tokens, dim] on the device, at a fixed address; row 0 is null
    index    [T] in a step's batch: the given row of each token, 0 if it keeps its own embedding

One graph serves steps with and without rows: it looks up both values and selects one. Rows are
copied in before a step; a step without rows copies nothing. Decode steps have no index.
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
    """Rows that replace the embeddings of some tokens.

    Attributes:
        rows: [K, dim] in the model's dtype, on its device.
        places: [K] ascending indices of these tokens among the packed tokens of a step.
    """

    rows: Tensor
    places: Sequence[int]


class GivenRows:
    """Device buffer from which the steps of a runner read the rows that replace embeddings.

    Args:
        max_tokens: most tokens of a step.
        dim: width of a row.
        dtype: dtype of the model.
        device: device of the model.
    """

    @torch.inference_mode(mode=False)
    def __init__(
        self, max_tokens: int, dim: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._rows = torch.zeros(1 + max_tokens, dim, dtype=dtype, device=device)

    @classmethod
    def of(cls, model: Model, max_tokens: int, takes_embeds: bool | None) -> GivenRows | None:
        """Make the buffer of a runner; None if its steps take no rows.

        Args:
            model: model of the runner.
            max_tokens: most tokens of a step.
            takes_embeds: whether steps take rows; None: they do if the model has a vision tower.

        Raises:
            UnsupportedError: the model's forward takes no rows.
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
        """Buffer in the form in which steps receive it, beside the pools."""
        return {GIVEN: ({"rows": self._rows},)}

    def check(self, embeds: Embeds, num_tokens: int) -> None:
        """Raise ValueError unless these rows fit a step of ``num_tokens`` tokens."""
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
        """Copy checked rows into the buffer for the next step, once the step before is launched."""
        self._rows[1 : 1 + len(embeds.places)].copy_(embeds.rows)
