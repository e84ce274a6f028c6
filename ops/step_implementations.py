"""Forms in which the decode step of a mixer is one op: in C++, Triton and vectorised torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from torch_hybrid.ops.composed import COMPOSED
from torch_hybrid.ops.core.capability import (
    BATCH_INVARIANT,
    FLOATS_AND_FLOAT64,
    Capability,
    Implementation,
)
from torch_hybrid.ops.native import compiler_missing
from torch_hybrid.ops.triton.devices import triton_devices, triton_missing

# Several tokens of a sequence in one call, by the arithmetic of one after the other.
EXTEND = frozenset({"extend"})
NO_STORE = frozenset({"no_store"})  # so of sequences, too, whose states are not stored
VERIFY = frozenset({"verify"})  # drafts after the first token, too; see ``ops.verify``


def composed_of(launcher: str) -> Implementation:
    """Define an implementation that calls an op for each part, of sequences of any lengths."""
    return Implementation(
        capability=Capability(
            devices=frozenset({"cpu", "cuda"}),
            dtypes=FLOATS_AND_FLOAT64,
            features=EXTEND | NO_STORE | VERIFY | {BATCH_INVARIANT},
            cuda_graph=True,
        ),
        launcher=launcher,
        is_traced=True,
    )


def step_implementations(
    op: str,
    folder: str,
    step: str,
    *,
    limits: Mapping[str, int],
    composed: str,
    has_invariant: bool = False,
) -> dict[str, Implementation]:
    """Define the implementations of a step's op: each is the function of the op's name in a module.

    Args:
        op: the op's name.
        folder: the folder of its family in ops/.
        step: the end of its modules' names: ``_cpu_step_gated.py`` has that of "gated".
        limits: sizes that the Triton form takes at most.
        composed: launcher that calls an op for each part of the mixer.
        has_invariant: whether there is a Triton form that gives a token the bits that it has in any
            call: the launcher's with ``is_invariant``.
    """
    package = f"torch_hybrid.ops.{folder}"
    on_gpu = Capability(
        devices=triton_devices(),
        limits=limits,
        features=VERIFY,
        cuda_graph=True,
        available=triton_missing,
    )
    forms = {
        "cpp": Implementation(
            capability=Capability(
                devices=frozenset({"cpu"}),
                dtypes=frozenset({torch.float32, torch.bfloat16}),
                features=EXTEND | VERIFY | {BATCH_INVARIANT},
                available=compiler_missing,
            ),
            launcher=f"{package}._cpu_step_{step}:{op}",
            checks_indices=True,
            figures="torch_hybrid.ops.native.cpu_tuning:state_figures",
        ),
        "triton": Implementation(capability=on_gpu, launcher=f"{package}._triton_step_{step}:{op}"),
    }
    if has_invariant:
        forms["triton_invariant"] = Implementation(
            capability=replace(on_gpu, features=EXTEND | NO_STORE | {BATCH_INVARIANT}),
            launcher=f"{package}._triton_step_{step}:{op}",
            options={"is_invariant": True},
        )
    forms[COMPOSED] = composed_of(composed)
    forms["torch"] = Implementation(
        capability=Capability(devices=frozenset({"cpu", "cuda"}), features=VERIFY),
        launcher=f"{package}._torch_step_{step}:{op}",
    )
    return forms
