"""Capabilities of implementations, as data: selection reads them, and nothing is probed for."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from torch_hybrid.ops.core.planning import Planner

FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})
FLOATS_AND_FLOAT64 = FLOATS | {torch.float64}
NO_FEATURES: frozenset[str] = frozenset()
# Each row of a result has an order of additions of its own: it has the same bits whatever other
# rows a call has, and however a sequence's tokens are cut into calls.
BATCH_INVARIANT = "batch_invariant"
# What makes the launcher of a C++ source, by the op that ``define`` declares.
CPP_LOADERS: dict[str, Callable[[Path], Callable[..., Any]]] = {}
_LOADED: dict[str, Callable[..., Any]] = {}


def always_available() -> str | None:
    """Return None: the implementation needs nothing beyond torch."""
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Demands of a caller on an implementation.

    ``sizes`` names the sizes an implementation may limit (``head_dim``, ``page_size``, ...);
    ``features`` names the optional behaviour it must have (``sliding_window``, ``lse``, ...);
    ``exact`` asks for states as good as float32's.
    """

    device: torch.device
    dtype: torch.dtype
    sizes: Mapping[str, int] = field(default_factory=dict)
    features: frozenset[str] = NO_FEATURES
    exact: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """Support that one implementation offers.

    Attributes:
        multiples, limits, one_of: bounds of sizes by name.
        only_with: features that a caller must want, for an implementation of special cases.
        exact: False where a call rounds states to BF16 or FP16.
        available: says why this machine cannot run the implementation; None when it can.
    """

    devices: frozenset[str]
    dtypes: frozenset[torch.dtype] = FLOATS
    multiples: Mapping[str, int] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)
    one_of: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    features: frozenset[str] = NO_FEATURES
    only_with: frozenset[str] = NO_FEATURES
    exact: bool = True
    cuda_graph: bool = False
    available: Callable[[], str | None] = always_available

    def why_not(self, need: Need) -> list[str]:
        """List every reason why this implementation cannot serve ``need``; empty when it can."""
        reasons = []
        if need.device.type not in self.devices:
            reasons.append(f"device {need.device.type} is not in {sorted(self.devices)}")
        elif (missing := self.available()) is not None:
            reasons.append(missing)
        if need.dtype not in self.dtypes:
            reasons.append(f"dtype {need.dtype} is not in {sorted(map(str, self.dtypes))}")
        if need.exact and not self.exact:
            reasons.append("it rounds states to 16 bits, and exact=True")
        reasons += self.sizes_refused(need.sizes)
        return reasons + self.features_refused(need.features)

    def sizes_refused(self, sizes: Mapping[str, int]) -> list[str]:
        """List every reason that lies in the sizes alone."""
        reasons = []
        for name, size in sizes.items():
            if size % self.multiples.get(name, 1):
                reasons.append(f"{name} {size} is not a multiple of {self.multiples[name]}")
            if size not in self.one_of.get(name, (size,)):
                reasons.append(f"{name} {size} is not one of {list(self.one_of[name])}")
            if size > self.limits.get(name, size):
                reasons.append(f"{name} {size} is over the limit {self.limits[name]}")
        return reasons

    def features_refused(self, features: frozenset[str]) -> list[str]:
        """List every reason that lies in the features that a caller wants, or does not want."""
        if features <= self.features and self.only_with <= features:
            return []  # as in every call of an op
        reasons = [f"it has no {feature}" for feature in sorted(features - self.features)]
        only = sorted(self.only_with - features)
        return reasons + [f"it is for {feature} alone" for feature in only]


@dataclass(frozen=True, slots=True, kw_only=True)
class Implementation:
    """One way to compute an op: what it can do, and where its launcher is found.

    ``launcher`` is ``"package.module:function"``, imported when first called, so that an
    implementation which is never used costs no import, no build and no memory. The module may be a
    script or a notebook; what stands in none is given as a function itself. A C++ kernel of a
    declared op is named as a module is: ``"package._cpu.cpp:op"``. ``planner``, found
    alike, makes what the launcher wants beside the op's own arguments, on the host and before each
    step; see ``ops.planning``. The launcher is then given it as ``planned``; one without
    ``needs_plan`` goes by shapes where it is not. ``figures``, found alike, says for a dtype in
    which forms it runs on this machine, and what was measured of them. ``options`` are given to the
    launcher beside the op's own. ``checks_indices`` says that it finds indices out of range itself,
    while it runs. ``by_name`` says why "auto" passes over it, however fast it is;
    "" where "auto" may take it. The public function of a declared op calls the launcher of one that
    ``is_traced`` itself, so that a compiler sees the ops within.
    """

    capability: Capability
    launcher: str | Callable[..., Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    planner: str | None = None
    needs_plan: bool = True
    checks_indices: bool = False
    figures: str | None = None
    by_name: str = ""
    is_traced: bool = False

    def load(self) -> Callable[..., Any]:
        """Import the launcher (once) and return it.

        Raises:
            ImportError: its name leads nowhere.
        """
        launcher = _load(self.launcher) if isinstance(self.launcher, str) else self.launcher
        return partial(launcher, **self.options) if self.options else launcher

    def load_planner(self) -> Planner | None:
        """Import the planner (once) and return it; None where nothing is planned."""
        return None if self.planner is None else _load(self.planner)

    def figures_of(self, dtype: torch.dtype) -> str:
        """Report what this machine measured of the implementation; "" where nothing was."""
        return "" if self.figures is None else str(_load(self.figures)(dtype))


def source_of(name: str) -> Path:
    """Find the C++ source that is named ``package.stem.cpp``."""
    package, stem, _ = name.rsplit(".", 2)
    [folder] = importlib.import_module(package).__path__
    return Path(folder, f"{stem}.cpp")


def _load(launcher: str) -> Callable[..., Any]:
    loaded = _LOADED.get(launcher)
    if loaded is not None:
        return loaded
    name, _, function = launcher.partition(":")
    if name.endswith(".cpp"):
        _LOADED[launcher] = CPP_LOADERS[function](source_of(name))
        return _LOADED[launcher]
    module = importlib.import_module(name)
    found: Callable[..., Any] | None = getattr(module, function, None)
    if found is None:
        raise ImportError(
            f"module {name!r} must have {function!r}, which is named {launcher!r} as an "
            f"implementation, got no such function: code of exec() gives the function itself"
        )
    if module.__spec__ is not None:  # else a cell of a notebook may define another one
        _LOADED[launcher] = found
    return found
