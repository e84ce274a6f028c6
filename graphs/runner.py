"""The runner: a model, its pools and its compiled steps, driven by hand or by an engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torch_hybrid.backends.hybrid import Plan, Step, forms_of, make_backends, plan_all
from torch_hybrid.backends.mode import Form, Mode
from torch_hybrid.backends.select import Backends
from torch_hybrid.batch import Batch, pad_to
from torch_hybrid.caches.hybrid import HybridCache, LayerCache, Sequence
from torch_hybrid.errors import UnsupportedError
from torch_hybrid.graphs.buckets import Bucket, doubling, round_up, token_sizes
from torch_hybrid.graphs.clone_check import PoolClone
from torch_hybrid.graphs.compile import CompileLog, GraphRecord, StepBackend, compile_step
from torch_hybrid.graphs.static_inputs import StaticInputs
from torch_hybrid.ops.gated_delta_rule import DEFAULT_CHUNK_SIZE
from torch_hybrid.specs import LayerTable

Logits = Literal["last", "all"]
# What a graph is traced with; distinct sizes, so that no two symbols are taken for one.
_TRACED = {
    Mode.DECODE: Bucket(num_seqs=8, num_tokens=8, num_pages=11),
    Mode.EXTEND: Bucket(num_seqs=5, num_tokens=512, num_pages=11),
}
_TRACED_ROWS = 192


class Model(Protocol):
    """What a runner needs of a model."""

    table: LayerTable
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    num_position_axes: int

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    def __call__(self, tokens: Tensor, positions: Tensor, step: Step) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """All of a step's input that changes from step to step."""

    batch: Batch
    plans: dict[str, Plan]


pytree.register_dataclass(Inputs)


