"""The runner: a model, its pools and its compiled steps, driven by hand or by an engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as Many
from copy import copy
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from torch_hybrid.backends.mode import Mode
from torch_hybrid.caches.adapter import Adapter
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
from torch_hybrid.graphs.stepping.adapters import Adapters, AdapterUser, ReadAdapter
from torch_hybrid.graphs.stepping.background import BackgroundSteps
from torch_hybrid.graphs.stepping.check_extend import check_extend, token_lists
from torch_hybrid.graphs.stepping.embeds import Embeds
from torch_hybrid.graphs.stepping.first_weight import FirstWeight
from torch_hybrid.graphs.stepping.model_use import ModelUse
from torch_hybrid.graphs.stepping.planner import Logits
from torch_hybrid.graphs.stepping.reachable import reachable
from torch_hybrid.graphs.turn import Turn, Within, in_turn
from torch_hybrid.host.ints import check_int
from torch_hybrid.host.malloc import trim
from torch_hybrid.host.progress import bar, tell
from torch_hybrid.host.shown import Shown
from torch_hybrid.sampling import Draw


@with_option_texts
class Runner(Shown):
    """A server of ragged batches of sequences, with one compiled graph per kind of step.

    Several threads may use one runner: each call waits for ``lock``, which is free to be held over
    several calls that belong together (an engine holds it for a whole step). Runners run beside
    each other, also on one model. A caller's default dtype and device, autocast and inference mode
    do not change a call's result.

    A call within another call of the same thread, by a hook of the model for example, is refused
    (RuntimeError). ``free`` and ``release`` are allowed: they are done when the outer call ends.

    The logits of a sequence depend on its own tokens alone, but for rounding. The size of the batch
    decides which GEMM kernels and splits run, and a cut of the prompt moves its chunks. So the last
    bits may differ with the company, unless the runner is ``batch_invariant``. Greedy tokens then
    differ only where two logits are that close.

    Args:
        model: a model of ``from_pretrained`` or ``adapt``. Its weights that were made in inference
            mode are replaced by plain copies.
        {options}

    Raises:
        TypeError: ``model`` or ``backends`` is of another type.
        UnsupportedError: no implementation can serve a layer of the model.
        CapacityError: the pools do not fit, or kv_tokens="auto" finds no room.
        ValueError: a size is too small to hold anything, an option is none of its values, or the
            folder of ``artefact`` is not there.
    """

    @takes_options(Options)
    def __init__(self, options: Options) -> None:
        check_types(options.model, options.backends, options.passes)
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
        self._adapted = parts.adapters
        self._device, self._capture = decided.device, decided.capture
        self._cache, self._given, self._last = parts.cache, parts.given, parts.last
        modes = parts.modes
        self._decodes = Mode.DECODE in modes
        self._extend_mode = next((each for each in modes if each.tokens_per_seq is None), None)
        self._planner, self._steps, self._execution = parts.planner, parts.steps, parts.execution
        self._beside = parts.steps if isinstance(parts.steps, BackgroundSteps) else None
        self._stepper, self._drafting = parts.stepper, parts.drafting
        self._weight = FirstWeight.of(model) if self.compile or self.captures else None

    def within(self) -> Runner:
        """Copy the runner for calls within one that holds the lock: an engine's step."""
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
        """Number of further sequences that can be made."""
        return self._cache.slots.num_free

    @property
    def free_pages(self) -> int:
        """Number of KV pages that a sequence can get.

        It includes pages of a prefix cache, which gives them back when they are needed.
        """
        return self._cache.pages.num_free + self._cache.pages.num_spare

    @property
    def free_snapshots(self) -> int:
        """Number of further states that fit before a prefix cache gives up some of its own."""
        return self._cache.num_free_snapshots

    @property
    def captures(self) -> bool:
        """True if steps are replayed as CUDA graphs, where their ops allow it."""
        return self._capture is not None and self._device.type == "cuda"

    @property
    def cache(self) -> HybridCache:
        """The pools, and the owners of their slots and pages."""
        return self._cache

    @property
    def takes_embeds(self) -> bool:
        """True if steps take rows in the place of tokens' own embeddings."""
        return self._given is not None

    @property
    def kv_room(self) -> KvRoom | None:
        """Memory that kv_tokens="auto" measured; None where a number was given."""
        return self._kv_room

    @property
    def variants(self) -> tuple[str, ...]:
        """Names of the kinds of step that have a graph each."""
        return tuple(variant.name for variant in self._planner.forms)

    @property
    def num_buckets(self) -> int:
        """Number of step sizes so far.

        The first step of a size takes longer: its kernels are looked up, and it may be compiled or
        captured.
        """
        return self._execution.num_buckets

    @in_turn
    def new_sequences(
        self,
        count: int,
        start: Snapshot | None = None,
        length: int | None = None,
        *,
        adapter: str | None = None,
    ) -> list[Sequence]:
        """Take a state slot for each of ``count`` new sequences: empty ones, or forks.

        Args:
            count: number of sequences.
            start: a snapshot whose tokens the sequences hold from the start. Only its last page is
                copied, if that is partly filled, when a sequence gets its first tokens.
            length: number of the snapshot's tokens to start with, at least 1; for models without
                states. None takes all.
            adapter: name of the adapter of all their tokens, that of ``start`` too; None: the base.

        Raises:
            CapacityError: fewer slots are free, or those of adapters are all in use.
            ValueError: ``count`` is negative, ``start`` was released or belongs to another runner,
                or no sequence can start at ``length``. Or no adapter of that name is loaded, or
                ``start`` has another one.
        """
        self._check_model()
        check_int("count", count)
        if count < 0:
            raise ValueError(f"count must not be negative, got {count}")
        if start is None and length is not None:
            raise ValueError(f"length is of the tokens of a snapshot, got {length} and no start")
        found = None if adapter is None else self._adapters().resident(adapter)
        return self._cache.allocate(count, start, length, found)

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the loaded adapters, evicted ones included."""
        return () if self._adapted is None else self._adapted.names

    def load_adapter(self, name: str, source: str | os.PathLike[str] | nn.Module) -> None:
        """Load an adapter (LoRA), from a folder as peft's ``save_pretrained`` writes it.

        If all ``max_adapters`` slots are taken, the least recently used adapter without sequences
        is evicted. Its name stays: sequences that ask for it have it read again. An adapter that
        comes from memory is not evicted.

        Args:
            name: by which requests ask for it.
            source: its folder; or a model of peft, whose active adapter is copied as it is now.

        Raises:
            ValueError: the name is taken; the source has no adapter, or one of another base or
                of a rank beyond ``max_lora_rank``; or a layer is not there.
            UnsupportedError: the runner has ``max_adapters=0``, or the adapter is of a kind that is
                not served.
            CapacityError: all slots are in use.
        """
        read = self._adapters().read(source if isinstance(source, nn.Module) else Path(source))
        self.turn.run("Runner.load_adapter", partial(self._add_adapter, name, read))

    def _add_adapter(self, name: str, read: ReadAdapter) -> None:
        self._execution.join()
        self._adapters().add(name, read)

    def read_evicted(self, names: Collection[str]) -> dict[str, ReadAdapter]:
        """Read the evicted ones among adapters for ``use_adapters``, while steps may run."""
        return self._adapters().read_evicted(names)

    def use_adapters(
        self, names: Iterable[str], user: AdapterUser, read: Mapping[str, ReadAdapter]
    ) -> list[Adapter]:
        """Make adapters resident for the requests of an engine, which ``user`` then tells of.

        Those that are evicted and not among ``read`` are read now.

        Raises:
            ValueError, CapacityError: as ``new_sequences`` does.
        """
        with self.lock:
            self._execution.join()
            found, adapters = list[Adapter](), self._adapters()
            for name in names:
                found.append(adapters.resident(name, found, read.get(name)))
            adapters.users.add(user)
            return found

    @in_turn
    def unload_adapter(self, name: str) -> None:
        """Forget a loaded adapter.

        Raises:
            ValueError: no adapter of that name is loaded, or sequences have it.
            UnsupportedError: the runner has ``max_adapters=0``.
        """
        self._adapters().unload(name)

    def _adapters(self) -> Adapters:
        if self._adapted is None:
            raise UnsupportedError("a runner with max_adapters=0 takes no adapters")
        return self._adapted

    @in_turn
    def snapshot(self, seq: Sequence) -> Snapshot:
        """Keep the states and keys of a sequence as they are now, for others to start from.

        Nothing is copied: the sequence leaves its states to the snapshot, and stores those of its
        next step elsewhere. It may go on, or be freed. Launched steps count as done.

        Returns:
            A handle for ``new_sequences`` and ``release``; it has ``num_tokens``.

        Raises:
            ValueError: the sequence is empty or broken, was freed, or belongs to another runner.
            CapacityError: ``max_snapshots`` are there already.
        """
        self._check_model()
        self._cache.check_usable([seq])
        self._drafting.flush([seq])
        return self._cache.snapshot(seq)

    def release(self, snapshot: Snapshot) -> None:
        """Release a snapshot; sequences that started from it stay as they are.

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
        """Count the tokens that a sequence holds."""
        return self._cache.length(seq)

    def pages_needed(self, seq: Sequence, num_new_tokens: int) -> int:
        """Count the further pages that ``extend`` would take for that many new tokens."""
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

        Sequences may get different numbers of tokens; one token each is a decode step. Several
        calls on one sequence are chunked prefill. Nothing changes if an error is raised before the
        step runs; if the step itself is cut off (Ctrl-C), its sequences can only be freed.

        Args:
            seqs: N distinct live sequences. With none, the step runs on padding alone: a rank
                that has no work still takes part in the collectives of the others.
            tokens: the new tokens of each (lists, or integer tensors), at least one, ``max_tokens``
                in all at most.
            logits: "last" for the logits after each sequence's last token, "all" for every token's.
            positions: [3, T] int64 rotary positions of the packed tokens, for models with 3-D
                positions; by default all three axes count each sequence on.
            embeds: rows in the place of some tokens' own embeddings, of an image for example. Only
                n-gram embeddings still read the ids of such tokens.

        Returns:
            [N, vocab_size] in the order of ``seqs``, or [T, vocab_size] for "all". They carry no
            gradient: a loss of them is one of a frozen model. The transformers model itself trains.

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

        Engines use it: sampled tokens stay on the device, so the next step can be launched before
        the host has seen them. The sequences hold the new tokens at once.

        Args:
            seqs: N distinct live sequences, at least one.
            tokens: the new tokens of each, as for ``extend``; None is one token: the one that the
                last launch sampled for the sequence.
            draws: the sampling of each sequence's next token; None samples none.
            positions, embeds: as for ``extend``.

        Raises:
            TypeError, ValueError, UnsupportedError, CapacityError: as ``extend``; ValueError also
                for None where nothing was sampled, TypeError for what is no draw.
        """
        if not len(seqs) == len(tokens) == len(draws) > 0:
            raise ValueError(
                f"launch takes tokens and a draw, or None, for each of at least one sequence, "
                f"got {len(seqs)} sequences, {len(tokens)} tokens and {len(draws)} draws"
            )
        if wrong := [each for each in draws if not isinstance(each, Draw | None)]:
            raise TypeError(f"draws must be torch_hybrid.sampling.Draw or None, got {wrong[0]!r}")
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
        """Append one token to each sequence, verify drafts after it, and return all their logits.

        A sequence holds its first new token from now on. It holds only the drafts that ``accept``
        counts before its next step, else none. States are those of plain decoding, whatever was
        tried. Nothing changes if an error is raised before the step runs.

        Args:
            seqs: N distinct live sequences, at least one.
            tokens: the new tokens of each: one committed token, then up to ``max_drafts`` drafts;
                ``max_tokens`` in all at most.
            positions: as for ``extend``.

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
        """Draft the next tokens of sequences with the model's draft head, for ``verify``.

        The tokens that sequences hold do not change.

        Args:
            seqs: N distinct live sequences, at least one.
            tokens: the token of each that follows those that it holds.
            counts: the number of drafts after that token, 1 to ``max_drafts``.

        Returns:
            That many drafts for each sequence.

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
        """Commit the first drafts of sequences, each by its own count; call it once after a verify.

        Raises:
            TypeError: counts are no integers.
            ValueError: a sequence has fewer drafts, was freed, is another runner's or comes twice;
                or there is not one count for each.
        """
        if len(counts) != len(seqs):
            raise ValueError(f"accept takes a count for each of {len(seqs)}, got {len(counts)}")
        self._cache.accept(seqs, counts)

    @in_turn
    def flush(self, seqs: Many[Sequence]) -> None:
        """Bring the states of sequences, and their draft head's, up to the last committed token.

        Code that copies or moves states needs it; all steps of the runner flush by themselves.
        """
        self._check_model()
        self._cache.check_usable(seqs)
        self._drafting.flush(seqs)

    def wait(self) -> None:
        """Wait until the device has done all launched steps."""
        self._execution.wait()

    def _check_model(self) -> None:
        """Raise ValueError if compiled or captured steps would run on other weights."""
        if self._weight is not None:
            self._weight.check()

    def _check_extend(
        self,
        tokens: Many[Many[int]],
        num_seqs: int,
        logits: str = "last",
        positions: Tensor | None = None,
        most_each: int | None = None,
        embeds: Embeds | None = None,
    ) -> None:
        self._check_model()
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
        """Plan a step: compile its variant if needed, pad its inputs, and take its tokens' pages.

        If it raises, no state has changed.
        """
        lengths = [len(new) for new in tokens]
        is_decode = max(lengths) == 1 and embeds is None  # the decode graph takes no given rows
        mode = Mode.DECODE if is_decode and self._decodes else self._extend_mode
        if mode is None:
            raise UnsupportedError(
                f"a runner with prefill=False appends one token to each sequence, got {lengths}"
            )
        if mode is self._extend_mode:
            (self._drafting.read if mode.num_drafts else self._drafting.flush)(seqs)
        elif not self._cache.are_replayed(seqs):  # a verify step replays as it decodes
            mode = self._drafting.verify_mode
        if mode is not Mode.EXTEND:
            self._drafting.keep_room(seqs, lengths)
        return self._stepper.plan(
            seqs, tokens, mode, logits=logits, positions=positions, embeds=embeds
        )

    def warm_up(
        self, on_variant: Callable[[str], None] | None = None, *, capture: bool = True
    ) -> None:
        """Make ready for serving: compile every variant, wait for the C++ kernels, capture steps.

        On a GPU, Triton builds kernels for some sizes when they first come, and each size of a step
        is captured. Here that is done for all sizes that an engine's steps have, as far as memory
        lasts; others are captured when they come.

        With compile="background" the call waits, and other threads may run steps meanwhile.

        Args:
            on_variant: called with the name of each variant before it is compiled.
            capture: False leaves all captures to the steps.

        Raises:
            UnsupportedError: background compilation failed.
        """
        num_before = len(self._steps.graphs)
        self.turn.check("Runner.warm_up")
        if self._beside is not None:
            self._beside.wait()
        self.turn.run("Runner.warm_up", partial(self._warm_up, num_before, on_variant))
        if capture and self._capture is not None:
            self.turn.run("Runner.warm_up", self._capture_ahead)
        self.turn.run("Runner.warm_up", self._steps.save_if_new)  # with Triton's kernels

    def _warm_up(self, num_before: int, on_variant: Callable[[str], None] | None) -> None:
        for variant in self._planner.forms:
            if on_variant is not None:
                on_variant(variant.name)
            self._stepper.compile(variant)
        self._stepper.builds.wait()
        if len(self._steps.graphs) > num_before:
            trim()

    def _capture_ahead(self) -> None:
        """Capture the buckets of all steps, as far as memory lasts on every rank."""
        assert self._capture is not None
        tell("capturing steps")
        with bar("capturing steps") as advance:
            for variant, inputs in reachable(self._planner):
                has_room = self._capture.has_room
                if self.model.ranks is not None:
                    has_room = bool(self.model.ranks.least(has_room, self._device))
                if not has_room:
                    tell("memory would not last: other steps are captured when they come")
                    return
                advance(0, f"capturing {variant.name} of {inputs.parts[0].batch.num_seqs}")
                self._execution.capture_ahead(variant, inputs)

    @in_turn
    def update_weights(
        self,
        weights: nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
        *,
        partial: bool = False,
    ) -> None:
        """Write new weights in the place of the model's.

        They are those of a model of transformers, which stays as it is and whose adapters of PEFT
        are merged on the way; or come by the names of the checkpoint. Nothing is compiled or
        captured anew. Shapes and dtypes are the checkpoint's. A new tensor is merged, sorted or cut
        for this rank as the old one was when it was read. So each rank is given all of it. Prefix
        caches drop their snapshots.

        Of a mapping or a list everything is checked before the first weight is written. Of an
        iterator each weight is checked when it comes, and written at once. An error then leaves the
        weights before it new and the others old, and says how many. Call it again with all of them.

        Args:
            weights: the model that trains; or names and values, on any device, of all weights.
            partial: keep the old values of weights that do not come.

        Raises:
            TypeError: the weights are of another kind.
            UnsupportedError: the model is quantized. Or, for names, it was not read from a
                checkpoint as it is; for a model, ranks share it.
            ValueError: sequences or snapshots are held, or another runner of the model keeps even
                prefixes, whose states come from the old weights; a name is unknown or comes twice,
                a shape or dtype is another, values are not finite, or some are missing.
        """
        if not isinstance(self.model, UpdatableModel):
            raise UnsupportedError(f"{type(self.model).__name__} takes no new weights")
        with torch.inference_mode():
            self._cache.check_nothing_held()
            ModelUse.of(self.model).check_unheld_elsewhere(self._cache)
            write = self.model.new_weights(weights, partial=partial)
            self._execution.wait()
            for reclaimer in list(self._cache.snapshots.reclaimers):  # each leaves the list
                reclaimer.clear()
            write()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the compiled steps to a file for ``Runner(..., artefact=path)`` of other processes.

        Steps that are not compiled yet are compiled first.

        Raises:
            UnsupportedError: the runner does not compile, or a step has a part that does not
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
        """Report the compiled and captured steps so far, and their contents."""
        steps, capture = self._steps, self._capture
        return Report(
            graphs=steps.graphs,
            recompiles=steps.recompiles,
            graph_breaks=steps.graph_breaks,
            captured_graphs=() if capture is None else capture.names,
            captured_bytes=0 if capture is None else capture.nbytes,
            captured_seconds=0.0 if capture is None else capture.seconds,
            not_captured={} if capture is None else capture.refused,
            pool_bytes=sum(pool.nbytes for pool in self._cache.pool_tensors()),
            static_input_bytes=self._execution.nbytes,
            overlap=self.overlap,
            overlap_trials=self._overlap_trials,
            switches=None if self._beside is None else self._beside.switches,
        )

    def close(self) -> None:
        """Stop background compilation; steps stay as they are.

        The end of the runner, or of the program, does so too.
        """
        if self._beside is not None:
            self._beside.close()
