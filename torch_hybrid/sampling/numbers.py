"""Random numbers of one request."""

from __future__ import annotations

from array import array

import torch

from torch_hybrid.sampling.parameters import Sampling

_AT_ONCE = 32


class RandomNumbers:
    """A number in [0, 1) for each token of a request, by the token's place in its output.

    A token that is sampled again (after a preemption, or an interrupted step) gets the same number.
    The numbers equal those of ``torch.rand`` calls for one number each.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self._drawn = array("d")

    @classmethod
    def of(cls, sampling: Sampling, sample: int = 0) -> RandomNumbers | None:
        """Make the numbers of one of the ``n`` outputs of a prompt; None if it draws greedily."""
        generator = sampling.make_generator(sample)
        return None if generator is None else cls(generator)

    @property
    def seed(self) -> int:
        """Seed of the generator."""
        return self._generator.initial_seed()

    def __getitem__(self, place: int) -> float:
        while place >= len(self._drawn):
            new = torch.rand(_AT_ONCE, dtype=torch.float64, device="cpu", generator=self._generator)
            self._drawn.extend(new.tolist())
        return self._drawn[place]
