"""Facts under which compiled steps are valid: a process with other facts cannot use them."""

from __future__ import annotations

import hashlib
import inspect
import platform
import sys
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from torch_hybrid.graphs.compiling.signature import fact, signature
from torch_hybrid.graphs.passes import Pass
from torch_hybrid.graphs.step import Model

_CODE = {".py", ".cpp", ".h"}


def _inductor_settings() -> dict[str, object]:
    """Read Inductor's settings, but for those of packages: making one leaves its facts there."""
    settings = torch._inductor.config.save_config_portable()
    return {name: x for name, x in settings.items() if not name.startswith("aot_inductor.")}


def _torch_settings() -> tuple[object, ...]:
    """Read what torch's own arithmetic follows, and kernels that stand for it."""
    return (
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
    )


def facts_of(model: Model, passes: Sequence[Pass], **sizes: object) -> dict[str, str]:
    """Collect the facts of this process, its model and its runner, by name."""
    facts = {
        "torch_hybrid": _package(),
        "torch": torch.__version__,
        "transformers": _version("transformers"),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "device": _device(model.device),
        "settings of Inductor": _digest(_inductor_settings()),
        "settings of torch": _digest(_torch_settings()),
        "passes": " ".join(f"{p.name}:{_digest(_unknown(p.apply))[:8]}" for p in passes),
        "model": _model(model),
        "dtype": str(model.dtype),
        "ranks": "1" if model.ranks is None else f"{model.ranks.rank} of {model.ranks.size}",
    }
    if model.device.type == "cpu":
        facts["threads"] = str(torch.get_num_threads())
    return facts | {name: str(size) for name, size in sizes.items()}


def _model(model: Model) -> str:
    """Digest a model's modules, their code, and the layouts of its tensors."""
    if not isinstance(model, nn.Module):
        return _digest(_unknown(model))
    code = sorted(set(map(_code_of, {type(module) for module in model.modules()})))
    table = fact(model.table, _unknown)
    return _digest((signature(model, _unknown), table, code))


def _code_of(kind: type) -> str:
    """Digest the file of a class, or its functions if it has no file (a notebook, for example)."""
    try:
        file = inspect.getsourcefile(kind)
    except (OSError, TypeError):
        file = None
    if file is not None and Path(file).is_file():
        return _digest(Path(file).read_bytes())
    own = {name: inspect.unwrap(value) for name, value in vars(kind).items() if callable(value)}
    return _digest(
        [(name, _compiled(f.__code__)) for name, f in own.items() if isinstance(f, FunctionType)]
    )


def _compiled(code: CodeType) -> tuple[Any, ...]:
    """Collect a function's bytecode and constants, without line numbers."""
    constants = [_compiled(x) if isinstance(x, CodeType) else repr(x) for x in code.co_consts]
    return code.co_code, code.co_names, code.co_varnames, constants


def _unknown(value: Any) -> object:
    """Describe an object of any class by facts that are the same in every process."""
    if isinstance(value, FunctionType):
        return value.__qualname__, _compiled(value.__code__)
    if func := getattr(value, "func", None):  # a partial, or another object that binds a function
        given = getattr(value, "args", ()), getattr(value, "keywords", {})
        return _unknown(func), fact(given, _name)
    held = {k: v for k, v in getattr(value, "__dict__", {}).items() if not k.startswith("_")}
    return _name(value), [(key, fact(held[key], _name)) for key in sorted(held)]


def _name(value: Any) -> str:
    kind = value if isinstance(value, type) else type(value)
    return f"{kind.__module__}.{kind.__qualname__} {getattr(value, '__qualname__', '')}"


def _version(package: str) -> str:
    return metadata.version(package) if package in sys.modules else "not imported"


@cache
def _package() -> str:
    """Digest the code of this package, on which graphs and their calls of C++ depend."""
    root = __name__.partition(".")[0]
    packages = [sys.modules[name] for name in (root, f"{root}.ops", f"{root}.graphs")]
    folders = {folder for package in packages for folder in package.__path__}
    files = {path for folder in folders for path in Path(folder).rglob("*") if path.suffix in _CODE}
    return _digest(sorted(hashlib.sha256(path.read_bytes()).hexdigest() for path in files))


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def _device(device: torch.device) -> str:
    """Name the kind of a device: code for one kind does not run, or is slow, on another."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"{torch.cuda.get_device_name(device)}, sm_{major}{minor}"
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else [platform.processor()]
    known = {name.strip(): value.strip() for name, _, value in (x.partition(":") for x in lines)}
    name = known.get("model name", platform.machine())
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}, {_digest(known.get('flags'))[:6]}"
