"""Choice of implementations: once, at construction, from data; a refusal gives every reason."""

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
    """Names of the implementations that a runner takes.

    ``"auto"`` takes the fastest implementation measured on the device, or the first that can serve
    if none was measured. It passes over some implementations; ``explain`` says why. A name that
    cannot serve is an error, never replaced by another.

    Args:
        full: name for full attention.
        linear: name for linear attention. "triton" is "recurrent_triton" in decode, "chunk_triton"
            in extend.
        conv: name for the convolutions of linear attention.
        experts: name for the experts of a mixture.
        products: name for the linear layers of compiled steps. "cpp" and "triton" merge the layers
            of one input, "torch" is torch's own GEMM.
        ops: names by op, which come before those by kind: for "latent_attention", for "decode
            latent_attention" in decode steps alone, for "fp8 linear" with FP8 weights.
        prefix: policy by which MLA layers attend to a prefix at prefill.
        batch_invariant: take implementations alone whose rows do not depend on one another;
            ``Runner`` sets it.
        exact: refuse implementations that round recurrent states to half precision within a call,
            as ``chunk_triton_rounded`` does. Its error is a tenth of other engines' kernels.
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
        """Features that every implementation must have."""
        return frozenset({BATCH_INVARIANT}) if self.batch_invariant else NO_FEATURES

    def __post_init__(self) -> None:
        if unknown := {name for name in self.ops if name.split()[-1] not in REGISTERED}:
            raise ValueError(f"ops must be among {sorted(REGISTERED)}, got {sorted(unknown)}")

    def named(self, op: str, kind: str, mode: Mode | None = None) -> str:
        """Find the name given for an op in steps of one mode; ``kind`` is that for all its kind."""
        name = self.ops.get(op, kind)
        return name if mode is None else self.ops.get(f"{mode.name} {op}", name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Implementation chosen for one op, and the reasons against the others.

    ``figures`` renders the measurements that decided, or those by which the implementation tunes
    itself on this machine. The latter are made when ``figures`` is called.
    """

    op: str
    impl: str
    figures: Callable[[], str] = field(default=str, compare=False, repr=False)
    refused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def measured(self) -> str:
        """Measurements behind the choice, as text; "" if there are none."""
        return self.figures()


@runtime_checkable
class HasImplementation(Protocol):
    """Module that calls an op whose implementation is chosen for all modules of its kind.

    Attributes:
        op: name of the op.
        kind: name of the modules that share a choice: "fp8 linear".
        implementations: implementations of the op.
        need: what an implementation must serve, given where the module's weights are now.
        choice: chosen implementation.
    """

    op: ClassVar[str]
    choice: Choice

    @property
    def kind(self) -> str: ...

    @property
    def implementations(self) -> Mapping[str, Implementation]: ...

    @property
    def need(self) -> Need: ...


def impls_of(choices: Iterable[Choice]) -> tuple[tuple[str, str], ...]:
    """List each op with its implementation."""
    return tuple((choice.op, choice.impl) for choice in choices)


def select(
    op: str,
    implementations: Mapping[str, Implementation],
    needs: Need | Iterable[Need],
    preferred: str = "auto",
) -> Choice:
    """Choose an implementation of ``op`` that can serve all ``needs``.

    The preferred one if it is named. Otherwise the fastest measured on the device, or the first if
    none was measured.

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
