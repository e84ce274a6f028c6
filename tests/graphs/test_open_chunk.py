"""Decode by open chunks in a runner: turns, mixed steps, snapshots, slots that are used again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.devices import needs_cuda
from tests.ops.triton_interpreter import interprets
from tests.tiny_models import make_hybrid
from torch_hybrid import Backends, Runner
from torch_hybrid.backends.recurrences import RECURRENCES
from torch_hybrid.caches.sizes import PoolSizes
from torch_hybrid.errors import UnsupportedError
from torch_hybrid.ops.open_chunk import OPEN_TOKENS
from torch_hybrid.ops.triton.devices import interpreted
from torch_hybrid.specs import Mamba2Spec

# A family for each op, with heads of the sizes at which Triton's form serves.
HEADS = {"linear_num_key_heads": 1, "linear_num_value_heads": 2}
HEADS |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "num_hidden_layers": 2}
MAMBA2 = {"mamba_n_heads": 2, "mamba_d_head": 64, "mamba_expand": 4}
MAMBA2 |= {"mamba_n_groups": 1, "mamba_d_state": 128}
FAMILIES: dict[str, tuple[str, dict[str, int]]] = {
    "gated_delta_step": ("qwen3_next_dense", HEADS),
    "kimi_delta_step": ("kimi_linear", {"linear_num_heads": 2, "linear_head_dim": 128}),
    "ssd_step": ("granitemoehybrid_dense", MAMBA2),
    "lightning_step": ("minimax", {"num_attention_heads": 2, "head_dim": 128}),
}
test_in_the_interpreter = interprets("test_open_chunk and interpreted")
needs_interpreter = pytest.mark.skipif(not interpreted(), reason="runs in the interpreter")


def make_runner(impl: str, op: str, device: str = "cpu", **options: Any) -> Runner:
    family, heads = FAMILIES[op]
    model = make_hybrid(family, **heads).to(device)
    backends = Backends(ops={f"decode {op}": impl})
    sizes = {"max_seqs": 16, "max_tokens": 64, "kv_tokens": 512, "page_size": 8}
    return Runner(model, **sizes, max_snapshots=3, backends=backends, **options)


class Pair:
    """Two runners through the same steps: one that keeps chunks open, and one that does not."""

    def __init__(self, *runners: Runner) -> None:
        assert [runner.cache.sizes.opens_chunks for runner in runners] == [True, False]
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
@pytest.mark.parametrize("op", ["gated_delta_step", "ssd_step", "lightning_step"])
def test_history_interpreted(op: str) -> None:
    run_history(Pair(*(make_runner(impl, op, compile=False) for impl in ("triton", "composed"))))


@needs_cuda
@pytest.mark.parametrize("op", FAMILIES)
def test_history_on_a_gpu(op: str) -> None:
    run_history(Pair(*(make_runner(impl, op, "cuda") for impl in ("triton", "composed"))))


@needs_interpreter
def test_sizes_that_open_chunks_interpreted() -> None:
    """Data say at which sizes of an op, and of how many sequences, that is faster."""
    spec = Mamba2Spec(num_heads=2, head_dim=64, state_dim=128, num_groups=1, conv_width=4)
    of_pools = {"num_pages": 1, "page_size": 8, "num_slots": 1}
    sizes = PoolSizes(**of_pools, dtype=torch.float32, device=torch.device("cpu"))
    backends = Backends(ops={"decode ssd_step": "triton"})
    rule = RECURRENCES["mamba2"]
    assert rule.opens_chunks({spec}, sizes, backends)
    assert not replace(rule, opened_from=2).opens_chunks({spec}, sizes, backends)
    elsewhere = replace(rule, timed={"head_k_dim": (256,)})
    assert not elsewhere.opens_chunks({spec}, sizes, Backends())
    with pytest.raises(UnsupportedError, match="head_k_dim"):
        elsewhere.opens_chunks({spec}, sizes, backends)


def test_no_chunks_where_a_step_stores_each_state() -> None:
    """On a CPU: its implementations have no such form."""
    runner = make_runner("auto", "gated_delta_step", compile=False)
    assert not runner.cache.sizes.opens_chunks
    assert "chunk" not in runner.cache.pools["gated_delta_rule"][0]
