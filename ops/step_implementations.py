"""Forms in which the decode step of a mixer is one op: in C++, Triton and vectorised torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch_hybrid.ops.composed import COMPOSED
from torch_hybrid.ops.core.capability import FLOATS_AND_FLOAT64, Capability, Implementation
from torch_hybrid.ops.implementations import (
    CPU,
    CUDA,
    INVARIANT,
    in_cpp,
    in_torch,
    in_triton,
    invariant,
)

# Several tokens of a sequence in one call, by the arithmetic of one after the other.
EXTEND = frozenset({"extend"})
NO_STORE = frozenset({"no_store"})  # so of sequences, too, whose states are not stored
VERIFY = frozenset({"verify"})  # drafts after the first token, too; see ``ops.verify``
OPEN = frozenset({"open"})  # by chunks that stay open between steps; see ``ops/open_chunk``


def composed_of(launcher: str) -> Implementation:
    """Define an implementation that calls an op for each part, of sequences of any lengths."""
    return Implementation(
        capability=Capability(
            devices=CPU | CUDA,
            dtypes=FLOATS_AND_FLOAT64,
            features=EXTEND | NO_STORE | VERIFY | INVARIANT,
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
    torch_form: str = "",
    has_invariant: bool = False,
    opens_chunks: bool = False,
) -> dict[str, Implementation]:
    """Define the implementations of a step's op: each is the function of the op's name in a module.

    Args:
        op: the op's name.
        folder: the folder of its family in ops/.
        step: the end of its files' names: ``_cpu_step_gated.cpp`` has that of "gated".
        limits: sizes that the Triton form takes at most.
        composed: launcher that calls an op for each part of the mixer.
        torch_form: launcher in torch, unless a module has it as Triton's has.
        has_invariant: whether there is a Triton form that gives a token the bits that it has in any
            call: the launcher's with ``is_invariant``.
        opens_chunks: whether the Triton form keeps chunks open.
    """
    package = f"torch_hybrid.ops.{folder}"
    able = VERIFY | OPEN if opens_chunks else VERIFY
    triton = in_triton(f"{package}._triton_step_{step}:{op}", limits=limits, features=able)
    forms = {
        "cpp": in_cpp(
            f"{package}._cpu_step_{step}.cpp:{op}",
            features=EXTEND | VERIFY | INVARIANT,
            figures="torch_hybrid.ops.native.cpu_tuning:state_figures",
        ),
        "triton": triton,
    }
    if has_invariant:
        without_drafts = replace(triton.capability, features=EXTEND | NO_STORE)
        forms["triton_invariant"] = invariant(replace(triton, capability=without_drafts))
    forms[COMPOSED] = composed_of(composed)
    forms["torch"] = in_torch(torch_form or f"{package}._torch_step_{step}:{op}", features=VERIFY)
    return forms
