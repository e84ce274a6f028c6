"""What works on tokens one by one: convolution, routers, experts, linear layers, the draw."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.case import Case, Inputs, Turns, installed, offsets, own, randn
from torch_hybrid.ops.causal_conv1d import causal_conv1d
from torch_hybrid.ops.causal_conv1d.op import IMPLEMENTATIONS as CONV_IMPLEMENTATIONS
from torch_hybrid.ops.draw_tokens import draw_tokens
from torch_hybrid.ops.draw_tokens.op import IMPLEMENTATIONS as DRAW_IMPLEMENTATIONS
from torch_hybrid.ops.fused_experts import fused_experts
from torch_hybrid.ops.fused_experts.op import IMPLEMENTATIONS as EXPERTS_IMPLEMENTATIONS
from torch_hybrid.ops.linear import linear
from torch_hybrid.ops.linear.op import IMPLEMENTATIONS as LINEAR_IMPLEMENTATIONS
from torch_hybrid.ops.power_sum import power_sum
from torch_hybrid.ops.power_sum.op import IMPLEMENTATIONS as SUM_IMPLEMENTATIONS
from torch_hybrid.ops.route import route
from torch_hybrid.ops.route.op import IMPLEMENTATIONS as ROUTE_IMPLEMENTATIONS
from torch_hybrid.ops.top_k import top_k
from torch_hybrid.ops.top_k.op import IMPLEMENTATIONS as TOP_K_IMPLEMENTATIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolution(Inputs):
    """x is a slice of a projection."""

    changed: ClassVar[tuple[str, ...]] = ("conv_state",)

    channels: int
    projected: Tensor  # [T, wider than the channels]
    weight: Tensor  # [C, W]
    conv_state: Tensor  # [N + 1, W - 1, C]
    cu_seqlens: Tensor
    long_cu_seqlens: Tensor
    indices: Tensor

    @classmethod
    def make(cls, channels: int, num_seqs: int, num_new: int) -> Convolution:
        width, cu_seqlens = 4, offsets(num_seqs, num_new)
        return cls(
            channels=channels,
            projected=randn(num_seqs * num_new, channels + 4096),
            weight=randn(channels, width),
            conv_state=randn(num_seqs + 1, width - 1, channels),
            cu_seqlens=cu_seqlens,
            long_cu_seqlens=cu_seqlens.long(),
            indices=torch.arange(1, num_seqs + 1, dtype=torch.int32),
        )

    @property
    def x(self) -> Tensor:
        return self.projected[:, : self.channels]

    @property
    def num_bytes(self) -> float:
        return 4 * self.x.numel() + 2 * self.conv_state[1:].nbytes + self.weight.nbytes


def call_conv(inputs: Convolution, impl: str) -> Tensor:
    """One call of this package's op."""
    return causal_conv1d(
        inputs.x,
        inputs.weight,
        None,
        inputs.conv_state,
        inputs.cu_seqlens,
        inputs.indices,
        inputs.indices,
        activation="silu",
        impl=impl,
    )


