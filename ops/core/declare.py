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
and the call of a C++ kernel (``cpp_launcher``). A launcher takes the class itself: ``scale(x)``
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

import linecache
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import partial, wraps
from itertools import pairwise
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Generic,
    Literal,
    ParamSpec,
    TypeVar,
    cast,
    get_args,
    get_type_hints,
)

import torch
from torch import Tensor

from torch_hybrid.ops.core.capability import (
    CPP_LOADERS,
    FLOATS_AND_FLOAT64,
    NO_FEATURES,
    Implementation,
)
from torch_hybrid.ops.core.docs import complete_doc
from torch_hybrid.ops.core.recurrence import fail_rows, has_dense_rows
from torch_hybrid.ops.core.registration import (
    LAUNCHERS,
    check_contiguous,
    check_dtypes,
    check_impl,
    check_planned,
    check_shapes,
    define_op,
    given,
    load_traced,
    plain_reads,
)
from torch_hybrid.ops.core.state_bounds import check_offsets
from torch_hybrid.ops.native import cpu_tuning
from torch_hybrid.ops.native.call import declared_fields, kernel

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(slots=True, repr=False, eq=False)
class Op:
    """Arguments of one call of an op; subclasses declare them as fields.

    A launcher may hand its value on to another implementation: ``scale(x, impl="torch")``. What
    follows stands in the docstring of every op that says nothing else of it.

    Args:
        impl: a name among the op's implementations.
        planned: for an implementation that plans, what its planner made for these lengths: its
            tensors, and its values as a tensor on the host.

    Raises:
        ValueError: a shape, dtype, layout or option is not as above, or ``impl`` is unknown or
            does not take these. Or, where reading it is free (on a CPU), an index is out of range.
    """

    impl: str = field(kw_only=True)

    def features(self) -> frozenset[str] | None:
        """List the features that an implementation must have for these arguments.

        None asks for nothing: those that an implementation is made for need not be there either.
        """
        return NO_FEATURES

    def check_form(self) -> None:
        """Raise ValueError, in words of the op's own, for forms that the fields refuse too; no
        other check comes before."""

    def check(self) -> None:
        """Raise ValueError for values that no kind of field can refuse; kinds hold by now."""

    def check_indices(self) -> None:
        """Raise ValueError for an index out of range; tensors are on the host."""


class StatefulOp(Op):
    """Op that reads and writes states of sequences in slots of a pool.

    Args:
        cu_seqlens: [N + 1] int32 offsets of the sequences in T, from 0. Tokens at or past
            ``cu_seqlens[N]`` are padding. An empty sequence leaves its slot as it is.
        initial_indices: [N] int32 slot that each sequence starts from; 0, the null slot, is the
            zero state. Several may start from one slot, which no other one may then write.
        state_indices: [N] int32 slot that receives the state of each sequence, distinct except
            for 0: that state is not stored.

    Attributes:
        pool_name: of the field that is the pool.
    """

    __slots__ = ()
    pool_name: ClassVar[str] = "state"

    if TYPE_CHECKING:
        cu_seqlens: Tensor
        initial_indices: Tensor
        state_indices: Tensor

    def each_sequence(self) -> Iterator[tuple[range, int, int]]:
        """Yield the tokens of each sequence that has some, and the slots it reads and writes."""
        offsets = pairwise(self.cu_seqlens.tolist())
        slots = self.initial_indices.tolist(), self.state_indices.tolist()
        for (begin, end), initial, slot in zip(offsets, *slots, strict=True):
            if begin < end:
                yield range(begin, end), initial, slot

    def check_indices(self) -> None:
        """Raise ValueError unless sequences are among the rows of the first field, slots in a pool.

        No sequence may start from a slot that another one writes.
        """
        first = next(each for each in fields(self) if not each.kw_only)
        check_offsets(self.cu_seqlens, num_tokens=getattr(self, first.name).shape[0])
        num_slots = getattr(self, self.pool_name).shape[0]
        read, written = self.initial_indices.tolist(), self.state_indices.tolist()
        for name, slots in {"initial_indices": read, "state_indices": written}.items():
            for slot in slots:
                if not 0 <= slot < num_slots:
                    raise ValueError(f"{name} must be in [0, {num_slots}), got {slot}")
        is_live = self.cu_seqlens.diff().tolist()
        taken = {slot: n for n, slot in enumerate(written) if is_live[n]}
        for n, slot in enumerate(read):
            if slot and is_live[n] and taken.get(slot, n) != n:
                raise ValueError(
                    f"sequence {n} must not start from slot {slot}, which sequence {taken[slot]} "
                    "writes"
                )


