"""Prefix cache: snapshots of prompts and answers, for requests that begin with the same tokens."""

from torch_hybrid.serving.prefix_cache.options import PrefixCache
from torch_hybrid.serving.prefix_cache.prefixes import Prefixes
from torch_hybrid.serving.prefix_cache.stats import PrefixStats

__all__ = ["PrefixCache", "PrefixStats", "Prefixes"]
