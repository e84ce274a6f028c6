"""Layers that are copied instead of traced: the step is the same, or the refusal says why."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.graphs.as_traced import run_as_traced
from torch_hybrid.graphs.compiling.compile import CompileLog, StepBackend, compile_step
from torch_hybrid.graphs.compiling.layers_once import LayerCount, LayersOnce, num_first, signature
from torch_hybrid.graphs.passes import DEFAULT_PASSES, without
from torch_hybrid.models.transformers_hooks import hand_steps
from torch_hybrid.specs import LayerTable

WIDTH, NUM_LAYERS = 6, 7


@dataclass(frozen=True)
class Statics:
    """A frozen value on a layer."""

    scale: float


class Layer(nn.Module):
    """x + scale * tanh(W x)."""

    def __init__(self, layer_idx: int, scale: float = 0.5) -> None:
        super().__init__()
        self.layer_idx, self.statics = layer_idx, Statics(scale)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.statics.scale * torch.tanh(self.proj(x))


class Stack(nn.Module):
    """As much of a model as is needed to copy its layers."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(layers)
        self.table = LayerTable(((),) * len(layers))
        self.dtype, self.device, self.ranks = torch.float32, torch.device("cpu"), None
        self.vocab_size, self.eos_token_ids, self.num_position_axes = 1, (), 1
        self.requires_grad_(False)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden

    @contextmanager
    def first_layers(self, count: int) -> Iterator[None]:
        whole, self.layers = self.layers, self.layers[:count]
        try:
            yield
        finally:
            self.layers = whole

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x.sum(-1)


def stack_of(make: Callable[..., nn.Module] = Layer, *args: Any) -> Stack:
    return Stack(*(make(index, *args) for index in range(NUM_LAYERS)))


class SumsDrift(Stack):
    """Reads something that is computed from the layers' values, between them."""

    def forward(self, x: Tensor) -> Tensor:
        x, drift = self.embed(x), 0.0
        for layer in self.layers:
            x = layer(x)
            drift = drift + x.mean()
        return x.sum(-1) + drift


class ScalesBetween(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x) * 1.5
        return x.sum(-1)


class TwoValues(Layer):
    """Hands its branch on beside the residual."""

    def forward(self, x: tuple[Tensor, Tensor] | Tensor) -> tuple[Tensor, Tensor]:
        residual, branch = x if isinstance(x, tuple) else (x, torch.zeros_like(x))
        residual = residual + branch
        return residual, self.statics.scale * torch.tanh(self.proj(residual))


