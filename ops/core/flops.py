"""FLOPs of each op for ``torch.utils.flop_counter``: multiplications and additions of its products.

An op's declaration says what it counts (``flops`` of ``define``). Lengths are data, and a counter
sees only shapes. Paged attention counts as if every sequence filled its row of the page table,
ragged attention as if all sequences were equally long. Neither counts causal masks, as torch's own
formulas do not. A recurrence counts what it needs token by token, whichever form runs. Copies and
element-wise operations count nothing.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from typing import Any

import torch

_COUNTER = "torch.utils.flop_counter"
_formulas: dict[torch._ops.OpOverloadPacket, Callable[..., int]] = {}


def register_formula(op: torch._ops.OpOverloadPacket, formula: Callable[..., int]) -> None:
    """Have the counter count ``op``: now, or once it is imported.

    The counter imports triton, which takes longer than all of this package; few need it.

    Args:
        op: op to count.
        formula: takes the arguments of a call.
    """
    _formulas[op] = formula
    if _COUNTER in sys.modules:
        _register(op)


def _register(op: torch._ops.OpOverloadPacket) -> None:
    from torch.utils.flop_counter import register_flop_formula

    def count(*args: Any, out_val: object, **options: Any) -> int:
        return _formulas[op](*args, **options)

    register_flop_formula(op, get_raw=True)(count)


class _AfterImport(MetaPathFinder):
    """Registers all formulas when the counter is imported, and is then gone."""

    def find_spec(self, name: str, path: object, target: object = None) -> Any:
        if name != _COUNTER:
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_register(module: Any) -> None:
            execute(module)
            for known in _formulas:
                _register(known)

        spec.loader.exec_module = execute_and_register
        return spec


if _COUNTER not in sys.modules:
    sys.meta_path.insert(0, _AfterImport())