class _Kind:
    """A tensor's dimensions, dtype and layout.

    Args:
        dims: sizes after the leading one, as letters, numbers and expressions; "..." where the
            op's ``check`` knows the shape.
        dtype: of the tensor, or several of them; None for that of the first field, "work" for
            float32 or for the first field's where that is wider, "any" where ``check`` knows it.
        or_float32: whether it may be float32 besides.
        counts: whether the field binds the letters of its dims that no field before it binds; or
            those that it binds, where it leaves others to a later field.
        last_dim: whether only the last dimension must be contiguous.
    """

    leading: tuple[str, ...] = ()

    def __init__(
        self,
        *dims: str,
        dtype: torch.dtype | tuple[torch.dtype, ...] | Literal["work", "any"] | None = None,
        or_float32: bool = False,
        counts: bool | str = True,
        last_dim: bool = False,
    ) -> None:
        self.dims = (*self.leading, *dims)
        self.dtype = dtype
        self.has_shape = "..." not in dims
        self.or_float32 = or_float32
        self.last_dim = last_dim
        named = counts.split() if isinstance(counts, str) else self.dims if counts else ()
        self.counted = named if self.has_shape else ()


class Rows(_Kind):
    """[T, *dims]: a row for each token; rows lie any distance apart, one row is dense.

    Args:
        dims: sizes of a row.
        apart: how many dimensions lie any distance apart, from the first on.
        dtype, counts, last_dim: as in any kind.
    """

    leading = ("T",)

    def __init__(
        self,
        *dims: str,
        apart: int = 1,
        dtype: torch.dtype | Literal["work", "any"] | None = None,
        counts: bool | str = True,
        last_dim: bool = False,
    ) -> None:
        super().__init__(*dims, dtype=dtype, counts=counts, last_dim=last_dim)
        self.apart = apart


class Dense(_Kind):
    """[*dims], contiguous."""


class Strided(_Kind):
    """[*dims], whatever its strides; ``check`` may refuse some. ``*x.shape`` are all dims of x."""


class Pool(_Kind):
    """[S, *dims], contiguous; the op mutates it. A second pool names a ``size`` of its own.

    Where the field may be None, nothing is mutated then.
    """

    def __init__(
        self,
        *dims: str,
        dtype: torch.dtype | Literal["any"] | None = None,
        size: str = "S",
        counts: bool | str = True,
    ) -> None:
        self.leading = (size,)
        super().__init__(*dims, dtype=dtype, counts=counts)


class OneOf:
    """Option of allowed values: ``Annotated[int, OneOf(16, 32)]``."""

    def __init__(self, *values: int) -> None:
        self.values = values


class Index(_Kind):
    """[*dims] int32, contiguous."""

    def __init__(self, *dims: str, counts: bool = False, last_dim: bool = False) -> None:
        super().__init__(*dims, dtype=torch.int32, counts=counts, last_dim=last_dim)


@dataclass(frozen=True, slots=True)
class Returns(Generic[R]):
    """Tensors that an op returns.

    Attributes:
        like: fields whose shapes and dtypes the tensors have; empty where ``fake`` makes them.
        fake: makes empty tensors of the right shapes and dtypes from an instance of the op.
        num_tensors: how many there are; 0 is None.
    """

    like: tuple[str, ...] = ()
    fake: Callable[[Any], Tensor | tuple[Tensor, ...]] | None = None
    num_tensors: int = 1


