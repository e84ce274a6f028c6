"""Attention with biases by distance, and the same without them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import product

import torch
from torch import Tensor

from benchmarks.gpu.attention import Paged
from benchmarks.gpu.case import Case, own, randn
from torch_hybrid.ops.paged_attention import paged_attention
from torch_hybrid.ops.paged_attention.op import IMPLEMENTATIONS, RELATIVE_BIAS

REACH, WINDOW = 1024, 512  # of Inkling's layers without a window and with one
FULL, SLIDING = (64, 8, 128), (64, 16, 128)  # query heads, key heads, head dim
# (sequences, length, new tokens of each)
SHAPES = (
    (1, 4096, 1),
    (32, 4096, 1),
    (128, 4096, 1),
    (1, 2048, 2048),
    (1, 8192, 2048),
    (4, 2048, 2048),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Biased(Paged):
    """The same with biases, or without, which reach as far as the window where there is one."""

    relative_bias: Tensor | None
    window: int

    @classmethod
    def of(
        cls, window: int, num_seqs: int, length: int, num_new: int, *, is_biased: bool
    ) -> Biased:
        """Inputs of a layer of Inkling."""
        heads = SLIDING if window else FULL
        plain = Paged.make(heads, num_seqs, length, num_new)
        biases = randn(num_seqs * num_new, heads[0], window or REACH) if is_biased else None
        return cls(
            **{field.name: getattr(plain, field.name) for field in fields(Paged)},
            relative_bias=biases,
            window=window,
        )

    def _num_pairs(self, most: int) -> int:
        """Of queries and keys, of which a query has so many at the most."""
        seen = torch.arange(self.length - self.num_new + 1, self.length + 1)
        return self.num_seqs * int(seen.clamp(max=most).sum())

    @property
    def num_bytes(self) -> float:
        """Keys and values that some query sees, queries, results, biases of keys that are seen."""
        num_q_heads, num_kv_heads, head_dim = self.heads
        num_keys = min(self.length, self.num_new + (self.window or self.length) - 1)
        num_bytes = 4 * self.num_seqs * num_keys * num_kv_heads * head_dim
        num_bytes += 4 * self.qkv.shape[0] * num_q_heads * head_dim
        if self.relative_bias is not None:
            num_bytes += 2 * num_q_heads * self._num_pairs(self.relative_bias.shape[2])
        return num_bytes

    @property
    def flops(self) -> float:
        num_q_heads, _, head_dim = self.heads
        return 4 * num_q_heads * head_dim * self._num_pairs(self.window or self.length)


def attend(inputs: Biased, impl: str, planned: Sequence[Tensor] = ()) -> Tensor:
    """One call of the op, which stores the new rows as well."""
    return paged_attention(
        *inputs.qkv_views(),
        inputs.kv,
        inputs.cu_seqlens,
        inputs.seq_lens,
        inputs.page_table,
        inputs.slot_mapping,
        scale=1 / inputs.heads[2],
        window=inputs.window,
        relative_bias=inputs.relative_bias,
        planned=planned,
        impl=impl,
    )


def cases() -> Iterator[Case]:
    """Each shape with biases and without."""
    for window, (num_seqs, length, num_new) in product((0, WINDOW), SHAPES):
        features = {"extend"} if num_new > 1 else set()
        features |= {"sliding_window"} if window else set()
        for is_biased in (True, False):
            wanted = features | ({RELATIVE_BIAS} if is_biased else set())
            make = partial(Biased.of, window, num_seqs, length, num_new, is_biased=is_biased)
            yield Case(
                op="biased GQA" if is_biased else "plain GQA",
                model=f"Inkling, window {window}" if window else "Inkling",
                shape=f"{num_seqs}x{num_new}" + ("" if num_new == length else f" of {length}"),
                make=make,
                reference=partial(attend, impl="torch"),
                own=own({"triton": IMPLEMENTATIONS["triton"]}, attend, features=tuple(wanted)),
            )
