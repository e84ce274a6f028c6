"""Masks of bits over the vocabulary: one for each row of logits that a token is drawn from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torch_hybrid.sampling.grammar.matcher import Matcher

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher


def make_masks(rows: Sequence[tuple[Matcher | None, Sequence[int]]]) -> Tensor | None:
    """Make the masks of a step on the host; no matcher advances.

    Args:
        rows: matcher of each request, if it has one, and its drafts.

    Returns:
        [T, W] int32, a row after the last token and each draft: bit ``v % 32`` of word ``v // 32``
        allows token ``v``. Rows after a draft that is not allowed, which no request reaches, allow
        all. None where no request has a matcher. If a mask takes too long, all matchers fail.
    """
    matchers = [matcher for matcher, _ in rows if matcher is not None]
    if not matchers:
        return None
    vocabulary = matchers[0].vocabulary
    first = list(accumulate((1 + len(drafts) for _, drafts in rows), initial=0))
    masks = torch.full((first[-1], vocabulary.num_words), -1, dtype=torch.int32, device="cpu")
    plain, drafted = [], []
    frees = [0 if matcher is None else matcher.num_free(drafts) for matcher, drafts in rows]
    for (matcher, drafts), at, num_free in zip(rows, first[:-1], frees, strict=True):
        if matcher is None or num_free > len(drafts):
            continue
        if num_free == len(drafts):
            plain.append((matcher.state, at + num_free))
        else:
            drafted.append((matcher.state, at + num_free, list(drafts[num_free:])))
    worker, errors = vocabulary.worker, [matcher.error for matcher in matchers]
    if worker.shared is None or worker.shared.makes:
        if worker.finishes(partial(_fill, masks, plain, drafted)):
            errors = [matcher.error for matcher in matchers]
        else:
            errors = ["a mask took too long"] * len(matchers)
            masks = torch.full_like(masks, -1)  # the late thread still writes
    if worker.shared is not None:
        errors = worker.shared.send(masks, errors)
    for failed, error in zip(matchers, errors, strict=True):
        if error is not None:
            failed.fail(error)
    for (matcher, _), at, end, num_free in zip(rows, first[:-1], first[1:], frees, strict=True):
        if matcher is not None:
            matcher.finish_rows(masks[at:end], num_free)
    return masks


def _fill(
    masks: Tensor,
    plain: list[tuple[LLMatcher, int]],
    drafted: list[tuple[LLMatcher, int, list[int]]],
    executor: LLExecutor,
) -> None:
    place = masks.data_ptr(), 4 * masks.shape[1], masks.shape[0]
    if plain:
        executor.unsafe_compute_mask_ptr(plain, *place)
    if drafted:
        executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *place)


def apply_masks(logits: Tensor, masks: Tensor) -> Tensor:
    """Replace the logits of tokens that masks do not allow by minus infinity.

    Args:
        logits: [T, vocab_size], any float dtype; not changed.
        masks: [T, W] int32 of ``make_masks``, on the host; W words hold the vocabulary at least.
    """
    words = masks.to(logits.device, non_blocking=True).unsqueeze(-1)
    places = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = (words >> places & 1).flatten(1)[:, : logits.shape[1]]
    return torch.where(allowed.bool(), logits, -math.inf)
