"""Two-batch overlap: which steps are cut into two halves, and at which token.

The halves run interleaved in one graph (``schedule``), so that what one waits for (a collective,
memory) is hidden behind the other's compute. The cut is planned on the host from lengths alone; it
may fall inside a sequence, whose second part then reads what the first wrote to the pools.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from torch_hybrid.backends.mode import Mode


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapPolicy:
    """Which steps are cut: those of at least so many sequences or tokens. None cuts no step.

    A step that is cut although it is too small for two halves runs with an empty one, which is
    right and slow: every half reads all weights. Steps that verify drafts, or make them, are never
    cut.
    """

    min_decode_seqs: int | None = None
    min_extend_tokens: int | None = None

    def cuts(self, mode: Mode, num_seqs: int, num_tokens: int) -> bool:
        """Whether a step of these sizes is cut."""
        smallest = self._smallest(mode)
        size = num_tokens if mode.tokens_per_seq is None else num_seqs
        return smallest is not None and size >= smallest

    def always_cuts(self, mode: Mode) -> bool:
        """Whether no step of a mode runs whole."""
        return self._smallest(mode) == 0

    def _smallest(self, mode: Mode) -> int | None:
        if mode.num_chained:
            return None
        if mode.num_drafts:  # a sequence that is cut would replay what was accepted twice
            return None
        return self.min_extend_tokens if mode.tokens_per_seq is None else self.min_decode_seqs


NEVER_CUT = OverlapPolicy()
ALWAYS_CUT = OverlapPolicy(min_decode_seqs=0, min_extend_tokens=0)


def overlap_policy(
    overlap: str | OverlapPolicy, measured: Callable[[], OverlapPolicy]
) -> OverlapPolicy:
    """The policy that a choice stands for.

    Args:
        overlap: "off", "on", "auto" or a policy.
        measured: what "auto" stands for.

    Raises:
        ValueError: another name.
    """
    match overlap:
        case OverlapPolicy():
            return overlap
        case "off":
            return NEVER_CUT
        case "on":
            return ALWAYS_CUT
        case "auto":
            return measured()
    raise ValueError(
        f"two_batch_overlap must be 'off', 'on', 'auto' or an OverlapPolicy, got {overlap!r}"
    )


def check_cuttable(
    policy: OverlapPolicy, *, max_seqs: int, max_tokens: int, chunk_size: int
) -> None:
    """Raise ValueError where a policy cuts steps of a runner that hold no two halves."""
    if policy.cuts(Mode.DECODE, max_seqs, max_seqs) and max_seqs < 2:
        raise ValueError(
            f"decode steps of at most {max_seqs} sequence(s) are too small to cut in halves: "
            f"two_batch_overlap needs max_seqs of at least 2"
        )
    if policy.cuts(Mode.EXTEND, max_seqs, max_tokens) and max_tokens < 2 * chunk_size:
        raise ValueError(
            f"extend steps of at most {max_tokens} tokens are too small to cut in halves: "
            f"two_batch_overlap needs max_tokens of at least {2 * chunk_size}"
        )


def plan_split(query_lens: Sequence[int], *, grid: int = 1) -> int:
    """The token at which a step is cut: as near to its middle as the chunk grid allows.

    Args:
        query_lens: new tokens of each sequence. One each (decode) cuts at half of the sequences.
        grid: inside a sequence, the cut is a multiple of so many of its new tokens, so that no
            chunk of a chunked mixer is cut.

    Returns:
        0 to ``sum(query_lens)``; the earlier one of two cuts that are equally near. A half may be
        empty.
    """
    ends = list(accumulate(query_lens))
    total = ends[-1] if ends else 0
    # The middle lies in the first sequence that ends past it; where none does, nothing is to cut.
    for length, end in zip(query_lens, ends, strict=True):
        if 2 * end >= total:
            start = end - length
            before = start + (total // 2 - start) // grid * grid
            after = min(before + grid, end)
            return before if total - 2 * before <= 2 * after - total else after
    return 0


def rows_in_halves(tokens: Tensor, cut: int, half_tokens: int) -> Tensor:
    """Where tokens of the whole step stand once its padded halves are joined.

    Args:
        tokens: [R] int64 indices of packed tokens.
        cut: from ``plan_split``.
        half_tokens: size of each padded half.
    """
    return tokens + (tokens >= cut) * (half_tokens - cut)
