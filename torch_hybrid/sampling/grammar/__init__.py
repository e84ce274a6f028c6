"""Grammars of a request's output: masks of bits over the vocabulary, applied before the draw."""

from torch_hybrid.sampling.grammar.compiler import Compiler
from torch_hybrid.sampling.grammar.grammar import Grammar
from torch_hybrid.sampling.grammar.masks import apply_masks, make_masks
from torch_hybrid.sampling.grammar.matcher import Matcher

__all__ = ["Compiler", "Grammar", "Matcher", "apply_masks", "make_masks"]
