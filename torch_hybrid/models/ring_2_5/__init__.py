"""Ring-2.5 and Ling-2.5/2.6: lightning attention and MLA; transformers has no class for them."""

from torch_hybrid.models.ring_2_5.config import Ring25Config, is_ring_2_5
from torch_hybrid.models.ring_2_5.model import Ring25
from torch_hybrid.models.ring_2_5.weights import make_unread_ring_2_5

__all__ = ["Ring25", "Ring25Config", "is_ring_2_5", "make_unread_ring_2_5"]
