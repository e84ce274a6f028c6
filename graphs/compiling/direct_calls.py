"""Calls of this package's ops past torch's dispatcher, in the code that Inductor generates.

A step of one sequence on a CPU calls a hundred ops. Each reads so many weights that the code and
the objects of the next call come from memory again. The dispatcher is half of a call, and has
nothing to choose: an op's one kernel serves all devices.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor import custom_graph_pass
from torch._ops import OpOverload

from torch_hybrid.ops.core.registration import NAMESPACE

# The class whose ``uuid`` Inductor's cache asks for; torch 2.11 has one for passes of all kinds.
_Pass: Any = getattr(custom_graph_pass, "CustomSchedulerPass", custom_graph_pass.CustomGraphPass)


class CallDirectly(_Pass):  # type: ignore[misc]
    """Inductor's pass by which code calls ``op.direct`` in place of ``op.default``."""

    def uuid(self) -> str:
        """Name this class in the key under which Inductor caches code."""
        return "torch_hybrid.CallDirectly.1"

    def __call__(self, nodes: list[Any]) -> list[Any]:
        """Rename what the calls of this package's ops are to call."""
        for kernel in (part.node for node in nodes for part in node.get_nodes()):
            op = getattr(kernel, "op_overload", None)
            if isinstance(op, OpOverload) and op.namespace == NAMESPACE:
                kernel.python_kernel_name = f"torch.ops.{NAMESPACE}.{op._opname}.direct"
        return nodes


def direct_calls() -> dict[str, Any]:
    """Make the option of Inductor, unless a user's own pass has that place."""
    is_taken = torch._inductor.config._pre_fusion_custom_pass is not None
    return {} if is_taken else {"_pre_fusion_custom_pass": CallDirectly()}
