"""Mixers with a state of fixed size, recurrent or convolutional: choices of ops, step plans, and
calls of the ops."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from torch_hybrid.backends.mode import LayerForm, Mode, OneForm
from torch_hybrid.backends.planned import PlannedTensors, plan_layers, planned_for, shape_name
from torch_hybrid.backends.replay import plan_replay, walk
from torch_hybrid.backends.select import Backends, Choice, impls_of, select
from torch_hybrid.backends.statics import Statics
from torch_hybrid.batch import Batch
from torch_hybrid.caches.pools import LayerCache
from torch_hybrid.caches.sizes import PoolSizes
from torch_hybrid.ops.causal_conv1d import op as conv
from torch_hybrid.ops.composed import COMPOSED, Parts
from torch_hybrid.ops.core.capability import NO_FEATURES, Implementation, Need
from torch_hybrid.ops.core.recurrence import CHUNK, DEFAULT_CHUNK_SIZE, RECURRENT, of_form
from torch_hybrid.ops.core.registration import REGISTERED
from torch_hybrid.ops.open_chunk import OpenStep
from torch_hybrid.ops.replay import Replay, Segments
from torch_hybrid.ops.step_implementations import EXTEND, NO_STORE, OPEN, VERIFY
from torch_hybrid.ops.verify import verify_by_replay
from torch_hybrid.pytrees import register_value
from torch_hybrid.specs import LayerEntry
from torch_hybrid.specs.pools import OPEN_CHUNK, RECORDS, STATE_RECORDS


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


register_value(RecurrentPlan)
At = RecurrentPlan | Segments  # offsets of sequences, and slots that they read and write


@dataclass(frozen=True, slots=True, kw_only=True)
class OpChoice:
    """Op that a layer calls, and its implementations to choose from.

    ``sizes`` maps a layer's spec to the sizes that implementations may limit and planners are told.
    An implementation must have all ``features``. ``preferred`` finds the name that the user gave
    for ops of this kind. ``form`` is the execution form, where the op has several: "triton" then
    stands for "chunk_triton" or "recurrent_triton".
    """

    name: str
    implementations: Mapping[str, Implementation]
    sizes: Callable[[Any], dict[str, int]]
    features: frozenset[str] = NO_FEATURES
    preferred: Callable[[Backends], str] = lambda backends: backends.linear
    form: str = ""

    def choose(self, specs: set[Any], sizes: PoolSizes, backends: Backends, mode: Mode) -> Choice:
        """Choose an implementation that serves all ``specs`` in steps of a mode."""
        needs = self.needs(specs, sizes, backends)
        known = of_form(self.implementations, self.form)
        return select(self.name, known, needs, self.asked_for(backends, mode))

    def needs(self, specs: set[Any], sizes: PoolSizes, backends: Backends) -> list[Need]:
        """List what an implementation must serve."""
        return [
            Need(
                device=sizes.device,
                dtype=sizes.dtype,
                sizes=self.sizes(spec),
                features=self.features | backends.features,
                exact=backends.exact,
            )
            for spec in specs
        ]

    def can_serve_name(
        self, specs: set[Any], sizes: PoolSizes, backends: Backends, mode: Mode
    ) -> bool:
        """Tell whether the implementation that the user named can serve, if one was named."""
        named = self.implementations.get(self.asked_for(backends, mode))
        needs = self.needs(specs, sizes, backends)
        return named is None or not any(named.capability.why_not(need) for need in needs)

    def asked_for(self, backends: Backends, mode: Mode) -> str:
        """Return the name that the user gave, or "auto"."""
        name = backends.named(self.name, self.preferred(backends), mode)
        in_form = f"{self.form}_{name}"
        return in_form if in_form in self.implementations else name


CONVOLUTION = OpChoice(
    name="causal_conv1d",
    implementations=conv.IMPLEMENTATIONS,
    sizes=lambda spec: {"conv_width": spec.conv_width},
    preferred=lambda backends: backends.conv,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence:
    """Ops that the layers of one kind call, and the chunk size of their prefill.

    ``mixer`` is the op of all between a layer's projections, where there is one. Its implementation
    "composed" calls the ops of ``decode`` for tokens one by one, and those of ``extend`` for any
    number. "composed" runs where the user named an implementation of one of these ops, or where no
    other can serve. The Triton form runs in decode at the sizes ``timed`` alone, where it was
    measured. In a cache of ``opened_from`` sequences or more it keeps chunks open.
    """

    decode: tuple[OpChoice, ...]  # the recurrence first
    extend: tuple[OpChoice, ...]
    mixer: OpChoice | None = None
    timed: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    opened_from: int = 1
    chunk_size: int = 0

    def parts(self, backends: Backends, mode: Mode) -> tuple[OpChoice, ...]:
        """Return the ops that a mode's steps are composed of.

        Those that take tokens one by one replay records, and give a token the same bits in steps of
        any lengths.
        """
        one_by_one = mode.tokens_per_seq == 1 or mode.num_drafts or backends.batch_invariant
        return self.decode if one_by_one else self.extend

    def choose(
        self, specs: set[Any], sizes: PoolSizes, backends: Backends, mode: Mode
    ) -> tuple[tuple[OpChoice, Choice], ...]:
        """Choose the ops of a mode and an implementation of each, the recurrence first.

        Raises:
            UnsupportedError: no implementation of an op can serve.
        """
        choice = self._choose_mixer(specs, sizes, backends, mode)
        if choice is not None and choice[1].impl != COMPOSED:
            return (choice,)
        at = Mode.DECODE if backends.batch_invariant else mode
        parts = tuple(
            (op, op.choose(specs, sizes, backends, at)) for op in self.parts(backends, mode)
        )
        is_listed = choice is not None and mode.tokens_per_seq == 1
        return (*parts, choice) if choice and is_listed and not backends.batch_invariant else parts

    def _choose_mixer(
        self, specs: set[Any], sizes: PoolSizes, backends: Backends, mode: Mode
    ) -> tuple[OpChoice, Choice] | None:
        """Choose how all between the projections runs; None: composed, as prefill always is."""
        if self.mixer is None or not (mode.tokens_per_seq or backends.batch_invariant):
            return None
        if mode.num_drafts and mode.tokens_per_seq is not None:
            mixer = _verifying(self.mixer)
        elif backends.batch_invariant:
            features = EXTEND | NO_STORE if mode.num_drafts else EXTEND
            mixer, mode = replace(self.mixer, features=features), Mode.DECODE
            if not mixer.can_serve_name(specs, sizes, backends, mode):
                return None
        else:
            asked_for = any(op.asked_for(backends, mode) != "auto" for op in self.decode)
            mixer = replace(
                self.mixer,
                implementations=_timed(self.mixer.implementations, self.timed),
                preferred=lambda _: COMPOSED if asked_for else "auto",
            )
        return mixer, mixer.choose(specs, sizes, backends, mode)

    def opens_chunks(self, specs: set[Any], sizes: PoolSizes, backends: Backends) -> bool:
        """Tell whether decode of the layers keeps chunks open (``ops/open_chunk``): where its
        implementation can, and for so many sequences that it is faster."""
        (op, choice), *_ = self.choose(specs, sizes, backends, Mode.DECODE)
        is_able = op.implementations[choice.impl].capability.features >= OPEN
        return is_able and sizes.num_slots >= self.opened_from

    def replays(self, chosen: Sequence[tuple[OpChoice, Choice]]) -> bool:
        """Tell whether what was chosen for steps with drafts runs them in two calls."""
        (op, choice), *_ = chosen
        if self.mixer is None or op.name != self.mixer.name:
            return True
        return not self.mixer.implementations[choice.impl].capability.features >= VERIFY


def _verifying(mixer: OpChoice) -> OpChoice:
    """Require that drafts are verified: in one call, or in two where several tokens are taken.

    "composed" comes last, since it always takes two.
    """

    def able(each: Implementation) -> Implementation:
        features = each.capability.features
        also = VERIFY if features >= EXTEND | NO_STORE else NO_FEATURES
        return replace(each, capability=replace(each.capability, features=features | also))

    known = {name: able(each) for name, each in mixer.implementations.items()}
    composed = known.pop(COMPOSED)
    return replace(mixer, implementations={**known, COMPOSED: composed}, features=VERIFY)


def _timed(
    implementations: Mapping[str, Implementation], sizes: Mapping[str, tuple[int, ...]]
) -> dict[str, Implementation]:
    """Let "triton" serve these sizes alone, at which it was measured."""
    triton = implementations["triton"]
    timed = replace(triton, capability=replace(triton.capability, one_of=sizes))
    return {**implementations, "triton": timed}


def chunked_rule(
    name: str,
    *also: OpChoice,
    implementations: Mapping[str, Implementation],
    sizes: Callable[[Any], dict[str, int]],
    mixer: OpChoice | None = None,
    timed: Mapping[str, tuple[int, ...]] | None = None,
    opened_from: int = 1,
) -> Recurrence:
    """Define a rule with two execution forms: by token in decode, by chunk in extend.

    ``also`` lists the other ops that its layers call. ``mixer`` is the op of all that they do; see
    ``Recurrence``.
    """
    op = OpChoice(name=name, implementations=implementations, sizes=sizes)
    decode, extend = (replace(op, form=form) for form in (RECURRENT, CHUNK))
    return Recurrence(
        decode=(decode, *also),
        extend=(extend, *also),
        mixer=mixer,
        timed=timed or {},
        opened_from=opened_from,
        chunk_size=DEFAULT_CHUNK_SIZE,
    )


class RecurrentBackend(OneForm):
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
        self._statics = {
            mode: Statics(with_mixer(impls_of(each), recurrence.mixer))
            for mode, each in self.choices.items()
        }
        self._replayed = {
            mode for mode, pairs in chosen.items() if mode.num_drafts and recurrence.replays(pairs)
        }
        self._planners, self._layers = {}, {}
        for mode, ((op, choice), *_) in chosen.items():
            self._planners[mode] = op.implementations[choice.impl].load_planner()
            told = [op.sizes(spec) for spec in specs]
            common = {"dtype": sizes.dtype, "device": sizes.device}
            self._layers[mode] = {shape_name(x): {**x, **common} for x in told}

    @classmethod
    def of_ops(cls, ops: Sequence[str], *args: Any) -> RecurrentBackend:
        """Make the planner of layers that call ops without forms or limits, recurrence first.

        The ops' modules are imported by now. ``args`` are the constructor's.
        """
        chosen = tuple(
            CONVOLUTION
            if op == CONVOLUTION.name
            else OpChoice(name=op, implementations=REGISTERED[op], sizes=lambda spec: {})
            for op in ops
        )
        return cls(Recurrence(decode=chosen, extend=chosen), *args)

    def plan(self, batch: Batch, mode: Mode, form: LayerForm) -> RecurrentPlan:
        """Plan one step. Pure: the plan has the batch's tensors, and schedules made from them."""
        return RecurrentPlan(
            **batch.tensors_for(RecurrentPlan),
            planned=plan_layers(self._planners[mode], batch, self._layers[mode]),
            statics=self._statics[mode],
            replay=plan_replay(batch, mode) if mode in self._replayed else None,
        )


