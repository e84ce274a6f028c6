"""Sampling: a request's options, its rules on the logits, and the draw of tokens for a batch."""

from torch_hybrid.ops.draw_tokens.counts import NOT_FINITE
from torch_hybrid.sampling.draw import Draw, candidates
from torch_hybrid.sampling.grammar import Grammar
from torch_hybrid.sampling.logprobs import TokenLogprob, logprobs_of, token_logprobs
from torch_hybrid.sampling.numbers import RandomNumbers
from torch_hybrid.sampling.on_device import (
    USUAL_KINDS,
    DrawKind,
    draw_tokens,
    no_settings,
    sample,
    settings_of,
)
from torch_hybrid.sampling.parameters import GREEDY, LogitsProcessor, Sampling
from torch_hybrid.sampling.rules import LogitsRules

__all__ = [
    "GREEDY",
    "NOT_FINITE",
    "USUAL_KINDS",
    "Draw",
    "DrawKind",
    "Grammar",
    "LogitsProcessor",
    "LogitsRules",
    "RandomNumbers",
    "Sampling",
    "TokenLogprob",
    "candidates",
    "draw_tokens",
    "logprobs_of",
    "no_settings",
    "sample",
    "settings_of",
    "token_logprobs",
]
