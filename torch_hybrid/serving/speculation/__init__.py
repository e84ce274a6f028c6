"""Speculative decoding: a drafter guesses tokens, and the model verifies several in one step.

``drafter`` is the interface of drafters: ``ngram``, the model's own ``head`` or a
``smaller_model``. ``pace`` chooses the number of drafts, by their ``acceptance`` and the ``costs``
of steps, and ``speculator`` is the engine's entry point. A step with drafts is an ``in_flight``
step like any other.
"""

from torch_hybrid.serving.speculation.drafter import Drafter
from torch_hybrid.serving.speculation.ngram import Ngram
from torch_hybrid.serving.speculation.parameters import Speculation
from torch_hybrid.serving.speculation.speculator import DraftCounts, Speculator

__all__ = ["DraftCounts", "Drafter", "Ngram", "Speculation", "Speculator"]
