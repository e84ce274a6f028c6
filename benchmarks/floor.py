"""The least time that a step can take: its bytes at the read bandwidth, or its FLOPs at the rate of
multiply-adds that wait for nothing, whichever is longer. Both ceilings are measured in the same
process, and beside them the best rate of a library, which bounds nothing.

    python -m benchmarks.floor [--model NAME] [--dtype NAME]

Bytes of a step: every weight that it must read (of experts, as many as uniform routing hits), the
recurrent and the convolution state of each sequence read and written, and its keys and values
(of MLA its latents) read once. FLOPs: 2 for each weight and token, the logits of the last tokens,
and those of the mixers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.ceilings import Peak, best_streams, native_read
from benchmarks.mixers import Row, cache_bytes, mixer_flops
from benchmarks.models import make_model
from benchmarks.results import Results, arguments, parse, title
from benchmarks.timing import best_of
from torch_hybrid import adapt
from torch_hybrid.host.memory import zeros
from torch_hybrid.layers.fused_experts import FusedExperts
from torch_hybrid.layers.head_linear import HeadLinear
from torch_hybrid.layers.ngram_embedding import NgramEmbedding
from torch_hybrid.layers.scaled_linear import ScaledLinear
from torch_hybrid.models.hybrid_model import HybridModel
from torch_hybrid.ops.linear import linear
from torch_hybrid.ops.native import compiler_missing

_CPU = torch.device("cpu")
_SUSTAINED = 32  # times as long as a peak takes by itself: a step's time


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """What this machine gives at best with all threads: bytes and FLOPs per second.

    Attributes:
        bandwidth: of a read.
        one_bandwidth: of a read by one thread.
        flop_rate: of independent multiply-adds in registers.
        flop_kind: of what they are; see ``Peak``. Without a compiler, they are the products'.
        product_rates: of the best large product of each who can compute one; no ceiling.
    """

    bandwidth: float
    one_bandwidth: float
    flop_rate: float
    flop_kind: str
    product_rates: Mapping[str, float]

    def __str__(self) -> str:
        products = ", ".join(f"{who} {x / 1e9:.0f}" for who, x in self.product_rates.items())
        return (
            f"read {self.bandwidth / 1e9:.1f} GB/s, by one thread {self.one_bandwidth / 1e9:.1f}; "
            f"multiply-adds of {self.flop_kind} {self.flop_rate / 1e9:.0f} GFLOP/s; "
            f"large products: {products} GFLOP/s"
        )


def measure(dtype: torch.dtype, *, rounds: int = 10) -> Ceilings:
    """Measure the ceilings now; a model in this dtype is judged by them."""
    read, threads = Read(), torch.get_num_threads()
    bandwidth = read.nbytes / best_of(lambda: read(read.nbytes), rounds=rounds)
    torch.set_num_threads(1)
    try:
        one = Read(read.memory)
        one_bandwidth = one.nbytes / best_of(lambda: one(one.nbytes), rounds=rounds)
    finally:
        torch.set_num_threads(threads)
    products = _product_rates(dtype, rounds=rounds)
    rate, kind = max(products.values()), "products"
    if compiler_missing() is None:
        peak = Peak(dtype)
        flops = _SUSTAINED * peak.flops
        rate, kind = flops / best_of(lambda: peak(flops), rounds=rounds), peak.kind
    return Ceilings(
        bandwidth=max(bandwidth, one_bandwidth),
        one_bandwidth=one_bandwidth,
        flop_rate=rate,
        flop_kind=kind,
        product_rates=products,
    )


class Read:
    """Reads so many bytes from memory as fast as the machine gives them, and does nothing else.

    Args:
        memory: what is read, all together much larger than any cache; the memory of a model's
            weights where a step of it is judged, because not all memory of a machine is as fast.
            By default a buffer in huge pages.
    """

    def __init__(self, memory: Iterable[Tensor] = ()) -> None:
        self.memory = list(memory) or [zeros([2**27], dtype=torch.float32, device=_CPU).fill_(1)]
        self._stretches = _stretches(self.memory)
        self.nbytes = sum(nbytes for _, nbytes in self._stretches)
        self._native: Callable[[int, int, int, int], object] | None = None
        if compiler_missing() is None:
            self._native = native_read()
            start, length = max(self._stretches, key=lambda stretch: stretch[1])
            self._streams = best_streams(start, length // 4, torch.get_num_threads())

    def __call__(self, nbytes: int) -> None:
        """Read ``nbytes``, the memory over and over."""
        while nbytes > 0:
            for start, length in self._stretches:
                count = min(length, nbytes)
                if self._native is None:
                    address = (ctypes.c_char * count).from_address(start)
                    torch.frombuffer(address, dtype=torch.int32, count=count // 4).sum()
                else:
                    self._native(start, count // 4, torch.get_num_threads(), self._streams)
                nbytes -= count
                if nbytes <= 0:
                    break


def _stretches(memory: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Start and length in bytes of what lies together; tensors may share memory."""
    found: list[tuple[int, int]] = []
    for start, length in sorted((x.data_ptr(), x.nbytes) for x in memory if x.nbytes):
        if found and start <= sum(found[-1]) + 64:
            first, before = found.pop()
            start, length = first, max(before, start + length - first)
        found.append((start, length))
    return found


