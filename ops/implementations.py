"""Implementations in C++, Triton and torch: what all of one kind have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from torch_hybrid.ops.core.capability import (
    BATCH_INVARIANT,
    FLOATS,
    NO_FEATURES,
    Capability,
    Implementation,
)
from torch_hybrid.ops.native import compiler_missing
from torch_hybrid.ops.triton.devices import triton_devices, triton_missing

CPU, CUDA = frozenset({"cpu"}), frozenset({"cuda"})
CPP_DTYPES = frozenset({torch.float32, torch.bfloat16})
HALVES = frozenset({torch.bfloat16, torch.float16})
INVARIANT = frozenset({BATCH_INVARIANT})
_NO_SIZES: Mapping[str, int] = {}
_NO_OPTIONS: Mapping[str, Any] = {}


def in_cpp(
    launcher: str,
    *,
    dtypes: frozenset[torch.dtype] = CPP_DTYPES,
    multiples: Mapping[str, int] = _NO_SIZES,
    features: frozenset[str] = NO_FEATURES,
    checks_indices: bool = True,
    figures: str | None = None,
) -> Implementation:
    """Define an implementation in C++: for CPUs, where a compiler is."""
    return Implementation(
        capability=Capability(
            devices=CPU,
            dtypes=dtypes,
            multiples=multiples,
            features=features,
            available=compiler_missing,
        ),
        launcher=launcher,
        checks_indices=checks_indices,
        figures=figures,
    )


def in_triton(
    launcher: str,
    *,
    dtypes: frozenset[torch.dtype] = FLOATS,
    limits: Mapping[str, int] = _NO_SIZES,
    features: frozenset[str] = NO_FEATURES,
    only_with: frozenset[str] = NO_FEATURES,
    available: Callable[[], str | None] = triton_missing,
    options: Mapping[str, Any] = _NO_OPTIONS,
    planner: str | None = None,
) -> Implementation:
    """Define an implementation in Triton, which CUDA graphs may hold and which needs no plan."""
    return Implementation(
        capability=Capability(
            devices=triton_devices(),
            dtypes=dtypes,
            limits=limits,
            features=features,
            only_with=only_with,
            cuda_graph=True,
            available=available,
        ),
        launcher=launcher,
        options=options,
        planner=planner,
        needs_plan=planner is None,
    )


def in_torch(
    launcher: str,
    *,
    dtypes: frozenset[torch.dtype] = FLOATS,
    features: frozenset[str] = NO_FEATURES,
    cuda_graph: bool = False,
) -> Implementation:
    """Define an implementation in vectorised torch, for every device."""
    return Implementation(
        capability=Capability(
            devices=CPU | CUDA, dtypes=dtypes, features=features, cuda_graph=cuda_graph
        ),
        launcher=launcher,
    )


def cut(implementation: Implementation) -> Implementation:
    """Define the form that cuts each sequence at its own places: its launcher's ``is_cut``."""
    return replace(implementation, options={"is_cut": True})


def invariant(implementation: Implementation) -> Implementation:
    """Define the batch-invariant form of an implementation: its launcher's ``is_invariant``."""
    capability = implementation.capability
    return replace(
        implementation,
        capability=replace(capability, features=capability.features | INVARIANT),
        options={"is_invariant": True},
        figures=None,
    )
