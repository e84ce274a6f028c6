"""Compile Triton kernels for a GPU that is not there, and read what they use.

A launcher is run within :func:`launches_on`, on tensors that hold no data, so that what is compiled
is what it launches at that shape: same arguments, same tiles, same specialisation. No driver is
needed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.ops.kernels import short_name
from torch_hybrid.ops.triton.devices import gluon_missing, interpreted, is_hopper

# Dynamic shared memory that one block may ask for, in bytes.
SHARED_LIMITS = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024}

# Instructions that are counted, as they stand in PTX.
_COUNTED = {
    "async_copies": r"\bcp\.async\.c[ag]\.shared",
    "tensor_copies": r"\bcp\.async\.bulk\.tensor",
    "wgmma": r"\bwgmma\.mma_async",
    "tcgen05": r"\btcgen05\.mma",
    "mma": r"\bmma\.sync",
}

_DTYPES = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel, and what it would have been launched with."""

    kernel: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@contextmanager
def launches_on(target: str, *, gluon: bool = True) -> Iterator[dict[str, Launch]]:
    """What launchers launch on a GPU of ``target``, by the kernel's name, instead of launching it.

    Of a kernel that one launcher launches with several constants, the later ones are by its name
    and those constants.
    Without ``gluon``, with a Triton whose Gluon is another.
    Modules must have been imported before: each asks for itself on what kind of GPU it is.
    """
    from triton.runtime.jit import JITFunction

    launches: dict[str, Launch] = {}
    hopper = target == "sm_90"
    answers = {
        "is_hopper": hopper,
        "launches_early": target != "sm_80",
        "converts_fp8": target != "sm_80",
        "runs_gluon": hopper and gluon and gluon_missing() is None,
    }

    def keep(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        name = kernel.fn.__name__
        if name in launches:
            given = launches[name].kwargs
            own = {key: value for key, value in kwargs.items() if not torch.is_tensor(value)}
            name += str({key: value for key, value in own.items() if given.get(key) != value})
        assert not name.endswith("{}"), f"{name} is launched twice"
        launches[name] = Launch(kernel, args, kwargs)

    with ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            # Not where it is defined: what is imported in the body keeps what it finds there.
            if not name.startswith("torch_hybrid.ops.") or name == is_hopper.__module__:
                continue
            for asked in answers.keys() & vars(module).keys():
                answer = mock.patch.object(module, asked, return_value=answers[asked])
                stack.enter_context(answer)
        stack.enter_context(mock.patch.object(JITFunction, "run", keep))
        yield launches


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What one thread (registers, stack) and one block (shared) of a compiled kernel take."""

    kernel: str  # its name, and at which shape: "prepare: Qwen3-Next"
    target: str
    num_warps: int
    registers: int
    stack: int  # bytes that a thread keeps in memory: what registers spilled
    shared: int
    async_copies: int  # instructions that copy global to shared memory without waiting
    tensor_copies: int  # those that copy a whole tile, by its descriptor (TMA)
    wgmma: int  # instructions of tensor cores, by the kind that GPUs of a target have
    tcgen05: int
    mma: int
    ir: str = ""  # a digest of all that decides the numbers, by ``digest_of``

    @property
    def products(self) -> str:
        """The tensor core instructions, "-" when products run outside them."""
        counts = {"mma": self.mma, "tcgen05": self.tcgen05, "wgmma": self.wgmma}
        return "/".join(name for name, count in counts.items() if count) or "-"


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


def compile_launch(launch: Launch, target: str, label: str) -> Resources:
    """Compile the recorded launch for ``target`` ("sm_90") and read what it uses.

    ``label`` says at which shape; the kernel's name is put before it.
    """
    import triton

    source, options = _source(launch)
    compiled = triton.compile(source, target=_gpu(target), options=options)
    registers, stack = _resource_usage(compiled.asm["cubin"])
    return Resources(
        kernel=title(launch, label),
        target=target,
        num_warps=compiled.metadata.num_warps,
        registers=registers,
        stack=stack,
        shared=compiled.metadata.shared,
        **{what: len(re.findall(text, compiled.asm["ptx"])) for what, text in _COUNTED.items()},
    )


def orders_of_sums(launch: Launch, target: str) -> list[str]:
    """How what the recorded launch sums is spread over threads, which says in what order it is
    added: the operands of its reductions, in Triton's own words."""
    import triton

    source, options = _source(launch)
    text = triton.compile(source, target=_gpu(target), options=options).asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", text, re.MULTILINE))
    operands = re.findall(r'"tt.reduce".*?\}\) : \((.*?)\) ->', text, re.DOTALL)
    return sorted(re.sub(r"#\w+", lambda name: layouts.get(name[0], name[0]), x) for x in operands)


def machine_code(launch: Launch, target: str) -> str:
    """The instructions that the recorded launch is compiled to for ``target``."""
    import triton

    source, options = _source(launch)
    compiled = triton.compile(source, target=_gpu(target), options=options)
    return _cuobjdump_of(compiled.asm["cubin"], "-sass")


def simplified_ir(launch: Launch, target: str) -> str:
    """The IR of the recorded launch, in Triton alone, once what can be simplified is."""
    from triton.compiler.compiler import Language

    backend, options, module = _first_ir(launch, target)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, Language.TRITON)
    return stages["ttir"](module, {}).str_nodebug()


