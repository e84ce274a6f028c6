"""Decode by open chunks in a runner: turns, mixed steps, snapshots, slots that are used again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.devices import needs_cuda
from tests.ops.triton_interpreter import interprets
from tests.tiny_models import make_hybrid
from torch_hybrid import Backends, Runner
from torch_hybrid.ops.delta_rule.open_chunk import OPEN_TOKENS
from torch_hybrid.ops.triton.devices import interpreted

STEP = "decode gated_delta_step"
HEADS = {"linear_num_key_heads": 1, "linear_num_value_heads": 2}
HEADS |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
test_in_the_interpreter = interprets("test_open_chunk and history and interpreted")
needs_interpreter = pytest.mark.skipif(not interpreted(), reason="runs in the interpreter")


def make_runner(impl: str, device: str = "cpu", **options: Any) -> Runner:
    model = make_hybrid("qwen3_next_dense", num_hidden_layers=2, **HEADS).to(device)
    backends = Backends(ops={STEP: impl})
    sizes = {"max_seqs": 4, "max_tokens": 64, "kv_tokens": 512, "page_size": 8}
    return Runner(model, **sizes, max_snapshots=3, backends=backends, **options)


class Pair:
    """Two runners through the same steps: one that keeps chunks open, and one that does not."""

    def __init__(self, *runners: Runner) -> None:
        self.runners = runners
        self.seqs = [[*runner.new_sequences(2)] for runner in runners]
        self._rng = torch.Generator().manual_seed(0)

    def step(self, *lengths: int) -> None:
        """Extend each sequence by as many tokens: the logits are the same within rounding."""
        tokens = [torch.randint(60, (n,), generator=self._rng).tolist() for n in lengths]
        live = [i for i, new in enumerate(tokens) if new]
        own, other = (self._logits(i, live, [tokens[j] for j in live]) for i in range(2))
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))

    def _logits(self, which: int, live: list[int], tokens: list[list[int]]) -> Tensor:
        seqs = [self.seqs[which][i] for i in live]
        return self.runners[which].extend(seqs, tokens).float().cpu()

    def decode(self, count: int) -> None:
        for _ in range(count):
            self.step(*(1 for _ in self.seqs[0]))

    def snapshot(self, index: int) -> list[Any]:
        pairs = zip(self.runners, self.seqs, strict=True)
        return [runner.snapshot(seqs[index]) for runner, seqs in pairs]

    def start(self, index: int, starts: list[Any]) -> None:
        """Free a sequence, if there is one, and start another from a snapshot or from nothing."""
        for runner, seqs, start in zip(self.runners, self.seqs, starts, strict=True):
            runner.free(seqs[index : index + 1])
            seqs[index : index + 1] = runner.new_sequences(1, start=start)


def run_history(pair: Pair) -> None:
    keeping, other = (runner.cache.sizes.opens_chunks for runner in pair.runners)
    assert keeping
    assert not other
    pair.step(20, 7)
    pair.decode(OPEN_TOKENS + 2)
    pair.step(9, 1)  # a turn beside a sequence that decodes
    pair.step(0, 1)
    kept = pair.snapshot(1)
    pair.decode(2)
    pair.start(2, kept)
    pair.decode(2)
    pair.start(0, kept)
    pair.step(11, 0, 1)
    pair.decode(2)
    pair.start(0, [None, None])  # a new sequence, which begins with a step of decode
    pair.decode(2)


@needs_interpreter
def test_history_interpreted() -> None:
    run_history(Pair(*(make_runner(impl, compile=False) for impl in ("triton", "composed"))))


@needs_cuda
def test_history_on_a_gpu() -> None:
    run_history(Pair(*(make_runner(impl, "cuda") for impl in ("triton", "composed"))))


def test_no_chunks_where_a_step_stores_each_state() -> None:
    """On a CPU: its implementations have no such form."""
    runner = make_runner("auto", compile=False)
    assert not runner.cache.sizes.opens_chunks
    assert "chunk" not in runner.cache.pools["gated_delta_rule"][0]
