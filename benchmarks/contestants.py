"""Who is measured: this package's runner, and transformers on padded batches."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException

from torch_hybrid import Runner

# ValueError: a model that refuses the static cache.
COMPILE_ERRORS = (TorchDynamoException, RuntimeError, TimeoutError, ValueError)


class Decoder(Protocol):
    """Holds a batch of sequences and appends one token to each."""

    def start(self, prompts: Sequence[Sequence[int]]) -> None: ...

    def step(self, tokens: Sequence[int]) -> Tensor: ...


class Ours:
    """Sequences of a runner, which have its adapters in turn, if it has any."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self._adapters = runner.adapters or (None,)
        self._seqs: list[Any] = []

    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        """Drop what is held, and prefill the prompts one by one."""
        if self._seqs:
            self.runner.free(self._seqs)
        names = islice(cycle(self._adapters), len(prompts))
        self._seqs = [self.runner.new_sequences(1, adapter=name)[0] for name in names]
        for seq, prompt in zip(self._seqs, prompts, strict=True):
            self.runner.extend([seq], [prompt])

    def step(self, tokens: Sequence[int]) -> Tensor:
        """Append a token to each sequence; [N, vocab_size] logits."""
        return self.runner.extend(self._seqs, [[token] for token in tokens])


def load_adapters(
    runner: Runner, hf_model: Any, count: int, rank: int, *, experts: bool = False
) -> None:
    """Load adapters of all linear layers but the head, and of stacks of experts.

    They change next to nothing, as after a training's first step: so logits can be checked, and the
    time is that of any.
    """
    tensors = {}

    def add(name: str, inputs: int, outputs: int, rank: int = rank) -> None:
        start = f"base_model.model.{name}.lora"
        tensors[f"{start}_A.weight"] = torch.randn(rank, inputs)
        tensors[f"{start}_B.weight"] = torch.full((outputs, rank), 1e-9)

    for name, layer in hf_model.named_modules():
        if type(layer) is torch.nn.Linear and not name.endswith("lm_head"):
            add(name, layer.in_features, layer.out_features)
        elif experts and name.endswith(".experts"):  # peft wraps them once for each weight
            (first, down) = (weight.shape for weight in layer.parameters())
            for own, (num_experts, outputs, inputs) in ((".base_layer", first), ("", down)):
                add(name + own, inputs, outputs, rank * num_experts)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    config |= {"target_parameters": ["gate_up_proj", "up_proj", "down_proj"]}
    with TemporaryDirectory() as folder:
        save_file(tensors, Path(folder) / "adapter_model.safetensors")
        (Path(folder) / "adapter_config.json").write_text(json.dumps(config))
        for number in range(count):
            runner.load_adapter(f"adapter {number}", folder)


class Transformers:
    """A transformers model on one left-padded batch, called as its ``generate`` calls it.

    Args:
        model: unmodified.
        max_len: compile the step with a static cache of this length; 0 runs eagerly with the
            cache that ``generate`` takes by default.
    """

    def __init__(self, model: Any, *, max_len: int = 0) -> None:
        self.model = model
        self.max_len = max_len
        # Not reduce-overhead, transformers' default: that is about CUDA graphs.
        self._call = torch.compile(model.__call__, dynamic=False) if max_len else model

    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        """Prefill the padded batch eagerly."""
        longest = max(map(len, prompts))
        padding = [longest - len(prompt) for prompt in prompts]
        ids = torch.tensor([[0] * n + list(p) for n, p in zip(padding, prompts, strict=True)])
        self._mask = torch.tensor([[0] * n + [1] * (longest - n) for n in padding])
        self._cache = self._empty_cache()
        self._forward(self.model, ids, (self._mask.cumsum(-1) - 1).clamp(min=0))

    def _empty_cache(self) -> Any:
        from transformers import DynamicCache, StaticCache
        from transformers.models.minimax.modeling_minimax import MiniMaxCache

        config = self.model.config
        if self.max_len:
            return StaticCache(config, self.max_len)
        return MiniMaxCache() if config.model_type == "minimax" else DynamicCache(config=config)

    def step(self, tokens: Sequence[int]) -> Tensor:
        """Append a token to each sequence; [N, vocab_size] logits."""
        self._mask = torch.nn.functional.pad(self._mask, (0, 1), value=1)
        positions = self._mask.sum(-1, keepdim=True) - 1
        return self._forward(self._call, torch.tensor(tokens)[:, None], positions)

    def _forward(self, call: Callable[..., Any], ids: Tensor, positions: Tensor) -> Tensor:
        from transformers.masking_utils import create_masks_for_generate

        mask: Any = self._mask
        with torch.inference_mode():
            if self.max_len:  # masks are made outside the graph, as generate does
                mask = create_masks_for_generate(
                    config=self.model.config,
                    inputs_embeds=torch.empty(*ids.shape, 0, dtype=self.model.dtype),
                    attention_mask=mask,
                    past_key_values=self._cache,
                    position_ids=positions,
                )
            logits: Tensor = call(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                use_cache=True,
                logits_to_keep=1,
                **{self._cache_name: self._cache},
            ).logits[:, -1]
        return logits

    @property
    def _cache_name(self) -> str:
        is_mamba = self.model.config.model_type in ("mamba", "falcon_mamba", "mamba2")
        return "cache_params" if is_mamba else "past_key_values"


