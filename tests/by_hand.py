"""Options of the fuzzers that are run by hand."""

from __future__ import annotations

import argparse
from collections.abc import Collection

import torch


def options(doc: str, families: Collection[str] = ()) -> argparse.ArgumentParser:
    """Make a parser of how long to go on, from which seed and, if there are some, which families.

    One thread computes: a fuzzer is about the order of things.
    """
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    each = " for each family" if families else ""
    parser.add_argument("--seconds", type=float, default=60.0, help=f"how long to go on{each}")
    parser.add_argument("--seed", type=int, default=0)
    if families:
        parser.add_argument("--families", nargs="+", choices=families, default=list(families))
    return parser
