"""Ops that are declared once: a class whose fields are the arguments of an op.

    @dataclass(slots=True)
    class Scale(Op):
        '''Multiply each row by a factor. ...'''

        x: Annotated[Tensor, Rows("D")]
        factor: Annotated[Tensor, Dense("D")]
        state: Annotated[Tensor, Pool("D", dtype=torch.float32)]  # mutated
        cu_seqlens: Annotated[Tensor, Index("N + 1")]
        state_indices: Annotated[Tensor, Index("N", counts=True)]
        bound: float = field(default=1.0, kw_only=True)

    scale = define(Scale, IMPLEMENTATIONS, returns=like("x"))

From the fields follow the public function with its checks, the schema with its mutations, the fake,
and the call of a C++ kernel (``load_cpp``). A launcher takes the class itself: ``scale(x)``
reads ``x.factor``.

Letters are sizes. A field of rows, weights or a pool binds the letters that it is the first to
name; ``counts=True`` lets an index tensor bind its own. Other dimensions are expressions of them.
``chunk_size: Annotated[int, NO_DEFAULT] = field(default=32, kw_only=True)`` is an option whose
default the public function alone has, and the schema has not. ``OneOf(16, 32)`` beside the type
lists allowed values. Letters that an optional field binds are of its own dimensions alone.
``pools: Annotated[Sequence[Tensor], MUTATED]`` are tensors of any number, whose forms the op's
``check`` knows; without ``MUTATED`` the op only reads them. What an
implementation's planner made comes as
``planned: Sequence[Tensor] | None = field(default=(), kw_only=True)``, which is empty or None where
nothing was planned. A field with ``TRACED`` is for implementations that ``is_traced`` alone: the
schema has it not.

A public function takes a value of the class too: ``scale(x)`` is a call with all its fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ParamSpec, TypeVar, cast

import torch

from torch_hybrid.ops.core.capability import CPP_LOADERS, FLOATS_AND_FLOAT64, Implementation
from torch_hybrid.ops.core.cpp_launcher import Cpp, load_cpp
from torch_hybrid.ops.core.declaration import Declaration, fail_count, fail_ndim
from torch_hybrid.ops.core.kinds import (
    MUTATED,
    NO_DEFAULT,
    NOTHING,
    TRACED,
    Dense,
    Index,
    OneOf,
    Pool,
    Returns,
    Rows,
    Strided,
    like,
    made,
    pair_like,
    pair_made,
    several_made,
)
from torch_hybrid.ops.core.op import Op, StatefulOp
from torch_hybrid.ops.core.registration import define_op

__all__ = [
    "MUTATED",
    "NOTHING",
    "NO_DEFAULT",
    "TRACED",
    "Cpp",
    "Dense",
    "Index",
    "OneOf",
    "Op",
    "Pool",
    "Returns",
    "Rows",
    "StatefulOp",
    "Strided",
    "define",
    "like",
    "made",
    "pair_like",
    "pair_made",
    "several_made",
]

P = ParamSpec("P")
R = TypeVar("R")

DECLARED: dict[str, Declaration] = {}  # by the op's name, in the order of definition


def define(
    op: Callable[P, Op],
    implementations: Mapping[str, Implementation],
    *,
    returns: Returns[R],
    limited: Mapping[str, str] | None = None,
    floats: frozenset[torch.dtype] = FLOATS_AND_FLOAT64,
    names_ndim: bool = False,
    flops: str = "0",
    backward: Callable[..., Any] | None = None,
    saves_results: int = 0,
    cpp: Cpp | None = None,
) -> Callable[P, R]:
    """Register a declared op, and return its public function.

    A declaration of the same name replaces an earlier one of the same module, as a cell of a
    notebook does that runs again.

    Args:
        op: a dataclass derived from ``Op``.
        implementations: by name. Each launcher takes an instance of ``op``.
        returns: what the op returns.
        limited: sizes that a ``Capability`` may limit, as letters or expressions of the arguments,
            by its names of them.
        floats: dtypes that the op's own may be; empty leaves them to the implementations.
        names_ndim: whether the error for a number of dimensions names theirs, not the shape.
        flops: multiplications and additions of products in a call, as an expression of letters
            and of ``x``, an instance of ``op``.
        backward: of an op without pools; see ``autograd.register_with_backward``.
        saves_results: likewise.
        cpp: names of a C++ kernel that do not follow from the fields.

    Raises:
        ValueError: another module has declared an op of this name.
    """
    declaration = Declaration(cast(type[Op], op))
    earlier, module = DECLARED.get(declaration.name), op.__module__
    if earlier is not None and earlier.cls.__module__ != module:
        raise ValueError(
            f"op {declaration.name!r} of {module} needs another name: "
            f"{earlier.cls.__module__} has declared one"
        )
    CPP_LOADERS[declaration.name] = partial(load_cpp, declaration, returns, cpp or Cpp())
    DECLARED[declaration.name] = declaration
    cls, first, make_fake = declaration.cls, declaration.first, returns.fake
    cls.implementations = implementations

    def check(x: Op) -> None:
        if getattr(x, first).device.type == "cpu":
            x.check_indices()

    def fake(*args: Any, **options: Any) -> Any:
        assert make_fake is not None
        return make_fake(cls(*args, **options))

    overload = define_op(
        declaration.schema(returns),
        implementations=implementations,
        like=returns.like,
        fake=None if make_fake is None else fake,
        value=cls,
        check=check,
        flops=partial(declaration.evaluate, flops),
        backward=backward,
        saves_results=saves_results,
    )
    known = {"floats": floats, "fail_ndim": fail_count if names_ndim else fail_ndim}
    public = declaration.public(overload, implementations, limited or {}, known)
    return cast(Callable[P, R], public)