def like(name: str) -> Returns[Tensor]:
    """Return one tensor with shape and dtype of a field."""
    return Returns(like=(name,))


def pair_like(first: str, second: str) -> Returns[tuple[Tensor, Tensor]]:
    """Return two tensors with shapes and dtypes of fields."""
    return Returns(like=(first, second), num_tensors=2)


def made(fake: Callable[[Any], Tensor]) -> Returns[Tensor]:
    """Return one tensor whose shape and dtype ``fake`` knows."""
    return Returns(fake=fake)


def pair_made(fake: Callable[[Any], tuple[Tensor, Tensor]]) -> Returns[tuple[Tensor, Tensor]]:
    """Return two tensors whose shapes and dtypes ``fake`` knows."""
    return Returns(fake=fake, num_tensors=2)


def several_made(
    count: int, fake: Callable[[Any], tuple[Tensor, ...]]
) -> Returns[tuple[Tensor, ...]]:
    """Return as many tensors, three or more, whose shapes and dtypes ``fake`` knows."""
    return Returns(fake=fake, num_tensors=count)


@dataclass(frozen=True, slots=True)
class Cpp:
    """Names that the struct of a C++ kernel has for what the op calls otherwise.

    Attributes:
        sizes: letters, or expressions of them without blanks: ``"D//2=half_dim"``. T, N, S, P and M
            are ``num_tokens``, ``num_seqs``, ``num_slots``, ``num_pages`` and ``max_pages``.
        values: expressions of ``x``, an instance of the op's class, by name.
    """

    sizes: str = ""
    values: Mapping[str, str] = field(default_factory=dict)


NOTHING: Returns[None] = Returns(num_tensors=0)
NO_DEFAULT = "no default in the schema"  # beside an option's type
MUTATED = "mutated"  # beside the type of tensors of any number
TRACED = "for traced implementations alone"  # beside a type that no schema has

_PLANNED = "planned"  # field

DECLARED: dict[str, Declaration] = {}  # by the op's name, in the order of definition