def _product_rates(dtype: torch.dtype, *, rounds: int) -> dict[str, float]:
    """FLOPs per second of large matrix products: torch's, and this package's."""
    rates = {"torch": 0.0} | ({"cpp": 0.0} if compiler_missing() is None else {})
    for rows, columns, depth in ((2048, 2048, 2048), (2048, 4096, 1024), (1024, 4096, 4096)):
        x, weight = torch.randn(rows, depth).to(dtype), torch.randn(columns, depth).to(dtype)
        for impl in rates:
            seconds = best_of(
                lambda x=x, w=weight, impl=impl: linear(x, [w], [None], impl=impl), rounds=rounds
            )
            rates[impl] = max(rates[impl], 2 * rows * columns * depth / seconds)
    return rates


def step_bytes(model: HybridModel, rows: Sequence[Row]) -> int:
    """Bytes that a step must move at the least."""
    num_tokens = sum(row.num_new for row in rows)
    moved = _weight_bytes(model, num_tokens)
    for entry in model.table.entries:
        moved += sum(cache_bytes(entry.spec, row, model.dtype) for row in rows)
    return moved


def _weight_bytes(model: HybridModel, num_tokens: int) -> int:
    embedding = model.hf_model.get_input_embeddings().weight
    read = 0
    for module in called_modules(model):
        hit = 1.0
        if isinstance(module, FusedExperts):
            routing = Routing.of(model, module)
            missed = routing.num_routed * (1 - routing.chosen / routing.num_routed) ** num_tokens
            hit = 1 - missed / routing.num_experts
        for weight in module.parameters(recurse=False):
            is_lookup = weight is embedding and isinstance(module, nn.Embedding)
            if isinstance(module, NgramEmbedding) and weight is module.table:
                row_bytes = weight.shape[1] * weight.itemsize
                read += num_tokens * len(module.head_sizes) * row_bytes
            else:
                read += 0 if is_lookup else int(hit * weight.nbytes)
    return read


def called_modules(model: HybridModel) -> Iterator[nn.Module]:
    """Every module of a model; one that several layers share once for each of them."""
    for layer in model.layers:
        yield from layer.modules()
    in_layers = {*model.layers.modules()}
    yield from (module for module in model.modules() if module not in in_layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Which of its experts serve a token: some of those that are routed to, the first ones, and all
    others (Inkling)."""

    num_experts: int
    num_routed: int
    chosen: int

    @classmethod
    def of(cls, model: HybridModel, experts: FusedExperts) -> Routing:
        """Of the experts of a layer."""
        config, num_experts = model.hf_model.config.get_text_config(), len(experts.gate_up_proj)
        return cls(
            num_experts=num_experts,
            num_routed=getattr(config, "n_routed_experts", num_experts),
            chosen=config.num_experts_per_tok,
        )

    @property
    def per_token(self) -> int:
        """How many experts serve a token."""
        return self.chosen + self.num_experts - self.num_routed

    def tokens_of(self, expert: int, num_tokens: int) -> int:
        """How many of a step's tokens an expert serves, if routing is uniform."""
        if expert >= self.num_routed:
            return num_tokens
        return max(1, round(num_tokens * self.chosen / self.num_routed))


def linear_flops(model: HybridModel, rows: Sequence[Row]) -> float:
    """FLOPs of the products with weights; logits of each sequence's last token only."""
    num_tokens = sum(row.num_new for row in rows)
    head = model.hf_model.get_output_embeddings()
    flops = 0.0
    for module in called_modules(model):
        match module:
            case nn.Linear() | ScaledLinear():
                times = len(rows) if module is head else num_tokens
                flops += 2 * times * module.in_features * module.out_features
            case HeadLinear():
                flops += 2 * num_tokens * module.weight.numel()
            case FusedExperts():
                expert_size = module.gate_up_proj[0].numel() + module.down_proj[0].numel()
                flops += 2 * num_tokens * Routing.of(model, module).per_token * expert_size
    return flops


def all_mixer_flops(model: HybridModel, rows: Sequence[Row]) -> float:
    """FLOPs of the mixers of all layers, beside their projections."""
    return sum(mixer_flops(entry.spec, row) for entry in model.table.entries for row in rows)


def step_flops(model: HybridModel, rows: Sequence[Row]) -> float:
    """All FLOPs of a step that are counted."""
    return linear_flops(model, rows) + all_mixer_flops(model, rows)


def step_floor(model: HybridModel, rows: Sequence[Row], ceilings: Ceilings) -> float:
    """Seconds that a step takes at the least on this machine."""
    memory = step_bytes(model, rows) / ceilings.bandwidth
    return max(memory, step_flops(model, rows) / ceilings.flop_rate)


def main() -> None:
    """Print the ceilings and the floors of some steps."""
    options = parse(arguments("The floors of steps on this machine."))
    model = adapt(make_model(options.model, options.torch_dtype, quick=options.quick))
    ceilings = measure(options.torch_dtype)
    results = Results(
        title=title(options, "Floors"),
        columns=["step", "GB", "GFLOP", "memory ms", "FMA ms"],
    )
    steps = {f"decode, {n} sequences of 256": [Row(1, 256)] * n for n in (1, 8, 32)}
    steps |= {f"prefill of {n}": [Row(n, 0)] for n in (512, 2048)}
    for name, rows in steps.items():
        moved = step_bytes(model, rows)
        flops = step_flops(model, rows)
        memory, matrix = moved / ceilings.bandwidth, flops / ceilings.flop_rate
        results.add(name, moved / 1e9, flops / 1e9, memory * 1e3, matrix * 1e3)
    results.notes.append(str(ceilings))
    results.emit(options)


if __name__ == "__main__":
    main()
