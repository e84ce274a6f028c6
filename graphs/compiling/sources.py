"""Files of the code that a trace went through, by which a later process knows that it still holds.

What the facts of a process tell already is left out: torch, Python's own library, this package.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import CodeType

UNKNOWN = ""  # in place of a digest: code of no file, as a notebook has
# Of code that others write: dataclasses, torch.fx, the declarations of ops.
_GENERATED = ("<string>", "<frozen ", "<eval_with_key>", "<torch_hybrid op ")
_KNOWN = {"torch", __name__.partition(".")[0], *sys.stdlib_module_names} - {"__main__"}


def sources_of(traced: Iterable[CodeType]) -> dict[str, str]:
    """Digest the file of each module that has some of this code, by the module's name.

    Code of no module's file is named by what it has instead, with ``UNKNOWN``.
    """
    modules = {getattr(m, "__file__", None): name for name, m in list(sys.modules.items())}
    files = {c.co_filename for c in traced if not c.co_filename.startswith(_GENERATED)}
    named = {modules.get(file, file) for file in files}
    return {name: _here(name) for name in named if name.partition(".")[0] not in _KNOWN}


def changed_sources(sources: Mapping[str, str]) -> list[str]:
    """List the modules whose file is another one in this process."""
    return [name for name, made_of in sources.items() if made_of not in (UNKNOWN, _here(name))]


def _here(name: str) -> str:
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None:  # imported by a step, perhaps, and so by none here
        with suppress(ImportError, ValueError):
            file = getattr(find_spec(name), "origin", None)
    if file is None or not Path(file).is_file():
        return UNKNOWN
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]