def with_mixer(
    impls: tuple[tuple[str, str], ...], mixer: OpChoice | None
) -> tuple[tuple[str, str], ...]:
    """Add the mixer's op, which is composed of the ops that are listed unless it is one of them."""
    if mixer is None or mixer.name in dict(impls):
        return impls
    return (*impls, (mixer.name, COMPOSED))


StepT = TypeVar("StepT", bound=OpenStep)


def run_mixer(
    op: Callable[..., Tensor],
    x: StepT,
    plan: RecurrentPlan,
    cache: LayerCache,
    sizes: Mapping[str, int],
) -> Tensor:
    """Run the op of all between a layer's projections, with the step's drafts if it has some.

    Args:
        op: public function of the op.
        x: its arguments, less drafts; ``x.impl`` is what the plan names.
        plan: plan of the step.
        cache: the layer's pools. Mutated at the slots that the plan names.
        sizes: those of the layer that planners are told.
    """
    if plan.accepted is not None:
        x = replace(x, records=cache[RECORDS], accepted=plan.accepted)
    if OPEN_CHUNK in cache:
        given: dict[str, Any] = {"chunk": cache[OPEN_CHUNK]}
        x = _closed(op, x, given) if x.impl == COMPOSED else replace(x, **given)
    if x.impl == COMPOSED:
        planned = planned_for(plan.planned, sizes)
        x = replace(x, parts=Parts(impls=plan.statics.impls, planned=planned, replay=plan.replay))
    elif plan.replay is not None:  # it takes several tokens, and verifies in two calls
        return verify_by_replay(op, x, plan.replay)
    return op(x)


