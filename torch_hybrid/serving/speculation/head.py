"""Drafts from the model's own head that predicts further tokens (MTP).

The model's steps keep what the head needs of each token, and the runner has the head read it when
it drafts: pages, forks, prefixes and preemption hold for it as they do for the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch_hybrid.serving.request import Request

if TYPE_CHECKING:
    from torch_hybrid.graphs.runner import Runner


class Head:
    """Asks the head of a runner's model, which drafts for all requests in one step.

    Raises:
        ValueError: the model has no head.
    """

    def __init__(self, runner: Runner) -> None:
        if not runner.has_head:
            raise ValueError(
                "speculate with 'mtp' needs a model with its head: from_pretrained(path, mtp=True)"
            )
        self._runner = runner

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[list[int]]:
        """As ``Drafter`` says; of requests whose last token alone is not held."""
        if not requests:
            return []
        sequences = [request.sequence for request in requests if request.sequence is not None]
        return self._runner.draft(sequences, [r.history[-1] for r in requests], counts)

    def forget(self, request: Request) -> None:
        """As ``Drafter`` says: nothing is kept."""
