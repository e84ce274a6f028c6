"""Mixers with a state of fixed size, recurrent or convolutional: choices of ops, step plans, and
calls of the ops."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from torch_hybrid.backends.mode import ONLY_FORM, LayerForm, Mode
from torch_hybrid.backends.planned import PlannedTensors, plan_layers, shape_name
from torch_hybrid.backends.replay import Replay, Segments, plan_replay, walk
from torch_hybrid.backends.select import Backends, Choice, impls_of, select
from torch_hybrid.backends.statics import Statics
from torch_hybrid.batch import Batch
from torch_hybrid.caches.pools import LayerCache
from torch_hybrid.caches.sizes import PoolSizes
from torch_hybrid.errors import UnsupportedError
from torch_hybrid.ops.causal_conv1d import op as conv
from torch_hybrid.ops.core.capability import (
    FLOATS_AND_FLOAT64,
    NO_FEATURES,
    Capability,
    Implementation,
    Need,
)
from torch_hybrid.ops.core.recurrence import DEFAULT_CHUNK_SIZE
from torch_hybrid.ops.step_implementations import EXTEND, NO_STORE, VERIFY
from torch_hybrid.pytrees import register_value
from torch_hybrid.specs import LayerEntry
from torch_hybrid.specs.pools import RECORDS


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentPlan:
    """Plan of a step: where its N sequences keep their states."""

    cu_seqlens: Tensor  # [N + 1]
    initial_indices: Tensor  # [N] slot that each sequence starts from; 0: zeros
    state_indices: Tensor  # [N] slot that receives its state; 0: the state is not stored
    planned: dict[str, PlannedTensors]  # by shape of the layers, where the implementation plans
    statics: Statics
    accepted: Tensor | None = None  # [N] records to replay, in a step that verifies drafts
    replay: Replay | None = None  # in such a step, for ops that do not replay records themselves

    def at(self, walk: Segments) -> RecurrentPlan:
        """Make the plan of one of the two calls of an op in a step that verifies drafts."""
        return RecurrentPlan(
            cu_seqlens=walk.cu_seqlens,
            initial_indices=walk.initial_indices,
            state_indices=walk.state_indices,
            planned=self.planned,
            statics=self.statics,
        )


register_value(RecurrentPlan)
At = RecurrentPlan | Segments  # offsets of sequences, and slots that they read and write


@dataclass(frozen=True, slots=True, kw_only=True)
class OpChoice:
    """Op that a layer calls, and its implementations to choose from.

    ``sizes`` maps a layer's spec to the sizes that implementations may limit and planners are told.
    An implementation must have all ``features``. ``preferred`` finds the name that the user gave
    for ops of this kind.
    """

    name: str
    implementations: Mapping[str, Implementation]
    sizes: Callable[[Any], dict[str, int]]
    features: frozenset[str] = NO_FEATURES
    preferred: Callable[[Backends], str] = lambda backends: backends.linear

    def choose(self, specs: set[Any], sizes: PoolSizes, backends: Backends, mode: Mode) -> Choice:
        """Choose an implementation that serves all ``specs`` in steps of a mode."""
        needs = [
            Need(
                device=sizes.device,
                dtype=sizes.dtype,
                sizes=self.sizes(spec),
                features=self.features | backends.features,
                exact=backends.exact,
            )
            for spec in specs
        ]
        preferred = self.asked_for(backends, mode)
        return select(self.name, self.implementations, needs, preferred)

    def asked_for(self, backends: Backends, mode: Mode) -> str:
        """Return the name that the user gave, or "auto"."""
        return backends.named(self.name, self.preferred(backends), mode)


# Stands for a fused op's parts among the implementations of that op, and is chosen like one.
PARTS = "parts"
_PARTS = Implementation(
    capability=Capability(
        devices=frozenset({"cpu", "cuda"}),
        dtypes=FLOATS_AND_FLOAT64,
    ),
    launcher="",
)

CONVOLUTION = OpChoice(
    name="causal_conv1d",
    implementations=conv.IMPLEMENTATIONS,
    sizes=lambda spec: {"conv_width": spec.conv_width},
    preferred=lambda backends: backends.conv,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence:
    """Ops that the layers of one kind call, and the chunk size of their prefill.

    The ops of ``decode`` run one new token per sequence, those of ``extend`` any number. ``whole``
    fuses all between a layer's projections in decode. The fused op runs where it can serve, unless
    the user named an implementation of one of its parts; its Triton form there alone where it was
    measured, at the sizes ``timed``. An implementation of it with the feature "verify" runs a token
    and drafts after it. Where there is none, the ops of ``decode``, which take tokens one by one,
    replay records too (``backends.replay``).
    """

    decode: tuple[OpChoice, ...]  # the recurrence first
    extend: tuple[OpChoice, ...]
    whole: OpChoice | None = None
    timed: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    chunk_size: int = 0

    def ops(self, mode: Mode) -> tuple[OpChoice, ...]:
        """Return the ops of a mode's steps, if no fused op runs instead."""
        return self.decode if mode.tokens_per_seq == 1 else self.extend

    def choose(
        self, specs: set[Any], sizes: PoolSizes, backends: Backends, mode: Mode
    ) -> tuple[tuple[OpChoice, Choice], ...]:
        """Choose the ops of a mode and an implementation of each, the recurrence first.

        Raises:
            UnsupportedError: no implementation of an op can serve.
        """
        if verifying := self._choose_verifying(specs, sizes, backends, mode):
            return (verifying,)
        if backends.batch_invariant:
            return self._choose_invariant(specs, sizes, backends, mode)
        ops = self.decode if mode.num_drafts else self.ops(mode)
        parts = tuple((op, op.choose(specs, sizes, backends, mode)) for op in ops)
        if self.whole is None or mode.tokens_per_seq != 1:
            return parts
        are_asked_for = any(op.asked_for(backends, mode) != "auto" for op in ops)
        whole = replace(
            self.whole,
            implementations=or_parts(self.whole.implementations, timed=self.timed),
            preferred=lambda _: PARTS if are_asked_for else "auto",
        )
        chosen = whole, whole.choose(specs, sizes, backends, mode)
        return (*parts, chosen) if chosen[1].impl == PARTS else (chosen,)

    def _choose_verifying(
        self, specs: set[Any], sizes: PoolSizes, backends: Backends, mode: Mode
    ) -> tuple[OpChoice, Choice] | None:
        """Choose the fused op for steps that verify drafts; None where it cannot serve."""
        if self.whole is None or not mode.num_drafts or mode.tokens_per_seq is None:
            return None
        known = {**self.whole.implementations, PARTS: _PARTS}  # which have no such feature
        whole = replace(self.whole, implementations=known, features=VERIFY)
        try:
            return whole, whole.choose(specs, sizes, backends, mode)
        except UnsupportedError:
            if whole.asked_for(backends, mode) not in ("auto", PARTS):
                raise
            return None

    def _choose_invariant(
        self, specs: set[Any], sizes: PoolSizes, backends: Backends, mode: Mode
    ) -> tuple[tuple[OpChoice, Choice], ...]:
        """Choose the ops that give a token the same bits in steps of any lengths.

        They run tokens one by one: the fused op that takes several tokens, if an implementation
        can serve, or else its parts.
        """

        def parts() -> tuple[tuple[OpChoice, Choice], ...]:
            return tuple((op, op.choose(specs, sizes, backends, Mode.DECODE)) for op in self.decode)

        if self.whole is None:
            return parts()
        whole = replace(
            self.whole,
            features=EXTEND | NO_STORE if mode.num_drafts else EXTEND,
            preferred=self.decode[0].preferred,
        )
        try:
            return ((whole, whole.choose(specs, sizes, backends, Mode.DECODE)),)
        except UnsupportedError as refusal:
            try:
                return parts()
            except UnsupportedError:
                raise refusal from None


