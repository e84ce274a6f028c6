"""Compile Triton kernels for a GPU that is not there, and read what they use.

A launcher is run with a :class:`LaunchRecorder` in the place of its kernel, on tensors that hold
no data, so that what is compiled is what the launcher launches at that shape: same arguments,
same tiles, same specialisation. No driver is needed.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from torch_hybrid.ops.triton.devices import interpreted

# Dynamic shared memory that one block may ask for, in bytes.
SHARED_LIMITS = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024}

_DTYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}


def pretend(monkeypatch: pytest.MonkeyPatch, target: str, *modules: ModuleType) -> None:
    """Let the launchers in these modules believe that tensors are on a GPU of ``target``."""
    for module in modules:
        monkeypatch.setattr(module, "is_hopper", lambda _: target == "sm_90")


@dataclass
class LaunchRecorder:
    """Stands in for a kernel: keeps the arguments of its launches instead of launching."""

    kernel: Any
    launches: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)

    def __getitem__(self, grid: tuple[int, ...]):
        return lambda *args, **kwargs: self.launches.append((args, kwargs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What one thread (registers, stack) and one block (shared) of a compiled kernel take."""

    kernel: str
    target: str
    num_warps: int
    registers: int
    stack: int
    shared: int
    async_copies: int  # instructions that copy global to shared memory without waiting
    products: str  # the tensor core instruction, "-" when products run outside them

    def __str__(self) -> str:
        return (
            f"| {self.kernel} | {self.target} | {self.num_warps} | {self.registers} | {self.stack} "
            f"| {self.shared} | {self.async_copies} | {self.products} |"
        )


_TABLE_HEADER = """\
| kernel | target | warps | registers | stack | shared | async copies | products |
|---|---|---|---|---|---|---|---|"""


def assert_all_fit(rows: Sequence[Resources]) -> None:
    """No spills, and no more shared memory than a block of the target may have; shown first."""
    print("", _TABLE_HEADER, *rows, sep="\n")
    for row in rows:
        limit = SHARED_LIMITS[row.target]
        assert row.stack == 0, f"{row.kernel} spills: {row}"
        assert row.shared <= limit, f"over {limit} bytes of shared memory: {row}"


def _cuobjdump() -> Path:
    spec = importlib.util.find_spec("triton")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def cross_compiler_missing() -> str | None:
    """Why kernels cannot be compiled for another machine here, or None when they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if interpreted():
        return "this process interprets kernels (TRITON_INTERPRET is set)"
    return None if _cuobjdump().exists() else "triton's cuobjdump is missing"


needs_cross_compiler = pytest.mark.skipif(
    cross_compiler_missing() is not None, reason=cross_compiler_missing() or ""
)


def compile_launch(recorder: LaunchRecorder, target: str, label: str) -> Resources:
    """Compile the recorded launch for ``target`` ("sm_90") and read what it uses."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    [(args, kwargs)] = recorder.launches
    options = {name: kwargs[name] for name in kwargs if name not in recorder.kernel.arg_names}
    signature, constexprs, attrs = _specialise(recorder.kernel, args, kwargs)
    source = ASTSource(fn=recorder.kernel, signature=signature, constexprs=constexprs, attrs=attrs)
    arch = int(target.removeprefix("sm_"))
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    registers, stack = _resource_usage(compiled.asm["cubin"])
    return Resources(
        kernel=label,
        target=target,
        num_warps=compiled.metadata.num_warps,
        registers=registers,
        stack=stack,
        shared=compiled.metadata.shared,
        async_copies=len(re.findall(r"cp\.async\.c[ag]\.shared", compiled.asm["ptx"])),
        products=_tensor_core_instruction(compiled.asm["ptx"]),
    )


def _specialise(
    kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[dict[str, str], dict[Any, Any], dict[Any, Any]]:
    """Signature, constants and divisibility of the arguments, as a launch would find them."""
    values = dict(zip(kernel.arg_names, args, strict=False)) | {
        name: kwargs[name] for name in kwargs if name in kernel.arg_names
    }
    signature: dict[str, Any] = {}
    constexprs: dict[Any, Any] = {}
    attrs: dict[Any, Any] = {}
    for position, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        # The members of a tuple are specialised each for itself.
        kinds = [
            _specialise_value(each, parameter, path, constexprs, attrs)
            for path, each in (
                [((position, i), each) for i, each in enumerate(value)]
                if isinstance(value, tuple)
                else [((position,), value)]
            )
        ]
        signature[parameter.name] = tuple(kinds) if isinstance(value, tuple) else kinds[0]
    return signature, constexprs, attrs


def _specialise_value(
    value: Any,
    parameter: Any,
    path: tuple[int, ...],
    constexprs: dict[Any, Any],
    attrs: dict[Any, Any],
) -> str:
    """The type of an argument; ``path`` says where it stands."""
    specialised = not parameter.do_not_specialize
    if isinstance(value, torch.Tensor):
        attrs[path] = [["tt.divisibility", 16]]
        return _DTYPES[value.dtype]
    if parameter.is_constexpr or value is None or (specialised and value == 1):
        constexprs[path] = value
        return "constexpr"
    if isinstance(value, int):
        if specialised and value % 16 == 0:
            attrs[path] = [["tt.divisibility", 16]]
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    return "fp32"


def _resource_usage(cubin: bytes) -> tuple[int, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(_cuobjdump()), "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2])


def _tensor_core_instruction(ptx: str) -> str:
    names = re.findall(r"\b(wgmma|tcgen05|mma)\.\S*m\d+n\d+k\d+|\b(tcgen05)\.mma", ptx)
    return "/".join(sorted({first or second for first, second in names})) or "-"
