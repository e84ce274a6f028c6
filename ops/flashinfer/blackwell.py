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


def plan_any(lengths: Lengths, **_: object) -> Planned:
    """Lengths [N] of one row at least, where they begin [N + 1], and the most new tokens of a
    sequence: a power of 2, or 0 where each has one, in a row of its own."""
    num_new = max(lengths.cu_seqlens.diff().tolist(), default=0)
    most = 1 << max(num_new - 1, 0).bit_length()
    if num_new <= 1 and lengths.num_tokens == lengths.seq_lens.shape[0]:
        has_tokens(lengths)
        most = 0
    seq_lens = lengths.seq_lens.clamp(min=1)
    first = torch.nn.functional.pad(seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
    return Planned(tensors=(seq_lens, first), values=(most,))
