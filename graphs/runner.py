"""The runner: a model, its pools and its compiled steps, driven by hand or by an engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Many
from copy import copy
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from torch_hybrid.backends.mode import Mode
from torch_hybrid.caches.hybrid import HybridCache
from torch_hybrid.caches.sequence import Sequence
from torch_hybrid.caches.snapshot import Snapshot
from torch_hybrid.errors import UnsupportedError
from torch_hybrid.graphs.capturing.launch import Launched
from torch_hybrid.graphs.options.assembly import assemble, decide
from torch_hybrid.graphs.options.check_options import check_types
from torch_hybrid.graphs.options.measure_kv_tokens import KvRoom
from torch_hybrid.graphs.options.options import Options, takes_options, with_option_texts
from torch_hybrid.graphs.report import Report
from torch_hybrid.graphs.step import Inputs, UpdatableModel, Variant
from torch_hybrid.graphs.stepping.background import BackgroundSteps
from torch_hybrid.graphs.stepping.check_extend import check_extend, token_lists
from torch_hybrid.graphs.stepping.embeds import Embeds
from torch_hybrid.graphs.stepping.planner import Logits
from torch_hybrid.graphs.turn import Turn, Within, in_turn
from torch_hybrid.host.malloc import trim
from torch_hybrid.host.shown import Shown
from torch_hybrid.sampling import Draw


@with_option_texts
class Runner(Shown):
    """Serves ragged batches of sequences with one compiled graph per kind of step.

    Several threads may use one runner: each call waits for ``lock``, which is free to be held over
    several calls that belong together (an engine holds it for a whole step). Runners run beside
    each other, also on one model. What surrounds a call (default dtype and device, autocast,
    inference mode) does not change what it does.

    A call inside another one of its thread, by a hook of the model for example, is refused
    (RuntimeError), but for ``free`` and ``release``: they are done when that other call ends.

    The logits of a sequence depend on its own tokens alone, but for rounding: products and splits
    are chosen by the size of the batch, and chunks begin where a prompt was cut, so that the last
    bits may differ with the company, unless the runner is ``batch_invariant``. Greedy tokens then
    differ only where two logits are as close.

    Args:
        model: from ``from_pretrained`` or ``adapt``. Weights that were made in inference mode are
            replaced by plain copies.
        {options}

    Raises:
        TypeError: ``model`` or ``backends`` is of another kind.
        UnsupportedError: no implementation can serve a layer of the model.
        CapacityError: the pools do not fit, or kv_tokens="auto" finds no room.
        ValueError: a size is too small to hold anything, an option is none of its values, or the
            folder of ``artefact`` is not there.
    """

    @takes_options(Options)
    def __init__(self, options: Options) -> None:
        check_types(options.model, options.backends)
        self.turn = Turn()
        self.lock = self.turn.lock
        self.model = model = options.model
        self.max_seqs, self.max_tokens = options.max_seqs, options.max_tokens
        self.page_size, self.max_snapshots = options.page_size, options.max_snapshots
        self.vocab_size = model.vocab_size
        self.eos_token_ids = model.eos_token_ids
        self.prefill, self.max_drafts = options.prefill, options.max_drafts
        decided = decide(options, Runner)
        self.compile = decided.options.compile  # False where torch.compile is switched off
        parts = assemble(decided, self)
        self.overlap, self._overlap_trials = decided.overlap, decided.overlap_trials
        self.batch_invariant = decided.backends.batch_invariant
        self.choices, self.backends = parts.choices, parts.backends
        self.has_head = parts.drafting.has_head
        self._kv_room = decided.kv_room
        self._device, self._capture = decided.device, decided.capture
        self._cache, self._given, self._last = parts.cache, parts.given, parts.last
        modes = parts.modes
        self._decodes = Mode.DECODE in modes
        self._extend_mode = next((each for each in modes if each.tokens_per_seq is None), None)
        self._planner, self._steps, self._execution = parts.planner, parts.steps, parts.execution
        self._beside = parts.steps if isinstance(parts.steps, BackgroundSteps) else None
        self._stepper, self._drafting = parts.stepper, parts.drafting

    def within(self) -> Runner:
        """Return the same runner for calls that are part of one in progress: an engine's step."""
        inner = copy(self)
        inner.turn = Within()
        return inner

    def facts(self) -> Mapping[str, str]:
        """Tell the sizes, and what is free."""
        return {
            "model": type(self.model).__name__,
            "device": str(self._device),
            "compile": str(self.compile),
            "slots": f"{self.free_slots} of {self.max_seqs} free",
            "pages": f"{self.free_pages} of {self._cache.num_pages} free",
            "step": f"{self.max_tokens} tokens at most",
        }

    @property
    def max_seq_len(self) -> int:
        """Most tokens that one sequence can hold."""
        return self._cache.num_pages * self.page_size

    @property
    def free_slots(self) -> int:
        """How many more sequences can be made."""
        return self._cache.slots.num_free

    @property
    def free_pages(self) -> int:
        """How many pages of the KV pool a sequence can have: nobody owns them, or a prefix cache
        does, which gives them back when they are needed."""
        return self._cache.pages.num_free + self._cache.pages.num_spare

    @property
    def free_snapshots(self) -> int:
        """How many more states can be kept, before a prefix cache gives up some of its own."""
        return self._cache.num_free_snapshots

    @property
    def captures(self) -> bool:
        """Whether steps are replayed as CUDA graphs, where their ops allow it."""
        return self._capture is not None and self._device.type == "cuda"

    @property
    def cache(self) -> HybridCache:
        """The pools, and who owns what in them."""
        return self._cache

    @property
    def takes_embeds(self) -> bool:
        """Whether steps take rows in the place of tokens' own embeddings."""
        return self._given is not None

    @property
    def kv_room(self) -> KvRoom | None:
        """What kv_tokens="auto" went by; None where a number was given."""
        return self._kv_room

    @property
    def variants(self) -> tuple[str, ...]:
        """Names of the kinds of step that have a graph each."""
        return tuple(variant.name for variant in self._planner.forms)

    @property
    def num_buckets(self) -> int:
        """How many sizes steps had so far. The first step of each takes longer: what it is called
        on is looked up, it may be captured, or compiled."""
        return self._execution.num_buckets

    @in_turn
    def new_sequences(
        self, count: int, start: Snapshot | None = None, length: int | None = None
    ) -> list[Sequence]:
        """Take a state slot for each of ``count`` new sequences: empty ones, or forks.

        Args:
            count: how many.
            start: a snapshot, whose tokens they hold from the start. Nothing is copied but its
                last page, if that is partly filled, when a sequence gets its first tokens.
            length: only so many of its tokens, at least 1; for models without states.

        Raises:
            CapacityError: fewer slots are free.
            ValueError: ``count`` is negative, ``start`` was released or belongs to another runner,
                or ``length`` is not one that it can be started at.
        """
        if count < 0:
            raise ValueError(f"count must not be negative, got {count}")
        if start is None and length is not None:
            raise ValueError(f"length is of the tokens of a snapshot, got {length} and no start")
        return self._cache.allocate(count, start, length)

    @in_turn
    def snapshot(self, seq: Sequence) -> Snapshot:
        """Keep what a sequence holds now, states and keys, for others to start from.

        Nothing is copied: the sequence leaves its states to the snapshot, and stores those of its
        next step elsewhere. It may go on, or be freed. What was launched counts as done.

        Returns:
            A handle for ``new_sequences`` and ``release``; it has ``num_tokens``.

        Raises:
            ValueError: the sequence is empty or broken, was freed, or belongs to another runner.
            CapacityError: ``max_snapshots`` are there already.
        """
        self._cache.check_usable([seq])
        self._drafting.flush([seq])
        return self._cache.snapshot(seq)

    def release(self, snapshot: Snapshot) -> None:
        """Keep a snapshot no longer; what started from it stays as it is.

        Raises:
            ValueError: it was released before, or belongs to another runner.
        """
        with self.lock:
            self._cache.snapshots.find(snapshot)
            self.turn.soon(partial(self._release, snapshot))

    def _release(self, snapshot: Snapshot) -> None:
        """Release a snapshot that was not released meanwhile."""
        if self._cache.snapshots.holds(snapshot):
            self._cache.release(snapshot)

    def free(self, seqs: Many[Sequence]) -> None:
        """Give back the slots and pages of sequences, all or none.

        Raises:
            ValueError: a sequence was freed before, belongs to another runner, or comes twice.
        """
        with self.lock:
            self._cache.check(seqs)
            self.turn.soon(partial(self._free, tuple(seqs)))

    def _free(self, seqs: Many[Sequence]) -> None:
        """Free sequences, but for those that were freed meanwhile."""
        live = [seq for seq in seqs if self._cache.holds(seq)]
        self._cache.free(live)
        self._last.forget(live)

    def length(self, seq: Sequence) -> int:
        """How many tokens a sequence holds."""
        return self._cache.length(seq)

    def pages_needed(self, seq: Sequence, num_new_tokens: int) -> int:
        """How many more pages ``extend`` would take for that many new tokens."""
        return self._cache.pages_needed(seq, num_new_tokens)

    @in_turn
    def extend(
        self,
        seqs: Many[Sequence],
        tokens: Many[Many[int]],
        *,
        logits: Logits = "last",
        positions: Tensor | None = None,
        embeds: Embeds | None = None,
    ) -> Tensor:
        """Append new tokens to sequences, in one step, and return logits.

        Any mix of lengths; one token each is a decode step. Several calls on one sequence are
        chunked prefill. Nothing changes if an error is raised before the step runs; if the step
        itself is cut off (Ctrl-C), its sequences can only be freed.

        Args:
            seqs: N distinct live sequences. With none, the step runs on padding alone: a rank
                that has no work still takes part in the collectives of the others.
            tokens: the new tokens of each (lists, or integer tensors), at least one, ``max_tokens``
                in all at most.
            logits: "last" for those after each sequence's last token, "all" for every token.
            positions: [3, T] int64 rotary positions of the packed tokens, for models with 3-D
                positions; by default all three axes count each sequence on.
            embeds: rows in the place of some tokens' own embeddings, those of an image for example;
                what their ids are is then no matter but to embeddings of n-grams.

        Returns:
            [N, vocab_size] in the order of ``seqs``, or [T, vocab_size] for "all".

        Raises:
            TypeError: tokens are no integers.
            ValueError: an argument is not as above.
            UnsupportedError: several new tokens for a sequence of a runner without prefill, or
                ``embeds`` for one that takes none.
            CapacityError: the KV pool has too few free pages.
        """
        given = token_lists(tokens)
        lengths = [len(new) for new in given]
        self._check_extend(given, len(seqs), logits, positions, embeds=embeds)
        if not seqs:
            return self._execution.logits(*self._stepper.plan_idle())[:0]
        variant, planned = self._plan(
            seqs, given, logits=logits, positions=positions, embeds=embeds
        )
        out = self._stepper.advance(
            seqs, lengths, variant, lambda: self._execution.logits(variant, planned)
        )
        self._last.forget(seqs)
        return out[: sum(lengths) if logits == "all" else len(seqs)]

    @in_turn
    def launch(
        self,
        seqs: Many[Sequence],
        tokens: Many[Many[int] | None],
        draws: Many[Draw | None],
        *,
        positions: Tensor | None = None,
        embeds: Embeds | None = None,
    ) -> Launched:
        """Start a step that also samples, and do not wait for it.

        For engines: tokens stay on the device, so that the next step can be launched with those
        that the host has not seen. The sequences hold the new tokens at once.

        Args:
            seqs: N distinct live sequences, at least one.
            tokens: the new tokens of each, as for ``extend``; None is one token, that which the
                last launch sampled for the sequence.
            draws: how each sequence's next token is drawn; None draws none.
            positions, embeds: as of ``extend``.

        Raises:
            TypeError, ValueError, UnsupportedError, CapacityError: as ``extend``; ValueError also
                for None where nothing was sampled.
        """
        if not len(seqs) == len(tokens) == len(draws) > 0:
            raise ValueError(
                f"launch takes tokens and a draw, or None, for each of at least one sequence, "
                f"got {len(seqs)} sequences, {len(tokens)} tokens and {len(draws)} draws"
            )
        known = iter(token_lists([new for new in tokens if new is not None]))
        given = [None if new is None else next(known) for new in tokens]
        known_tokens = [(0,) if new is None else new for new in given]
        self._check_extend(known_tokens, len(seqs), positions=positions, embeds=embeds)
        places = self._cache.places_of(seqs)
        fed = self._last.fill(seqs, places, given)
        variant, planned = self._plan(seqs, fed, logits="last", positions=positions, embeds=embeds)
        launched = self._stepper.advance(
            seqs,
            list(map(len, fed)),
            variant,
            lambda: self._execution.launch(variant, planned, places, draws),
        )
        self._last.note(seqs, draws)
        return launched

    @in_turn
    def verify(
        self,
        seqs: Many[Sequence],
        tokens: Many[Many[int]],
        *,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Append one token to each sequence, try drafts after it, and return logits of all of them.

        A sequence holds its first new token from now on; its drafts only as far as ``accept`` says
        before its next step, and none of them otherwise. States are those of plain decoding,
        whatever was tried. Nothing changes if an error is raised before the step runs.

        Args:
            seqs: N distinct live sequences, at least one.
            tokens: the new tokens of each, of which the first is certain: one and up to
                ``max_drafts`` drafts, ``max_tokens`` in all at most.
            positions: as of ``extend``.

        Returns:
            [T, vocab_size]: after each token, the sequences one after the other.

        Raises:
            TypeError: tokens are no integers.
            ValueError: an argument is not as above.
            UnsupportedError: the runner has ``max_drafts=0``.
            CapacityError: the KV pool has too few free pages.
        """
        if not self.max_drafts:
            raise UnsupportedError("a runner with max_drafts=0 verifies no drafts")
        given = token_lists(tokens)
        if not seqs:
            raise ValueError("verify takes at least one sequence, got none")
        self._check_extend(given, len(seqs), "all", positions, most_each=1 + self.max_drafts)
        out = self._drafting.verify(seqs, given, positions)
        self._last.forget(seqs)
        return out[: sum(map(len, given))]

    @in_turn
    def draft(self, seqs: Many[Sequence], tokens: Many[int], counts: Many[int]) -> list[list[int]]:
        """What the head of a model expects to follow, for ``verify`` to try.

        No sequence holds anything else afterwards.

        Args:
            seqs: N distinct live sequences, at least one.
            tokens: of each, the one after those that it holds.
            counts: how many tokens after that one are wanted, 1 to ``max_drafts``.

        Returns:
            So many tokens for each sequence.

        Raises:
            TypeError: tokens are no integers.
            ValueError: an argument is not as above.
            UnsupportedError: the model has no head, or the runner ``max_drafts=0``.
            CapacityError: the KV pool has too few free pages for as many tokens.
        """
        if not self.has_head:
            raise UnsupportedError(
                "drafts of its own need a model from from_pretrained(path, mtp=True) on a runner "
                "with max_drafts"
            )
        if not seqs or not len(seqs) == len(tokens) == len(counts):
            raise ValueError(
                f"draft takes a token and a count for each of at least one sequence, got "
                f"{len(seqs)} sequences, {len(tokens)} tokens and {len(counts)} counts"
            )
        if not all(1 <= count <= self.max_drafts for count in counts):
            raise ValueError(f"counts must be within 1 and {self.max_drafts}, got {list(counts)}")
        given = token_lists([[token] for token in tokens])
        self._check_extend(given, len(seqs))
        return self._drafting.draft(seqs, given, counts)

    @in_turn
    def accept(self, seqs: Many[Sequence], counts: Many[int]) -> None:
        """Count the first drafts of sequences as held, each by its own count; once after a verify.

        Raises:
            ValueError: a sequence has fewer drafts, was freed, is another runner's or comes twice;
                or there is not one count for each.
        """
        if len(counts) != len(seqs):
            raise ValueError(f"accept takes a count for each of {len(seqs)}, got {len(counts)}")
        self._cache.accept(seqs, counts)

    @in_turn
    def flush(self, seqs: Many[Sequence]) -> None:
        """Bring the states of sequences up to their last certain token, and what a head has read.

        For those who copy or move states: all other steps do so where they need it.
        """
        self._cache.check_usable(seqs)
        self._drafting.flush(seqs)

    def wait(self) -> None:
        """Wait until the device has done all that was launched."""
        self._execution.wait()

    def _check_extend(
        self,
        tokens: Many[Many[int]],
        num_seqs: int,
        logits: str = "last",
        positions: Tensor | None = None,
        most_each: int | None = None,
        embeds: Embeds | None = None,
    ) -> None:
        check_extend(
            tokens,
            positions,
            logits,
            num_seqs=num_seqs,
            max_tokens=self.max_tokens,
            vocab_size=self.vocab_size,
            num_position_axes=self.model.num_position_axes,
            most_each=most_each,
        )
        if embeds is None:
            return
        if self._given is None or not self.prefill:
            raise UnsupportedError(
                f"embeds need a runner with takes_embeds=True and prefill=True, got "
                f"takes_embeds={self.takes_embeds} and prefill={self.prefill}"
            )
        self._given.check(embeds, sum(map(len, tokens)))

    def _plan(
        self,
        seqs: Many[Sequence],
        tokens: Many[Many[int]],
        *,
        logits: Logits,
        positions: Tensor | None = None,
        embeds: Embeds | None = None,
    ) -> tuple[Variant, Inputs]:
        """A step's variant, compiled by now, and its inputs; the pages of its tokens are taken.

        Where it raises, no state has changed.
        """
        lengths = [len(new) for new in tokens]
        is_decode = max(lengths) == 1 and embeds is None  # whose graph looks no rows up
        mode = Mode.DECODE if is_decode and self._decodes else self._extend_mode
        if mode is None:
            raise UnsupportedError(
                f"a runner with prefill=False appends one token to each sequence, got {lengths}"
            )
        if mode is self._extend_mode:
            (self._drafting.read if mode.num_drafts else self._drafting.flush)(seqs)
        elif not self._cache.are_replayed(seqs):  # a step that replays as it decodes
            mode = self._drafting.verify_mode
        if mode is not Mode.EXTEND:
            self._drafting.keep_room(seqs, lengths)
        return self._stepper.plan(
            seqs, tokens, mode, logits=logits, positions=positions, embeds=embeds
        )

    def warm_up(self, on_variant: Callable[[str], None] | None = None) -> None:
        """Compile every variant of decode and extend ahead of time, unless it is already, and wait
        for the C++ kernels.

        ``on_variant`` is called with the name of each variant before it is compiled. With
        compile="background" it waits, and others may run steps meanwhile.

        Raises:
            UnsupportedError: what was compiled in the background failed.
        """
        num_before = len(self._steps.graphs)
        self.turn.check("Runner.warm_up")
        if self._beside is not None:
            self._beside.wait()
        self.turn.run("Runner.warm_up", partial(self._warm_up, num_before, on_variant))

    def _warm_up(self, num_before: int, on_variant: Callable[[str], None] | None) -> None:
        for variant in self._planner.forms:
            if on_variant is not None:
                on_variant(variant.name)
            self._stepper.compile(variant)
        self._stepper.wait_for_builds()
        if len(self._steps.graphs) > num_before:
            trim()

    @in_turn
    def update_weights(
        self,
        weights: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
        *,
        partial: bool = False,
    ) -> None:
        """Write new weights in the place of the model's, by the names of its checkpoint.

        Nothing is compiled or captured anew. Shapes and dtypes are the checkpoint's, and what
        became of a tensor when it was read becomes of the new one: it is merged, sorted or cut for
        this rank (each rank is given all of it). What prefix caches keep is dropped.

        Of a mapping or a list everything is checked before the first weight is written. Of an
        iterator each weight is checked when it comes, and written at once: an error then leaves
        those before it new and the others old, and says how many; call it again with all of them.

        Args:
            weights: names and values, on any device; all that the model was made of.
            partial: leave those that do not come as they are.

        Raises:
            UnsupportedError: the model was not read from a checkpoint as it is, or is quantized.
            ValueError: sequences or snapshots are held, whose states are of the old weights; a
                name is unknown or comes twice, a shape or dtype is another, values are not finite,
                or some are missing.
        """
        if not isinstance(self.model, UpdatableModel):
            raise UnsupportedError(f"{type(self.model).__name__} takes no new weights")
        with torch.inference_mode():
            self._cache.check_nothing_held()
            write = self.model.new_weights(weights, partial=partial)
            self._execution.wait()
            for reclaimer in self._cache.snapshots.reclaimers:
                reclaimer.clear()
            write()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the compiled steps to a file for ``Runner(..., artefact=path)`` of other processes.

        Steps that are not compiled yet are compiled first.

        Raises:
            UnsupportedError: the runner compiles nothing, or a step has something that does not
                outlive this process.
            OSError: the file cannot be written.
        """
        if not self.compile:
            raise UnsupportedError("a runner with compile=False has no compiled steps to save")
        self.turn.check("Runner.save")
        if self._beside is not None:
            self._beside.wait()
        self.turn.run("Runner.save", partial(self._save, Path(path)))

    def _save(self, path: Path) -> None:
        for variant in self._planner.forms:
            self._stepper.compile(variant)
        self._steps.save(path)

    def report(self) -> Report:
        """What was compiled so far, and what is in it."""
        steps, capture = self._steps, self._capture
        return Report(
            graphs=steps.graphs,
            recompiles=steps.recompiles,
            graph_breaks=steps.graph_breaks,
            captured_graphs=() if capture is None else capture.names,
            captured_bytes=0 if capture is None else capture.nbytes,
            not_captured={} if capture is None else capture.refused,
            pool_bytes=sum(pool.nbytes for pool in self._cache.pool_tensors()),
            static_input_bytes=self._execution.nbytes,
            overlap=self.overlap,
            overlap_trials=self._overlap_trials,
            switches=None if self._beside is None else self._beside.switches,
        )

    def close(self) -> None:
        """Stop what compiles in the background; steps stay as they are. So does the end of the
        runner, and of the program."""
        if self._beside is not None:
            self._beside.close()
