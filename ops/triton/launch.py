"""Launches of kernels whose parameters have the names that an op gives its arguments."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from torch_hybrid.ops.core.declaration import Declaration, compile_function
from torch_hybrid.ops.triton.devices import launches_early

_Arguments = Callable[..., dict[str, Any]]
_ARGUMENTS: dict[tuple[Any, tuple[type, ...], tuple[str, ...]], _Arguments] = {}


def bind(kernel: Any, x: Any, *others: object) -> _Bound:
    """Bind a kernel to arguments of an op: ``bind(kernel, x)[grid](out=out, BLOCK=64)``.

    A launch gives the parameters, by name, that the op does not, and options. ``x`` gives fields
    and properties, which constants name in capitals, and sizes: by their letters, ``num_tokens``,
    rows of its first field, and ``num_seqs``. Of tensors of both, ``stride_<name>``,
    ``stride_<name>_token`` and ``stride_<name>_head`` are the first stride or the second, 0 where
    there is no tensor. A kernel with ``EARLY`` is launched early where the device can
    (``ops/triton/early.py``).

    Args:
        kernel: in Triton or Gluon.
        x: arguments of the op.
        others: objects whose fields are parameters that x has not: tiles, for example.
    """
    return _Bound(kernel, (x, *others))


def early(device: torch.device) -> dict[str, bool]:
    """Give the values of ``EARLY`` and of the option that launches a kernel so."""
    is_early = launches_early(device)
    return {"EARLY": is_early, "launch_pdl": is_early}


def launch(kernel: Any, grid: tuple[int, ...], held: Mapping[str, Any], **others: Any) -> None:
    """Launch a kernel with the ``held`` values that it names, and with others."""
    named = {name: held[name] for name in kernel.arg_names if name in held}
    kernel[grid](**named, **others)


@dataclass(frozen=True, slots=True)
class _Bound:
    kernel: Any
    sources: tuple[Any, ...]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], **values: Any) -> None:
        key = (self.kernel.fn, tuple(map(type, self.sources)), tuple(values))
        if (arguments := _ARGUMENTS.get(key)) is None:
            arguments = _ARGUMENTS[key] = _arguments(self.kernel, self.sources, values)
        self.kernel[grid](**arguments(values, *self.sources), **values)


def _arguments(kernel: Any, sources: tuple[Any, ...], values: Mapping[str, Any]) -> _Arguments:
    """Compile what finds the arguments of a kernel that ``values`` lacks, by name."""
    variables = [f"s{i}" for i in range(len(sources))]
    found = {name: f"s{i}.{name}" for i, x in reversed([*enumerate(sources)]) for name in dir(x)}
    op = Declaration(type(sources[0]))
    first, bound = op.first, op.bound.items()
    letters = {x.upper(): f"s0.{of}.shape[{d}]" for x, (of, d) in bound if of not in op.optional}
    sizes = {"num_tokens": f"s0.{first}.shape[0]", "num_seqs": "s0.cu_seqlens.shape[0] - 1"}
    tensors = found | {name: f"values['{name}']" for name in values}

    def source(name: str) -> str:
        if name in found or name in sizes:
            return (found | sizes)[name]
        plain = name.lower() if name.isupper() else name
        stride = re.fullmatch(r"stride_(\w+?)(_token|_head)?", plain)
        if stride and (of := tensors.get(stride[1])):
            return f"0 if {of} is None else {of}.stride({int(stride[2] == '_head')})"
        if len(name) > 1 and plain in found:
            return found[plain]
        if name in letters:
            return letters[name]
        raise TypeError(f"{kernel.fn.__name__} takes {name}, which no argument is named like")

    names = [n for n in kernel.arg_names if n not in values]
    pairs = [f"{n!r}: {source(n)}" for n in names if n != "EARLY"]
    if "EARLY" in names:
        pairs.append(f"**early(s0.{first}.device)")
    code = f"def arguments(values, {', '.join(variables)}):\n    return {{{', '.join(pairs)}}}"
    return compile_function(code, "arguments", {"early": early})
