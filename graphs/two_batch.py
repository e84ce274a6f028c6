"""Two-batch overlap: which steps are cut into two halves, and at which token.

The halves run interleaved in one graph (``schedule``), so that the compute of one hides a wait of
the other (for a collective, for memory). The cut is planned on the host from lengths alone. It may
fall inside a sequence; then the second part reads what the first wrote to the pools.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from torch_hybrid.backends.mode import Mode


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapPolicy:
    """Policy of cutting: a step of at least so many sequences or tokens is cut in halves.

    A minimum of None cuts no step. A step that is cut though it is too small for two halves runs
    with an empty half, which is correct and slow: every half reads all weights. Steps that verify
    or make drafts are never cut.

    Attributes:
        min_decode_seqs: fewest sequences of a decode step that is cut.
        min_extend_tokens: fewest new tokens of an extend step that is cut.
    """

    min_decode_seqs: int | None = None
    min_extend_tokens: int | None = None

    def cuts(self, mode: Mode, num_seqs: int, num_tokens: int) -> bool:
        """Tell whether a step of these sizes is cut."""
        smallest = self._smallest(mode)
        size = num_tokens if mode.tokens_per_seq is None else num_seqs
        return smallest is not None and size >= smallest

    def always_cuts(self, mode: Mode) -> bool:
        """Tell whether every step of a mode is cut."""
        return self._smallest(mode) == 0

    def _smallest(self, mode: Mode) -> int | None:
        if mode.num_chained:
            return None
        if mode.num_drafts:  # a sequence that is cut would replay its accepted drafts twice
            return None
        return self.min_extend_tokens if mode.tokens_per_seq is None else self.min_decode_seqs


NEVER_CUT = OverlapPolicy()
ALWAYS_CUT = OverlapPolicy(min_decode_seqs=0, min_extend_tokens=0)


def overlap_policy(
    overlap: str | OverlapPolicy, measured: Callable[[], OverlapPolicy]
) -> OverlapPolicy:
    """Resolve the runner's option ``two_batch_overlap`` to a policy.

    Args:
        overlap: "off", "on", "auto" or a policy.
        measured: makes the policy of "auto".

    Raises:
        ValueError: ``overlap`` is another name.
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
    """Raise ValueError if a policy cuts steps of a runner that are too small for two halves."""
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
    """Choose the token at which a step is cut: as near to its middle as the chunk grid allows.

    Args:
        query_lens: new tokens of each sequence. One each (decode) cuts at half of the sequences.
        grid: inside a sequence, the cut is at a multiple of so many of its new tokens. So no chunk
            of a chunked mixer is cut.

    Returns:
        0 to ``sum(query_lens)``; the earlier one of two cuts that are equally near. A half may be
        empty.
    """
    ends = list(accumulate(query_lens))
    total = ends[-1] if ends else 0
    # The middle lies in the first sequence that ends past it; an empty step has none.
    for length, end in zip(query_lens, ends, strict=True):
        if 2 * end >= total:
            start = end - length
            before = start + (total // 2 - start) // grid * grid
            after = min(before + grid, end)
            return before if total - 2 * before <= 2 * after - total else after
    return 0


def rows_in_halves(tokens: Tensor, cut: int, half_tokens: int) -> Tensor:
    """Map tokens of the whole step to their places in the joined, padded halves.

    Args:
        tokens: [R] int64 indices of packed tokens.
        cut: from ``plan_split``.
        half_tokens: size of each padded half.
    """
    return tokens + (tokens >= cut) * (half_tokens - cut)
