"""Images of a prompt on their way through the engine.

The tower computes their rows when the first step needs them; the rows are freed once the prompt has
passed them. A request that is preempted, or that restarts before an image, has them computed again.
A prefix cache hit that covers all images spares the tower.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torch_hybrid.host.surroundings import isolated

if TYPE_CHECKING:
    from torch_hybrid.models.tower import Inputs, Tower

_KEY_BYTES = 8


@dataclass(eq=False)
class Images:
    """Images of a prompt, shared by its requests.

    Raises:
        ValueError: inputs are incomplete, or give more or fewer rows than there are placeholders.
    """

    tower: Tower  # the model's tower
    prompt: Sequence[int]  # tokens, placeholders included
    inputs: Inputs  # inputs of the tower
    num_requests: int  # number of requests of the prompt

    def __post_init__(self) -> None:
        self.tower.check(self.prompt, self.inputs)
        self._places = self.tower.places(self.prompt, self.inputs)
        self._rows: Tensor | None = None
        self._left = set(range(self.num_requests))  # requests that have not passed the images yet
        self._positions: Tensor | None = None
        self._delta = 0
        if self.tower.has_positions:
            self._positions, self._delta = self.tower.positions(self.prompt, self.inputs)

    @cached_property
    def path(self) -> array[int]:
        """Prompt of type "q", with hashes of images (numbers below 0) in the place of placeholders.

        Prompts share a prefix of this path only if they share its images.
        """
        path = array("q", self.prompt)
        for places, images in self.tower.digests(self.prompt, self.inputs):
            keys = [key for digest, count in images for key in _keys(digest, count)]
            for place, key in zip(places, keys, strict=True):
                path[place] = key
        return path

    def are_needed(self, first: int, count: int) -> bool:
        """Tell whether any of these tokens is a placeholder."""
        low, high = self._span(first, count)
        return high > low

    def load(self) -> None:
        """Compute the rows of the images, unless they are there."""
        if self._rows is None:
            with isolated():
                rows = self.tower.rows(self.prompt, self.inputs)
            if len(rows) != len(self._places):
                raise ValueError(
                    f"the tower made {len(rows)} rows of images for {len(self._places)} places"
                )
            self._rows = rows

    def rows(self, first: int, count: int) -> tuple[Tensor, list[int]]:
        """Return the image rows of a span of tokens, and which of those tokens they replace."""
        assert self._rows is not None, "rows are asked for that were not loaded"
        low, high = self._span(first, count)
        return self._rows[low:high], [place - first for place in self._places[low:high]]

    def passed(self, sample: int, num_held: int) -> None:
        """Note how many tokens a request holds; free rows that no request needs any more."""
        if self._places and num_held <= self._places[-1]:
            return
        self._left.discard(sample)
        if not self._left:
            self._rows = None

    def positions(self, first: int, count: int) -> Tensor | None:
        """Return rotary positions [3, count] of tokens, generated ones included.

        None where each position is the token's index.
        """
        if self._positions is None:
            return None
        known = self._positions[:, first : first + count]
        after = range(first + known.shape[1], first + count)
        later = torch.tensor(after, dtype=torch.int64, device="cpu") + self._delta
        return torch.cat([known, later.expand(3, -1)], dim=1)

    def _span(self, first: int, count: int) -> tuple[int, int]:
        return bisect_left(self._places, first), bisect_left(self._places, first + count)


def _keys(digest: bytes, count: int) -> list[int]:
    """Hash an image into numbers below 0, one for each of its rows."""
    drawn = hashlib.shake_256(digest).digest(_KEY_BYTES * count)
    starts = range(0, len(drawn), _KEY_BYTES)
    return [~(int.from_bytes(drawn[at : at + _KEY_BYTES]) >> 1) for at in starts]
