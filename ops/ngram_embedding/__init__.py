"""Embeddings of the n-grams that end at each token, found by hashes of their tokens."""

from torch_hybrid.ops.ngram_embedding.op import ngram_embedding

__all__ = ["ngram_embedding"]
