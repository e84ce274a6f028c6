"""Logits of a trainer with the bits that a batch-invariant server of its weights has.

A runner of the trainer's own computes them, by the very steps that serve; they take the place of
the trainer's logits, whose gradients are computed for these values. A policy gradient is then that
of the distribution that was sampled: the mean of its scores at the logits is 0, as softmax and
log-probabilities are the server's.

The runner's weights are the trainer's memory where a server takes them as they are. Those that it
joins or scales are made again in each call: no counter tells all the ways to change a weight.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torch_hybrid.errors import UnsupportedError

if TYPE_CHECKING:
    from torch_hybrid.graphs.runner import Runner

_SIZES = {"max_seqs": 16, "max_tokens": 2048, "page_size": 16}
_SERVERS: weakref.WeakValueDictionary[int, ServedLogits] = weakref.WeakValueDictionary()
_NUMBERS = count()


class ServedLogits:
    """The runner of one trainer, made when logits are first asked for.

    A copy, or one that was pickled, is of the trainer that calls it next.

    Args:
        options: those of the runner that are not as a ``Runner`` has them by default.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = {**_SIZES, **options}
        self.number = next(_NUMBERS)
        self._trainer: Callable[[], nn.Module | None] = lambda: None
        self._runner: Runner | None = None
        self._room = 0
        self._memory: Sequence[object] = ()
        _SERVERS[self.number] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return ServedLogits, (self.options,)

    def serve(self, trainer: nn.Module) -> None:
        """Take the weights of ``trainer``, a causal language model."""
        if self._trainer() is not trainer:
            self._trainer, self._runner = weakref.ref(trainer), None

    def compute(self, tokens: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Run the sequences of packed ``tokens`` [T], and return logits [T, vocab_size]."""
        given: list[int] = tokens.tolist()
        ends = sorted({0, *cu_seqlens.tolist(), len(given)})
        runner = self._with_weights_of_now(max(end - start for start, end in pairwise(ends)))
        live: dict[int, Any] = {}  # by the end of a sequence
        parts: list[Tensor] = []
        try:
            for step in _steps(ends, runner.max_tokens, runner.max_seqs):
                new = [end for end, _, _ in step if end not in live]
                live |= zip(new, runner.new_sequences(len(new)), strict=True)
                seqs, new_tokens = zip(
                    *((live[end], given[a:b]) for end, a, b in step), strict=True
                )
                parts.append(runner.extend(seqs, new_tokens, logits="all").clone())
                runner.free([live.pop(end) for end, _, b in step if b == end])
        finally:
            runner.free([*live.values()])  # of a step that failed
        return torch.cat(parts)

    def _with_weights_of_now(self, longest: int) -> Runner:
        """Make the runner, or give it the trainer's weights."""
        from torch_hybrid.models.shared_weights import named_weights

        model: Any = self._trainer()
        if model is None:
            raise RuntimeError("a copy of a model is called once before it is compiled")
        if any(isinstance(w, DTensor) for w in model.parameters()):
            raise UnsupportedError("batch_invariant=True needs whole weights, got sharded ones")
        memory = [(w.data_ptr(), w.device, w.dtype) for _, w in named_weights(model)]
        runner = self._runner
        if runner is None or self._room < longest or memory != self._memory:
            self._memory, self._runner = memory, (runner := self._make(model, longest))
        else:
            runner.update_weights(model)
        return runner

    def _make(self, model: nn.Module, longest: int) -> Runner:
        from torch_hybrid.graphs.runner import Runner
        from torch_hybrid.models.shared_weights import adapt_shared

        self._runner = None  # first free its pools
        self._room = max(2048, 1 << (longest - 1).bit_length())
        sizes = self.options
        kv_tokens = self._room + sizes["max_tokens"] + sizes["max_seqs"] * sizes["page_size"]
        options = {"kv_tokens": kv_tokens, **sizes, "batch_invariant": True}
        return Runner(adapt_shared(model), **options)


def _steps(
    ends: Sequence[int], most_tokens: int, most_seqs: int
) -> Iterator[list[tuple[int, int, int]]]:
    """Cut packed sequences into steps of a runner.

    Args:
        ends: ends of the sequences, after 0.
        most_tokens, most_seqs: most tokens and sequences of a step.

    Yields:
        Of each sequence in a step, its end, and where the step's part of it starts and ends.
    """
    step: list[tuple[int, int, int]] = []
    room = most_tokens
    for start, end in pairwise(ends):
        while start < end:
            stop = min(end, start + room)
            step.append((end, start, stop))
            start, room = stop, room - (stop - start)
            if not room or len(step) == most_seqs:
                yield step
                step, room = [], most_tokens
    if step:
        yield step


@torch.library.custom_op("torch_hybrid::served_logits", mutates_args=())
def _served_logits(logits: Tensor, input_ids: Tensor, cu_seqlens: Tensor, server: int) -> Tensor:
    served = _SERVERS[server].compute(input_ids.flatten(), cu_seqlens)
    if torch.promote_types(served.dtype, logits.dtype) != logits.dtype:
        raise ValueError(
            f"a model with batch_invariant=True runs in the dtype of its weights, {served.dtype}, "
            f"got logits of {logits.dtype}: leave autocast, or cast the model"
        )
    made = torch.full_like(logits, -torch.inf)  # of columns that stand for no token
    made.flatten(0, -2)[:, : served.shape[1]] = served
    return made


@_served_logits.register_fake
def _empty_logits(logits: Tensor, *_: Any) -> Tensor:
    """Make a tensor as the op returns it."""
    return torch.empty_like(logits)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return grad, None, None, None


_served_logits.register_autograd(_backward)


def served_logits(
    trainer: nn.Module, logits: Tensor, inputs: Mapping[str, Any], server: ServedLogits
) -> Tensor:
    """Give a trainer's ``logits`` [B, T, V] the values that its server has.

    Raises:
        ValueError: the inputs are no tokens, or have images.
    """
    tokens: Tensor | None = inputs.get("input_ids")
    others = [k for k, v in inputs.items() if k.startswith("pixel_values") and v is not None]
    if tokens is None or others:
        came = ", ".join(others) or "inputs_embeds"
        raise ValueError(f"a model with batch_invariant=True takes input_ids alone, got {came}")
    if not torch.compiler.is_compiling():
        server.serve(trainer)
    made: Tensor = _served_logits(logits, tokens, inputs["packing"].cu_seqlens, server.number)
    return made