_CPP_SIZES = ("T=num_tokens", "N=num_seqs", "S=num_slots", "P=num_pages", "M=max_pages")
_SCHEMA_TYPES = {
    float: "float",
    int: "int",
    bool: "bool",
    str: "str",
    int | None: "int?",
    float | None: "float?",
    Sequence[float] | None: "float[]?",
    torch.dtype: "ScalarType",
    torch.dtype | None: "ScalarType?",
    Sequence[Tensor]: "Tensor[]",
    Sequence[Tensor] | None: "Tensor[]?",
    Sequence[Tensor | None]: "Tensor?[]",
}


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
    """
    declaration = Declaration(cast(type[Op], op))
    CPP_LOADERS[declaration.name] = partial(_load_cpp, declaration, returns, cpp or Cpp())
    DECLARED[declaration.name] = declaration
    cls, first, make_fake = declaration.cls, declaration.first, returns.fake

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
    known = {"floats": floats, "fail_ndim": _fail_count if names_ndim else _fail_ndim}
    public = declaration.public(overload, implementations, limited or {}, known)
    return cast(Callable[P, R], public)


class Declaration:
    """Facts that follow from the fields of an op's class.

    Attributes:
        name: of the op: the class's name in lower case.
        kinds: of the tensors, by field.
        optional: tensors that may be None.
        first: tensor, whose device the op runs on.
        floating: the first tensor without a dtype of its own, which others share; if any.
        bound: the field and axis that bind each letter.
        takes_plan: whether implementations may plan.
    """

    def __init__(self, cls: type[Op]) -> None:
        self.cls = cls
        self.name = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
        self._hints = get_type_hints(cls, include_extras=True)
        own = [each for each in fields(cls) if each.name != "impl"]
        own.sort(key=lambda each: each.kw_only is True)  # a base's may be by name
        self._traced = [each for each in own if TRACED in _metadata(self._hints[each.name])]
        self._fields = [each for each in own if each not in self._traced]
        self.kinds: dict[str, _Kind] = {
            each.name: kind
            for each in self._fields
            for kind in _metadata(self._hints[each.name])
            if isinstance(kind, _Kind)
        }
        self.first = next(iter(self.kinds))
        self.floating = next((name for name, kind in self.kinds.items() if kind.dtype is None), "")
        self.optional = {
            name for name in self.kinds if type(None) in get_args(_bare(self._hints[name]))
        }
        self.takes_plan = any(each.name == _PLANNED for each in self._fields)
        self.bound: dict[str, tuple[str, int]] = {}
        for name, kind in self.kinds.items():
            for axis, letter in enumerate(kind.dims):
                if letter.isidentifier() and letter in kind.counted:
                    self.bound.setdefault(letter, (name, axis))

    def evaluate(self, expression: str, call: Op) -> int:
        """Compute an expression of letters, from the shapes of a call, and of the call, ``x``."""
        tensors = {letter: getattr(call, name) for letter, (name, _) in self.bound.items()}
        sizes = {n: x.shape[self.bound[n][1]] for n, x in tensors.items() if x is not None}
        return int(eval(expression, {**sizes, "x": call}))

    def schema(self, returns: Returns[Any]) -> str:
        """Write the schema, in which pools are marked as mutated."""
        letters = iter("abcdefghijklmnop")

        def declared(each: Field[Any]) -> str:
            if each.name == _PLANNED:
                return f"Tensor[]? {_PLANNED}=None"
            if (kind := self.kinds.get(each.name)) is None:
                hint = self._hints[each.name]
                is_bare = each.default is MISSING or NO_DEFAULT in _metadata(hint)
                default = "" if is_bare else f"={each.default!r}".replace("'", '"')
                written = _SCHEMA_TYPES[_bare(hint)]
                if MUTATED in _metadata(hint):
                    written = written.replace("Tensor", f"Tensor({next(letters)}!)")
                return f"{written} {each.name}{default}"
            mark = f"({next(letters)}!)" if isinstance(kind, Pool) else ""
            default = "" if each.default is MISSING else "=None"
            return f"Tensor{mark}{'?' * (each.name in self.optional)} {each.name}{default}"

        positional, before, after = (map(declared, part) for part in self._ordered())
        results = ["Tensor"] * returns.num_tensors
        result = "Tensor" if len(results) == 1 else f"({', '.join(results)})"
        arguments = ", ".join([*positional, "*", *before, "str impl", *after])
        return f"{self.name}({arguments}) -> {result}"

    def _ordered(self) -> tuple[list[Field[Any]], list[Field[Any]], list[Field[Any]]]:
        """Order the fields as a call has them: by position, and by name around ``impl``."""
        by_name = [each for each in self._fields if each.kw_only]
        tensors = {*self.kinds, _PLANNED}
        return (
            [each for each in self._fields if not each.kw_only],
            [each for each in by_name if each.name not in tensors],
            [each for each in by_name if each.name in tensors],
        )

    def public(
        self,
        overload: Callable[..., Any],
        implementations: Mapping[str, Implementation],
        limited: Mapping[str, str],
        known: Mapping[str, object],
    ) -> Callable[..., Any]:
        """Make the function that users call: straight-line checks, then the op."""
        scope = _SCOPE | {f"default_{name}": value for name, value in self._defaults().items()}
        scope |= {"cls": self.cls, "op": overload, "implementations": implementations}
        scope |= {"op_name": self.name, "traced": LAUNCHERS[self.name]}
        scope |= known
        is_traced = any(each.is_traced for each in implementations.values())
        code = self._code(limited, has_floats=bool(known["floats"]), is_traced=is_traced)
        function: Callable[..., Any] = compile_function("\n".join(code), self.name, scope)
        call_of: Callable[..., Any] = scope["call"]
        function.__module__ = self.cls.__module__
        every = [each for part in self._ordered() for each in part]
        named = [*(each.name for each in [*every, *self._traced]), "impl"]
        function.__doc__ = self.cls.__doc__ = complete_doc(self.cls, named)
        hints = self._hints
        function.__annotations__ = {e.name: _bare(hints[e.name]) for e in fields(self.cls)}

        @wraps(function)
        def call(*args: Any, **named: Any) -> Any:
            if not args or not isinstance(args[0], self.cls):
                return function(*args, **named)
            if not named:
                return call_of(args[0])
            return overload(*self._values(args[0]), **self._named(args[0]), **named)

        return call

    def _defaults(self) -> dict[str, object]:
        every = [*self._fields, *self._traced]
        return {each.name: each.default for each in every if each.default is not MISSING}

    def _code(
        self, limited: Mapping[str, str], *, has_floats: bool, is_traced: bool
    ) -> Iterator[str]:
        """Write the public function, and ``call``, which is given a value of the op's class."""
        passed = ", ".join(
            f"{each.name}={each.name}" if each.kw_only else each.name for each in self._fields
        )
        yield f"def {self.name}({self._parameters()}):"
        yield "    with plain_reads():"
        for check in self._all_checks(passed, limited, has_floats=has_floats, is_traced=is_traced):
            yield f"    {check}"
        if self.takes_plan:
            passed = passed.replace(f"{_PLANNED}={_PLANNED}", f"**given({_PLANNED})")
        if is_traced:
            yield "    if implementations[impl].is_traced:"
            yield f"        if {self.first}.device.type == 'cpu' and not is_compiling():"
            yield "            _given.check_indices()"
            yield "        load_traced(op_name, impl)"
            yield "        return traced[impl](_given)"
        yield f"    return op({passed}, impl=impl)"
        values = ", ".join(f"{each.name}=x.{each.name}" for each in [*self._fields, *self._traced])
        yield f"def call(x): return {self.name}({values}, impl=x.impl)"

    def _all_checks(
        self, passed: str, limited: Mapping[str, str], *, has_floats: bool, is_traced: bool
    ) -> Iterator[str]:
        """Write the checks of tensors, of options and of the implementation."""
        own = {name for name, method in _CHECKS.items() if getattr(self.cls, name) is not method}
        if own or is_traced:
            also = "".join(f", {each.name}={each.name}" for each in self._traced)
            yield f"    _given = cls({passed}, impl=impl{also})"
        if "check_form" in own:
            yield "    _given.check_form()"
        if has_floats:
            fail = f"fail_floats('{self.floating}', {self.floating})"
            yield f"    if {self.floating}.dtype not in floats: {fail}"
        yield from self._checks()
        for each in self._fields:
            for option in _metadata(self._hints[each.name]):
                if isinstance(option, OneOf):
                    fail = f"fail_option('{each.name}', {each.name}, {option.values})"
                    yield f"    if {each.name} not in {option.values}: {fail}"
        if "check" in own:
            yield "    _given.check()"
        sizes = ", ".join(f"'{size}': {letter}" for size, letter in limited.items())
        asked = f"impl, implementations, {self.first}.device, {{{sizes}}}"
        asked += f", dtype={self.floating}.dtype" * bool(self.floating)
        asked += ", features=_given.features()" * ("features" in own)
        yield f"    check_impl({asked})"
        if self.takes_plan:
            yield f"    check_planned(impl, implementations, {_PLANNED})"

    def _parameters(self) -> str:
        """Write the parameters in the order of a call."""
        defaults = self._defaults()

        def parameter(each: Field[Any]) -> str:
            return f"{each.name}=default_{each.name}" if each.name in defaults else each.name

        positional, before, after = (map(parameter, part) for part in self._ordered())
        return ", ".join([*positional, "*", *before, "impl", *after, *map(parameter, self._traced)])

    def _values(self, call: Op) -> list[Any]:
        return [getattr(call, each.name) for each in self._fields if not each.kw_only]

    def _named(self, call: Op) -> dict[str, Any]:
        named = {each.name: getattr(call, each.name) for each in self._fields if each.kw_only}
        planned = named.pop(_PLANNED, ())
        return named | given(planned)

    def _checks(self) -> Iterator[str]:
        """Write the checks, one comparison a line: shapes first, then dtypes, then layouts."""
        for name, kind in self.kinds.items():
            yield from self._binding(name, kind)
        for name, kind in self.kinds.items():
            wanted = f"({', '.join(kind.dims)},)"
            fail = f"check_shapes({{'{name}': ({name}, {wanted})}})"
            if kind.has_shape and not self._binds_all(name):
                yield from self._unless(name, f"{name}.shape == {wanted}", fail)
        first_dtype = f"{self.floating}.dtype"
        written: dict[object, str] = {
            None: first_dtype,
            "work": f"torch.promote_types({first_dtype}, torch.float32)",
        }
        for name, kind in self.kinds.items():
            dtype = written.get(kind.dtype, repr(kind.dtype))
            if isinstance(kind.dtype, tuple):
                fail = f"fail_dtype('{name}', {name}, {dtype})"
                yield from self._unless(name, f"{name}.dtype in {dtype}", fail)
            elif name != self.floating and kind.dtype != "any":
                fail = f"check_dtypes({{'{name}': ({name}, {dtype})}})"
                holds = f"{name}.dtype == {dtype}"
                holds += f" or {name}.dtype == torch.float32" * kind.or_float32
                yield from self._unless(name, holds, fail)
        for name, kind in self.kinds.items():
            holds = f"{name}.is_contiguous()"
            fail = f"check_contiguous({name}={name})"
            if isinstance(kind, Strided):
                continue
            if kind.last_dim:
                holds, fail = f"{name}.stride()[-1:] == (1,)", f"fail_last_dim('{name}', {name})"
            elif isinstance(kind, Rows):
                holds += f" or has_dense_rows({name}, {kind.apart})"
                fail = f"fail_rows('{name}', {name})"
            yield from self._unless(name, holds, fail)

    def _binding(self, name: str, kind: _Kind) -> Iterator[str]:
        """Bind letters to sizes of a tensor, whose number of dimensions is checked before."""
        new = {letter: axis for letter, (owner, axis) in self.bound.items() if owner == name}
        ndim = len(kind.dims)
        indent = "    "
        if name in self.optional and new:
            yield f"    if {name} is not None:"
            indent *= 2
        if new.keys() - {*kind.leading}:
            yield f"{indent}if {name}.ndim != {ndim}: fail_ndim('{name}', {name}, {ndim})"
        if self._binds_all(name):
            yield f"{indent}{', '.join(kind.dims)} = {name}.shape"
        else:
            yield from (f"{indent}{letter} = {name}.shape[{axis}]" for letter, axis in new.items())

    def _binds_all(self, name: str) -> bool:
        """Tell whether a tensor of two dimensions or more gives all its letters their sizes."""
        dims = self.kinds[name].dims
        return len(dims) > 1 and all(
            self.bound.get(letter) == (name, axis) for axis, letter in enumerate(dims)
        )

    def _unless(self, name: str, holds: str, otherwise: str) -> Iterator[str]:
        guard = f"{name} is not None and " if name in self.optional else ""
        yield f"    if {guard}not ({holds}): {otherwise}"


