"""Public calls in contexts of their caller: results have the bits of a plain call's, and the state
of the process is the same after as before."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from transformers.utils import logging

import torch_hybrid as th
from tests.host.test_surroundings import SURROUNDINGS, logits_of
from tests.tiny_models import make_model

T = TypeVar("T")
Call = Callable[[], list[Tensor]]
LAYERS = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
SIZES = {"max_seqs": 3, "max_tokens": 64, "kv_tokens": 192, "page_size": 16, "compile": False}
PROMPT = [7 * token % 89 + 2 for token in range(40)]


def process() -> tuple[object, ...]:
    """All that a call could leave behind."""
    return (
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch._C._len_torch_function_stack(),
        torch.is_inference_mode_enabled(),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.are_deterministic_algorithms_enabled(),
        logging.get_verbosity(),
        logging.is_progress_bar_enabled(),
        torch.nn.init.normal_,
    )


def unchanged(call: Callable[[], T]) -> T:
    """Make a call, after which the process is as before."""
    before = process()
    result = call()
    assert process() == before
    return result


def in_context(context: Callable[[], AbstractContextManager[object]], call: Callable[[], T]) -> T:
    with context():
        return unchanged(call)


def in_event_loop(call: Callable[[], T]) -> T:
    async def run() -> T:
        return unchanged(call)

    return asyncio.run(run())


def in_thread(call: Callable[[], T]) -> T:
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(unchanged, call).result()


CONTEXTS: dict[str, Callable[[Callable[[], T]], T]] = {
    **{name: partial(in_context, context) for name, context in SURROUNDINGS.items()},
    "event loop": in_event_loop,
    "thread": in_thread,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model("qwen3_next_dense", **LAYERS).save_pretrained(path)
    return path


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Calls:
    """Each method makes what a call needs, and returns the call, which runs in a context, and what
    is looked at afterwards."""

    def __init__(self, folder: Path, tmp_path: Path) -> None:
        self._folder, self._path = folder, tmp_path / "written"

    def from_pretrained(self) -> tuple[Callable[[], object], Call]:
        made: list[th.HybridModel] = []
        return lambda: made.append(th.from_pretrained(self._folder)), lambda: logits(*made)

    def adapt(self) -> tuple[Callable[[], object], Call]:
        hf_model, made = make_model("qwen3_next_dense", **LAYERS), []
        return lambda: made.append(th.adapt(hf_model)), lambda: logits(*made)

    def quantize(self) -> tuple[Callable[[], object], Call]:
        model = self._model()
        return lambda: th.quantize(model, "int4"), lambda: logits(model)

    def shard(self) -> tuple[Callable[[], object], Call]:
        model = self._model()
        return lambda: th.shard(model), lambda: logits(model)

    def runner(self) -> tuple[Callable[[], object], Call]:
        model, outputs = self._model(), []

        def call() -> None:
            runner = th.Runner(model, max_snapshots=2, max_drafts=2, **SIZES)
            (seq,) = runner.new_sequences(1)
            outputs.append(runner.extend([seq], [PROMPT]).clone())
            outputs.append(runner.verify([seq], [[3, 4, 5]]).clone())
            runner.accept([seq], [1])
            snapshot = runner.snapshot(seq)
            outputs.append(runner.extend([seq], [[6]]).clone())
            (fork,) = runner.new_sequences(1, snapshot)
            outputs.append(runner.extend([fork, seq], [[6], [8]]).clone())
            runner.free([seq, fork])
            runner.release(snapshot)

        return call, lambda: outputs

    def engine(self) -> tuple[Callable[[], object], Call]:
        model, tokens = self._model(), []

        def call() -> None:
            with th.Engine(th.Runner(model, **SIZES)) as engine:
                sampling = th.Sampling(max_new_tokens=4, temperature=0.7, seed=1, ignore_eos=True)
                (output,) = engine.generate([PROMPT], sampling)
                tokens.append(torch.tensor(output.tokens, device="cpu"))
                engine.submit(PROMPT[:9], sampling)
                while engine.has_unfinished:
                    tokens.extend(torch.tensor(e.token, device="cpu") for e in engine.step())

        return call, lambda: tokens

    def update_weights(self) -> tuple[Callable[[], object], Call]:
        runner = th.Runner(self._model(), **SIZES)
        weights = load_file(self._folder / "model.safetensors")
        doubled = {name: 2 * weight for name, weight in weights.items()}
        return lambda: runner.update_weights(doubled), lambda: logits_of(runner)

    def kv_scales(self) -> tuple[Callable[[], object], Call]:
        model, scales = self._model(), {}
        return lambda: scales.update(th.kv_scales(model, [PROMPT])), lambda: [*scales.values()]

    def prefixes(self) -> tuple[Callable[[], object], Call]:
        options, counts = th.PrefixCache(min_tokens=16, host_bytes=1 << 20), []
        runners = [th.Runner(self._model(), max_snapshots=4, **SIZES) for _ in range(2)]
        sampling = th.Sampling(max_new_tokens=4, temperature=0.0, ignore_eos=True)

        def call() -> None:
            with th.Engine(runners[0], prefix_cache=options) as engine:
                list(engine.generate([PROMPT], sampling))
                counts.append(engine.save_prefixes(self._path))
            engine = th.Engine(runners[1], prefix_cache=options)
            counts.append(engine.load_prefixes(self._path))
            (output,) = engine.generate([[*PROMPT, 5]], sampling)
            counts.extend([output.num_cached_tokens, *output.tokens])

        return call, lambda: [torch.tensor(counts)]

    def _model(self) -> th.HybridModel:
        return th.from_pretrained(self._folder)


def logits(model: th.HybridModel) -> list[Tensor]:
    return logits_of(th.Runner(model, **SIZES))


CALLS = [name for name in vars(Calls) if not name.startswith("_")]


@pytest.mark.parametrize("name", CALLS)
def test_same_bits_and_the_same_process(name: str, folder: Path, tmp_path: Path) -> None:
    def results(within: Callable[[Callable[[], object]], object]) -> list[Tensor]:
        call, result = getattr(Calls(folder, tmp_path), name)()
        unchanged(lambda: within(call))
        return result()

    expected = results(unchanged)
    assert expected
    for context, within in CONTEXTS.items():
        found = results(within)
        assert [x.dtype for x in found] == [x.dtype for x in expected], context
        assert all(map(torch.equal, found, expected)), context
        assert not any(x.is_inference() and name == "kv_scales" for x in found), context
