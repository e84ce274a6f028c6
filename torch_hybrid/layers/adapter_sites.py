"""Modules that adapters change: factors of resident adapters, and what a row's adapter does.

AdapterSite      linear layer, or several side by side
EmbeddingSite    embedding: rows of the first factor are looked up
KeysSite         MLA's product from queries to latents, head by head: first B, then A
ValuesSite       MLA's product from latents to values, head by head: first A, then B
NormSite         norm, in which an adapter has weights of its own
RouterSite       router of a mixture: an adapter changes the logits that experts are chosen by
ExpertsSite      experts: an adapter has factors for each matrix of each expert
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call

from torch_hybrid.caches.pools import LayerCache
from torch_hybrid.layers.fused_experts import FusedExperts
from torch_hybrid.ops.lora.op import lora

# Of a part of a layer: a [r, inputs] and b [outputs of the part, r]. None in the place of a: b is
# in the place of the layer's own weight. None: the adapter leaves the part as it is. Of a part of
# experts: a [E, r, inputs] and b [E, outputs, r], of the first E.
Factors = tuple[Tensor | None, Tensor] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterKinds:
    """Choice of what adapters may change beside linear layers and the embedding.

    Attributes:
        saved_modules: the output head and norms, which they replace.
        experts: experts of mixtures, and their routers.
    """

    saved_modules: bool = False
    experts: bool = False


class Ran(NamedTuple):
    """A module that ran, and whose adapters change its outputs.

    Attributes:
        module: the module without hooks.
        inputs: what it was given.
        out: what it returned; of a router, a tensor of T rows for each of its results.
        slots: [T] adapter of each row, from 1; 0 adds nothing.
        impl: implementation of ``lora``.
    """

    module: nn.Module
    inputs: tuple[Tensor, ...]
    out: Any
    slots: Tensor
    impl: str


class Hook(Protocol):
    """Forward hook of a module, and the one before its forward.

    Attributes:
        module: copy of the module without hooks, of the same weights.
    """

    @property
    def module(self) -> nn.Module: ...

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...], out: Tensor, /) -> Tensor: ...
    def before(
        self, module: nn.Module, args: tuple[Tensor, ...], /
    ) -> tuple[Tensor, ...] | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSite:
    """Linear layer that adapters may change.

    Attributes:
        paths: of the module in the model; several where layers share it together with its adapters.
        inputs: width of a row of inputs.
        widths: outputs of each part: adapters have factors of their own for each.
        dtype: of inputs and outputs.
        is_replaceable: whether adapters may have a weight in the place of the layer's own.
    """

    paths: tuple[str, ...]
    inputs: int
    widths: tuple[int, ...]
    dtype: torch.dtype
    is_replaceable: bool = False

    def attach(self, module: nn.Module, hook: Hook) -> Callable[[], None]:
        """Have a hook change the outputs of a module; return what removes it."""
        return module.register_forward_hook(hook).remove

    def before(
        self, pool: LayerCache, slots: Tensor, inputs: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Change the inputs of a module, where a hook before it is attached."""
        raise NotImplementedError

    def pool(self, max_adapters: int, max_rank: int, device: torch.device) -> LayerCache:
        """Allocate the factors of resident adapters, which are none yet."""
        rank = max(max_rank, self.inputs) if self.is_replaceable else max_rank
        pool = self._factors(max_adapters, rank, self.inputs, self.widths, device)
        if self.is_replaceable:
            pool["replaces"] = torch.zeros(max_adapters, dtype=torch.bool, device=device)
        return pool

    def write(self, pool: LayerCache, slot: int, factors: Sequence[Factors]) -> None:
        """Write an adapter's factors of each part into a slot, from 0."""
        if self.is_replaceable:
            pool["replaces"][slot] = any(part is not None and part[0] is None for part in factors)
        _write(pool, slot, [part if part is None else _low_rank(*part) for part in factors])

    def add(self, pool: LayerCache, ran: Ran) -> Tensor:
        """Add the adapters of the rows to the outputs of a module."""
        base = ran.out.reshape(-1, ran.out.shape[-1])
        if self.is_replaceable:
            base = base.masked_fill(_of_rows(pool["replaces"], ran.slots)[:, None], 0.0)
        return _added(base, ran.inputs[0], pool, ran.slots, ran.impl).view(ran.out.shape)

    def _factors(
        self,
        num_slots: int,
        rank: int,
        inputs: int,
        widths: tuple[int, ...],
        device: torch.device,
    ) -> LayerCache:
        """Allocate the factors that one call of ``lora`` takes."""
        parts = len(widths)
        starts = [sum(widths[:i]) for i in range(parts + 1)]
        a, b = (num_slots, parts, rank, inputs), (num_slots, rank, sum(widths))
        return {
            "a": torch.zeros(a, dtype=self.dtype, device=device),
            "b": torch.zeros(b, dtype=self.dtype, device=device),
            "ranks": torch.zeros(num_slots, parts, dtype=torch.int32, device=device),
            "starts": torch.tensor(starts, dtype=torch.int32, device=device),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingSite(AdapterSite):
    """Embedding of ``inputs`` tokens that adapters may change."""

    def pool(self, max_adapters: int, max_rank: int, device: torch.device) -> LayerCache:
        shape = max_adapters, self.inputs, max_rank
        rows = torch.zeros(shape, dtype=self.dtype, device=device)
        own = self._factors(max_adapters, max_rank, max_rank, self.widths, device)
        return {"rows": rows, **own}

    def write(self, pool: LayerCache, slot: int, factors: Sequence[Factors]) -> None:
        (part,) = factors
        rows = pool["rows"][slot].zero_()
        if part is not None:
            a, b = part
            assert a is not None
            rows[:, : a.shape[0]].copy_(a.T)
            part = torch.eye(a.shape[0], rows.shape[1], dtype=b.dtype, device=b.device), b
        _write(pool, slot, [part])

    def add(self, pool: LayerCache, ran: Ran) -> Tensor:
        """Add the adapters of the rows to the embeddings of their tokens."""
        x = pool["rows"][(ran.slots.long() - 1).clamp(min=0), ran.inputs[0].flatten()]
        base = ran.out.reshape(-1, ran.out.shape[-1])
        return _added(base, x, pool, ran.slots, ran.impl).view(ran.out.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadsSite(AdapterSite):
    """Product [T, H, inputs] to [T, H, widths] by rows of each head of MLA's ``kv_b_proj``.

    An adapter's a is [r, latent_rank], and its b has these rows, [H * rows of a head, r]. They are
    two products: one of them has factors of its own for each head, the other the same for all.

    Attributes:
        num_heads: H.
    """

    num_heads: int

    def _counts(self) -> tuple[int, int]:
        """Count the factors of an adapter in the first and in the second product."""
        raise NotImplementedError

    def _products(self, a: Tensor, heads: Tensor, rank: int) -> tuple[list[Factors], list[Factors]]:
        """Make the factors of both products of a and b [H, rows, r], with ``rank`` in between."""
        raise NotImplementedError

    def pool(self, max_adapters: int, max_rank: int, device: torch.device) -> LayerCache:
        first, second = (count * max_adapters for count in self._counts())
        outer = self._factors(second, max_rank, max_rank, self.widths, device)
        inner = self._factors(first, max_rank, self.inputs, (max_rank,), device)
        return inner | {f"{_OUTER}{name}": tensor for name, tensor in outer.items()}

    def write(self, pool: LayerCache, slot: int, factors: Sequence[Factors]) -> None:
        (part,) = factors
        first, second = self._counts()
        products: tuple[list[Factors], list[Factors]] = [None] * first, [None] * second
        if part is not None:
            a, b = part
            assert a is not None
            heads = b.unflatten(0, (self.num_heads, -1))
            products = self._products(a, heads, pool["b"].shape[-1])
        for own, of_slot in zip((pool, _under(_OUTER, pool)), products, strict=True):
            for place, each in enumerate(of_slot):
                _write(own, slot * len(of_slot) + place, [each])

    def add(self, pool: LayerCache, ran: Ran) -> Tensor:
        """Add the adapters of the rows to the product of each head."""
        number = torch.arange(self.num_heads, dtype=torch.int32, device=ran.slots.device)
        slots = ran.slots[:, None]
        first, second = (
            torch.where(slots > 0, (slots - 1) * count + number % count + 1, 0).flatten()
            for count in self._counts()
        )
        nothing = ran.out.new_zeros(first.shape[0], pool["b"].shape[-1])
        inner = _added(nothing, ran.inputs[0], pool, first, ran.impl)
        base = ran.out.reshape(-1, ran.out.shape[-1])
        return _added(base, inner, _under(_OUTER, pool), second, ran.impl).view(ran.out.shape)


class KeysSite(HeadsSite):
    """Product of queries by transposed rows of each head: queries to latents."""

    __slots__ = ()

    def _counts(self) -> tuple[int, int]:
        return self.num_heads, 1

    def _products(self, a: Tensor, heads: Tensor, rank: int) -> tuple[list[Factors], list[Factors]]:
        across = torch.eye(rank, len(a), dtype=heads.dtype, device=heads.device)
        return [(head.T, across) for head in heads], [(across.T, a.T)]


class ValuesSite(HeadsSite):
    """Product of what was attended to by rows of each head: latents to values."""

    __slots__ = ()

    def _counts(self) -> tuple[int, int]:
        return 1, self.num_heads

    def _products(self, a: Tensor, heads: Tensor, rank: int) -> tuple[list[Factors], list[Factors]]:
        across = torch.eye(rank, len(a), dtype=heads.dtype, device=heads.device)
        return [(a, across)], [(across.T, head) for head in heads]


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSite(AdapterSite):
    """Norm of rows of ``inputs`` numbers, whose weights adapters may have of their own.

    An adapter's parts are the weights, each as b.

    Attributes:
        names: of the weights.
    """

    names: tuple[str, ...]

    def pool(self, max_adapters: int, max_rank: int, device: torch.device) -> LayerCache:
        """Allocate the weights of resident adapters, which have none yet."""
        shape = max_adapters, self.inputs
        own = {name: torch.zeros(shape, dtype=self.dtype, device=device) for name in self.names}
        return {**own, "replaces": torch.zeros(max_adapters, dtype=torch.bool, device=device)}

    def write(self, pool: LayerCache, slot: int, factors: Sequence[Factors]) -> None:
        """Write an adapter's weights into a slot, from 0."""
        pool["replaces"][slot] = None not in factors
        for name, part in zip(self.names, factors, strict=True):
            if part is not None:
                pool[name][slot].copy_(part[1])

    def add(self, pool: LayerCache, ran: Ran) -> Tensor:
        """Apply the norm to the rows by the weights of their adapters."""
        is_replaced = _of_rows(pool["replaces"], ran.slots)[:, None]
        # Tokens are the first dim, or the second after one of size 1; others stand before the last.
        x = ran.inputs[0]
        num_between = x.ndim - 2 - (x.shape[0] == 1 and x.ndim > 2)
        weights = {
            name: torch.where(
                is_replaced, _of_rows(pool[name], ran.slots), ran.module.get_parameter(name)
            ).unflatten(0, (-1, *[1] * num_between))
            for name in self.names
        }
        made: Tensor = functional_call(ran.module, weights, ran.inputs)
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSite(AdapterSite):
    """Router of a mixture, whose only product is that of rows with its weight [experts, inputs].

    It is handed logits, with the adapters' added, in the place of rows, and the identity in the
    place of its weight.
    """

    def attach(self, module: nn.Module, hook: Hook) -> Callable[[], None]:
        """Have a hook change the choice of a router; return what removes it."""
        if hasattr(module, "hidden_dim"):
            setattr(hook.module, "hidden_dim", self.widths[0])  # noqa: B010
        return AdapterSite.attach(self, module, hook)

    def pool(self, max_adapters: int, max_rank: int, device: torch.device) -> LayerCache:
        (width,) = self.widths
        return {
            **self._factors(max_adapters, max_rank, self.inputs, self.widths, device),
            "identity": torch.eye(width, dtype=self.dtype, device=device),
            "is_adapted": torch.zeros(max_adapters, dtype=torch.bool, device=device),
        }

    def write(self, pool: LayerCache, slot: int, factors: Sequence[Factors]) -> None:
        pool["is_adapted"][slot] = None not in factors
        _write(pool, slot, factors)

    def add(self, pool: LayerCache, ran: Ran) -> Any:
        """Let the router choose for rows whose adapters change its logits; others keep their bits.

        ``out`` has a tensor of T rows for each result of the router.
        """
        x, *others = ran.inputs
        rows = x.reshape(-1, x.shape[-1]).to(self.dtype)
        base = nn.functional.linear(rows, ran.module.get_parameter("weight").to(self.dtype))
        logits = _added(base, rows, pool, ran.slots, ran.impl)
        made = functional_call(ran.module, {"weight": pool["identity"]}, (logits, *others))
        is_own = _of_rows(pool["is_adapted"], ran.slots)[:, None]
        pairs = zip(made, ran.out, strict=True)
        return tuple(torch.where(is_own, own.to(each.dtype), each) for own, each in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSite(AdapterSite):
    """Experts of a mixture, of tokens of ``inputs`` numbers, that adapters may change.

    ``widths`` are the outputs of an expert's matrices, its parts: gate if there is one, up, down.
    The factors of expert e of an adapter are in the slot ``adapter * E + e``. A step has E more
    slots for each adapter, ``R (inputs + outputs)`` numbers in each part.

    Attributes:
        num_experts: E.
    """

    num_experts: int

    def attach(self, module: nn.Module, hook: Hook) -> Callable[[], None]:
        """Have a hook take rows from a module, and add their outputs; return what removes it."""
        undo = ExitStack()
        undo.callback(module.register_forward_pre_hook(hook.before).remove)
        undo.callback(module.register_forward_hook(hook).remove)
        return undo.close

    def before(
        self, pool: LayerCache, slots: Tensor, inputs: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Leave the experts of rows with factors to ``add``, which is handed them besides."""
        x, ids, weights = inputs
        is_own = _of_rows(pool["is_adapted"], slots)[:, None]
        left, own = (
            torch.where(mask, ids, self.num_experts) for mask in (is_own.logical_not(), is_own)
        )
        return x, left, weights, own.int()

    def pool(self, max_adapters: int, max_rank: int, device: torch.device) -> LayerCache:
        num_slots, last = max_adapters * self.num_experts, len(self.widths) - 1
        found = {"is_adapted": torch.zeros(max_adapters, dtype=torch.bool, device=device)}
        for place, width in enumerate(self.widths):
            inputs = self.widths[0] if place == last else self.inputs
            factors = self._factors(num_slots, max_rank, inputs, (width,), device)
            found |= {f"{place} {name}": tensor for name, tensor in factors.items()}
        return found

    def write(self, pool: LayerCache, slot: int, factors: Sequence[Factors]) -> None:
        pool["is_adapted"][slot] = any(part is not None for part in factors)
        own = slice(slot * self.num_experts, (slot + 1) * self.num_experts)
        for place, part in enumerate(factors):
            a, b, ranks = (pool[f"{place} {name}"][own] for name in ("a", "b", "ranks"))
            ranks.zero_()
            if part is not None:
                first, second = part
                assert first is not None
                num_experts, rank, _ = first.shape
                a[:num_experts, 0, :rank].copy_(first)
                b[:num_experts, :rank].copy_(second.mT)
                ranks[:num_experts] = rank

    def add(self, pool: LayerCache, ran: Ran) -> Tensor:
        """Run rows with factors through experts, by one product after the other.

        Other rows have the bits of a plain step. For T tokens of k choices these products take
        ``T k (2 inputs + the sum of widths + the hidden width)`` numbers at once.
        """
        module = ran.module
        assert isinstance(module, FusedExperts)
        x, _, weights, own = ran.inputs
        first_slot = (ran.slots[:, None] - 1) * self.num_experts + 1
        of_pairs = torch.where(own < self.num_experts, first_slot + own, 0).flatten().int()

        def product(place: int, rows: Tensor) -> Tensor:
            base = module.product(place, rows, own.flatten())
            return _added(base, rows, _under(f"{place} ", pool), of_pairs, ran.impl)

        *firsts, last = range(len(self.widths))
        rows = x[:, None].expand(-1, own.shape[1], -1).flatten(0, 1)
        hidden = module.hidden(torch.cat([product(place, rows) for place in firsts], -1))
        results = product(last, hidden).unflatten(0, own.shape).float()
        total = torch.zeros_like(ran.out, dtype=torch.float32)
        for choice in range(own.shape[1]):
            total = total + weights[:, choice, None].float() * results[:, choice]
        is_own = _of_rows(pool["is_adapted"], ran.slots)[:, None]
        return torch.where(is_own, total.to(ran.out.dtype), ran.out)


_OUTER = "outer "


def _under(prefix: str, pool: LayerCache) -> LayerCache:
    """Return the factors of one of several products."""
    return {n.removeprefix(prefix): tensor for n, tensor in pool.items() if n.startswith(prefix)}


def _low_rank(a: Tensor | None, b: Tensor) -> Factors:
    """Return a weight as the product of itself and the identity."""
    return torch.eye(b.shape[1], dtype=b.dtype, device=b.device) if a is None else a, b


def _of_rows(values: Tensor, slots: Tensor) -> Tensor:
    """Look up the adapters' values [S, ...] for rows; 0 for a row without an adapter."""
    found = values[(slots.long() - 1).clamp(min=0)]
    return found & (slots > 0) if values.dtype == torch.bool else found


def _write(pool: LayerCache, slot: int, factors: Sequence[Factors]) -> None:
    """Write factors of each part for ``lora``, and their ranks."""
    a, b = pool["a"][slot], pool["b"][slot]
    columns = b.split(pool["starts"].diff().tolist(), dim=1)
    ranks = [0] * len(factors)
    for place, part in enumerate(factors):
        if part is not None:
            first, second = part
            assert first is not None
            ranks[place] = first.shape[0]
            a[place, : ranks[place]].copy_(first)
            columns[place][: ranks[place]].copy_(second.T)
    pool["ranks"][slot].copy_(torch.tensor(ranks, dtype=torch.int32, device="cpu"))


def _added(base: Tensor, x: Tensor, pool: LayerCache, slots: Tensor, impl: str) -> Tensor:
    """Add the adapters of the rows to base [T, N] for inputs x, whose last dim is K."""
    rows = x.reshape(-1, x.shape[-1])
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    factors = (pool["a"], pool["b"], pool["ranks"], pool["starts"])
    return lora(base, rows, *factors, slots, impl=impl)
