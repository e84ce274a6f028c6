"""What the processes of these tests run: a model alone and shared, led through the same steps."""

from __future__ import annotations

import hashlib
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import torch_hybrid as th
from tests.graphs.as_traced import run_as_traced
from tests.graphs.test_batch_invariant import assert_same_bits
from tests.models.oracle import Step, make_texts, serve
from tests.tiny_models import make_model
from torch_hybrid.models.shard import Experts

LENGTHS = (5, 64, 73)
VOCAB_SIZE = 200  # which the ranks divide
# Prompts, chunks beside single tokens, and decode.
STEPS: list[Step] = [{0: 2, 1: 60, 2: 33}, {0: 1, 2: 37}, {0: 1, 1: 1, 2: 1}, {0: 1, 1: 3, 2: 2}]
SIZES = {"max_seqs": 4, "max_tokens": 128, "kv_tokens": 256}
HYBRID = ("linear_attention", "full_attention")
ONE_LAYER = {"num_hidden_layers": 1, "hidden_size": 32, "layer_types": ["linear_attention"]}
# Weights without a near tie of routers, nor a token whose logits magnify rounding a hundredfold.
SEEDS = {"qwen3_next_dense": 1, "qwen3_5": 2, "xlstm": 3}
# Heads that four ranks can share.
OPTIONS = {"kimi_linear": {"linear_num_heads": 4}}


@dataclass(frozen=True)
class Shared:
    """What came of a model that the ranks share."""

    error: float | None  # against the model alone, of the largest logit; on the first rank
    digest: str  # of the logits
    pool_bytes: tuple[int, int]  # alone, on the first rank, and shared
    counts: tuple[int, int, int]  # recompiles, graph breaks, pool clones


def make(family: str, **options: Any) -> Any:
    options = {"vocab_size": VOCAB_SIZE, **OPTIONS.get(family, {}), **options}
    return th.adapt(make_model(family, seed=SEEDS.get(family, 0), **options))


def share(
    family: str,
    compile: bool,
    experts: Experts = "tensor",
    steps: list[Step] = STEPS,
    **options: Any,
) -> Shared:
    """Serve the same texts with a model alone, on the first rank, and with a shared one."""
    expected, alone_bytes = None, 0
    if dist.get_rank() == 0:
        alone = th.Runner(make(family, **options), **SIZES, compile=False)
        expected, alone_bytes = _logits(alone, steps), alone.report().pool_bytes
    model = th.shard(make(family, **options), experts=experts)
    runner = th.Runner(model, **SIZES, compile=compile)
    logits, report = _logits(runner, steps), runner.report()
    error = None
    if expected is not None:
        error = ((logits - expected).abs().max() / expected.abs().max()).item()
    return Shared(
        error=error,
        digest=hashlib.sha256(logits.numpy().tobytes()).hexdigest(),
        pool_bytes=(alone_bytes, report.pool_bytes),
        counts=(report.recompiles, report.graph_breaks, len(report.pool_clones)),
    )


def share_all(families: list[str], compile: bool, experts: Experts = "tensor") -> dict[str, Shared]:
    return {family: share(family, compile, experts) for family in families}


@dataclass(frozen=True)
class CompiledJob:
    """A small model, the first so many steps, and whether Inductor is to compile their graphs."""

    family: str
    experts: Experts
    layers: tuple[str, ...]
    num_steps: int
    by_inductor: bool

    def run(self) -> Shared:
        sizes = {"num_hidden_layers": len(self.layers), "hidden_size": 32}
        options = {**sizes, "layer_types": list(self.layers)}
        with nullcontext() if self.by_inductor else run_as_traced():
            return share(self.family, True, self.experts, STEPS[: self.num_steps], **options)


def share_compiled(jobs: list[CompiledJob]) -> list[Shared]:
    return [job.run() for job in jobs]


def adapt_all(families: list[str]) -> list[float]:
    """Errors of rows with adapters and without: of a shared model, against the model alone."""
    from tests.models.test_adapters import save_adapter, saving  # needs peft

    errors = []
    for family in families:
        options = {"vocab_size": VOCAB_SIZE, **OPTIONS.get(family, {})}
        sizes = {**SIZES, "max_adapters": 2, "saved_modules": True, "compile": False}
        sizes["expert_adapters"] = True
        with TemporaryDirectory() as folder:
            for seed, name in enumerate("ab"):
                base = make_model(family, seed=SEEDS.get(family, 0), **options)
                own = saving(base, family) if name == "b" else {}
                save_adapter(Path(folder, name), family, seed, base=base, **own)
            found = []
            for model in (make(family), th.shard(make(family))):
                runner = th.Runner(model, **sizes)
                for name in "ab":
                    runner.load_adapter(name, Path(folder, name))
                found.append(_logits_of_adapters(runner, ["a", "b", None]))
        alone, shared = found
        assert all((alone[:2] - alone[2]).abs().amax(1) > 0.1 * alone.abs().max())
        errors.append(((shared - alone).abs().max() / alone.abs().max()).item())
    return errors


