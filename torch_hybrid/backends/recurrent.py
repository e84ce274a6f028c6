"""Mixers with a recurrent state: what a step needs, whatever the recurrence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torch_hybrid.backends.mode import ONLY_FORM, Form, Mode
from torch_hybrid.backends.select import Backends, Choice, select
from torch_hybrid.batch import Batch
from torch_hybrid.caches.sizes import PoolSizes
from torch_hybrid.ops.capability import Implementation, Need
from torch_hybrid.ops.causal_conv1d import op as conv
from torch_hybrid.ops.recurrence import DEFAULT_CHUNK_SIZE
from torch_hybrid.pytrees import register_constant, register_value
from torch_hybrid.specs import LayerEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentStatics:
    """What is part of the graph: the form of the recurrence and the implementations."""

    chunked: bool
    rule_impl: str
    conv_impl: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentPlan:
    """Where the N sequences of a step keep their states."""

    cu_seqlens: Tensor  # [N + 1]
    state_indices: Tensor  # [N]
    has_initial_state: Tensor  # [N] bool
    statics: RecurrentStatics


register_constant(RecurrentStatics)
register_value(RecurrentPlan)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence:
    """The ops of one recurrence: two execution forms, after a convolution or not.

    ``sizes`` gives, from a layer's facts, the sizes that an implementation may limit.
    """

    name: str
    recurrent: Mapping[str, Implementation]
    chunk: Mapping[str, Implementation]
    sizes: Callable[[Any], dict[str, int]]
    convolved: bool = True
    chunk_size: int = DEFAULT_CHUNK_SIZE


class RecurrentBackend:
    """Plans steps for the layers of one recurrence of one model.

    Decode takes the recurrent form, extend the chunk form.
    """

    def __init__(
        self,
        recurrence: Recurrence,
        entries: tuple[LayerEntry, ...],
        sizes: PoolSizes,
        backends: Backends,
        modes: Sequence[Mode],
    ) -> None:
        """Choose an implementation for each of ``modes`` that serves every layer in ``entries``."""
        self.chunk_size = recurrence.chunk_size
        specs: set[Any] = {entry.spec for entry in entries}

        def choose(
            op: str,
            implementations: Mapping[str, Implementation],
            sizes_of: Callable[[Any], dict[str, int]],
            preferred: str,
        ) -> Choice:
            needs = [
                Need(device=sizes.device, dtype=sizes.dtype, sizes=sizes_of(spec)) for spec in specs
            ]
            return select(op, implementations, needs, preferred)

        convolutions: tuple[Choice, ...] = ()
        if recurrence.convolved:
            width = _conv_width
            convolutions = (choose("causal_conv1d", conv.IMPLEMENTATIONS, width, backends.conv),)
        rules = {
            Mode.DECODE: (f"recurrent_{recurrence.name}", recurrence.recurrent),
            Mode.EXTEND: (f"chunk_{recurrence.name}", recurrence.chunk),
        }
        self.choices = {
            mode: (choose(*rules[mode], recurrence.sizes, backends.linear), *convolutions)
            for mode in modes
        }

    def forms(self, mode: Mode) -> tuple[Form, ...]:
        """Steps of a mode all run in one form."""
        return (ONLY_FORM,)

    def form_of(self, batches: Sequence[Batch], mode: Mode) -> Form:
        """As ``forms`` says."""
        return ONLY_FORM

    def plan(self, batch: Batch, mode: Mode, form: Form) -> RecurrentPlan:
        """The plan of one step. Pure."""
        rule_choice, *conv_choice = self.choices[mode]
        query_lens = batch.cu_seqlens[1:] - batch.cu_seqlens[:-1]
        return RecurrentPlan(
            cu_seqlens=batch.cu_seqlens,
            state_indices=batch.state_indices,
            has_initial_state=batch.seq_lens > query_lens,
            statics=RecurrentStatics(
                chunked=mode is Mode.EXTEND,
                rule_impl=rule_choice.impl,
                conv_impl=conv_choice[0].impl if conv_choice else "none",
            ),
        )


def _conv_width(spec: Any) -> dict[str, int]:
    return {"conv_width": spec.conv_width}


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    plan: RecurrentPlan,
    state: Tensor,
    *,
    activation: str,
) -> Tensor:
    """Causal convolution and activation of x [T, C] -> [T, C]; advances ``state``."""
    return conv.causal_conv1d(
        x,
        weight,
        bias,
        state,
        plan.cu_seqlens,
        plan.state_indices,
        plan.has_initial_state,
        activation=activation,
        impl=plan.statics.conv_impl,
    )
