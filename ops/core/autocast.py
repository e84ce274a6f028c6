"""Launchers that do not see the caller's autocast.

A compiled graph calls an op outside of it. So an uncompiled call whose products autocast rounds
would give other values.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function with autocast switched off on the devices that ops run on."""

    @wraps(function)
    def run(*args: P.args, **options: P.kwargs) -> R:
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return function(*args, **options)

    return run
