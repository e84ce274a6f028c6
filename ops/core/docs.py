"""Docstrings of declared ops: what a base class says of its arguments stands in it alone."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable

_ARGS = re.compile(r"^Args:\n((?:    .*\n)+)", re.MULTILINE)
_RAISES = re.compile(r"^Raises:\n(?:    .*\n)+", re.MULTILINE)
# One argument or several, with the lines that belong to them.
_ENTRY = re.compile(r"^    (\w+(?:, \w+)*):.*\n(?:     .*\n)*", re.MULTILINE)


def complete_doc(cls: type, names: Iterable[str]) -> str | None:
    """Complete a docstring by Args that its bases alone have, in the order of ``names``, and by
    their Raises.

    A docstring without Args stays as it is.
    """
    own, *bases = (f"{inspect.cleandoc(each.__doc__ or '')}\n" for each in cls.__mro__)
    if _ARGS.search(own) is None:
        return cls.__doc__
    told: dict[str, str] = {}
    for doc in (*reversed(bases), own):
        for entry in _ENTRY.finditer("".join(_ARGS.findall(doc))):
            told |= dict.fromkeys(entry[1].split(", "), entry[0])
    arguments = "Args:\n" + "".join(dict.fromkeys(told[name] for name in names if name in told))
    if _RAISES.search(own) is None:
        raises = next(each[0] for each in map(_RAISES.search, bases) if each)
        before, paragraph, after = own.partition("\nReturns:\n")
        results, _, rest = after.partition("\n\n")
        own = f"{before}{paragraph}{results.rstrip()}\n\n{raises}\n{rest}".rstrip() + "\n"
    return _ARGS.sub(lambda _: arguments, own)
