"""Logits of a trainer with the bits that a batch-invariant server of its weights has.

A runner of the trainer's own computes them, by the very steps that serve; they take the place of
the trainer's logits, whose gradients are computed for these values. A policy gradient is then that
of the distribution that was sampled: the mean of its scores at the logits is 0, as softmax and
log-probabilities are the server's.

The runner's weights are the trainer's memory where a server takes them as they are. Those that it
joins or scales are made again in each call: no counter tells all the ways to change a weight.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torch_hybrid.errors import UnsupportedError
from torch_hybrid.training.linear import linear
from torch_hybrid.training.linear_cross_entropy import LossHead

if TYPE_CHECKING:
    from torch_hybrid.graphs.runner import Runner
    from torch_hybrid.models.hybrid_model import HybridModel

_SIZES = {"max_seqs": 16, "max_tokens": 2048, "page_size": 16}
_SERVERS: weakref.WeakValueDictionary[int, ServedLogits] = weakref.WeakValueDictionary()
_NUMBERS = count()


class ServedLogits:
    """The runner of one trainer, made when logits are first asked for.

    A copy, or one that was pickled, is of the trainer that calls it next.

    Args:
        options: those of the runner that are not as a ``Runner`` has them by default. Of a model
            in integers, ``weights`` is that of the server's ``from_pretrained``.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = {**_SIZES, **options}
        self.number = next(_NUMBERS)
        self._trainer: Callable[[], nn.Module | None] = lambda: None
        self._runner: Runner | None = None
        self._room = 0
        self._memory: Sequence[object] = ()
        self._form: Any = None  # the trainer before it was sharded, without values of its weights
        self._base: HybridModel | None = None  # of adapters over quantized weights
        self._adapter: str | None = None  # over that base; others are merged
        _SERVERS[self.number] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return ServedLogits, (self.options,)

    def serve(self, trainer: Any) -> None:
        """Take the weights of ``trainer``, a causal language model.

        Raises:
            UnsupportedError: they are quantized, and it is not known which checkpoint they are of.
        """
        if self._trainer() is not trainer:
            self._trainer, self._runner, self._base = weakref.ref(trainer), None, None
            self._form = None
        self._keep_form(trainer)
        if is_quantized(trainer) and (self._base is None or self._base.device != trainer.device):
            self._runner, self._base = None, _base_of(trainer, self.options.get("weights"))

    def _keep_form(self, trainer: Any) -> None:
        """Copy a trainer without values of its weights: once it is sharded it has no copies."""
        from torch_hybrid.models.shared_weights import with_weights

        weights = _read_weights(trainer)
        known = 0 if self._form is None else len(_read_weights(self._form))
        if known == len(weights) or is_quantized(trainer) or _is_sharded(weights):
            return
        self._form = with_weights(trainer, {id(w): w.detach().to("meta") for w in weights})

    def check_form(self, trainer: Any, weights: Sequence[Tensor]) -> None:
        """Raise UnsupportedError for sharded weights of a trainer that was not seen whole."""
        if not _is_sharded(weights):
            return
        form = self._form
        if (
            form is None
            or len(_read_weights(form)) != len(weights)
            or _switches(form) != _switches(trainer)
        ):
            raise UnsupportedError(
                "a model with batch_invariant=True that changed or was copied since "
                "make_trainable is called once before fully_shard, after which its adapters are "
                "neither switched nor exchanged"
            )

    def compute(
        self, tokens: Tensor, cu_seqlens: Tensor, weights: Sequence[Tensor], out: Tensor
    ) -> None:
        """Run the sequences of packed ``tokens`` [T], and write their logits to ``out`` [T, V].

        ``weights`` are values of the trainer's, which are elsewhere in a graph that changes them.
        Columns past those of the server stand for no token.
        """
        given: list[int] = tokens.tolist()
        ends = sorted({0, *cu_seqlens.tolist(), len(given)})
        longest = max(end - start for start, end in pairwise(ends))
        runner = self._with_weights(weights, longest)
        live: dict[int, Any] = {}  # by the end of a sequence
        num_done = 0
        out[:, runner.vocab_size :] = -torch.inf
        try:
            for step in _steps(ends, runner.max_tokens, runner.max_seqs):
                new = [end for end, _, _ in step if end not in live]
                live |= zip(new, runner.new_sequences(len(new), adapter=self._adapter), strict=True)
                seqs, new_tokens = zip(
                    *((live[end], given[a:b]) for end, a, b in step), strict=True
                )
                made = runner.extend(seqs, new_tokens, logits="all")
                if made.dtype != out.dtype:
                    raise ValueError(
                        f"a model with batch_invariant=True has a head in the dtype of its other "
                        f"weights, {made.dtype}, got {out.dtype}"
                    )
                out[num_done : num_done + len(made), : runner.vocab_size] = made
                num_done += len(made)
                runner.free([live.pop(end) for end, _, b in step if b == end])
        finally:
            runner.free([*live.values()])  # of a step that failed

    def _with_weights(self, weights: Sequence[Tensor], longest: int) -> Runner:
        """Make the runner, or give it new weights."""
        from torch_hybrid.models.shared_weights import with_weights

        model: Any = self._trainer()
        if model is None:
            raise RuntimeError("a copy of a model is called once before it is compiled")
        own = _read_weights(model)
        memory: Sequence[object] = _places(weights)
        if memory != _places(own):  # that of a graph or of gathered weights, which ends with it
            memory = [(w.device, w.dtype) for w in weights]
            stays = self._room >= longest and memory == self._memory
            new = weights if stays else [w.clone() for w in weights]
            if _is_sharded(own):
                model, own = self._form, _read_weights(self._form)
            model = with_weights(model, {id(old): w for old, w in zip(own, new, strict=True)})
        runner = self._runner
        if runner is None or self._room < longest or memory != self._memory:
            self._memory, self._runner = memory, (runner := self._make(model, longest))
        elif self._base is None:
            runner.update_weights(model)
        if self._base is not None:
            for name in runner.adapters:
                runner.unload_adapter(name)
            self._adapter = None
            if any(is_on for is_on, _ in _switches(model)):
                self._adapter = "trained"
                runner.load_adapter(self._adapter, model)
        return runner

    def _make(self, model: Any, longest: int) -> Runner:
        from torch_hybrid.graphs.runner import Runner
        from torch_hybrid.models.shared_weights import adapt_shared

        self._runner = None  # first free its pools
        self._room = max(2048, 1 << (longest - 1).bit_length())
        sizes = dict(self.options)
        sizes.pop("weights", None)
        kv_tokens = self._room + sizes["max_tokens"] + sizes["max_seqs"] * sizes["page_size"]
        options = {"kv_tokens": kv_tokens, **sizes, "batch_invariant": True}
        if self._base is None:
            return Runner(adapt_shared(model), **options)
        ranks = [min(w.shape) for name, w in model.named_parameters() if ".lora_" in name]
        options |= {"max_adapters": 1, "max_lora_rank": max(ranks, default=1)}
        return Runner(self._base, **options)


