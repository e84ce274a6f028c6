"""What Inductor may not choose where a value must have the same bits in every graph.

It fuses what it likes, and with that decides two things of a value that is computed on a GPU: a
product and the sum after it may become one instruction, which rounds once; and an intermediate of
16 bits is rounded where it goes to memory, and stays as it is in float32 where it does not. It also
rewrites patterns whose ends are in one graph. Nothing of that is left here:

    products and sums are instructions of their own    (enable_fp_fusion of Triton's compiler)
    every value of 16 bits is rounded where it is computed
    no pattern is rewritten
    no sum over a row is left                           (the pass row_sums; looked for in the code)

What remains are functions of single elements, each by the same instructions wherever it stands.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.fx import Graph

from torch_hybrid.errors import UnsupportedError

# The first also asks for Triton kernels without fused products and sums.
_OPTIONS = {"emulate_precision_casts": True, "pattern_matcher": False}
_BARRIER = "low_precision_pointwise_barrier"
_SUM = re.compile(
    r"\btl\.(?:sum|reduce|associative_scan|cumsum|cumprod|atomic_add|dot)\("
    r"|\btriton_helpers\.(?:prod|welford\w*|online_softmax\w*|exclusive_scan\w*)\("
)


def fuses_freely(device: torch.device) -> bool:
    """Whether what is compiled for a device goes by the graph that it is in: on a CPU, Inductor's
    C++ rounds each product, and adds rows up in one order."""
    return device.type == "cuda"


@contextmanager
def fixed_arithmetic() -> Iterator[None]:
    """Regions are compiled so meanwhile; ``round_every_value`` sees to what options leave open."""
    from triton import knobs

    with torch._inductor.config.patch(_OPTIONS), knobs.nvidia.scope():
        # Beside the first option Inductor would have all kernels that are compiled from then on
        # take their functions of the CUDA toolkit, ours too.
        knobs.nvidia.libdevice_path = knobs.nvidia.libdevice_path or _libdevice()
        yield


def _libdevice() -> str:
    """The functions that Triton takes of itself."""
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "lib" / "libdevice.10.bc")


def round_every_value(graph: Graph) -> None:
    """Have Inductor round all that it computes of 16 bits in a graph of ATen's ops.

    By its option it does so of what the traced function called itself: neither of casts, nor of
    what those calls were taken apart into.
    """
    for node in graph.nodes:
        if node.op == "call_function":
            node.meta[_BARRIER] = True


def check_sums(sources: Sequence[str]) -> None:
    """Raise unless no kernel of Inductor's code adds elements up.

    Raises:
        UnsupportedError: one does, of something that the pass row_sums does not know.
    """
    found = sorted({match[0] for source in sources for match in _SUM.finditer(source)})
    if found:
        raise UnsupportedError(
            f"batch_invariant: the model sums in a way whose order goes by the graph, by "
            f"{', '.join(each.removesuffix('(') for each in found)}"
        )