def _closed(op: Callable[..., Tensor], x: StepT, chunk: dict[str, Any]) -> StepT:
    """Close the open chunks of a step's sequences, which then start from their own slots."""
    known = x.implementations.items()
    opening = next(name for name, each in known if each.capability.features >= OPEN)
    op(replace(x.without_tokens(), **chunk, impl=opening))
    starts = torch.where(x.initial_indices > 0, x.state_indices, 0)
    own: dict[str, Any] = {"initial_indices": starts}
    return replace(x, **own)


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
    return run_rule(
        conv.causal_conv1d,
        (x,),
        (weight, bias, cache["conv"]),
        plan,
        cache,
        reading={name: tensor for name, tensor in of_outputs.items() if tensor is not None},
        options={"activation": activation, "input_gate": input_gate},
        records=RECORDS,
    )


_NOTHING: Mapping[str, Any] = {}


def run_rule(
    op: Callable[..., Tensor],
    advancing: Sequence[Tensor],
    given: Sequence[Tensor | None],
    plan: RecurrentPlan,
    cache: LayerCache,
    *,
    reading: Mapping[str, Tensor] = _NOTHING,
    options: Mapping[str, object] = _NOTHING,
    records: str = STATE_RECORDS,
) -> Tensor:
    """Run an op over a step's tokens, whose states or last inputs are in ``given``.

    Args:
        op: public function; the plan names its implementation.
        advancing: [T, ...] each, the first arguments, which states depend on.
        given: arguments that follow, up to those of sequences. Pools among them are mutated.
        plan, cache, records: as ``walk`` takes them.
        reading: [T, ...] each, arguments that outputs alone depend on.
        options: other arguments.
    """

    def run(advanced: Sequence[Tensor], read: Sequence[Tensor], at: At) -> Tensor:
        return op(
            *advanced,
            *given,
            at.cu_seqlens,
            at.initial_indices,
            at.state_indices,
            **dict(zip(reading, read, strict=True)),
            **options,
            impl=plan.statics.impl(op.__name__),
        )

    return walk(run, advancing, [*reading.values()], plan, cache, records)
