"""Drafts of sequences: tried by a step that verifies them, and made by a model's own head.

    verify    a step replays what was accepted before, appends a certain token and tries drafts
    flush     such a step without new tokens, for those who copy or move states
    draft     the head reads what it has not read of a sequence, and goes on from there
    read      the head reads, and drafts nothing

All of them leave the states of sequences as plain decoding would.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from torch_hybrid.backends.mode import Mode
from torch_hybrid.caches.hybrid import HybridCache
from torch_hybrid.caches.sequence import Sequence as HeldSequence
from torch_hybrid.graphs.stepping.execution import Execution
from torch_hybrid.graphs.stepping.planner import StepPlanner
from torch_hybrid.graphs.stepping.stepper import Stepper
from torch_hybrid.specs import KEPT_HIDDEN


class Drafting:
    """What a runner does about drafts, of sequences and tokens that have been checked.

    Args:
        cache: of the sequences.
        planner: of the steps.
        stepper: plans and counts those that verify.
        execution: runs them.
        verify_mode: of steps that verify.
        has_head: whether the model has layers that draft.
        max_drafts: of a sequence.
        max_tokens: of a step.
        num_position_axes: of the model.
    """

    def __init__(
        self,
        cache: HybridCache,
        planner: StepPlanner,
        stepper: Stepper,
        execution: Execution,
        *,
        verify_mode: Mode,
        has_head: bool,
        max_drafts: int,
        max_tokens: int,
        num_position_axes: int,
    ) -> None:
        self._cache, self._planner = cache, planner
        self._stepper, self._execution = stepper, execution
        self.verify_mode, self.has_head = verify_mode, has_head
        self._max_drafts, self._max_tokens = max_drafts, max_tokens
        self._num_position_axes = num_position_axes
        self._most_unread = min(KEPT_HIDDEN - 1, max_tokens)  # by the head, of a sequence

    def verify(
        self,
        seqs: Sequence[HeldSequence],
        tokens: Sequence[Sequence[int]],
        positions: Tensor | None = None,
    ) -> Tensor:
        """Run a step that verifies drafts, of sequences that may have no token; logits, padded."""
        num_drafts = [len(new) - 1 for new in tokens]
        self.keep_room(seqs, [len(new) for new in tokens])
        variant, planned = self._stepper.plan(
            seqs,
            tokens,
            self.verify_mode,
            num_drafts=[max(count, 0) for count in num_drafts],
            positions=positions,
        )
        return self._stepper.run(
            seqs,
            lambda: self._execution.logits(variant, planned),
            lambda: self._cache.commit_drafts(seqs, num_drafts),
        )

    def flush(self, seqs: Sequence[HeldSequence]) -> None:
        """Bring the states of sequences up to their last certain token, and what a head has
        read."""
        behind = [seq for seq in seqs if not self._cache.are_replayed([seq])]
        if behind:
            self.verify(behind, [()] * len(behind))
        self.read(seqs)

    def draft(
        self,
        seqs: Sequence[HeldSequence],
        tokens: Sequence[Sequence[int]],
        counts: Sequence[int],
    ) -> list[list[int]]:
        """So many tokens that the head expects of each sequence, after one that it does not hold.

        Args:
            seqs: that are live.
            tokens: of each, that one.
            counts: 1 to ``max_drafts``.
        """
        if len(seqs) + sum(map(self._cache.num_unread, seqs)) > self._max_tokens:
            self.read(seqs)
        drafted = self._run_head(seqs, tokens, counts).T.tolist()
        return [own[:count] for own, count in zip(drafted, counts, strict=False)]

    def read(self, seqs: Sequence[HeldSequence]) -> None:
        """Have the head read what it has not read of sequences."""
        if not self.has_head:
            return
        group: list[HeldSequence] = []
        room = self._max_tokens
        for seq in [seq for seq in seqs if self._cache.num_unread(seq)]:
            if self._cache.num_unread(seq) > room:
                self._run_head(group, [()] * len(group), ())
                group, room = [], self._max_tokens
            group.append(seq)
            room -= self._cache.num_unread(seq)
        if group:
            self._run_head(group, [()] * len(group), ())

    def keep_room(self, seqs: Sequence[HeldSequence], num_new: Sequence[int]) -> None:
        """Have the head read what a step would lose unread: its new tokens write over it, or it
        takes the states to another slot, with the last token's alone."""
        if not self.has_head:
            return
        unread = map(self._cache.num_unread, seqs)
        if any(own + new > self._most_unread for own, new in zip(unread, num_new, strict=True)):
            self.read(seqs)
        self.read([seq for seq in seqs if self._cache.moves(seq)])

    def _run_head(
        self,
        seqs: Sequence[HeldSequence],
        tokens: Sequence[Sequence[int]],
        counts: Sequence[int],
    ) -> Tensor:
        """[1 or max_drafts, N] of the head, padded; it reads what it has not read of sequences, and
        the tokens after those. Without ``counts`` that is all."""
        self._execution.join()  # pages may be copied
        batch = self._cache.make_draft_batch(
            seqs,
            tokens,
            counts or [0] * len(seqs),
            num_position_axes=self._num_position_axes,
            table_width=self._planner.table_width,
        )
        try:
            self._stepper.check(batch)
            num_further = self._max_drafts - 1 if max(counts, default=1) > 1 else 0
            further = self._cache.places_after(seqs if counts else (), counts, num_further)
            variant, planned = self._planner.plan_drafts(batch, further)
            self._stepper.compile(variant)
            drafted = self._execution.logits(variant, planned)
        finally:
            self._cache.give_back_pages(seqs)
        self._cache.note_read(seqs)
        return drafted
