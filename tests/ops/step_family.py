"""A mixer's decode step, which is one op: what its tests and benchmarks are told of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from torch_hybrid.ops.core.capability import Implementation
from torch_hybrid.ops.verify import StepOp


class Inputs:
    """The tensors of a call and its options: a kind of step has a dataclass of these, whose fields
    are in the op's order.

    Attributes:
        OPTIONS: the fields that are no tensors.
        PER_TOKEN: those with a row for each token; the first is what the op is named by.
    """

    __slots__ = ()
    OPTIONS: ClassVar[tuple[str, ...]]
    PER_TOKEN: ClassVar[tuple[str, ...]]

    def tensors(self) -> dict[str, Tensor | None]:
        """All tensors, by name."""
        names = (each.name for each in fields(self))  # type: ignore[arg-type]
        return {name: getattr(self, name) for name in names if name not in self.OPTIONS}

    def args(self) -> tuple[Tensor | None, ...]:
        return tuple(self.tensors().values())

    def options(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.OPTIONS}

    def pools(self) -> dict[str, Tensor]:
        """What the op changes, by name."""
        found = ((name, getattr(self, name, None)) for name in ("conv_state", "state"))
        return {name: pool for name, pool in found if pool is not None}

    def tokens(self, index: Tensor | slice) -> dict[str, Tensor]:
        """The per-token tensors at ``index``, by name."""
        rows = ((name, getattr(self, name)) for name in self.PER_TOKEN)
        return {name: x[index] for name, x in rows if x is not None}

    def copy(self) -> Self:
        """The same inputs with pools of their own."""
        return self.changed(**{name: pool.clone() for name, pool in self.pools().items()})

    def exact(self) -> Self:
        """The same values in float64."""
        tensors = {name: x for name, x in self.tensors().items() if x is not None}
        return self.changed(**{n: x.double() for n, x in tensors.items() if x.is_floating_point()})

    def changed(self, **changes: Any) -> Self:
        """The same but for some fields."""
        return replace(self, **changes)  # type: ignore[type-var]

    def written_slots(self) -> Tensor:
        is_written = (self.cu_seqlens.diff() > 0) & (self.state_indices > 0)
        return self.state_indices[is_written]

    @property
    def out_dtype(self) -> torch.dtype:
        return getattr(self, self.PER_TOKEN[0]).dtype


@dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """A step: its op, its oracle and its inputs. ``cases`` has one named "mixed".

    ``value`` is the class of its arguments, which the oracle takes.
    """

    op: Callable[..., Tensor]
    value: type[StepOp]
    implementations: Mapping[str, Implementation]
    reference: Callable[[Any], Tensor]
    cases: Mapping[str, Any]
    make_inputs: Callable[..., Any]

    def run(self, inputs: Inputs, impl: str) -> Tensor:
        return self.op(*inputs.args(), **inputs.options(), impl=impl)

    def by_reference(self, inputs: Inputs) -> Tensor:
        return self.reference(self.value(*inputs.args(), **inputs.options(), impl="reference"))

    def chunk_of(self, inputs: Inputs, fill: float = torch.nan) -> Tensor:
        """Records of all slots, of which nobody has any."""
        step: Any = self.value(*inputs.args(), **inputs.options(), impl="triton")
        return step.state.new_full((len(step.state), step.chunk_width), fill)

    def mixed(self, **changes: object) -> Any:
        return self.make_inputs(replace(self.cases["mixed"], **changes))
