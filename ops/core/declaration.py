"""Facts that follow from the fields of an op's class, and the public function that checks them."""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from functools import wraps
from inspect import formatannotation
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor

from torch_hybrid.ops.core.capability import Implementation
from torch_hybrid.ops.core.docs import complete_doc
from torch_hybrid.ops.core.kinds import (
    MUTATED,
    NO_DEFAULT,
    TRACED,
    Kind,
    OneOf,
    Pool,
    Returns,
    Rows,
    Strided,
)
from torch_hybrid.ops.core.op import Op
from torch_hybrid.ops.core.recurrence import fail_rows, has_dense_rows
from torch_hybrid.ops.core.registration import (
    LAUNCHERS,
    check_contiguous,
    check_dtypes,
    check_impl,
    check_planned,
    check_shapes,
    given,
    load_traced,
    plain_reads,
)

_PLANNED = "planned"  # field

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
        self.kinds: dict[str, Kind] = {
            each.name: kind
            for each in self._fields
            for kind in _metadata(self._hints[each.name])
            if isinstance(kind, Kind)
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

    def sizes_of(self, name: str) -> Callable[[Any], tuple[int, ...]]:
        """Compile what computes a tensor's sizes after the first from a call's other tensors."""
        letters = {letter: f"x.{of}.shape[{axis}]" for letter, (of, axis) in self.bound.items()}
        dims = (
            re.sub(r"[A-Za-z]\w*", lambda found: letters[found[0]], dim)
            for dim in self.kinds[name].dims[1:]
        )
        return compile_function(f"def sizes(x): return ({', '.join(dims)},)", "sizes", {})

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
                written = _SCHEMA_TYPES.get(_bare(hint))
                if written is None:
                    known = ", ".join(map(formatannotation, _SCHEMA_TYPES))
                    raise TypeError(
                        f"field {each.name} of {self.cls.__name__} must be of {known}, or a tensor "
                        f"like Annotated[Tensor, Rows('D')], got {formatannotation(hint)}"
                    )
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

    def _binding(self, name: str, kind: Kind) -> Iterator[str]:
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


def _metadata(hint: Any) -> tuple[Any, ...]:
    return tuple(getattr(hint, "__metadata__", ()))


def _bare(hint: Any) -> Any:
    """Strip the kind from an annotation."""
    return get_args(hint)[0] if _metadata(hint) else hint


def fail_ndim(name: str, x: Tensor, ndim: int) -> None:
    raise ValueError(f"{name} must have {ndim} dimensions, got {list(x.shape)}")


def fail_count(name: str, x: Tensor, ndim: int) -> None:
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
