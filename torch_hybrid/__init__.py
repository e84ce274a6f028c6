"""Hybrid attention language models as one compiled graph.

Full and linear attention are ``torch.library`` ops with declared mutations. So ``torch.compile``
traces a whole step of a hybrid model into one graph.

If torch is not loaded yet, names and ops are loaded when a name is first used: the command line
shows its help without torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING or "torch" in sys.modules:
    from torch_hybrid.public import *  # noqa: F403
    from torch_hybrid.public import __all__ as __all__
else:

    def __getattr__(name: str) -> object:
        """Load the module of this name; at the first other name, load all public names."""
        missing = f"module {__name__!r} has no attribute {name!r}"
        if name.startswith("__") and name != "__all__":
            raise AttributeError(missing)
        if find_spec(f"{__name__}.{name}"):
            return import_module(f"{__name__}.{name}")
        public = import_module(f"{__name__}.public")
        names = {"__all__": public.__all__, **{each: vars(public)[each] for each in public.__all__}}
        globals().update(names)
        if name not in names:
            raise AttributeError(missing)
        return names[name]

    def __dir__() -> list[str]:
        return sorted({*globals(), *__getattr__("__all__")})