def is_quantized(model: Any) -> bool:
    """Tell whether a model's weights are quantized."""
    return vars(model.config).get("quantization_config") is not None


def _base_of(model: Any, weights: str | None) -> HybridModel:
    """Load the checkpoint of a quantized model, whose weights stay as they are.

    Raises:
        UnsupportedError: it is not known which, or how it is quantized.
    """
    from torch_hybrid.models.load import from_pretrained

    method = str.__str__(model.config.to_dict()["quantization_config"]["quant_method"])
    path = model.config.name_or_path
    if weights is None and method != "fp8":
        raise UnsupportedError(
            f"a server of a base in {method} quantizes its checkpoint anew: "
            f"batch_invariant={{'weights': 'int8'}}, or 'int4', says how"
        )
    if not path:
        raise UnsupportedError(
            "the server of a quantized base reads its checkpoint, and config.name_or_path is empty"
        )
    dtype = model.get_input_embeddings().weight.dtype
    base: Any = from_pretrained(path, dtype, model.device, weights=weights or "auto")
    return base  # type: ignore[no-any-return]


def _is_sharded(weights: Sequence[Tensor]) -> bool:
    """Tell whether ranks have parts of weights."""
    return any(isinstance(each, DTensor) for each in weights)


def _switches(model: nn.Module) -> list[tuple[bool, list[str]]]:
    """List whether adapters are switched on, and which are active, for each layer that has some."""
    if "peft" not in sys.modules:
        return []
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [each for each in model.modules() if isinstance(each, BaseTunerLayer)]
    return [(not each.disable_adapters, [*each.active_adapters]) for each in layers]


def _read_weights(model: Any) -> list[Tensor]:
    """List the weights that a server reads in each call: of a quantized base, adapters alone."""
    from torch_hybrid.models.shared_weights import named_weights

    adapters_alone = is_quantized(model)
    return [w for name, w in named_weights(model) if ".lora_" in name or not adapters_alone]


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


def _places(weights: Sequence[Tensor]) -> list[tuple[int, torch.device, torch.dtype]]:
    """Tell where weights lie."""
    return [(each.data_ptr(), each.device, each.dtype) for each in weights]


