"""Restrictions on Inductor under which a value has the same bits in every graph.

On a GPU, fusion changes the rounding of a value. A product and the sum after it may become one
instruction (FMA), which rounds once. A BF16 or FP16 intermediate is rounded when it goes to memory,
but stays float32 inside a fused kernel. Inductor also rewrites patterns that lie in one graph. Here
all of this is switched off:

    products and sums are separate instructions        (enable_fp_fusion of Triton's compiler)
    every BF16 or FP16 value is rounded where it is computed
    no pattern is rewritten
    no sum over a row is left                           (the pass row_sums; checked in the code)

Only functions of single elements remain, compiled to the same instructions in every graph.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.fx import Graph

from torch_hybrid.errors import UnsupportedError

# The first option also compiles Triton kernels without FMA.
_OPTIONS = {"emulate_precision_casts": True, "pattern_matcher": False}
_BARRIER = "low_precision_pointwise_barrier"
_SUM = re.compile(
    r"\btl\.(?:sum|reduce|associative_scan|cumsum|cumprod|atomic_add|dot)\("
    r"|\btriton_helpers\.(?:prod|welford\w*|online_softmax\w*|exclusive_scan\w*)\("
)


def fuses_freely(device: torch.device) -> bool:
    """Tell whether Inductor's rounding depends on the graph: true on CUDA.

    On a CPU, Inductor's C++ rounds each product, and adds rows up in one order.
    """
    return device.type == "cuda"


@contextmanager
def fixed_arithmetic() -> Iterator[None]:
    """Set Inductor's options for a fixed rounding of the regions that are compiled meanwhile.

    ``round_every_value`` does what options cannot.
    """
    from triton import knobs

    with torch._inductor.config.patch(_OPTIONS), knobs.nvidia.scope():
        # With the first option, Inductor would make all kernels compiled from then on, ours too,
        # use the CUDA toolkit's libdevice.
        knobs.nvidia.libdevice_path = knobs.nvidia.libdevice_path or _libdevice()
        yield


def _libdevice() -> str:
    """Find the libdevice that Triton uses by default."""
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "lib" / "libdevice.10.bc")


def round_every_value(graph: Graph) -> None:
    """Make Inductor round every BF16 or FP16 value of a graph of ATen ops where it is computed.

    Inductor's own option rounds only the calls of the traced function: neither casts nor the ops
    that those calls decompose into.
    """
    for node in graph.nodes:
        if node.op == "call_function":
            node.meta[_BARRIER] = True


def check_sums(sources: Sequence[str]) -> None:
    """Raise unless no kernel of Inductor's code sums elements.

    Raises:
        UnsupportedError: a kernel sums, in a form that the pass row_sums does not know.
    """
    found = sorted({match[0] for source in sources for match in _SUM.finditer(source)})
    if found:
        raise UnsupportedError(
            f"batch_invariant: the model sums in a way whose order goes by the graph, by "
            f"{', '.join(each.removesuffix('(') for each in found)}"
        )
