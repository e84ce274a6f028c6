"""What an engine keeps of the prompts and answers that it has run, for those that begin alike."""

from torch_hybrid.serving.prefix_cache.options import PrefixCache
from torch_hybrid.serving.prefix_cache.prefixes import Prefixes
from torch_hybrid.serving.prefix_cache.stats import PrefixStats

__all__ = ["PrefixCache", "PrefixStats", "Prefixes"]
