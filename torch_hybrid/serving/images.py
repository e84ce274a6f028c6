"""The images of a prompt on their way through the engine.

Their rows are made when the first step needs them, and given up when the prompt has passed them: a
request that is preempted, or begins elsewhere, has them made again. A prefix cache that has all of
them spares the tower.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torch_hybrid.host.surroundings import isolated

if TYPE_CHECKING:
    from torch_hybrid.models.tower import Inputs, Tower

_KEY_BYTES = 8


class Images:
    """What a prompt has beside its tokens, shared by its requests.

    Args:
        tower: of the model.
        prompt: its tokens, placeholders included.
        inputs: of the tower.
        num_requests: of the prompt.

    Raises:
        ValueError: inputs are incomplete, or come to more or fewer rows than placeholders.
    """

    def __init__(
        self, tower: Tower, prompt: Sequence[int], inputs: Inputs, num_requests: int
    ) -> None:
        tower.check(prompt, inputs)
        self._tower, self._prompt, self._inputs = tower, prompt, inputs
        self._places = tower.places(prompt, inputs)
        self._rows: Tensor | None = None
        self._left = set(range(num_requests))  # that have not passed the images once
        self._positions: Tensor | None = None
        self._delta = 0
        if tower.has_positions:
            self._positions, self._delta = tower.positions(prompt, inputs)

    @cached_property
    def path(self) -> array[int]:
        """The prompt, of type "q", with numbers below 0 in the place of placeholders that say what
        they show: prompts that begin alike have images that are alike."""
        path = array("q", self._prompt)
        for places, images in self._tower.digests(self._prompt, self._inputs):
            keys = [key for digest, count in images for key in _keys(digest, count)]
            for place, key in zip(places, keys, strict=True):
                path[place] = key
        return path

    def are_needed(self, first: int, count: int) -> bool:
        """Whether some of these tokens are placeholders."""
        low, high = self._span(first, count)
        return high > low

    def load(self) -> None:
        """Have their rows, which takes the tower where they are not there."""
        if self._rows is None:
            with isolated():
                rows = self._tower.rows(self._prompt, self._inputs)
            if len(rows) != len(self._places):
                raise ValueError(
                    f"the tower made {len(rows)} rows of images for {len(self._places)} places"
                )
            self._rows = rows

    def rows(self, first: int, count: int) -> tuple[Tensor, list[int]]:
        """The rows of some tokens, and which of those they are."""
        assert self._rows is not None, "rows are asked for that were not loaded"
        low, high = self._span(first, count)
        return self._rows[low:high], [place - first for place in self._places[low:high]]

    def passed(self, sample: int, num_held: int) -> None:
        """One of the requests holds so many tokens: rows that none needs any more are given up."""
        if self._places and num_held <= self._places[-1]:
            return
        self._left.discard(sample)
        if not self._left:
            self._rows = None

    def positions(self, first: int, count: int) -> Tensor | None:
        """[3, count] rotary positions of tokens, the generated ones included; None where they are
        their numbers."""
        if self._positions is None:
            return None
        known = self._positions[:, first : first + count]
        after = range(first + known.shape[1], first + count)
        later = torch.tensor(after, dtype=torch.int64, device="cpu") + self._delta
        return torch.cat([known, later.expand(3, -1)], dim=1)

    def _span(self, first: int, count: int) -> tuple[int, int]:
        return bisect_left(self._places, first), bisect_left(self._places, first + count)


def _keys(digest: bytes, count: int) -> list[int]:
    """Numbers below 0, one for each row of an image, that no other image has."""
    drawn = hashlib.shake_256(digest).digest(_KEY_BYTES * count)
    starts = range(0, len(drawn), _KEY_BYTES)
    return [~(int.from_bytes(drawn[at : at + _KEY_BYTES]) >> 1) for at in starts]
