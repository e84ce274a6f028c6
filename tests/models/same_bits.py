"""Hashes of what every family computes, to see whether a change keeps all bits.

    python -m tests.models.same_bits before.json              in a checkout of the one commit
    python -m tests.models.same_bits after.json before.json   in one of the other: what differs

Logits of every token of four steps (prompts, decode, both) and what they leave in the pools, in
float32 and bfloat16, as the model runs eagerly; with ``--compiled FAMILY ...``, compiled too.
``--forms`` adds steps that verify drafts, batch-invariant ones, FP8 keys and integer weights.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import torch_hybrid as th
from tests.tiny_models import BUILDERS, make_model

STEPS = [[[5] * 70, [7] * 3, [9]], [[1], [2], [3]], [[4] * 3, [1] * 40, [2]], [[4], [1], [2]]]
SIZES = {"max_seqs": 4, "max_tokens": 128, "kv_tokens": 256}
DTYPES = (torch.float32, torch.bfloat16)
DRAFTS = [[1, 2, 3, 4], [2], [3, 4, 5]]
ACCEPTED = [2, 0, 2]
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "verify": {"max_drafts": 3},
    "batch_invariant": {"batch_invariant": True},
    "fp8": {"kv_dtype": "fp8"},
    "int8": {},
    "int4": {},
}


def digest(tensors: list[Tensor]) -> str:
    """Hash the bits, in whatever order the tensors come."""
    each = sorted(
        hashlib.sha256(t.contiguous().flatten().view(torch.uint8).numpy()).hexdigest()
        for t in tensors
    )
    return hashlib.sha256("".join(each).encode()).hexdigest()[:12]


def serve(family: str, dtype: torch.dtype, form: str, *, compiled: bool) -> list[str]:
    """Return hashes of the logits of all steps and of the pools after them, or what was refused."""
    model = th.adapt(make_model(family, seed=2).to(dtype))
    try:
        if form in ("int8", "int4"):
            th.quantize(model, form)
        runner = th.Runner(model, **SIZES, **FORMS[form], compile=compiled)
    except (ValueError, th.UnsupportedError) as refused:
        return [str(refused)[:60]]
    seqs = runner.new_sequences(3)
    steps: list[Callable[[], Tensor]] = [
        lambda tokens=tokens: runner.extend(seqs, tokens, logits="all") for tokens in STEPS
    ]
    if form == "verify":
        steps[1:1] = steps[3:3] = [lambda: verified(runner, seqs)]
    logits = [step() for step in steps]
    return [digest([torch.cat(logits)]), digest(runner.cache.pool_tensors())]


def verified(runner: th.Runner, seqs: list[th.Sequence]) -> Tensor:
    """Verify drafts and accept some of them."""
    logits = runner.verify(seqs, DRAFTS)
    runner.accept(seqs, ACCEPTED)
    return logits


def main() -> None:
    """Write the hashes, and name those that are not the other file's."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("other", type=Path, nargs="?")
    parser.add_argument("--compiled", nargs="+", default=[], choices=[*sorted(BUILDERS), "all"])
    parser.add_argument("--forms", nargs="+", default=["plain"], choices=FORMS)
    options = parser.parse_args()
    found = {}
    for family in sorted(BUILDERS):
        is_compiled = not {family, "all"}.isdisjoint(options.compiled)
        for form in options.forms:
            for compiled in (False, True) if is_compiled else (False,):
                how = ("compiled" if compiled else "eager") + (
                    "" if form == "plain" else f" {form}"
                )
                for dtype in DTYPES:
                    name = f"{family} {str(dtype)[6:]} {how}"
                    start = time.monotonic()
                    found[name] = serve(family, dtype, form, compiled=compiled)
                    print(name, *found[name], f"{time.monotonic() - start:.1f} s", flush=True)
        options.file.write_text(json.dumps(found, indent=1))
    if options.other is None:
        return
    other = json.loads(options.other.read_text())
    both = [name for name in found if name in other]
    differing = [name for name in both if found[name] != other[name]]
    print(f"{len(both) - len(differing)} of {len(both)} are the same bits", *differing, sep="\n")


if __name__ == "__main__":
    main()
