"""Multi-token prediction (MTP): drafts from the model's own head.

The model's steps keep what the head needs of each token, and the runner runs the head to draft.
Pages, forks, prefixes and preemption work for the head as for the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch_hybrid.serving.request import Request

if TYPE_CHECKING:
    from torch_hybrid.graphs.runner import Runner


class Head:
    """Drafter that runs the head of a runner's model, for all requests in one step.

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
        """Draft for requests whose sequences lack only the last token; see ``Drafter``."""
        if not requests:
            return []
        sequences = [request.sequence for request in requests if request.sequence is not None]
        return self._runner.draft(sequences, [r.history[-1] for r in requests], counts)

    def forget(self, request: Request) -> None:
        """Do nothing: the head keeps nothing of a request."""
