"""Drafts of sequences: verified by a step of the model, and made by the model's draft head.

    verify    a step replays the accepted drafts, appends a committed token, and tries new drafts
    flush     a verify step without new tokens: it completes states that are to be copied or moved
    draft     the head reads the tokens that it has not read, then drafts further ones
    read      the head reads, and drafts nothing

All of them leave the states of sequences as plain decoding would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from torch_hybrid.backends.mode import Mode
from torch_hybrid.caches.hybrid import HybridCache
from torch_hybrid.caches.sequence import Sequence as HeldSequence
from torch_hybrid.graphs.stepping.execution import Execution
from torch_hybrid.graphs.stepping.planner import StepPlanner
from torch_hybrid.graphs.stepping.stepper import Stepper
from torch_hybrid.specs import KEPT_HIDDEN


@dataclass(eq=False)
class Drafting:
    """Verification and drafting of a runner; its callers have checked sequences and tokens."""

    cache: HybridCache  # states of the sequences
    planner: StepPlanner  # plans the steps of the draft head
    stepper: Stepper  # plans, runs and counts the verify steps
    execution: Execution  # runs planned steps
    verify_mode: Mode  # mode of verify steps
    has_head: bool  # whether the model has a draft head
    max_drafts: int  # most drafts of a sequence in one step
    max_tokens: int  # most tokens of a step
    num_position_axes: int  # position axes of the model

    def __post_init__(self) -> None:
        self._most_unread = min(KEPT_HIDDEN - 1, self.max_tokens)  # by the head, of one sequence

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
        variant, planned = self.stepper.plan(
            seqs,
            tokens,
            self.verify_mode,
            num_drafts=[max(count, 0) for count in num_drafts],
            positions=positions,
        )
        return self.stepper.run(
            seqs,
            lambda: self.execution.logits(variant, planned),
            lambda: self.cache.commit_drafts(seqs, num_drafts),
        )

    def flush(self, seqs: Sequence[HeldSequence]) -> None:
        """Replay accepted drafts into the states of sequences, and have the head read the rest."""
        behind = [seq for seq in seqs if not self.cache.are_replayed([seq])]
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
        if len(seqs) + sum(map(self.cache.num_unread, seqs)) > self.max_tokens:
            self.read(seqs)
        drafted = self._run_head(seqs, tokens, counts).T.tolist()
        return [own[:count] for own, count in zip(drafted, counts, strict=False)]

    def read(self, seqs: Sequence[HeldSequence]) -> None:
        """Run the head on the tokens of sequences that it has not read, as many a step as fit."""
        if not self.has_head:
            return
        group: list[HeldSequence] = []
        room = self.max_tokens
        for seq in [seq for seq in seqs if self.cache.num_unread(seq)]:
            if self.cache.num_unread(seq) > room:
                self._run_head(group, [()] * len(group), ())
                group, room = [], self.max_tokens
            group.append(seq)
            room -= self.cache.num_unread(seq)
        if group:
            self._run_head(group, [()] * len(group), ())

    def keep_room(self, seqs: Sequence[HeldSequence], num_new: Sequence[int]) -> None:
        """Have the head read the hidden states that the next step would overwrite or leave behind.

        A step overwrites them if unread and new tokens together exceed the kept hidden states. A
        step that starts from another slot takes only the last token's hidden state with it.
        """
        if not self.has_head:
            return
        unread = map(self.cache.num_unread, seqs)
        if any(own + new > self._most_unread for own, new in zip(unread, num_new, strict=True)):
            self.read(seqs)
        self.read([seq for seq in seqs if self.cache.moves(seq)])

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
        self.execution.join()  # the batch may copy pages on the device
        batch = self.cache.make_draft_batch(
            seqs,
            tokens,
            counts or [0] * len(seqs),
            num_position_axes=self.num_position_axes,
            table_width=self.planner.table_width,
        )
        try:
            self.stepper.check(batch)
            num_further = self.max_drafts - 1 if max(counts, default=1) > 1 else 0
            further = self.cache.places_after(seqs if counts else (), counts, num_further)
            variant, planned = self.planner.plan_drafts(batch, further)
            self.stepper.compile(variant)
            drafted = self.execution.logits(variant, planned)
        finally:
            self.cache.give_back_pages(seqs)
        self.cache.note_read(seqs)
        return drafted
