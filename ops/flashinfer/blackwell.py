"""What FlashInfer's kernels for Blackwell take of a step: TensorRT-LLM's and those in CuTe DSL.

They want no schedule, but lengths, page tables and a workspace. That a sequence may be empty is
said of none: a null sequence counts as one of a single row, which is in page 0; what comes of it is
a row of padding, which is set to 0 afterwards.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from torch_hybrid.ops.core.planning import Lengths, Planned
from torch_hybrid.ops.flashinfer.one_token import has_tokens

_WORKSPACE_BYTES = 128 << 20  # as FlashInfer recommends
_TABLE_WIDTH = 8  # pages: the CuTe DSL form reads 128 rows at once, of pages of 16 or more


@cache
def workspace(device: torch.device) -> Tensor:
    """Zeros at first: kernels keep semaphores in it, and leave them at zero."""
    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def plan_decode(lengths: Lengths, **_: object) -> Planned:
    """Lengths [N] of one row at least, and the page table in whole tiles.

    Raises:
        ValueError: a sequence has more than one token, or its row is not its own.
    """
    has_tokens(lengths)
    width = lengths.page_table.shape[1]
    table = torch.nn.functional.pad(lengths.page_table, (0, -width % _TABLE_WIDTH))
    return Planned(tensors=(lengths.seq_lens.clamp(min=1), table), values=())
