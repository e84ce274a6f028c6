"""Ring-2.5 and Ling-2.5/2.6: lightning attention and MLA; transformers has no class for them."""

from torch_hybrid.models.families.ring_2_5.family import Ring25Family

__all__ = ["Ring25Family"]
