"""Drafts of sequences: verified by a step of the model, and made by the model's draft head.

    verify    a step replays the accepted drafts, appends a committed token, and tries new drafts
    flush     a verify step without new tokens: it completes states that are to be copied or moved
    draft     the head reads the tokens that it has not read, then drafts further ones
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
    """Verification and drafting of a runner; its callers have checked sequences and tokens.

    Args:
        cache: states of the sequences.
        planner: plans the steps of the draft head.
        stepper: plans, runs and counts the verify steps.
        execution: runs planned steps.
        verify_mode: mode of verify steps.
        has_head: whether the model has a draft head.
        max_drafts: most drafts of a sequence in one step.
        max_tokens: most tokens of a step.
        num_position_axes: position axes of the model.
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
        self._most_unread = min(KEPT_HIDDEN - 1, max_tokens)  # by the head, of one sequence

    def verify(
        self,
        seqs: Sequence[HeldSequence],
        tokens: Sequence[Sequence[int]],
        positions: Tensor | None = None,
    ) -> Tensor:
        """Run a step that verifies drafts, and return its logits, padding included.

        Args:
            seqs: sequences of the step.
            tokens: new tokens of each: one committed token, then drafts; or none at all.
            positions: positions of the tokens; by default they follow the committed ones.
        """
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
        """Replay accepted drafts into the states of sequences, and have the head read the rest."""
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
        """Draft tokens of each sequence with the model's head.

        Args:
            seqs: live sequences.
            tokens: for each, the one token that follows those it holds.
            counts: drafts wanted of each, 1 to ``max_drafts``.

        Returns:
            The drafts of each sequence, as many as its count.
        """
        if len(seqs) + sum(map(self._cache.num_unread, seqs)) > self._max_tokens:
            self.read(seqs)
        drafted = self._run_head(seqs, tokens, counts).T.tolist()
        return [own[:count] for own, count in zip(drafted, counts, strict=False)]

    def read(self, seqs: Sequence[HeldSequence]) -> None:
        """Run the head on the tokens of sequences that it has not read, as many a step as fit."""
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
        """Have the head read the hidden states that the next step would overwrite or leave behind.

        A step overwrites them if unread and new tokens together exceed the kept hidden states. A
        step that starts from another slot takes only the last token's hidden state with it.
        """
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
        """Run the head on unread tokens and on ``tokens``, then on its own drafts.

        Args:
            seqs: live sequences.
            tokens: tokens after those that each sequence holds.
            counts: drafts wanted of each sequence; empty only reads.

        Returns:
            [1 or max_drafts, N] drafts, padding included.
        """
        self._execution.join()  # the batch may copy pages on the device
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