@torch.library.custom_op("torch_hybrid::served_logits", mutates_args=())
def _served_logits(
    hidden: Tensor | None,
    head: Tensor | None,
    input_ids: Tensor,
    cu_seqlens: Tensor,
    weights: Sequence[Tensor],
    softcap: float | None,
    vocab_size: int,
    dtype: torch.dtype,
    server: int,
) -> Tensor:
    made = input_ids.new_empty((*input_ids.shape, vocab_size), dtype=dtype)
    _SERVERS[server].compute(input_ids.flatten(), cu_seqlens, weights, made.flatten(0, -2))
    return made


@_served_logits.register_fake
def _empty_logits(
    hidden: Tensor | None,
    head: Tensor | None,
    input_ids: Tensor,
    cu_seqlens: Tensor,
    weights: Sequence[Tensor],
    softcap: float | None,
    vocab_size: int,
    dtype: torch.dtype,
    server: int,
) -> Tensor:
    """Make a tensor as the op returns it."""
    return input_ids.new_empty((*input_ids.shape, vocab_size), dtype=dtype)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Keep the factors of the product that the values stand for, and what bounds them."""
    hidden, head, _, _, weights, ctx.softcap, *_ = inputs
    ctx.num_weights = len(weights)
    ctx.save_for_backward(None if head is None else hidden, head, output if ctx.softcap else None)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Compute the gradients of logits = bound(hidden @ head.T)."""
    hidden, head, bounded = ctx.saved_tensors
    if bounded is not None:
        wide = torch.promote_types(grad.dtype, torch.float32)
        share = bounded.to(wide) / ctx.softcap
        grad = (grad * (1 - share * share)).to(grad.dtype)
    others = None, None, [None] * ctx.num_weights, None, None, None, None
    if head is None:
        return grad, None, *others
    needs_hidden, needs_head = ctx.needs_input_grad[:2]
    dhidden = linear(grad, head.T) if needs_hidden else None
    dhead = linear(grad.flatten(0, -2).T, hidden.flatten(0, -2).T) if needs_head else None
    return dhidden, dhead, *others


_served_logits.register_autograd(_backward, setup_context=_keep)


def served_logits(
    trainer: Any,
    hidden: Tensor | None,
    inputs: Mapping[str, Any],
    server: ServedLogits,
    softcap: float | None,
    vocab_size: int | None,
) -> Tensor:
    """Compute logits [B, T, V] of a trainer by its server.

    Args:
        trainer: a causal language model, whose ``lm_head`` has gradients for these logits.
        hidden: [B, T, D], its hidden states, which have gradients as well; None without gradients.
        inputs: its inputs.
        server: its server.
        softcap: bound of its logits.
        vocab_size: the number of its logits, if it is not that of the rows of its head.

    Raises:
        ValueError: the inputs are no tokens, or have images; or this is in autocast.
        UnsupportedError: weights were sharded before the model was whole in a call.
    """
    tokens: Tensor | None = inputs.get("input_ids")
    others = [k for k, v in inputs.items() if k.startswith("pixel_values") and v is not None]
    if tokens is None or others:
        came = ", ".join(others) or "inputs_embeds"
        raise ValueError(f"a model with batch_invariant=True takes input_ids alone, got {came}")
    weights = [weight.detach() for weight in _read_weights(trainer)]
    if not torch.compiler.is_compiling():
        server.serve(trainer)
        server.check_form(trainer, weights)
    weights = [w.full_tensor() if isinstance(w, DTensor) else w for w in weights]
    head = trainer.lm_head
    dtype, kind = head.weight.dtype, tokens.device.type
    if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != dtype:
        raise ValueError(
            f"a model with batch_invariant=True runs in the dtype of its weights, {dtype}, "
            f"got autocast to {torch.get_autocast_dtype(kind)}: leave autocast, or cast the model"
        )
    vocab_size = len(head.weight) if vocab_size is None else vocab_size
    factor: Tensor | None = None
    if hidden is not None:
        hidden = hidden.to(dtype)  # backbones may keep their residuals in float32
        if isinstance(head, LossHead) and not isinstance(head.weight, DTensor):
            factor = head.weight[:vocab_size]
        else:  # of PEFT, with a bias, or sharded apart from the model
            hidden = head(hidden)[..., :vocab_size]
    made: Tensor = _served_logits(
        hidden,
        factor,
        tokens,
        inputs["packing"].cu_seqlens,
        weights,
        softcap,
        vocab_size,
        dtype,
        server.number,
    )
    return made