class OneByOneTransformers:
    """A transformers model that takes its states as a list, run eagerly: one sequence after the
    other, as it knows no masks, and its steps of one token mix the sequences of a batch.

    Args:
        model: unmodified.
    """

    def __init__(self, model: Any) -> None:
        self.model = model

    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        """Prefill each prompt."""
        self._states = [self._forward(prompt, None).state for prompt in prompts]

    def step(self, tokens: Sequence[int]) -> Tensor:
        """Append a token to each sequence; [N, vocab_size] logits."""
        each = zip(tokens, self._states, strict=True)
        outputs = [self._forward([token], state) for token, state in each]
        self._states = [output.state for output in outputs]
        return torch.cat([output.logits[:, -1] for output in outputs])

    def _forward(self, tokens: Sequence[int], state: list[Tensor] | None) -> Any:
        with torch.inference_mode():
            ids = torch.tensor([list(tokens)])
            return self.model(input_ids=ids, state=state, use_cache=True, logits_to_keep=1)


class UnpaddedTransformers:
    """A transformers model that knows neither masks nor static caches (xLSTM), run eagerly: prompts
    are prefilled one by one, and their states put side by side.

    Args:
        model: unmodified.
    """

    def __init__(self, model: Any) -> None:
        self.model = model

    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        """Prefill each prompt."""
        with torch.inference_mode():
            caches = [
                self.model(input_ids=torch.tensor([list(prompt)]), use_cache=True).cache_params
                for prompt in prompts
            ]
        self._cache, *_ = caches
        for layer in self._cache.rnn_state:
            states = zip(*(cache.rnn_state[layer] for cache in caches), strict=True)
            self._cache.rnn_state[layer] = tuple(map(torch.cat, states))

    def step(self, tokens: Sequence[int]) -> Tensor:
        """Append a token to each sequence; [N, vocab_size] logits."""
        with torch.inference_mode():
            ids = torch.tensor(tokens)[:, None]
            outputs = self.model(input_ids=ids, cache_params=self._cache, use_cache=True)
            logits: Tensor = outputs.logits[:, -1]
        return logits


def transformers(model: Any) -> Transformers | UnpaddedTransformers | OneByOneTransformers:
    """A transformers model run eagerly, as it takes a batch."""
    if model.config.model_type == "xlstm":
        return UnpaddedTransformers(model)
    if "state" in signature(model.forward).parameters:
        return OneByOneTransformers(model)
    return Transformers(model)


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in the body after so many seconds."""

    def stop(_signal: int, _frame: Any) -> None:
        raise TimeoutError(f"took longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def failure(run: Callable[[], Any], *, limit: int) -> str | None:
    """Run something that compiles; why it failed within ``limit`` seconds, or None."""
    try:
        with time_limit(limit):
            run()
    except COMPILE_ERRORS as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
    return None