class TwoValueStack(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return (x[0] + x[1]).sum(-1)


class TwoWidths(Layer):
    """Hands half of its branch on, which the next one reads and nothing behind the last one."""

    def forward(self, x: tuple[Tensor, Tensor] | Tensor) -> tuple[Tensor, Tensor]:
        residual, half = x if isinstance(x, tuple) else (x, torch.ones_like(x[:, : WIDTH // 2]))
        branch = torch.tanh(self.proj(residual))
        return residual + branch * half.mean(-1, keepdim=True), branch[:, : WIDTH // 2] - half


class FirstValueStack(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x[0].sum(-1)


class NumberInACall(Layer):
    """What differs by layer stands in the argument of a call."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.layer_idx)


class ScaleOfItsOwn(Layer):
    def __init__(self, layer_idx: int) -> None:
        super().__init__(layer_idx, scale=0.1 * layer_idx)


class ReadsTheFirst(Layer):
    """A weight that is another layer's, known to nobody as this one's."""

    def __init__(self, layer_idx: int, first: list[nn.Module]) -> None:
        super().__init__(layer_idx)
        first.append(self)
        self.first = first

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.linear(x, self.first[0].proj.weight)


class SkipStack(Stack):
    """Each layer reads the two values before it."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        before = x
        for layer in self.layers:
            before, x = x, layer(x, before)
        return x.sum(-1)


class ReadsTheEmbedding(Stack):
    def forward(self, x: Tensor) -> Tensor:
        start = x = self.embed(x)
        for layer in self.layers:
            x = layer(x, start)
        return x.sum(-1)


class WithAnother(Layer):
    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return super().forward(x) + other


class HandsASizeOn(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x, size = self.embed(x), None
        for layer in self.layers:
            x, size = layer(x, size)
        return x.sum(-1)


class WithASize(Layer):
    """A size that layer 0 computes and the others read."""

    def forward(self, x: Tensor, size: int | None) -> tuple[Tensor, int]:
        size = (x.shape[0] + 1) * 2 if size is None else size
        return super().forward(x) * size / 12, size


class InPlace(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return x.add_(torch.tanh(self.proj(x)))


def two_kinds() -> Stack:
    """LLHLLH...: layer 0 is of a kind that comes back, and is no template."""
    kinds = [Layer, Layer, NegatedLayer]
    return Stack(*(kinds[i % 3](i) for i in range(9)))


class NegatedLayer(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return -super().forward(x)


def shared_weights(*, everywhere: bool) -> Stack:
    """One projection in all layers, or in layers 1 and 5 alone."""
    stack = stack_of()
    for index in range(NUM_LAYERS) if everywhere else (1, 5):
        stack.layers[index].proj = stack.layers[1].proj
    return stack


def one_module_twice() -> Stack:
    layers = [Layer(i) for i in range(NUM_LAYERS)]
    return Stack(*layers[:-1], layers[2])


class WithoutFirstLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = stack_of()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


COPIED = {
    "plain": (stack_of, 3),
    "two kinds": (two_kinds, 6),
    "one projection in all layers": (lambda: shared_weights(everywhere=True), 3),
    "one projection in two layers": (lambda: shared_weights(everywhere=False), 3),
    "each reads the embedding": (
        lambda: ReadsTheEmbedding(*(WithAnother(i) for i in range(NUM_LAYERS))),
        3,
    ),
    "a size of layer 0": (
        lambda: HandsASizeOn(*(WithASize(i) for i in range(NUM_LAYERS))),
        3,
    ),
    "two values": (lambda: FirstValueStack(*(TwoWidths(i) for i in range(NUM_LAYERS))), 3),
    "in place": (lambda: stack_of(InPlace), None),
}
REFUSED = {
    "two values that look alike": (
        lambda: TwoValueStack(*(TwoValues(i) for i in range(NUM_LAYERS))),
        r"layer 0 must give values of different shapes, got \[.*, .*\]",
    ),
    "a number in a call": (
        lambda: stack_of(NumberInACall),
        r"layers 1 and 2 look alike, and one calls operator.mul\(%3, 2\) where the other "
        r"calls operator.mul\(%3, 3\)",
    ),
    "a weight of another layer": (
        lambda: stack_of(ReadsTheFirst, []),
        r"layer 1 reads .*proj.weight of layer 0",
    ),
    "the two values before": (
        lambda: SkipStack(*(WithAnother(i) for i in range(NUM_LAYERS))),
        r"layers 1 and 2 look alike, .* where the other calls operator.add\(%3, x_1\)",
    ),
    "a call between layers": (
        lambda: ScalesBetween(*(Layer(i) for i in range(NUM_LAYERS))),
        r"x_1 stands between layers and is part of none",
    ),
    "a sum over layers": (
        lambda: SumsDrift(*(Layer(i) for i in range(NUM_LAYERS))),
        r".* stands between layers and is part of none",
    ),
    "one module twice": (one_module_twice, r"layers 2 and 6 are one module"),
    "no first_layers": (WithoutFirstLayers, r"the model has no first_layers"),
    "a scale of its own": (
        lambda: stack_of(ScaleOfItsOwn),
        r"all 7 layers are needed to see each kind",
    ),
}


def run(model: nn.Module) -> tuple[Tensor, LayerCount]:
    """What a traced step of a model gives, the layers that need no trace copied."""
    torch._dynamo.reset()
    log, layers, outputs = CompileLog(), LayersOnce(model, {}), []
    given = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1))
    floats = torch._dynamo.config.patch(specialize_float=True)
    with run_as_traced(), torch.inference_mode(), floats:
        # Of merged products the last bits are another's than torch's, on some CPUs.
        passes = without(DEFAULT_PASSES, {"merge_linears"})
        backend = StepBackend(log, pool_sizes=(), layers=layers, passes=passes)
        step = compile_step(lambda inputs, caches: model(inputs), backend)
        layers.trace(lambda: outputs.append(step(given, None)))
        expected = model(given)
    assert torch.equal(outputs[0], expected)
    assert expected.abs().max() > 0.01
    return outputs[0], log.graphs[-1].layers


@pytest.mark.parametrize("name", COPIED)
def test_copied_layers_compute_what_they_would(name: str):
    make, num_traced = COPIED[name]
    model = make()
    _, count = run(model)
    if num_traced is not None:
        total = len(model.layers)
        assert count == LayerCount(traced=num_traced, copied=total - num_traced)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_copied_is_traced_whole_and_says_why(name: str):
    make, reason = REFUSED[name]
    model = make()
    _, count = run(model)
    assert count.copied == 0
    assert re.fullmatch(reason, count.why_not_copied, re.DOTALL), count.why_not_copied


@pytest.mark.parametrize(
    ("make", "traced"),
    [
        (stack_of, [3, 2]),
        # What the last of them gives shows in the one before.
        (lambda: FirstValueStack(*(TwoWidths(i) for i in range(NUM_LAYERS))), [3, 3]),
    ],
    ids=["one value", "two values"],
)
def test_later_variants_trace_each_kind_once(make: Callable[[], Stack], traced: list[int]):
    torch._dynamo.reset()
    model, log = make(), CompileLog()
    layers = LayersOnce(model, {})
    given = torch.randn(5, WIDTH)
    floats = torch._dynamo.config.patch(specialize_float=True)
    with run_as_traced(), torch.inference_mode(), floats:
        for _ in range(2):
            backend = StepBackend(log, pool_sizes=(), layers=layers)
            step = compile_step(lambda inputs, caches: model(inputs), backend)
            layers.trace(lambda step=step: step(given, None))
    assert [graph.layers.traced for graph in log.graphs] == traced


@pytest.mark.parametrize(
    ("kinds", "once", "twice"),
    [
        ((0,), 1, 1),
        ((0, 0), 2, 2),
        ((0, 0, 0), 2, 3),
        ((0, 1, 1, 1), 2, 3),
        ((0, 0, 0, 1) * 12, 4, 8),
        ((0, 1, 2, 3), 4, 4),
        ((0, 1, 2, 1), 3, 4),
    ],
)
def test_how_many_layers_show_every_kind(kinds: tuple[int, ...], once: int, twice: int):
    assert num_first(kinds) == once
    assert num_first(kinds, times=2) == twice


class Changed:
    """Ways to change a layer that a trace can see."""

    @staticmethod
    def of_a_frozen_value(layer: Layer) -> None:
        layer.statics = Statics(0.25)

    @staticmethod
    def private(layer: Layer) -> None:
        layer._flag = True

    @staticmethod
    def of_a_list(layer: Layer) -> None:
        layer.sizes = [1, 2]

    @staticmethod
    def of_an_unknown_object(layer: Layer) -> None:
        layer.helper = object()

    @staticmethod
    def of_a_hidden_module(layer: Layer) -> None:
        layer.hidden = [nn.Linear(2, 2)]

    @staticmethod
    def forward_itself(layer: Layer) -> None:
        layer.forward = lambda x: x

    @staticmethod
    def a_hook(layer: Layer) -> None:
        layer.register_forward_hook(lambda *_: None)

    @staticmethod
    def the_shape_of_a_weight(layer: Layer) -> None:
        layer.proj = nn.Linear(WIDTH, WIDTH + 1)

    @staticmethod
    def the_strides_of_a_weight(layer: Layer) -> None:
        layer.proj.weight.data = layer.proj.weight.data.t()

    @staticmethod
    def a_buffer(layer: Layer) -> None:
        layer.register_buffer("offset", torch.zeros(2))

    @staticmethod
    def a_plain_tensor(layer: Layer) -> None:
        layer.offset = torch.zeros(2)

    @staticmethod
    def no_bias(layer: Layer) -> None:
        layer.proj.bias = None


CHANGES = [name for name in vars(Changed) if not name.startswith("__")]


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_trace_can_see_makes_another_kind(name: str):
    plain, changed = Layer(1), Layer(2)
    assert signature(plain) == signature(changed)
    getattr(Changed, name)(changed)
    assert signature(plain) != signature(changed)


def test_hooks_that_hand_on_the_step_leave_layers_of_one_kind():
    """They differ by the layer's number and by torch's count of all hooks alone."""
    plain, *handed = (Layer(index) for index in range(4))
    hand_steps(handed)
    assert len({signature(layer) for layer in handed}) == 1
    assert signature(plain) != signature(handed[0])
    handed[1].register_forward_pre_hook(pass_on)
    handed[2].register_forward_pre_hook(pass_on, with_kwargs=True)
    assert len({signature(layer) for layer in handed}) == 3


def pass_on(*_: object) -> None:
    """A hook that changes nothing."""


def test_tied_weights_make_another_kind():
    class Two(Layer):
        def __init__(self, layer_idx: int, tied: bool) -> None:
            super().__init__(layer_idx)
            self.other = self.proj if tied else nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.other(x)

    model = Stack(*(Two(i, tied=i in (0, 1, 2, 5)) for i in range(NUM_LAYERS)))
    _, count = run(model)
    assert count.traced == 5
