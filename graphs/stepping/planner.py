"""Planner of steps: pads ragged batches to a few buckets, and plans their layers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product
from operator import add
from typing import Literal

import torch
from torch import Tensor

from torch_hybrid.backends.mode import MODES, LayerForm, Mode
from torch_hybrid.backends.step import LayerBackend, forms_of, plan_all
from torch_hybrid.batch import Batch, chained, pad_to, split
from torch_hybrid.errors import UnsupportedError
from torch_hybrid.graphs.step import BatchPart, Inputs, Variant
from torch_hybrid.graphs.stepping.buckets import Bucket, StepSizes, round_up
from torch_hybrid.graphs.two_batch import OverlapPolicy, plan_split, rows_in_halves
from torch_hybrid.host.ints import int_tensor

Logits = Literal["last", "all"]
# Sizes of the step that is traced; they differ, so that no two symbols are taken for one.
_TRACED_SEQS, _TRACED_PAGES = 8, 11
_TRACED_MIX = Bucket(num_seqs=5, num_tokens=512, num_pages=_TRACED_PAGES)
_TRACED_CHUNK_ROWS = 192
_TRACED_ROWS = 13


@dataclass(eq=False)
class StepPlanner:
    """Planner that pads steps to buckets, cuts large ones in halves, and plans their layers."""

    backends: Mapping[str, LayerBackend]  # the backend of each kind of layer of the model
    sizes: StepSizes  # the buckets that steps are padded to
    num_position_axes: int  # position axes of the model (1, or 3 with multimodal rotary embeddings)
    overlap: OverlapPolicy  # which steps are cut in halves
    chunk_grid: int  # a cut inside a sequence falls on a multiple of so many tokens
    modes: Sequence[Mode] = MODES  # modes of the steps to plan
    takes_embeds: bool = False  # whether extend steps take rows in the place of token embeddings
    takes_adapters: bool = False  # whether sequences may have adapters
    # kinds of layers in the model's draft head; a draft step plans only these
    drafting: Collection[str] = ()

    def __post_init__(self) -> None:
        self._drafting = {
            kind: backend for kind, backend in self.backends.items() if kind in self.drafting
        }
        self._idle = Mode.DECODE if Mode.DECODE in self.modes else self.modes[0]
        self._verifying = next((mode for mode in self.modes if mode.num_drafts), self._idle)
        self.forms = {
            Variant.of(mode, forms, in_halves=in_halves, has_adapters=has_adapters): forms
            for has_adapters in [False, *[True] * self.takes_adapters]
            for mode in self.modes
            if not (mode.num_chained and has_adapters)
            for in_halves in self._cuts_of(mode)
            for forms in self._forms_of(mode, has_adapters=has_adapters)
        }

    def table_width(self, num_pages: int) -> int:
        """Round up a number of pages to a bucket: the width of the page table."""
        width: int = round_up(num_pages, self.sizes.pages)
        return width

    def plan(self, batch: Batch, mode: Mode, logits: Logits) -> tuple[Variant, Inputs]:
        """Plan a batch: choose its variant and pad its inputs, on the host, to a bucket.

        Args:
            batch: unpadded; its page table is as wide as ``table_width`` says.
            mode: mode of the step; it fits the number of new tokens of each sequence.
            logits: "last" returns the logits of each sequence's last token, "all" those of every
                token.

        Returns:
            The variant whose graph serves the step, and its padded inputs.
        """
        parts: tuple[Batch, ...] = (batch,)
        cut = batch.num_tokens
        if self.overlap.cuts(mode, batch.num_seqs, batch.num_tokens):
            cut = plan_split(batch.cu_seqlens.diff().tolist(), grid=self.chunk_grid)
            parts = split(batch, cut)
        num_seqs, num_tokens = self._bucket_of(parts, mode)
        rows = None
        if mode.tokens_per_seq is None or len(parts) == 2:
            rows = self._wanted(batch, mode, logits)
            if len(parts) == 2:
                rows = rows_in_halves(rows, cut, num_tokens)
        forms = self._forms_of_step(parts, mode)
        padded = [pad_to(part, num_seqs=num_seqs, num_tokens=num_tokens) for part in parts]
        variant = Variant.of(
            mode,
            forms,
            in_halves=len(parts) == 2,
            has_adapters=batch.adapter_slots is not None,
        )
        return variant, self._inputs(padded, mode, forms, rows)

    def plan_drafts(
        self, batch: Batch, further: Mapping[str, Sequence[Sequence[int]]]
    ) -> tuple[Variant, Inputs]:
        """Plan the consecutive steps of the draft head, which run in one graph.

        Args:
            batch: the tokens that the head reads in the first step.
            further: arguments of ``chained`` for the steps after the first.

        Returns:
            The variant whose graph serves the steps, and its padded inputs.
        """
        mode = Mode.draft(1 + len(further["slots"]))
        forms = self._forms_of_step([batch], mode)
        num_seqs, num_tokens = self._decode_seqs(batch.num_seqs), batch.num_tokens
        if self.sizes.decode_seqs is not None:
            num_tokens = round_up(num_tokens, self.sizes.tokens)
        first = pad_to(batch, num_seqs=num_seqs, num_tokens=num_tokens)
        padded = [first, *chained(first, **further)]
        variant = Variant.of(mode, forms, in_halves=False)
        return variant, self._inputs(padded, mode, forms, None)

    def plan_idle(self) -> tuple[Variant, Inputs]:
        """Plan a step without sequences, a decode step if the modes include one. All of it is
        padding, so it reads and writes no state."""
        nothing = self._null_batch(Bucket(num_seqs=0, num_tokens=0, num_pages=2), self._idle)
        return self.plan(nothing, self._idle, "last")

    def null_batch(
        self, mode: Mode, width: int, lengths: Sequence[int], held: Sequence[int]
    ) -> Batch:
        """Build a batch of null sequences with these lengths of new tokens, after those held."""
        bucket = Bucket(num_seqs=len(lengths), num_tokens=sum(lengths), num_pages=width)
        return replace(
            self._null_batch(bucket, mode),
            cu_seqlens=int_tensor(accumulate(lengths, initial=0), torch.int32),
            seq_lens=int_tensor(map(add, lengths, held), torch.int32),
        )

    def largest(self, variant: Variant) -> Inputs:
        """Build an all-padding step of a variant; each tensor has its largest possible size."""
        num_seqs = self.sizes.seqs[-1]
        each = variant.mode.tokens_per_seq
        if each is not None and not variant.mode.num_chained:
            num_tokens = num_rows = num_seqs * each
        else:
            sizes = self.sizes.half_tokens if variant.in_halves else self.sizes.tokens
            num_tokens, num_rows = sizes[-1], self.sizes.tokens[-1]
        bucket = Bucket(num_seqs=num_seqs, num_tokens=num_tokens, num_pages=self.sizes.pages[-1])
        return self._null_inputs(variant, bucket, self.forms[variant], num_rows)

    def traced(self, variant: Variant) -> Inputs:
        """Build the all-padding step that a variant is traced on; sizes of two kinds differ."""
        forms = {
            kind: replace(form, num_rows=_TRACED_CHUNK_ROWS)
            for kind, form in self.forms[variant].items()
        }
        bucket = _TRACED_MIX
        if (each := variant.mode.tokens_per_seq) is not None:
            tokens = _TRACED_SEQS * (each + variant.mode.num_chained)
            bucket = Bucket(num_seqs=_TRACED_SEQS, num_tokens=tokens, num_pages=_TRACED_PAGES)
        return self._null_inputs(variant, bucket, forms, _TRACED_ROWS)

    def _bucket_of(self, parts: Sequence[Batch], mode: Mode) -> tuple[int, int]:
        """Choose the numbers of sequences and of tokens that each part is padded to."""
        num_seqs = max(part.num_seqs for part in parts)
        if mode.tokens_per_seq is not None:
            num_seqs = self._decode_seqs(num_seqs)
            return num_seqs, num_seqs * _longest(parts, mode)
        sizes = self.sizes.tokens if len(parts) == 1 else self.sizes.half_tokens
        num_tokens = max(part.num_tokens for part in parts)
        return round_up(num_seqs, self.sizes.seqs), round_up(num_tokens, sizes)

    def _backends_of(self, mode: Mode) -> Mapping[str, LayerBackend]:
        """Choose the backends of the layers that a step of a mode runs."""
        return self._drafting if mode.num_chained else self.backends

    def _planned_as(self, mode: Mode, part: int = 0) -> Mode:
        """Choose the mode in which the layers plan a part of a step.

        Parts of a draft step are planned as decode; the first, which may have several tokens for
        each sequence, as verify.
        """
        if not mode.num_chained:
            return mode
        return self._idle if part else self._verifying

    def _forms_of_step(self, batches: Sequence[Batch], mode: Mode) -> dict[str, LayerForm]:
        """Choose the form of each kind of layer for these batches, and pad its tables."""
        planned_as = self._planned_as(mode)
        found = forms_of(self._backends_of(mode), batches, planned_as)
        return {kind: self._padded(kind, planned_as, form) for kind, form in found.items()}

    def _decode_seqs(self, num_seqs: int) -> int:
        """Round up the number of sequences of a step that has equally many tokens for each."""
        num_seqs = max(num_seqs, 1)
        sizes = self.sizes.decode_seqs
        return num_seqs if sizes is None else round_up(num_seqs, sizes)

    def _padded(self, kind: str, mode: Mode, form: LayerForm) -> LayerForm:
        """Round up the number of rows of a form's tables, if ``sizes`` has buckets for them."""
        if self.sizes.chunk_rows is None or not form.num_rows:
            return form
        largest = {f.name: f.num_rows for f in self.backends[kind].forms(mode)}[form.name]
        return replace(form, num_rows=min(round_up(form.num_rows, self.sizes.chunk_rows), largest))

    def _wanted(self, batch: Batch, mode: Mode, logits: Logits) -> Tensor:
        """Find the tokens whose logits are wanted: indices [R], padded with token 0."""
        if mode.tokens_per_seq is not None:
            rows = _counted(batch.num_tokens)
            size = self._decode_seqs(batch.num_seqs) * mode.tokens_per_seq
        elif logits == "all":
            size = round_up(batch.num_tokens, self.sizes.tokens)
            rows = _counted(batch.num_tokens)
        else:
            rows, size = batch.cu_seqlens[1:].long() - 1, round_up(batch.num_seqs, self.sizes.seqs)
        return torch.constant_pad_nd(rows, (0, size - rows.shape[0]))

    def _inputs(
        self,
        batches: Iterable[Batch],
        mode: Mode,
        forms: Mapping[str, LayerForm],
        rows: Tensor | None,
    ) -> Inputs:
        backends = self._backends_of(mode)
        parts = [
            BatchPart(
                batch=batch, plans=plan_all(backends, batch, self._planned_as(mode, i), forms)
            )
            for i, batch in enumerate(batches)
        ]
        return Inputs(parts=tuple(parts), rows=rows)

    def _null_inputs(
        self, variant: Variant, bucket: Bucket, forms: Mapping[str, LayerForm], num_rows: int
    ) -> Inputs:
        mode = variant.mode
        batches = [self._null_batch(bucket, mode) for _ in range(1 + variant.in_halves)]
        if mode.num_chained:
            nobody: list[list[int]] = [[]] * (mode.num_chained - 1)
            batches += chained(batches[0], positions=nobody, slots=nobody, seq_lens=nobody)
        if variant.has_adapters:
            slots = _zeros(bucket.num_tokens, dtype=torch.int32)
            batches = [replace(batch, adapter_slots=slots.clone()) for batch in batches]
        if self.takes_embeds and mode.tokens_per_seq is None:
            size = bucket.num_tokens
            batches = [replace(b, embed_rows=_zeros(size, dtype=torch.int32)) for b in batches]
        rows = None
        if mode.tokens_per_seq is None or variant.in_halves:
            rows = _zeros(num_rows, dtype=torch.int64)
        return self._inputs(batches, mode, forms, rows)

    def _null_batch(self, bucket: Bucket, mode: Mode) -> Batch:
        """Build a batch of empty sequences and padding tokens."""
        axes, num_tokens, num_seqs = self.num_position_axes, bucket.num_tokens, bucket.num_seqs
        position_shape = (num_tokens,) if axes == 1 else (axes, num_tokens)
        return Batch(
            tokens=_zeros(num_tokens, dtype=torch.int64),
            positions=_zeros(*position_shape, dtype=torch.int64),
            slot_mapping=_zeros(num_tokens, dtype=torch.int32),
            cu_seqlens=_zeros(num_seqs + 1, dtype=torch.int32),
            seq_lens=_zeros(num_seqs, dtype=torch.int32),
            page_table=_zeros(num_seqs, bucket.num_pages, dtype=torch.int32),
            initial_indices=_zeros(num_seqs, dtype=torch.int32),
            state_indices=_zeros(num_seqs, dtype=torch.int32),
            accepted=_zeros(num_seqs, dtype=torch.int32) if mode.num_drafts else None,
            num_drafts=_zeros(num_seqs, dtype=torch.int32) if mode.num_drafts else None,
        )

    def _cuts_of(self, mode: Mode) -> list[bool]:
        """List whether steps of a mode may run whole (False), in halves (True), or either way."""
        largest = self.sizes.seqs[-1], self.sizes.tokens[-1]
        whole = [] if self.overlap.always_cuts(mode) else [False]
        halves = [True] if self.overlap.cuts(mode, *largest) else []
        return whole + halves

    def _forms_of(self, mode: Mode, *, has_adapters: bool) -> Iterator[dict[str, LayerForm]]:
        """Enumerate the combinations of layer forms of a mode's steps, each form at its largest.

        Raises:
            UnsupportedError: a kind of layer has no form that takes adapters.
        """
        backends = self._backends_of(mode)
        planned_as = self._planned_as(mode)
        found = {kind: backend.forms(planned_as) for kind, backend in backends.items()}
        if has_adapters:
            for kind, forms in found.items():
                found[kind] = tuple(form for form in forms if form.takes_adapters)
                if not found[kind]:
                    raise UnsupportedError(
                        f"max_adapters: none of the forms {[form.name for form in forms]} of "
                        f"{kind} takes adapters, which the absorbed form does"
                    )
        for each in product(*found.values()):
            yield dict(zip(backends, each, strict=True))


def _longest(parts: Sequence[Batch], mode: Mode) -> int:
    """Count the tokens that each sequence is padded to, in a mode with as many for each sequence.

    A verify step pads to the longest sequence of the batch.
    """
    if not mode.num_drafts:
        return mode.tokens_per_seq or 1
    lengths = [int(part.cu_seqlens.diff().max()) for part in parts]
    return max(1, *lengths)


def _zeros(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device="cpu")


def _counted(count: int) -> Tensor:
    return torch.arange(count, dtype=torch.int64, device="cpu")