def compile_function(code: str, name: str, scope: dict[str, Any]) -> Callable[..., Any]:
    """Compile generated code so that tracebacks show its lines."""
    filename = f"<torch_hybrid op {name}>"
    linecache.cache[filename] = (len(code), None, code.splitlines(keepends=True), filename)
    exec(compile(code, filename, "exec"), scope)
    function: Callable[..., Any] = scope[name]
    return function


def cpp_launcher(
    cls: type[Op],
    source: Path,
    *,
    integers: str,
    sizes: str = "",
    values: Mapping[str, str] | None = None,
    numbers: str = "",
    tensors: str = "",
    out: str | Callable[[Any], Tensor | tuple[Tensor, ...]],
    results: str = "out",
) -> Callable[..., Any]:
    """Make the launcher of a C++ kernel.

    Args:
        cls: the op's class.
        source: of the kernel, whose function has the op's name.
        sizes: letters, or expressions of them without blanks, and what the struct calls them:
            ``"T=num_tokens D//2=half_dim N"``.
        integers: of the struct in its order: names of sizes and values, ``<field>_stride`` and
            ``<field>_head_stride`` of rows, ``is_bf16``, ``wide_<field>`` (float32),
            ``num_threads``, ``state_streams``; options and properties of the op. With
            ``is_invariant``, that is the launcher's option. ``<field>_token`` and ``<field>_row``
            are the first stride too, ``<field>_head`` the second.
        values: expressions of ``x``, an instance of ``cls``, by the struct's names of them.
        numbers: options and values that the struct has as doubles.
        tensors: of the struct in its order, unless those are the op's and then the results.
        out: field that the result has shape and dtype of, or what makes the result from an instance
            of ``cls``. Several are named as in the struct: ``"out=o_a lse=lse_a"``; one like a
            field that is None is None. Empty: it returns nothing.
        results: what the struct calls those that ``out`` makes.
    """
    declaration = Declaration(cls)
    if isinstance(out, str):
        named = [each.rpartition("=") for each in out.split()]
        made = {
            name or "out": f"None if x.{of} is None else " * (of in declaration.optional)
            + f"x.{of}.new_empty(x.{of}.shape)"
            for name, _, of in named
        }
    else:
        made = {", ".join(results.split()): "make(x)"}
    returned = ", ".join(made)
    names = tensors.split() or [*declaration.kinds, *returned.split(", ")]
    run = kernel(
        declaration.name,
        source,
        tensors=" ".join(names),
        integers=integers,
        numbers=numbers,
    )
    special = {
        "is_bf16": f"x.{declaration.floating}.dtype is bf16",
        "num_threads": "num_threads()",
        "state_streams": f"cpu_tuning.tuning(x.{declaration.floating}.dtype).state_streams",
        **(values or {}),
    }

    def size_of(letter: re.Match[str]) -> str:
        owner, axis = declaration.bound[letter.group()]
        return f"{owner}_shape[{axis}]"

    for size, _, name in (each.partition("=") for each in sizes.split()):
        special[name or size] = re.sub(r"[A-Za-z_]+", size_of, size)

    def value(name: str) -> str:
        if name in special:
            return special[name]
        if name.startswith("wide_"):
            wide = name.removeprefix("wide_")
            guard = f"x.{wide} is not None and " * (wide in declaration.optional)
            return f"{guard}x.{wide}.dtype is float32"
        rows = re.fullmatch(r"(\w+?)(?:_stride|_token|_row|(_head)(?:_stride)?)", name)
        if rows is None or rows[1] not in declaration.kinds:
            if name == "is_invariant":
                return name
            if name not in dir(cls):
                raise TypeError(f"{source} takes {name}, which no argument is named like")
            return f"x.{name}"
        stride = f"x.{rows[1]}.stride({int(rows[2] is not None)})"
        is_optional = rows[1] in declaration.optional
        return f"0 if x.{rows[1]} is None else {stride}" if is_optional else stride

    passed = [f"x.{name}" if name in declaration.kinds else name for name in names]
    passed += map(value, integers.split())
    passed += [special.get(name, f"x.{name}") for name in numbers.split()]
    written = " ".join(passed)
    owners = {owner for owner, _ in declaration.bound.values() if f"{owner}_shape[" in written}
    lines = [
        f"def {declaration.name}(x{', *, is_invariant=False' * ('is_invariant' in integers)}):",
        *(f"    {owner}_shape = x.{owner}.shape" for owner in sorted(owners)),
        *(f"    {name} = {value}" for name, value in made.items()),
        f"    if not run({', '.join(passed)}):",
        "        x.check_indices()",
        f"    return {returned}",
    ]
    scope = {"run": run, "bf16": torch.bfloat16, "float32": torch.float32, "make": out}
    scope |= {"num_threads": torch.get_num_threads, "cpu_tuning": cpu_tuning}
    return compile_function("\n".join(lines), declaration.name, scope)