def _logits_of_adapters(runner: th.Runner, names: list[str | None]) -> Tensor:
    """Logits of a prompt and a decode step, of a sequence for each name."""
    seqs = [seq for name in names for seq in runner.new_sequences(1, adapter=name)]
    texts = make_texts([20]) * len(names)
    prompts = runner.extend(seqs, [text[:-1] for text in texts]).clone()
    return torch.cat([prompts, runner.extend(seqs, [text[-1:] for text in texts])])


KEPT = {**SIZES, "kv_tokens": 640, "page_size": 8, "batch_invariant": True}


def keep_bits() -> None:
    """Tokens of models that the ranks share have the same bits in any batch."""
    assert_same_bits(th.Runner(th.shard(make("olmo_hybrid")), **KEPT, compile=False))
    with pytest.raises(th.UnsupportedError, match="not to be had with experts='all_to_all'"):
        th.Runner(th.shard(make("qwen3_next"), experts="all_to_all"), **KEPT)


def keep_bits_in_graphs() -> None:
    """In graphs no sum over the ranks is left to a collective."""
    model = th.shard(make("qwen3_next_dense", **ONE_LAYER))
    with run_as_traced():
        runner = th.Runner(model, **KEPT)
        logits = _logits(runner, STEPS[2:3])
    called = {op for record in runner.report().graphs.values() for op in record.ops}
    assert called
    assert not any("all_reduce" in op for op in called), called
    expected = _logits(th.Runner(model, **KEPT, compile=False), STEPS[2:3])
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4 * expected.abs().max())


def vocabularies(cases: list[tuple[int, bool]]) -> list[set[int]]:
    """Rows of the embedding and the head that a rank has, by number of tokens and whether tied."""
    return [_vocabulary(*case) for case in cases]


def _vocabulary(vocab_size: int, is_tied: bool) -> set[int]:
    sizes = {"vocab_size": vocab_size, "tie_word_embeddings": is_tied}
    served = share("qwen3", False, **sizes)
    assert served.error is None or served.error < 2e-5
    model = th.shard(make("qwen3", **sizes))
    weights = [next(part.parameters()) for part in (model.embedding, model.head)]
    assert (weights[0] is weights[1]) == is_tied
    return {len(weight) for weight in weights}


def rounding(family: str) -> tuple[float, float]:
    """Root mean square error of bfloat16 logits against float32, alone and shared."""

    def serve_with(model: th.HybridModel) -> Tensor:
        return _logits(th.Runner(model, **SIZES, compile=False), STEPS).float()

    def rounded() -> th.HybridModel:
        return th.adapt(make_model(family, vocab_size=VOCAB_SIZE).bfloat16())

    exact = serve_with(make(family))
    served = serve_with(rounded()), serve_with(th.shard(rounded()))
    alone, shared = ((logits - exact).square().mean().sqrt().item() for logits in served)
    return alone, shared


def refusals() -> None:
    """Widths that the ranks do not divide, unknown weights, and a second time."""
    with pytest.raises(th.UnsupportedError, match=r"width of an MLP, got 2 ranks and 33"):
        th.shard(make("qwen3_next_dense", intermediate_size=33))
    with pytest.raises(th.UnsupportedError, match=r"width of the experts, got 2 ranks and 15"):
        th.shard(make("qwen3_next", moe_intermediate_size=15))
    stranger = make("qwen3_next_dense")
    stranger.hf_model.model.layers[0].mlp.adapter = torch.nn.Linear(2, 2)
    with pytest.raises(th.UnsupportedError, match=r"Qwen3NextMLP: .* of its 'adapter'"):
        th.shard(stranger)
    shared = th.shard(make("qwen3_next_dense"))
    with pytest.raises(ValueError, match="sharded before, for 2 ranks"):
        th.shard(shared)


def states() -> list[tuple[Tensor, Tensor, th.DeltaRuleSpec]]:
    """Convolution and recurrent states of every linear layer after the same steps."""
    found = []
    for shared in (False, True):
        model = make("qwen3_next_dense")
        model = th.shard(model) if shared else model
        runner = th.Runner(model, **SIZES, compile=False)
        _logits(runner, STEPS)
        for entry in model.table.of_kind("gated_delta_rule"):
            pool = runner.cache.pools["gated_delta_rule"][entry.index]
            found.append((pool["conv"], pool["state"], entry.spec))
    return found


def _logits(runner: th.Runner, steps: list[Step]) -> Tensor:
    return torch.cat(serve(runner, make_texts(LENGTHS), steps))
