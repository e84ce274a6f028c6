"""From logits to tokens: what a request asks for, its rules on the logits, the draw of a batch."""

from torch_hybrid.sampling.draw import NOT_FINITE, candidates, sample
from torch_hybrid.sampling.logprobs import TokenLogprob, logprobs_of
from torch_hybrid.sampling.parameters import GREEDY, LogitsProcessor, Sampling
from torch_hybrid.sampling.rules import LogitsRules

__all__ = [
    "GREEDY",
    "NOT_FINITE",
    "LogitsProcessor",
    "LogitsRules",
    "Sampling",
    "TokenLogprob",
    "candidates",
    "logprobs_of",
    "sample",
]