# Mixers without a recurrence: their only state is that of a convolution.
SHORT_CONVOLUTION = Recurrence(decode=(CONVOLUTION,), extend=(CONVOLUTION,))


def chunked_rule(
    name: str,
    *also: OpChoice,
    recurrent: Mapping[str, Implementation],
    chunk: Mapping[str, Implementation],
    sizes: Callable[[Any], dict[str, int]],
    whole: OpChoice | None = None,
    timed: Mapping[str, tuple[int, ...]] | None = None,
) -> Recurrence:
    """Define a rule with two forms: ``recurrent_<name>`` in decode, ``chunk_<name>`` in extend.

    ``also`` lists the other ops that its layers call. ``whole`` fuses all of them; see
    ``Recurrence``.
    """
    decode = OpChoice(name=f"recurrent_{name}", implementations=recurrent, sizes=sizes)
    extend = OpChoice(name=f"chunk_{name}", implementations=chunk, sizes=sizes)
    return Recurrence(
        decode=(decode, *also),
        extend=(extend, *also),
        whole=whole,
        timed=timed or {},
        chunk_size=DEFAULT_CHUNK_SIZE,
    )


def or_parts(
    implementations: Mapping[str, Implementation],
    *,
    timed: Mapping[str, tuple[int, ...]] | None = None,
) -> dict[str, Implementation]:
    """Add running the parts of a fused op to the op's implementations, as one of them.

    The parts come before "torch", since the compiler fuses more of them than "torch" does. With
    ``timed``, "triton" serves these sizes alone, at which it was measured.
    """
    first = {name: each for name, each in implementations.items() if name != "torch"}
    if timed:
        triton = first["triton"]
        first["triton"] = replace(triton, capability=replace(triton.capability, one_of=timed))
    last = {name: each for name, each in implementations.items() if name not in first}
    return {**first, PARTS: _PARTS, **last}


