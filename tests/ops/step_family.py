"""A mixer's decode step, which is one op: what its tests and benchmarks are told of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

from tests.ops.declared import RecurrentInputs
from torch_hybrid.ops.core.capability import Implementation
from torch_hybrid.ops.core.declaration import Declaration


class Inputs(RecurrentInputs):
    """Mixin of a step's class, whose instances are inputs of a test."""

    __slots__ = ()

    def tensors(self) -> dict[str, Tensor | None]:
        """All that is given by position, by name."""
        return {each.name: getattr(self, each.name) for each in fields(self) if not each.kw_only}

    def options(self) -> dict[str, Any]:
        """What is given by name, but what is an implementation's matter, drafts and chunks."""
        named = (each.name for each in fields(self) if each.kw_only)
        return {name: getattr(self, name) for name in named if name not in _APART}

    def held(self) -> dict[str, Tensor]:
        """What the op changes, by name."""
        found = ((name, getattr(self, name, None)) for name in ("conv_state", "state"))
        return {name: pool for name, pool in found if pool is not None}

    def tokens(self, index: Tensor | slice) -> dict[str, Tensor]:
        """The per-token tensors at ``index``, by name."""
        rows = ((name, getattr(self, name)) for name in self.per_token)
        return {name: x[index] for name, x in rows if x is not None}

    def empty_records(self, num_drafts: int, fill: float = torch.nan) -> Tensor:
        """Room for the inputs of drafts of each slot, as the op declares them."""
        declaration = Declaration(type(self))
        kind = declaration.kinds["records"]
        like = getattr(self, declaration.first) if kind.dtype is None else self.state
        width = declaration.evaluate(kind.dims[-1], self)
        return like.new_full((len(self.state), num_drafts, width), fill)

    def without_memory(self) -> Self:
        """The same on tensors that lie alike and hold nothing."""
        given = {name: x for name, x in self.tensors().items() if x is not None}
        return self.changed(
            **{
                name: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
                for name, x in given.items()
            }
        )

    def empty_chunk(self, fill: float = torch.nan) -> Tensor:
        """Records of open chunks of all slots, of which nobody has any."""
        return self.state.new_full((len(self.state), self.chunk_width), fill)

    def changed(self, **changes: Any) -> Self:
        """The same but for some fields."""
        return replace(self, **changes)

    @property
    def out_dtype(self) -> torch.dtype:
        return getattr(self, self.per_token[0]).dtype


_APART = {"impl", "records", "accepted", "parts", "chunk"}


@dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """A step: its op, its oracle and its inputs. ``cases`` has one named "mixed"."""

    op: Callable[..., Tensor]
    implementations: Mapping[str, Implementation]
    reference: Callable[[Any], Tensor]
    cases: Mapping[str, Any]
    make_inputs: Callable[..., Any]

    def run(self, inputs: Inputs, impl: str) -> Tensor:
        return self.op(*inputs.args(), **inputs.options(), impl=impl)

    def by_reference(self, inputs: Inputs) -> Tensor:
        return self.reference(inputs)

    def mixed(self, **changes: object) -> Any:
        return self.make_inputs(replace(self.cases["mixed"], **changes))
