"""Tiles of implementation "triton", into which the work of gathered keys is cut."""

from __future__ import annotations

from dataclasses import dataclass

import triton
from torch import Tensor

from torch_hybrid.ops.triton.devices import PROCESSORS, is_hopper

_WIDE = 256  # heads that are wider leave room for fewer rows and keys
_SPLIT_KEYS = 64  # that a program has at least, where several share a query
# Of results so wide that to write and merge them is most of the work: more keys, and more splits
# than these only where they leave half of the processors idle.
_WIDE_SPLIT_KEYS, _WIDE_SPLITS = 128, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Sizes decided by shapes alone, so that a captured graph serves any lengths.

    A program has ``block_m`` query heads of one key head of one token, and one of ``num_splits``
    parts of its keys. It takes ``block_kv`` of them at a time, in parts of ``block_part`` elements:
    the narrower, the fewer rows a thread has to place.
    """

    block_m: int
    block_d: int
    block_part: int
    block_kv: int
    num_splits: int
    num_warps: int
    num_stages: int

    @classmethod
    def of(
        cls,
        q: Tensor,
        *,
        num_kv_heads: int,
        most_keys: int,
        has_values: bool,
        is_invariant: bool = False,
    ) -> Tiles:
        """Cut the work of queries [T, Hq, D] that see at most so many keys.

        Keys are not split where a query is to have the bits that it has in any call.
        """
        num_tokens, num_q_heads, head_dim = q.shape
        group = num_q_heads // num_kv_heads
        # float32 products run outside the tensor cores, on operands held in registers.
        tensor_cores, is_wide = q.itemsize == 2, head_dim > _WIDE
        # On Hopper 64 rows, of which half may be idle, fill a processor, as in latent_attention.
        fills = is_wide and tensor_cores and not has_values and group > 16 and is_hopper(q.device)
        most_rows = 64 if not is_wide else 32 if tensor_cores else 16
        block_m = 64 if fills else min(most_rows, max(16, triton.next_power_of_2(group)))
        block_kv = 16 if not tensor_cores else 64 if fills or not is_wide else 32
        block_d = max(16, triton.next_power_of_2(head_dim))

        # Programs of so many rows run one after another on a processor, others at least in pairs.
        programs = num_tokens * num_kv_heads * triton.cdiv(group, block_m)
        wanted = PROCESSORS * (1 if fills else 2) // programs
        if fills:
            wanted = max(min(wanted, _WIDE_SPLITS), wanted // 2)
        least = _WIDE_SPLIT_KEYS if fills and num_tokens > 1 else _SPLIT_KEYS
        splits = 1 if is_invariant else max(1, min(wanted, triton.cdiv(most_keys, least)))
        return cls(
            block_m=block_m,
            block_d=block_d,
            block_part=64 if fills else block_d,
            block_kv=block_kv,
            num_splits=1 << (splits.bit_length() - 1),
            num_warps=8 if is_wide else 4,
            num_stages=2 if tensor_cores else 1,
        )