def _load_cpp(
    declaration: Declaration,
    returns: Returns[Any],
    cpp: Cpp,
    source: Path,
) -> Callable[..., Any]:
    """Build a C++ kernel and make its launcher, of fields that the kernel's struct declares."""
    fields = declared_fields(declaration.name, source)
    tensors, integers, numbers = (
        " ".join(name for name, kind in fields if kind == wanted)
        for wanted in ("tensor", "integer", "number")
    )
    results = [name for name in tensors.split() if name not in declaration.kinds]
    pairs = (f"{name}={of}" for name, of in zip(results, returns.like, strict=False))
    usual = " ".join(size for size in _CPP_SIZES if size[0] in declaration.bound)
    return cpp_launcher(
        declaration.cls,
        source,
        sizes=f"{usual} {cpp.sizes}",
        values=cpp.values,
        tensors=tensors,
        integers=integers,
        numbers=numbers,
        out=returns.fake or " ".join(pairs),
        results=" ".join(results),
    )


def _metadata(hint: Any) -> tuple[Any, ...]:
    return tuple(getattr(hint, "__metadata__", ()))


def _bare(hint: Any) -> Any:
    """Strip the kind from an annotation."""
    return get_args(hint)[0] if _metadata(hint) else hint


def _fail_ndim(name: str, x: Tensor, ndim: int) -> None:
    raise ValueError(f"{name} must have {ndim} dimensions, got {list(x.shape)}")


