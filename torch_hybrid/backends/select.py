"""Choosing an implementation: once, at construction, from data; a refusal gives every reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Protocol, runtime_checkable

from torch_hybrid.backends.measured import fastest
from torch_hybrid.backends.mode import Mode
from torch_hybrid.backends.prefix import PrefixPolicy
from torch_hybrid.errors import UnsupportedError
from torch_hybrid.ops.core.capability import BATCH_INVARIANT, NO_FEATURES, Implementation, Need
from torch_hybrid.ops.core.registration import REGISTERED


@dataclass(frozen=True, slots=True, kw_only=True)
class Backends:
    """Which implementations a runner may take, by name; ``"auto"`` is the one that was measured to
    be the fastest on the device, or the first that can serve where nothing was; some are taken by
    name alone, and ``explain`` says why.

    ``full`` is for full attention, ``linear`` for linear attention and ``conv`` for its
    convolution, ``experts`` for the experts of a mixture, and ``products`` for the linear layers of
    compiled steps: "cpp" and "triton" merge those of one input, "torch" is torch's own. ``ops``
    names one for an op by the op's own name, before those: "latent_attention", or "decode
    latent_attention" in decode steps alone, "fp8 linear" where weights have 8 bits. A name that
    cannot serve is an error, never replaced by another. ``prefix`` says how MLA layers reach what a
    sequence holds already. ``batch_invariant`` takes none whose rows depend on one another; see
    ``Runner``, which sets it. ``exact`` takes none that rounds recurrent states to 16 bits within a
    call, as the kernels of other engines do and, ten times less, ``triton_rounded``.
    """

    full: str = "auto"
    linear: str = "auto"
    conv: str = "auto"
    experts: str = "auto"
    products: str = "auto"
    ops: Mapping[str, str] = field(default_factory=dict)
    prefix: PrefixPolicy = PrefixPolicy()
    batch_invariant: bool = False
    exact: bool = False

    @property
    def features(self) -> frozenset[str]:
        """What every implementation must be able to do."""
        return frozenset({BATCH_INVARIANT}) if self.batch_invariant else NO_FEATURES

    def __post_init__(self) -> None:
        if unknown := {name for name in self.ops if name.split()[-1] not in REGISTERED}:
            raise ValueError(f"ops must be among {sorted(REGISTERED)}, got {sorted(unknown)}")

    def named(self, op: str, kind: str, mode: Mode | None = None) -> str:
        """What is asked for an op, in steps of one mode: by its own name, or else ``kind``, that of
        all of its kind."""
        name = self.ops.get(op, kind)
        return name if mode is None else self.ops.get(f"{mode.name} {op}", name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What was chosen for one op, and why the others were not.

    ``figures`` says which decided, or by which the implementation goes on this machine: these are
    measured when somebody asks.
    """

    op: str
    impl: str
    figures: Callable[[], str] = field(default=str, compare=False, repr=False)
    refused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def measured(self) -> str:
        """The figures; "" where the order of implementations decided."""
        return self.figures()


@runtime_checkable
class HasImplementation(Protocol):
    """A module that calls an op whose implementation is chosen for all modules of its kind.

    Attributes:
        op: the op's name.
        kind: of modules that go by one choice, by which it is named: "fp8 linear".
        implementations: of the op.
        need: what serves the module, where its weights are now.
        choice: what is called.
    """

    op: ClassVar[str]
    implementations: ClassVar[Mapping[str, Implementation]]
    choice: Choice

    @property
    def kind(self) -> str: ...

    @property
    def need(self) -> Need: ...


def impls_of(choices: Iterable[Choice]) -> tuple[tuple[str, str], ...]:
    """Each op with its implementation."""
    return tuple((choice.op, choice.impl) for choice in choices)


def select(
    op: str,
    implementations: Mapping[str, Implementation],
    needs: Need | Iterable[Need],
    preferred: str = "auto",
) -> Choice:
    """An implementation of ``op`` that can serve all ``needs``: the preferred one, or that which
    was measured to be the fastest on the device, or else the first.

    Raises:
        ValueError: ``preferred`` names no implementation of the op.
        UnsupportedError: none can serve; the message lists every reason of every candidate.
    """
    wanted = [needs] if isinstance(needs, Need) else list(needs)
    if preferred != "auto" and preferred not in implementations:
        raise ValueError(
            f"{op} has no implementation {preferred!r}; it has {['auto', *implementations]}"
        )
    refused: dict[str, tuple[str, ...]] = {}
    able: list[str] = []
    for name, implementation in implementations.items():
        why_not = implementation.capability.why_not
        reasons = list(dict.fromkeys(reason for need in wanted for reason in why_not(need)))
        if not reasons and preferred not in ("auto", name):
            reasons = [f"{preferred} was asked for by name"]
        if implementation.by_name and preferred == "auto":
            reasons.append(f"it is taken by name alone: {implementation.by_name}")
        if reasons:
            refused[name] = tuple(reasons)
        else:
            able.append(name)
    if not able:
        asked_first = sorted(refused, key=lambda name: name != preferred)
        listed = "\n".join(f"  {name}: {'; '.join(refused[name])}" for name in asked_first)
        raise UnsupportedError(f"no implementation of {op} can serve:\n{listed}")
    best = fastest(op, wanted, able) if preferred == "auto" else None
    chosen = best.impl if best else able[0]
    reason = best.why_not if best else lambda _: f"{chosen} comes first"
    others = {name: refused.get(name) or (reason(name),) for name in implementations}
    del others[chosen]
    figures = partial(implementations[chosen].figures_of, wanted[0].dtype)
    return Choice(op=op, impl=chosen, figures=best.__str__ if best else figures, refused=others)
