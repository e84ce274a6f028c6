"""Drafts from a smaller model, a hybrid too, on a runner of its own.

    for each request, a sequence of its committed tokens
        extend it by the tokens committed since         the first draft
        fork it, and decode the fork                    the other drafts
        free the fork

A fork copies no state, so nothing is rolled back: drafts are only ever in the fork.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_hybrid.serving.request import Request

if TYPE_CHECKING:
    from torch_hybrid.caches.sequence import Sequence as HeldSequence
    from torch_hybrid.graphs.runner import Runner


@dataclass(slots=True)
class _Drafting:
    """A request that gets drafts: its sequence, the tokens missing there, and the drafts so far."""

    request: Request
    sequence: HeldSequence
    missing: list[int]
    count: int
    drafts: list[int]


class SmallerModel:
    """Drafter that decodes greedily with the model of another runner.

    A request that this runner has no room for gets no drafts, and loses nothing.

    Args:
        drafter: the other runner. A request with several drafts needs two slots there, and a
            snapshot if the model has states.
        runner: verifies the drafts.

    Raises:
        ValueError: the runners are the same, their vocabularies differ, or ``drafter`` cannot fork,
            or does not prefill prompts.
    """

    def __init__(self, drafter: Runner, runner: Runner) -> None:
        if drafter.cache is runner.cache:
            raise ValueError("a runner cannot draft for itself")
        if drafter.vocab_size != runner.vocab_size:
            raise ValueError(
                f"the drafter must have the vocabulary of the model that it drafts for, of "
                f"{runner.vocab_size} tokens, got {drafter.vocab_size}"
            )
        if not drafter.prefill:
            raise ValueError("the drafter prefills prompts, got a runner with prefill=False")
        if drafter.max_seqs < 2 or drafter.free_snapshots < 1:
            raise ValueError(
                f"the drafter forks sequences, for which a runner needs max_seqs of at least 2, "
                f"and max_snapshots of at least 1 if its model has states; got "
                f"{drafter.max_seqs} and {drafter.max_snapshots}"
            )
        self._runner = drafter
        self._sequences: dict[Request, HeldSequence] = {}

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[list[int]]:
        """Draft greedily with the smaller model; see ``Drafter``."""
        chosen = self._with_room(requests, counts)
        try:
            self._catch_up(chosen)
            self._go_on([x for x in chosen if x.count > 1])
        except BaseException:
            self._free(x.request for x in chosen)  # a step may have been cut off
            raise
        drafts = {x.request: x.drafts for x in chosen}
        return [drafts.get(request, []) for request in requests]

    def forget(self, request: Request) -> None:
        """Free the sequence of a request."""
        self._free([request])

    def _with_room(self, requests: Sequence[Request], counts: Sequence[int]) -> list[_Drafting]:
        """Choose the requests that the runner has room for, and give each a sequence."""
        runner = self._runner
        chosen: list[_Drafting] = []
        pages = runner.free_pages
        for request, count in zip(requests, counts, strict=True):
            is_new = request not in self._sequences
            if runner.free_slots < len(chosen) + 1 + is_new:
                continue
            if is_new:
                [self._sequences[request]] = runner.new_sequences(1)
            sequence = self._sequences[request]
            if runner.length(sequence) == len(request.history):  # asked again: a step was cut off
                self._free([request])
                [sequence] = runner.new_sequences(1)
                self._sequences[request] = sequence
            missing = request.history[runner.length(sequence) :]
            # A fork copies the last page, which may be partly filled.
            needed = runner.pages_needed(sequence, len(missing) + count) + 1
            if needed > pages:
                self._free([request])
                pages = runner.free_pages
                continue
            pages -= needed
            chosen.append(_Drafting(request, sequence, missing, count, []))
        return chosen

    def _catch_up(self, chosen: Sequence[_Drafting]) -> None:
        """Run committed tokens, in chunks; each request gets its first draft."""
        runner = self._runner
        while behind := [x for x in chosen if x.missing]:
            rows: list[tuple[_Drafting, list[int]]] = []
            budget = runner.max_tokens
            for x in behind:
                if not budget:
                    break
                rows.append((x, x.missing[:budget]))
                budget -= len(rows[-1][1])
            logits = runner.extend([x.sequence for x, _ in rows], [new for _, new in rows])
            for (x, new), token in zip(rows, logits.argmax(-1).tolist(), strict=True):
                x.missing = x.missing[len(new) :]
                if not x.missing:
                    x.drafts.append(token)

    def _go_on(self, drafting: Sequence[_Drafting]) -> None:
        """Draft the further tokens on forks, as far as there are snapshots to fork from."""
        runner = self._runner
        forks: list[HeldSequence] = []
        try:
            for x in drafting[: runner.free_snapshots]:
                snapshot = runner.snapshot(x.sequence)
                try:
                    forks += runner.new_sequences(1, start=snapshot)
                finally:
                    runner.release(snapshot)
            pairs = list(zip(drafting, forks, strict=False))
            while pairs := [(x, fork) for x, fork in pairs if len(x.drafts) < x.count]:
                logits = runner.extend(
                    [fork for _, fork in pairs], [x.drafts[-1:] for x, _ in pairs]
                )
                for (x, _), token in zip(pairs, logits.argmax(-1).tolist(), strict=True):
                    x.drafts.append(token)
        finally:
            runner.free(forks)

    def _free(self, requests: Iterable[Request]) -> None:
        held = [self._sequences.pop(x) for x in requests if x in self._sequences]
        self._runner.free(held)