class RecurrentBackend:
    """Planner of steps for the layers of one recurrence in a model."""

    def __init__(
        self,
        recurrence: Recurrence,
        entries: tuple[LayerEntry, ...],
        sizes: PoolSizes,
        backends: Backends,
        modes: Sequence[Mode],
    ) -> None:
        """Choose an implementation for each of ``modes`` that serves every layer in ``entries``."""
        self.chunk_size = 0 if backends.batch_invariant else recurrence.chunk_size
        specs: set[Any] = {entry.spec for entry in entries}
        chosen = {mode: recurrence.choose(specs, sizes, backends, mode) for mode in modes}
        self.choices = {mode: tuple(each for _, each in pairs) for mode, pairs in chosen.items()}
        self._statics = {mode: Statics(impls_of(each)) for mode, each in self.choices.items()}
        self._replayed = {
            mode
            for mode, pairs in chosen.items()
            if mode.num_drafts and not any(op.features >= VERIFY for op, _ in pairs)
        }
        self._planners, self._layers = {}, {}
        for mode, ((op, choice), *_) in chosen.items():
            self._planners[mode] = op.implementations[choice.impl].load_planner()
            told = [op.sizes(spec) for spec in specs]
            common = {"dtype": sizes.dtype, "device": sizes.device}
            self._layers[mode] = {shape_name(x): {**x, **common} for x in told}

    def forms(self, mode: Mode) -> tuple[LayerForm, ...]:
        """List the forms of a mode's steps: the only one."""
        return (ONLY_FORM,)

    def form_of(self, batches: Sequence[Batch], mode: Mode) -> LayerForm:
        """Return the only form."""
        return ONLY_FORM

    def plan(self, batch: Batch, mode: Mode, form: LayerForm) -> RecurrentPlan:
        """Plan one step. Pure: the plan has the batch's tensors, and schedules made from them."""
        return RecurrentPlan(
            cu_seqlens=batch.cu_seqlens,
            initial_indices=batch.initial_indices,
            state_indices=batch.state_indices,
            planned=plan_layers(self._planners[mode], batch, self._layers[mode]),
            statics=self._statics[mode],
            accepted=batch.accepted,
            replay=plan_replay(batch, mode) if mode in self._replayed else None,
        )


def rule_of(
    plan: RecurrentPlan, forms: Mapping[str, Callable[..., Tensor]]
) -> tuple[Callable[..., Tensor], str]:
    """Find the op among ``forms`` that the plan runs, and its implementation."""
    name, impl = next(pair for pair in plan.statics.impls if pair[0] in forms)
    return forms[name], impl


def drafts_of(plan: RecurrentPlan, cache: LayerCache) -> dict[str, Tensor]:
    """Return what the fused op of a step takes beside, by name, where it verifies drafts."""
    if plan.accepted is None:
        return {}
    return {"records": cache[RECORDS], "accepted": plan.accepted}


def whole_impl(plan: RecurrentPlan, *ops: str) -> str | None:
    """Find the implementation of the fused op among ``ops`` that the plan runs; None: its parts."""
    impl = next((impl for op, impl in plan.statics.impls if op in ops), PARTS)
    return None if impl == PARTS else impl


def walk_layer(
    run: Callable[[Sequence[Tensor], Sequence[Tensor], RecurrentPlan], Tensor],
    advancing: Sequence[Tensor],
    reading: Sequence[Tensor],
    plan: RecurrentPlan,
    cache: LayerCache,
) -> Tensor:
    """Run all ops of a layer over a step's tokens, as ``walk`` runs one.

    ``advancing`` and ``reading`` are the inputs of the layer's ops together.
    """

    def run_at(advancing: Sequence[Tensor], reading: Sequence[Tensor], at: At) -> Tensor:
        return run(advancing, reading, plan.at(at) if isinstance(at, Segments) else at)

    return walk(run_at, advancing, reading, plan, cache)


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    plan: RecurrentPlan,
    cache: LayerCache,
    *,
    activation: str,
    input_gate: Tensor | None = None,
    output_gate: Tensor | None = None,
    token_taps: Tensor | None = None,
) -> Tensor:
    """Convolve x [T, C] causally and activate it -> [T, C]; advance the state in ``cache``.

    Gates are [T, C]. ``token_taps`` [T, H, W] are each token's own addition to the filters.
    """

    if plan.replay is not None and input_gate is not None:
        x, input_gate = input_gate * x, None  # records keep gated inputs
    of_outputs = {"output_gate": output_gate, "token_taps": token_taps}
    given = {name: tensor for name, tensor in of_outputs.items() if tensor is not None}

    def run(advancing: Sequence[Tensor], reading: Sequence[Tensor], at: At) -> Tensor:
        (x,), read = advancing, dict(zip(given, reading, strict=True))
        return conv.causal_conv1d(
            x,
            weight,
            bias,
            cache["conv"],
            at.cu_seqlens,
            at.initial_indices,
            at.state_indices,
            activation=activation,
            input_gate=input_gate,
            **read,
            impl=plan.statics.impl("causal_conv1d"),
        )

    return walk(run, [x], [*given.values()], plan, cache)
