"""Hashes of what every family computes, to see whether a change keeps all bits.

    python -m tests.models.same_bits before.json              in a checkout of the one commit
    python -m tests.models.same_bits after.json before.json   in one of the other: what differs

Logits of every token of four steps (prompts, decode, both) and what they leave in the pools, in
float32 and bfloat16, as the model runs eagerly; with ``--compiled FAMILY ...``, compiled too.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

import torch
from torch import Tensor

import torch_hybrid as th
from tests.tiny_models import BUILDERS, make_model

STEPS = [[[5] * 70, [7] * 3, [9]], [[1], [2], [3]], [[4] * 3, [1] * 40, [2]], [[4], [1], [2]]]
SIZES = {"max_seqs": 4, "max_tokens": 128, "kv_tokens": 256}


def digest(tensors: list[Tensor]) -> str:
    """Of the bits, in whatever order the tensors come."""
    each = sorted(
        hashlib.sha256(t.contiguous().flatten().view(torch.uint8).numpy()).hexdigest()
        for t in tensors
    )
    return hashlib.sha256("".join(each).encode()).hexdigest()[:12]


def serve(family: str, dtype: torch.dtype, *, compiled: bool) -> list[str]:
    """Hashes of the logits of all steps and of the pools after them."""
    model = th.adapt(make_model(family, seed=2).to(dtype))
    runner = th.Runner(model, **SIZES, compile=compiled)
    seqs = runner.new_sequences(3)
    logits = [runner.extend(seqs, tokens, logits="all") for tokens in STEPS]
    return [digest([torch.cat(logits)]), digest(runner.cache.pool_tensors())]


def main() -> None:
    """Write the hashes, and name those that are not the other file's."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("other", type=Path, nargs="?")
    parser.add_argument("--compiled", nargs="+", default=[], choices=sorted(BUILDERS))
    options = parser.parse_args()
    found = {}
    for family in sorted(BUILDERS):
        for dtype in (torch.float32, torch.bfloat16):
            for compiled in (False, True) if family in options.compiled else (False,):
                form = "compiled" if compiled else "eager"
                found[f"{family} {str(dtype)[6:]} {form}"] = serve(family, dtype, compiled=compiled)
    options.file.write_text(json.dumps(found, indent=1))
    if options.other is None:
        return
    other = json.loads(options.other.read_text())
    both = [name for name in found if name in other]
    differing = [name for name in both if found[name] != other[name]]
    print(f"{len(both) - len(differing)} of {len(both)} are the same bits", *differing, sep="\n")


if __name__ == "__main__":
    main()
