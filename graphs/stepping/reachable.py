"""Sizes of steps that serving comes to, so that all can be captured before it begins."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product

import torch

from torch_hybrid.backends.mode import Mode
from torch_hybrid.batch import Batch
from torch_hybrid.graphs.step import Inputs, Variant
from torch_hybrid.graphs.stepping.planner import StepPlanner

# Of a step's tokens, those of its longest sequence: planners go by how many such there could be.
_SHARES = (1, 5 / 6, 2 / 3, *(2.0**-n for n in range(1, 12)))


def reachable(planner: StepPlanner) -> Iterator[tuple[Variant, Inputs]]:
    """Plan a step for each bucket that steps come to, those of short sequences first.

    Sequences are null. They hold as little as asks for a page table of the bucket's width, or as
    much as fills tables of their prefixes. Left out are logits of all tokens of long prompts, and
    halves of other sizes than such steps are cut into.
    """
    sizes = planner.sizes
    for (before, width), mode in product(pairwise((0, *sizes.pages)), planner.modes):
        within = range(before * sizes.page_size + 1, width * sizes.page_size + 1)
        for lengths in _lengths(planner, mode):
            for total in _held(planner, mode, sum(lengths)):
                held, left = [], max(total, within[0] - lengths[0])
                for length in lengths:
                    held.append(min(left, within[-1] - length))
                    left -= held[-1]
                if left or held[0] + lengths[0] not in within:
                    continue
                yield from _plans(planner, mode, planner.null_batch(mode, width, lengths, held))


def _plans(planner: StepPlanner, mode: Mode, batch: Batch) -> Iterator[tuple[Variant, Inputs]]:
    """Plan a batch in each way in which steps of its lengths run."""
    if mode.num_chained:
        nobody: list[list[int]] = [[]] * (mode.num_chained - 1)
        further = {"positions": nobody, "slots": nobody, "seq_lens": nobody}
        yield planner.plan_drafts(batch, further)
        return
    is_mix = mode.tokens_per_seq is None
    nothing = torch.zeros(batch.num_tokens, dtype=torch.int32, device="cpu")
    if planner.takes_embeds and is_mix:
        batch = replace(batch, embed_rows=nothing)
    may_verify = is_mix and batch.num_tokens <= batch.num_seqs * (1 + mode.num_drafts)
    for has_adapters in (False, True)[: 1 + planner.takes_adapters]:
        given = replace(batch, adapter_slots=nothing.clone()) if has_adapters else batch
        yield planner.plan(given, mode, "last")
        if mode.num_drafts and may_verify:
            yield planner.plan(given, mode, "all")


def _lengths(planner: StepPlanner, mode: Mode) -> Iterator[list[int]]:
    """List the new tokens of sequences, the longest first, for each size of a mode's steps."""
    sizes = planner.sizes
    most_tokens = sizes.tokens[-1]
    if (each := mode.tokens_per_seq) is not None:
        if mode.num_chained:  # it reads all that a verify step accepted
            each = 1 + max(other.num_drafts for other in planner.modes)
        counts = sizes.decode_seqs or range(1, sizes.seqs[-1] + 1)
        for num_seqs, length in product(counts, range(1, each + 1)):
            if num_seqs * length <= most_tokens:
                yield [length] * num_seqs
        return
    for num_tokens, (before, size) in product(sizes.tokens, pairwise((0, *sizes.seqs))):
        num_seqs = min(size, num_tokens)
        for share in _SHARES if num_seqs > before else ():
            longest = math.ceil(num_tokens * share)
            if longest * num_seqs >= num_tokens:
                yield _filled(num_tokens, num_seqs, longest)


def _filled(num_tokens: int, num_seqs: int, longest: int) -> list[int]:
    """Share tokens among sequences: as many of the longest as can be, and at least one for each."""
    lengths: list[int] = []
    for others in reversed(range(num_seqs)):
        lengths.append(min(longest, num_tokens - sum(lengths) - others))
    return lengths


def _held(planner: StepPlanner, mode: Mode, num_new: int) -> Sequence[int]:
    """List tokens that sequences may hold together before a step, by the tables of its forms."""
    room = planner.sizes.pages[-1] * planner.sizes.page_size - num_new
    found = {0}
    for forms in (forms for variant, forms in planner.forms.items() if variant.mode == mode):
        for form in forms.values():
            sizes = [size for size in planner.sizes.chunk_rows or () if size < form.num_rows]
            rows = {size * form.num_chunks for size in (*sizes, form.num_rows)} - {0}
            found |= rows | {size - num_new for size in rows}
    return sorted({min(held, room) for held in found if min(held, room) >= 0})
