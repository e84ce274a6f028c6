"""Compiled regions as bytes, by the serialization that Inductor uses for its caches.

When Inductor's code for a CPU is loaded, it hands C++ source to a compiler. The artefact keeps the
resulting libraries beside the bytes and supplies these instead, so that loading needs no compiler.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from threading import Lock
from typing import Any

from torch_hybrid.errors import UnsupportedError
from torch_hybrid.graphs.compiling.compile_region import CompiledRegion

_LOADING = Lock()


def dump_region(region: CompiledRegion, kernels: dict[str, Path]) -> bytes:
    """Serialize a region for ``load_region``.

    Args:
        region: compiled or loaded in this process.
        kernels: receives the files of the libraries that the region needs, by key.

    Raises:
        UnsupportedError: the region runs more than Inductor's code: autograd's wrapper.
    """
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.output_code import CompiledFxGraph

    if not isinstance(region.owner, CompiledFxGraph):
        raise UnsupportedError("a region is called through the wrapper of autograd")
    graph = copy(region.owner)
    graph.prepare_for_serialization()
    data = pickle.dumps(graph)
    compile_or_find = AsyncCompile.cpp_pybinding

    def note(compiler: Any, types: list[str], source: str) -> Any:
        found = compile_or_find(compiler, types, source)
        kernel = found.result() if hasattr(found, "result") else found
        kernels[_key(types, source)] = Path(kernel.__self__.__file__)
        return kernel

    _load(data, note)  # collects the libraries, and proves that the bytes load
    return data


def load_region(data: bytes, kernels: Mapping[str, Path]) -> CompiledRegion:
    """Load a region from its bytes and the libraries that it needs."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    def find(_compiler: Any, types: list[str], source: str) -> Any:
        key = _key(types, source)
        library: Any = CppPythonBindingsCodeCache._load_library(str(kernels[key]), key)
        return library.kernel

    graph = _load(data, find)
    return CompiledRegion(call=graph.current_callable, owner=graph, sources=(graph.source_code,))


def _load(data: bytes, cpp_pybinding: Callable[[Any, list[str], str], Any]) -> Any:
    """Load the graph of these bytes; ``cpp_pybinding`` supplies its C++ kernels."""
    from torch._inductor.output_code import CompiledFxGraphConstants
    from torch._inductor.triton_bundler import TritonBundler

    graph = pickle.loads(data)
    if bundle := graph._triton_bundle:
        TritonBundler.read_and_emit(bundle)
    constants = CompiledFxGraphConstants()
    with _LOADING, _kernels_from(cpp_pybinding):
        graph.after_deserialization(constants)
    graph.post_compile((), constants, graph.fx_kwargs)
    return graph


@contextmanager
def _kernels_from(cpp_pybinding: Callable[[Any, list[str], str], Any]) -> Iterator[None]:
    from torch._inductor.async_compile import AsyncCompile

    before = AsyncCompile.cpp_pybinding
    AsyncCompile.cpp_pybinding = cpp_pybinding  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        AsyncCompile.cpp_pybinding = before  # type: ignore[method-assign]


def _key(types: list[str], source: str) -> str:
    return hashlib.sha256("\n".join([*types, source]).encode()).hexdigest()[:20]
