"""Threads that load models in random dtypes and contexts, while others serve and look at the
settings of the process.

Every model must have its own dtype and the logits that it has when it is loaded alone, some loads
must fail, every request must have its tokens, and no thread may ever see a changed setting.

    python -m tests.hostile.fuzz_threads --seconds 600 --seed 1
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.utils import logging

import torch_hybrid as th
from tests.by_hand import options
from tests.tiny_models import make_model

LAYERS = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
SIZES = {"max_seqs": 3, "max_tokens": 64, "kv_tokens": 192, "page_size": 16, "compile": False}
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
SERVED = (torch.float32, torch.bfloat16)
PROMPT = [7 * token % 89 + 2 for token in range(40)]
GREEDY = th.Sampling(max_new_tokens=4, temperature=0.0, ignore_eos=True)
# Of the calling thread alone: a default dtype would be a change of the process by its user.
CONTEXTS: tuple[Callable[[], AbstractContextManager[object]], ...] = (
    nullcontext,
    torch.inference_mode,
    torch.no_grad,
    torch.enable_grad,
    lambda: torch.autocast("cpu", torch.bfloat16),
)
LOADS, LOADERS = 3, 3


def settings() -> tuple[object, ...]:
    """All that a load could change for other threads."""
    return (
        torch.zeros(1).dtype,
        torch.get_default_dtype(),
        torch.nn.Linear(1, 1).weight.device,
        logging.is_progress_bar_enabled(),
    )


def logits(model: th.HybridModel) -> Tensor:
    runner = th.Runner(model, **SIZES)
    return runner.extend(runner.new_sequences(1), [PROMPT]).clone()


def tokens(engine: th.Engine) -> list[int]:
    (output,) = engine.generate([PROMPT], GREEDY)
    return output.tokens


class ThreadsFuzz:
    """Rounds of threads, of a seed.

    Attributes:
        counts: of what was done: "loaded", "refused", "served", "looked".
    """

    def __init__(self, seed: int, folder: Path) -> None:
        self.rng, self.counts = random.Random(seed), Counter[str]()
        self._whole, self._broken = folder / "whole", folder / "broken"
        hf_model = make_model("qwen3_next_dense", **LAYERS)
        for path in (self._whole, self._broken):
            hf_model.save_pretrained(path)
        weights = load_file(self._broken / "model.safetensors")
        del weights["lm_head.weight"]
        save_file(weights, self._broken / "model.safetensors")
        models = {dtype: th.from_pretrained(self._whole, dtype=dtype) for dtype in DTYPES}
        self._logits = {dtype: logits(models[dtype]) for dtype in SERVED}
        self._engine = th.Engine(th.Runner(models[torch.float32], **SIZES))
        self._tokens = tokens(self._engine)
        self._settings, self._verbosity = settings(), logging.get_verbosity()
        self._failures: list[BaseException] = []

    def round(self) -> None:
        """Run all threads until the loaders are done; raise what one of them raised."""
        is_done = threading.Event()
        loaders = [
            self._thread(partial(self._load, random.Random(self.rng.random())))
            for _ in range(LOADERS)
        ]
        others = [
            self._thread(partial(self._repeat, call, is_done)) for call in (self._serve, self._look)
        ]
        for thread in loaders:
            thread.join()
        is_done.set()
        for thread in others:
            thread.join()
        if self._failures:
            raise self._failures[0]
        assert settings() == self._settings
        assert logging.get_verbosity() == self._verbosity

    def _thread(self, call: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                call()
            except BaseException as error:
                self._failures.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def _repeat(self, call: Callable[[], None], is_done: threading.Event) -> None:
        while not is_done.is_set():
            call()

    def _load(self, rng: random.Random) -> None:
        for _ in range(LOADS):
            dtype, is_whole = rng.choice(DTYPES), rng.random() < 0.8
            with ExitStack() as stack:
                for context in rng.sample(CONTEXTS, rng.randrange(3)):
                    stack.enter_context(context())
                if is_whole:
                    self._check(th.from_pretrained(self._whole, dtype=dtype), dtype)
                else:
                    self._refused(dtype)

    def _check(self, model: th.HybridModel, dtype: torch.dtype) -> None:
        assert {weight.dtype for weight in model.parameters()} == {dtype}
        if dtype in SERVED:
            assert torch.equal(logits(model), self._logits[dtype])
        self.counts["loaded"] += 1

    def _refused(self, dtype: torch.dtype) -> None:
        with pytest.raises(ValueError, match=r"lm_head\.weight"):
            th.from_pretrained(self._broken, dtype=dtype)
        self.counts["refused"] += 1

    def _serve(self) -> None:
        assert tokens(self._engine) == self._tokens
        self.counts["served"] += 1

    def _look(self) -> None:
        seen = settings()
        # A bar is hidden under the lock of loaders, as all of transformers' own settings are.
        assert seen[:-1] == self._settings[:-1], seen
        self.counts["looked"] += 1


def run(*, seed: int, seconds: float) -> Counter[str]:
    """Rounds for so many seconds."""
    with TemporaryDirectory() as folder:
        fuzz = ThreadsFuzz(seed, Path(folder))
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            fuzz.round()
        return fuzz.counts


def main() -> None:
    args = options(__doc__).parse_args()
    print(dict(run(seed=args.seed, seconds=args.seconds)))


if __name__ == "__main__":
    main()