@dataclass(frozen=True, slots=True)
class Variant:
    """What steps that share a graph have in common, but for which logits they return."""

    mode: Mode
    forms: tuple[tuple[str, str], ...]  # kind of layer and the name of its form

    @classmethod
    def of(cls, mode: Mode, forms: Mapping[str, Form]) -> Variant:
        """The variant of a step."""
        return cls(mode, tuple((kind, form.name) for kind, form in forms.items()))

    def name(self, logits: Logits) -> str:
        """As it stands in reports: "extend, one shot", for example."""
        every = ["all logits"] if (self.mode, logits) == (Mode.EXTEND, "all") else []
        forms = [name for _, name in self.forms if name and self.mode is Mode.EXTEND]
        return ", ".join([self.mode.value, *forms, *every])


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a runner compiled so far.

    ``graphs`` is by step variant; ``recompiles`` counts graphs beyond the one that each variant
    needs; ``ops`` counts calls by ``op[implementation]`` in one step of each variant.
    """

    graphs: Mapping[str, GraphRecord]
    recompiles: int
    graph_breaks: int
    captured_graphs: tuple[str, ...]
    pool_bytes: int
    static_input_bytes: int

    @property
    def compiles(self) -> int:
        """How many graphs were compiled."""
        return len(self.graphs) + self.recompiles

    @property
    def ops(self) -> Mapping[str, Counter[str]]:
        """Calls by op and implementation, for each variant."""
        return {variant: graph.ops for variant, graph in self.graphs.items()}

    @property
    def pool_clones(self) -> tuple[PoolClone, ...]:
        """Copies of a whole pool in the compiled code; none is right."""
        return tuple(clone for graph in self.graphs.values() for clone in graph.pool_clones)


class Runner:
    """Serves ragged batches of sequences with one compiled graph per kind of step.

    Args:
        model: from ``from_pretrained`` or ``adapt``.
        max_seqs: sequences that can be held at once.
        max_tokens: most new tokens in one ``extend``; longer prompts come in chunks.
        kv_tokens: tokens that all sequences together can hold.
        page_size: tokens in a page of the KV pool.
        compile: compile the steps; without, the same code runs eagerly.
        cuda_graphs: "auto" or "off"; nothing is captured yet.
        two_batch_overlap: "off" or "auto"; overlap is not offered yet.
        backends: implementations to take, by name.

    Raises:
        UnsupportedError: no implementation can serve a layer of the model.
        ValueError: a size is too small to hold anything.
    """

    def __init__(
        self,
        model: Model,
        *,
        max_seqs: int = 64,
        max_tokens: int = 2048,
        kv_tokens: int = 65536,
        page_size: int = 16,
        compile: bool = True,
        cuda_graphs: Literal["auto", "off"] = "auto",
        two_batch_overlap: Literal["auto", "off"] = "off",
        backends: Backends | None = None,
    ) -> None:
        if max_tokens < DEFAULT_CHUNK_SIZE:
            raise ValueError(
                f"max_tokens must hold at least one chunk of {DEFAULT_CHUNK_SIZE} tokens, "
                f"got {max_tokens}"
            )
        for name, value in (("cuda_graphs", cuda_graphs), ("two_batch_overlap", two_batch_overlap)):
            if value not in ("auto", "off"):
                raise UnsupportedError(f"{name} must be 'auto' or 'off', got {value!r}")
        self.model = model
        self.max_seqs, self.max_tokens, self.page_size = max_seqs, max_tokens, page_size
        self.vocab_size = model.vocab_size
        self.eos_token_ids = model.eos_token_ids
        self.compile = compile
        self._cache = HybridCache(
            model.table,
            max_seqs=max_seqs,
            kv_tokens=kv_tokens,
            page_size=page_size,
            dtype=model.dtype,
            device=model.device,
        )
        self.backends = make_backends(model.table, self._cache.sizes, backends)
        self._page_sizes = doubling(2, max(self._cache.num_pages, 2))
        self._seq_sizes = doubling(2, max(max_seqs, 2))
        self._token_sizes = token_sizes(max_tokens)
        self._forms = {Variant.of(mode, forms): forms for mode in Mode for forms in self._all(mode)}
        self._inputs = {
            variant: StaticInputs(
                self._null_inputs(variant.mode, self._largest(variant.mode), forms), model.device
            )
            for variant, forms in self._forms.items()
        }
        self._log = CompileLog()
        self._variants: dict[str, int] = {}  # name of a variant to its graph's place in the log
        self._breaks_before = _count_graph_breaks()
        self._steps = self._make_steps()

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
        """How many pages of the KV pool nobody owns."""
        return self._cache.pages.num_free

    @property
    def cache(self) -> HybridCache:
        """The pools, and who owns what in them."""
        return self._cache

    def new_sequences(self, count: int) -> list[Sequence]:
        """Take a state slot for each of ``count`` new, empty sequences.

        Raises:
            CapacityError: fewer slots are free.
        """
        if count < 0:
            raise ValueError(f"count must not be negative, got {count}")
        return self._cache.allocate(count)

    def free(self, seqs: Many[Sequence]) -> None:
        """Give back the slots and pages of sequences, all or none.

        Raises:
            ValueError: a sequence was freed before, belongs to another runner, or comes twice.
        """
        self._cache.free(seqs)

    def length(self, seq: Sequence) -> int:
        """How many tokens a sequence holds."""
        return self._cache.length(seq)

    def pages_needed(self, seq: Sequence, num_new_tokens: int) -> int:
        """How many more pages ``extend`` would take for that many new tokens."""
        return self._cache.pages_needed(seq, num_new_tokens)

    def extend(
        self,
        seqs: Many[Sequence],
        tokens: Many[Many[int]],
        *,
        logits: Logits = "last",
        positions: Tensor | None = None,
    ) -> Tensor:
        """Append new tokens to sequences, in one step, and return logits.

        Any mix of lengths; one token each is a decode step. Several calls on one sequence are
        chunked prefill. Nothing changes if an error is raised before the step runs; if the step
        itself is cut off (Ctrl-C), its sequences can only be freed.

        Args:
            seqs: N distinct live sequences.
            tokens: the new tokens of each, at least one, ``max_tokens`` in all at most.
            logits: "last" for those after each sequence's last token, "all" for every token.
            positions: [3, T] int64 rotary positions of the packed tokens, for models with 3-D
                positions; by default all three axes count each sequence on.

        Returns:
            [N, vocab_size] in the order of ``seqs``, or [T, vocab_size] for "all".

        Raises:
            ValueError: an argument is not as above.
            CapacityError: the KV pool has too few free pages.
        """
        lengths = [len(new) for new in tokens]
        self._check_extend(seqs, tokens, lengths, logits, positions)
        mode = Mode.DECODE if max(lengths) == 1 else Mode.EXTEND
        variant, planned = self._plan(seqs, tokens, positions, mode)
        inputs = self._inputs[variant].refresh(planned)
        try:
            out = self._run(variant, logits, inputs)
            self._cache.commit(seqs, lengths)
        except BaseException:
            self._cache.mark_broken(seqs)
            raise
        return out[: sum(lengths) if logits == "all" else len(seqs)]

    def warm_up(self, on_variant: Callable[[str], None] | None = None) -> None:
        """Compile every variant of decode and extend ahead of time, unless it is already.

        ``on_variant`` is called with the name of each variant before it is compiled.
        """
        for variant in self._forms:
            if on_variant is not None:
                on_variant(variant.name("last"))
            self._compile(variant, "last")

    def report(self) -> Report:
        """What was compiled so far, and what is in it."""
        graphs = {name: self._log.graphs[i] for name, i in self._variants.items()}
        return Report(
            graphs=graphs,
            recompiles=len(self._log.graphs) - len(graphs),
            graph_breaks=_count_graph_breaks() - self._breaks_before,
            captured_graphs=(),
            pool_bytes=sum(pool.nbytes for pool in self._cache.pool_tensors()),
            static_input_bytes=sum(inputs.nbytes for inputs in self._inputs.values()),
        )

    def _plan(
        self,
        seqs: Many[Sequence],
        tokens: Many[Many[int]],
        positions: Tensor | None,
        mode: Mode,
    ) -> tuple[Variant, Inputs]:
        """A step's variant and its inputs on the host, padded to their bucket."""
        batch = self._cache.make_batch(
            seqs,
            tokens,
            positions=positions,
            num_position_axes=self.model.num_position_axes,
            table_width=lambda used: round_up(used, self._page_sizes),
        )
        # At least two of each: a size of 1 would be a graph of its own.
        if mode is Mode.DECODE:
            num_seqs = num_tokens = max(batch.num_seqs, 2)
        else:
            num_seqs = round_up(batch.num_seqs, self._seq_sizes)
            num_tokens = round_up(batch.num_tokens, self._token_sizes)
        batch = pad_to(batch, num_seqs=num_seqs, num_tokens=num_tokens)
        forms = forms_of(self.backends, batch, mode)
        plans = plan_all(self.backends, batch, mode, forms)
        return Variant.of(mode, forms), Inputs(batch=batch, plans=plans)

    def _run(self, variant: Variant, logits: Logits, inputs: Inputs) -> Tensor:
        self._compile(variant, logits)
        with torch.inference_mode():
            out: Tensor = self._steps[variant.mode, logits](inputs, self._cache.pools)
        return out

    def _compile(self, variant: Variant, logits: Logits) -> None:
        """Trace and compile one variant on a step of null sequences, which changes no state."""
        name, mode = variant.name(logits), variant.mode
        if name in self._variants or not self.compile:
            return
        forms = {
            kind: replace(form, num_rows=_TRACED_ROWS)
            for kind, form in self._forms[variant].items()
        }
        null = self._null_inputs(mode, _TRACED[mode], forms)
        # One tensor that stands in several places stays one: graphs are guarded by that.
        moved: dict[int, Tensor] = {}
        inputs = pytree.tree_map(
            lambda leaf: moved.setdefault(id(leaf), leaf.to(self.model.device)), null
        )
        if inputs.batch.positions.ndim == 2:
            torch._dynamo.mark_static(inputs.batch.positions, 0)
        place = len(self._log.graphs)
        # Floats of the model (an eps) are constants: as inputs, each is a tensor made every step.
        with torch.inference_mode(), torch._dynamo.config.patch(specialize_float=True):
            self._steps[mode, logits](inputs, self._cache.pools)
        self._variants[name] = place

    def _make_steps(self) -> dict[tuple[Mode, Logits], Callable[[Inputs, Any], Tensor]]:
        pools = self._cache.pool_tensors()
        for pool in pools:
            torch._dynamo.mark_static(pool)
        backend = StepBackend(self._log, pool_sizes={pool.numel() for pool in pools})

        def make(gather_last: bool) -> Callable[[Inputs, Any], Tensor]:
            step = _make_step(self.model, gather_last=gather_last)
            return compile_step(step, backend) if self.compile else step

        decode = make(gather_last=False)  # one token each: the last is all there is
        return {
            (Mode.DECODE, "last"): decode,
            (Mode.DECODE, "all"): decode,
            (Mode.EXTEND, "last"): make(gather_last=True),
            (Mode.EXTEND, "all"): make(gather_last=False),
        }

    def _all(self, mode: Mode) -> Iterator[dict[str, Form]]:
        """Every combination of forms that steps of a mode may take, each at its largest."""
        kinds = list(self.backends)
        for forms in product(*(self.backends[kind].forms(mode) for kind in kinds)):
            yield dict(zip(kinds, forms, strict=True))

    def _null_inputs(self, mode: Mode, bucket: Bucket, forms: Mapping[str, Form]) -> Inputs:
        """A step of empty sequences, all padding: it reads and writes no state."""
        axes, num_tokens, num_seqs = (
            self.model.num_position_axes,
            bucket.num_tokens,
            bucket.num_seqs,
        )
        position_shape = (num_tokens,) if axes == 1 else (axes, num_tokens)
        batch = Batch(
            tokens=torch.zeros(num_tokens, dtype=torch.int64),
            positions=torch.zeros(position_shape, dtype=torch.int64),
            slot_mapping=torch.zeros(num_tokens, dtype=torch.int32),
            cu_seqlens=torch.zeros(num_seqs + 1, dtype=torch.int32),
            seq_lens=torch.zeros(num_seqs, dtype=torch.int32),
            page_table=torch.zeros(num_seqs, bucket.num_pages, dtype=torch.int32),
            state_indices=torch.zeros(num_seqs, dtype=torch.int32),
        )
        return Inputs(batch=batch, plans=plan_all(self.backends, batch, mode, forms))

    def _largest(self, mode: Mode) -> Bucket:
        num_seqs = self._seq_sizes[-1]
        return Bucket(
            num_seqs=num_seqs,
            num_tokens=num_seqs if mode is Mode.DECODE else self.max_tokens,
            num_pages=self._page_sizes[-1],
        )

    def _check_extend(
        self,
        seqs: Many[Sequence],
        tokens: Many[Many[int]],
        lengths: Many[int],
        logits: str,
        positions: Tensor | None,
    ) -> None:
        if not seqs or len(seqs) != len(tokens):
            raise ValueError(
                f"tokens must have one list for each of at least one sequence, "
                f"got {len(tokens)} lists for {len(seqs)} sequences"
            )
        if logits not in ("last", "all"):
            raise ValueError(f"logits must be 'last' or 'all', got {logits!r}")
        if min(lengths) == 0:
            raise ValueError(f"every sequence needs at least one new token, got {lengths}")
        if sum(lengths) > self.max_tokens:
            raise ValueError(
                f"at most max_tokens = {self.max_tokens} new tokens fit one step, got "
                f"{sum(lengths)}: extend in chunks"
            )
        lowest, highest = min(map(min, tokens)), max(map(max, tokens))
        if lowest < 0 or highest >= self.vocab_size:
            bad = lowest if lowest < 0 else highest
            raise ValueError(f"token ids must be within 0 and {self.vocab_size - 1}, got {bad}")
        if positions is not None:
            axes = self.model.num_position_axes
            shape = (sum(lengths),) if axes == 1 else (axes, sum(lengths))
            if tuple(positions.shape) != shape or positions.dtype != torch.int64:
                raise ValueError(
                    f"positions must be int64 of shape {list(shape)}, "
                    f"got {positions.dtype} of shape {list(positions.shape)}"
                )


def _make_step(
    model: Model, *, gather_last: bool
) -> Callable[[Inputs, dict[str, tuple[LayerCache, ...]]], Tensor]:
    def step(inputs: Inputs, caches: dict[str, tuple[LayerCache, ...]]) -> Tensor:
        batch = inputs.batch
        layers = Step(plans=inputs.plans, caches=caches, table=model.table)
        hidden = model(batch.tokens, batch.positions, layers)
        if gather_last:
            hidden = hidden[(batch.cu_seqlens[1:].long() - 1).clamp(min=0)]
        return model.logits(hidden)

    return step


def _count_graph_breaks() -> int:
    return sum(torch._dynamo.utils.counters["graph_break"].values())
