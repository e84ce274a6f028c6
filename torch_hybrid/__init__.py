"""Hybrid attention language models as one compiled graph.

Full and linear attention are ``torch.library`` ops with declared mutations, so that a whole step of
a hybrid model is traced by ``torch.compile`` into one graph.
"""

from torch_hybrid.backends.select import Backends
from torch_hybrid.batch import Batch, make_batch
from torch_hybrid.errors import CapacityError, UnsupportedError
from torch_hybrid.graphs.runner import Report, Runner
from torch_hybrid.models.load import adapt, from_pretrained

__all__ = [
    "Backends",
    "Batch",
    "CapacityError",
    "Report",
    "Runner",
    "UnsupportedError",
    "adapt",
    "from_pretrained",
    "make_batch",
]