def _fla_conv(inputs: Sequence[Convolution]) -> Turns:
    """Its cache holds one token more; of one token each, by its op for that."""
    module = installed("fla", "fla.modules.causal_conv1d")
    caches = [F.pad(each.conv_state[1:].transpose(1, 2), (1, 0)).contiguous() for each in inputs]
    calls = []
    for each, cache in zip(inputs, caches, strict=True):
        x, options = each.x.contiguous()[None], {"weight": each.weight, "activation": "silu"}
        if each.projected.shape[0] == each.indices.shape[0]:
            calls.append(partial(module.causal_conv1d_update, x, cache, **options))
        else:
            options |= {"initial_state": cache, "output_final_state": True}
            options["cu_seqlens"] = each.long_cu_seqlens
            calls.append(partial(module.causal_conv1d, x, **options))
    return Turns(calls=calls, output=lambda result: result[0].flatten(0, -2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Router(Inputs):
    """The probabilities of a router, of which k are chosen."""

    x: Tensor  # [T, E] float32
    k: int

    @classmethod
    def make(cls, num_experts: int, k: int, num_tokens: int) -> Router:
        return cls(x=torch.randn(num_tokens, num_experts).softmax(-1), k=k)

    @property
    def num_bytes(self) -> float:
        return self.x.nbytes + 12 * self.x.shape[0] * self.k


def call_router(inputs: Router, impl: str) -> Tensor:
    """One call of this package's op; what was chosen."""
    return top_k(inputs.x, inputs.k, impl=impl)[0]


def _torch_top_k(inputs: Sequence[Router]) -> Turns:
    calls = [partial(torch.topk, each.x, each.k) for each in inputs]
    return Turns(calls=calls, output=lambda result: result[0])


def call_route(inputs: Router, impl: str) -> Tensor:
    """From logits to the weights of the chosen."""
    return route(inputs.x, None, inputs.k, score="softmax", impl=impl)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Normed(Inputs):
    """What a norm goes over, hidden states or the heads of a projection."""

    x: Tensor  # [T, ..., D]

    @classmethod
    def make(cls, *shape: int) -> Normed:
        return cls(x=randn(*shape))

    @property
    def num_bytes(self) -> float:
        return self.x.nbytes + 4 * self.x[..., 0].numel()


def call_squares(inputs: Normed, impl: str) -> Tensor:
    """The sum of the squares of each row."""
    return power_sum(inputs.x, 2, impl=impl)


# Temperature, number, top-k, top-p and min-p, by what a request asks for.
_ASKED = {
    "greedy": (0.0, 0.0, 0.0, 1.0, 0.0),
    "all tokens": (1.0, 0.3, 0.0, 1.0, 0.0),
    "top-k 20, top-p 0.95": (0.8, 0.3, 20.0, 0.95, 0.0),
    "top-p 0.95": (0.8, 0.3, 0.0, 0.95, 0.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn(Inputs):
    """Logits of which some tokens stand out, and how one is drawn of each row."""

    logits: Tensor  # [N, vocab]
    settings: Tensor  # [5, N]

    @classmethod
    def make(cls, asked: str, vocab: int, num_rows: int) -> Drawn:
        logits = 2 * randn(num_rows, vocab)
        logits += 12 * (logits > 6.8)
        settings = torch.tensor(_ASKED[asked], dtype=torch.float64)[:, None]
        return cls(logits=logits, settings=settings.repeat(1, num_rows))

    @property
    def num_bytes(self) -> float:
        return self.logits.nbytes


def call_draw(inputs: Drawn, impl: str, *, asked: str) -> Tensor:
    """One call of this package's op; ids as floats, which hold them."""
    temperature, _, top_k, top_p, _ = _ASKED[asked]
    tokens = draw_tokens(
        inputs.logits,
        inputs.settings,
        draws=temperature > 0,
        num_ranked=64 if top_k else 0,
        has_wide_top_p=top_p < 1 and not top_k,
        impl=impl,
    )
    return tokens.float()


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts(Inputs):
    """Tokens and their experts; the weights of all experts are shared by all turns."""

    x: Tensor  # [T, D]
    ids: Tensor  # [T, k]
    scores: Tensor  # [T, k]
    gate_up: Tensor  # [E, 2 W, D]
    down: Tensor  # [E, D, W]
    liked: Tensor  # [E], how much more than by chance each is chosen

    @classmethod
    def make(
        cls, num_experts: int, k: int, dim: int, width: int, num_tokens: int, *, skew: float = 0.0
    ) -> Experts:
        inputs = cls(
            x=randn(num_tokens, dim),
            ids=torch.zeros(num_tokens, k, dtype=torch.int64),
            scores=randn(num_tokens, k),
            gate_up=randn(num_experts, 2 * width, dim) * dim**-0.5,
            down=randn(num_experts, dim, width) * width**-0.5,
            liked=skew * torch.rand(num_experts),
        )
        return inputs.another()

    def another(self) -> Experts:
        """Other experts are chosen."""
        chance = torch.rand(self.x.shape[0], self.liked.shape[0], device=self.liked.device)
        chosen = (chance + self.liked).topk(self.ids.shape[1])
        scores = chosen.values.to(self.scores.dtype)
        return replace(self, x=self.x.clone(), ids=chosen.indices, scores=scores)

    @property
    def num_bytes(self) -> float:
        num_hit = self.ids.unique().numel()
        expert = self.gate_up[0].nbytes + self.down[0].nbytes
        return num_hit * expert + 2 * self.x.nbytes

    @property
    def flops(self) -> float:
        return 2 * self.ids.numel() * (self.gate_up[0].numel() + self.down[0].numel())


def call_experts(inputs: Experts, impl: str) -> Tensor:
    """One call of this package's op."""
    tensors = (inputs.x, inputs.ids, inputs.scores, inputs.gate_up, inputs.down)
    return fused_experts(*tensors, activation="silu", impl=impl)


def _grouped_mm(inputs: Sequence[Experts]) -> Turns:
    """torch's grouped products, tokens sorted by expert around them."""

    def run(each: Experts) -> Tensor:
        num_experts, k = each.gate_up.shape[0], each.ids.shape[1]
        order = each.ids.flatten().argsort(stable=True)
        ones = torch.ones_like(order, dtype=torch.int32)
        counts = ones.new_zeros(num_experts).scatter_add_(0, each.ids.flatten(), ones)
        ends = counts.cumsum(0, dtype=torch.int32)
        rows = F.grouped_mm(each.x[order // k], each.gate_up.transpose(1, 2), offs=ends)
        gate, up = rows.chunk(2, 1)
        rows = F.grouped_mm(F.silu(gate) * up, each.down.transpose(1, 2), offs=ends)
        back = order.argsort()
        return (rows[back].view(-1, k, rows.shape[1]) * each.scores[..., None]).sum(1)

    return Turns(calls=[partial(run, each) for each in inputs])


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear(Inputs):
    """One product with a weight."""

    x: Tensor
    weight: Tensor

    @classmethod
    def make(cls, num_tokens: int, dim: int, width: int) -> Linear:
        return cls(x=randn(num_tokens, dim), weight=randn(width, dim))

    @property
    def num_bytes(self) -> float:
        return self.x.nbytes + self.weight.nbytes + 2 * self.x.shape[0] * self.weight.shape[0]

    @property
    def flops(self) -> float:
        return 2 * self.x.shape[0] * self.weight.numel()


def call_linear(inputs: Linear, impl: str) -> Tensor:
    """One call of this package's op."""
    return linear(inputs.x, [inputs.weight], [None], impl=impl)


def cases() -> Iterator[Case]:
    """Qwen3-Next's sizes, and those of another mixture of experts."""
    for num_seqs, num_new in ((1, 1), (64, 1), (256, 1), (1, 8192), (8, 1024)):
        yield Case(
            op="convolution",
            model="Qwen3-Next 8192 channels",
            shape=f"{num_seqs}x{num_new}",
            make=partial(Convolution.make, 8192, num_seqs, num_new),
            reference=partial(call_conv, impl="torch"),
            own=own(CONV_IMPLEMENTATIONS, call_conv),
            others={"fla": _fla_conv},
        )
    for num_experts, k, num_tokens in (
        *((512, 10, num_tokens) for num_tokens in (1, 32, 256, 8192)),
        (256, 8, 1),
        (256, 8, 8192),
        (64, 6, 8192),
    ):
        yield Case(
            op="router's choice",
            model=f"{k} of {num_experts}",
            shape=f"{num_tokens} tokens",
            make=partial(Router.make, num_experts, k, num_tokens),
            reference=partial(call_router, impl="torch"),
            own=own(TOP_K_IMPLEMENTATIONS, call_router),
            others={"torch": _torch_top_k},
        )
    for num_tokens in (1, 8, 32, 128, 8192):
        yield Case(
            op="router",
            model="10 of 512",
            shape=f"{num_tokens} tokens",
            make=partial(Router.make, 512, 10, num_tokens),
            reference=partial(call_route, impl="torch"),
            own=own(ROUTE_IMPLEMENTATIONS, call_route),
        )
    for shape in (
        (1, 2048),
        (32, 2048),
        (8192, 2048),
        (1, 16, 256),
        (32, 16, 256),
        (8192, 16, 256),
    ):
        yield Case(
            op="sums of squares",
            model=f"{' x '.join(map(str, shape[1:]))}",
            shape=f"{shape[0]} tokens",
            make=partial(Normed.make, *shape),
            reference=partial(call_squares, impl="torch"),
            own=own(SUM_IMPLEMENTATIONS, call_squares),
        )
    for asked in _ASKED:
        for num_rows in (1, 32, 128):
            call = partial(call_draw, asked=asked)
            yield Case(
                op="draw",
                model=f"{asked} of 151936",
                shape=f"{num_rows} rows",
                make=partial(Drawn.make, asked, 151_936, num_rows),
                reference=partial(call, impl="torch"),
                own=own(DRAW_IMPLEMENTATIONS, call),
            )
    for name, sizes, counts in (
        ("Qwen3-Next", (512, 10, 2048, 512), (1, 8, 64, 512, 1024, 2048, 4096, 8192)),
        ("Qwen3-30B-A3B", (128, 8, 2048, 768), (1, 8, 64, 512, 4096, 8192)),
        ("Kimi-Linear", (256, 8, 2304, 1024), (4096,)),
    ):
        for num_tokens in counts:
            yield Case(
                op="experts",
                model=f"{name} {sizes[1]} of {sizes[0]}",
                shape=f"{num_tokens} tokens",
                make=partial(Experts.make, *sizes, num_tokens),
                reference=partial(call_experts, impl="torch"),
                own=own(EXPERTS_IMPLEMENTATIONS, call_experts),
                others={"torch grouped": _grouped_mm},
            )
    yield Case(
        op="experts",
        model="Qwen3-Next 10 of 512, some liked",
        shape="8192 tokens",
        make=partial(Experts.make, 512, 10, 2048, 512, 8192, skew=0.6),
        reference=partial(call_experts, impl="torch"),
        own=own(EXPERTS_IMPLEMENTATIONS, call_experts),
        others={"torch grouped": _grouped_mm},
    )
    for num_tokens in (1, 32, 8192):
        yield Case(
            op="linear",
            model="Qwen3-Next 2048 to 12352",
            shape=f"{num_tokens} tokens",
            make=partial(Linear.make, num_tokens, 2048, 12352),
            reference=partial(call_linear, impl="torch"),
            own=own(LINEAR_IMPLEMENTATIONS, call_linear),
        )
