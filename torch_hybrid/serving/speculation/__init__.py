"""Drafts: tokens that somebody guesses, and that the model verifies several of in one step.

``drafter`` says what proposes them: ``ngram``, the model's own ``head`` or a ``smaller_model``.
``pace`` decides how many are worth trying at a time, by their ``acceptance`` and the ``costs`` of
steps, and ``speculator`` is what an engine asks. A step that tries them is a ``in_flight`` as any.
"""

from torch_hybrid.serving.speculation.drafter import Drafter
from torch_hybrid.serving.speculation.ngram import Ngram
from torch_hybrid.serving.speculation.parameters import Speculation
from torch_hybrid.serving.speculation.speculator import DraftCounts, Speculator

__all__ = ["DraftCounts", "Drafter", "Ngram", "Speculation", "Speculator"]