def _fail_count(name: str, x: Tensor, ndim: int) -> None:
    raise ValueError(f"{name} must have {ndim} dimensions, got {x.ndim}")


def _fail_floats(name: str, x: Tensor) -> None:
    raise ValueError(f"{name} must be a floating point tensor, got {x.dtype}")


def _fail_dtype(name: str, x: Tensor, dtypes: Sequence[torch.dtype]) -> None:
    allowed = " or ".join(map(str, dtypes))
    raise ValueError(f"{name} must have dtype {allowed}, got {x.dtype}")


def _fail_option(name: str, option: int, values: Sequence[int]) -> None:
    raise ValueError(f"{name} must be one of {list(values)}, got {option}")


def _fail_last_dim(name: str, x: Tensor) -> None:
    raise ValueError(f"{name} must have a contiguous last dim, got {x.stride()}")


_CHECKS = {"check_form": Op.check_form, "check": Op.check, "features": Op.features}
_SCOPE: dict[str, Any] = {
    "torch": torch,
    "check_shapes": check_shapes,
    "check_dtypes": check_dtypes,
    "check_contiguous": check_contiguous,
    "check_impl": check_impl,
    "check_planned": check_planned,
    "is_compiling": torch.compiler.is_compiling,
    "plain_reads": plain_reads,
    "load_traced": load_traced,
    "given": given,
    "has_dense_rows": has_dense_rows,
    "fail_floats": _fail_floats,
    "fail_dtype": _fail_dtype,
    "fail_option": _fail_option,
    "fail_rows": fail_rows,
    "fail_last_dim": _fail_last_dim,
}