def digest_of(launch: Launch, target: str) -> str:
    """Of the kernel's first IR at that launch, without positions in files, and of all that is
    compiled of it by: with one version of Triton, what is as it was compiles to what it was."""
    _, _, module = _first_ir(launch, target)
    given, code = _source(launch)[1], module.str_nodebug()
    if given.get("launch_pdl"):
        assert "griddepcontrol.wait" in code, f"{title(launch, target)} is early and never waits"
    decides = (code, target, sorted(given.items()))
    return hashlib.sha256(repr(decides).encode()).hexdigest()[:12]


def _first_ir(launch: Launch, target: str) -> tuple[Any, Any, Any]:
    """A backend for the target, its options of the launch, and the module that it begins with."""
    from triton._C.libtriton import ir
    from triton.compiler import make_backend

    source, given = _source(launch)
    backend = make_backend(_gpu(target))
    options = backend.parse_options(given)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    codegen, modules = backend.get_codegen_implementation(options), backend.get_module_map()
    return backend, options, source.make_ir(_gpu(target), options, codegen, modules, context)


def title(launch: Launch, label: str) -> str:
    """The kernel's name, and at which shape."""
    return f"{short_name(launch.kernel.fn.__name__)}: {label}"


def _gpu(target: str) -> Any:
    from triton.backends.compiler import GPUTarget

    return GPUTarget("cuda", int(target.removeprefix("sm_")), 32)


def _source(launch: Launch) -> tuple[Any, dict[str, Any]]:
    """What is compiled, and the options of the launch."""
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    kernel, kwargs = launch.kernel, launch.kwargs
    options = {name: kwargs[name] for name in kwargs if name not in kernel.arg_names}
    signature, constexprs, attrs = _specialise(kernel, launch.args, kwargs)
    kind = GluonASTSource if kernel.is_gluon() else ASTSource
    return kind(fn=kernel, signature=signature, constexprs=constexprs, attrs=attrs), options


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
        if isinstance(value, tuple):  # its members are specialised each for itself
            signature[parameter.name] = tuple(
                _specialise_value(each, parameter, (position, i), constexprs, attrs)
                for i, each in enumerate(value)
            )
        else:
            signature[parameter.name] = _specialise_value(
                value, parameter, (position,), constexprs, attrs
            )
    return signature, constexprs, attrs


def _specialise_value(
    value: Any,
    parameter: Any,
    path: tuple[int, ...],
    constexprs: dict[Any, Any],
    attrs: dict[Any, Any],
) -> str:
    """The type of an argument; ``path`` says where it stands."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    specialised = not parameter.do_not_specialize
    if isinstance(value, TensorDescriptor):
        dtype = _DTYPES[value.base.dtype].removeprefix("*")
        return f"tensordesc<{dtype}{list(value.block_shape)},{value.layout!r}>"
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
    text = _cuobjdump_of(cubin, "--dump-resource-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2])


def _cuobjdump_of(cubin: bytes, what: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(_cuobjdump()), what, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
