"""Drafts in a runner's steps: what is accepted is held, and nothing else is."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_hybrid as th
from tests.devices import needs_cuda
from tests.graphs.as_traced import run_as_traced
from tests.ops.triton_interpreter import needs_triton
from tests.tiny_models import (
    BUILDERS,
    EACH_KIND,
    FEWEST_LAYERS,
    VOCAB_SIZE,
    make_hybrid,
    make_model,
)
from torch_hybrid.errors import CapacityError, UnsupportedError
from torch_hybrid.graphs.capturing.cuda_graph import why_not_capturable
from torch_hybrid.graphs.report import Report
from torch_hybrid.graphs.runner import Runner
from torch_hybrid.models.adapt import adapt
from torch_hybrid.ops.core.capability import Implementation, Need
from torch_hybrid.ops.delta_rule import op_step_gated as gated_delta_step
from torch_hybrid.ops.delta_rule import op_step_kimi as kimi_delta_step
from torch_hybrid.ops.ssd import op_step_lightning as lightning_step
from torch_hybrid.ops.ssd import op_step_mamba2 as ssd_step
from torch_hybrid.ops.step_implementations import VERIFY
from torch_hybrid.sampling import Draw, Sampling

SIZES = {"max_seqs": 4, "max_tokens": 64, "kv_tokens": 512}
DRAFTS = 3
# Every kind of mixer that replays, and a family without any.
NEW = sorted({"lara_mini", "inkling2_loop"} & BUILDERS.keys())
FAMILIES = (*EACH_KIND, "qwen3", "inkling", "ring_2_5", *NEW)


def small(family: str, device: str = "cpu") -> Any:
    return adapt(make_model(family, **FEWEST_LAYERS[family]).to(device))


def tokens_of(rng: random.Random, *lengths: int) -> list[list[int]]:
    return [[rng.randrange(VOCAB_SIZE) for _ in range(n)] for n in lengths]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).abs().max() / expected.abs().max()).item()


class Twins:
    """A runner with drafts, and one that is given what turns out right."""

    def __init__(self, model: Any, *, compile: bool = False, **options: Any) -> None:
        self.rng = random.Random(0)
        self.runner = Runner(model, **SIZES, compile=compile, max_drafts=DRAFTS, **options)
        self.plain = Runner(model, **SIZES, compile=False)
        prompts = tokens_of(self.rng, 4, 1, 20)
        self.seqs, self.twins = self.runner.new_sequences(3), self.plain.new_sequences(3)
        self.runner.extend(self.seqs, prompts)
        self.plain.extend(self.twins, prompts)

    def verify(self, num_drafts: Sequence[int], counts: Sequence[int]) -> None:
        new = tokens_of(self.rng, *(1 + n for n in num_drafts))
        logits = self.runner.verify(self.seqs, new).split([len(x) for x in new])
        self.runner.accept(self.seqs, counts)
        kept = [x[: 1 + n] for x, n in zip(new, counts, strict=True)]
        expected = self.plain.extend(self.twins, kept, logits="all")
        actual = torch.cat([x[: 1 + n] for x, n in zip(logits, counts, strict=True)])
        assert relative_error(actual, expected) < 5e-5
        self.check_lengths()

    def extend(self, *lengths: int) -> None:
        new = tokens_of(self.rng, *lengths)
        expected = self.plain.extend(self.twins, new)
        assert relative_error(self.runner.extend(self.seqs, new), expected) < 5e-5
        self.check_lengths()

    def check_lengths(self) -> None:
        assert [self.runner.length(s) for s in self.seqs] == [
            self.plain.length(s) for s in self.twins
        ]


def go_through(twins: Twins) -> None:
    """Verifying, decoding and extending in every order, whatever was accepted before."""
    twins.verify([3, 0, 2], [3, 0, 1])
    twins.verify([1, 3, 0], [0, 2, 0])
    twins.extend(1, 1, 1)
    twins.verify([3, 3, 3], [2, 3, 0])
    twins.extend(2, 1, 40)
    twins.verify([3, 1, 1], [3, 1, 1])
    twins.runner.flush(twins.seqs)
    twins.runner.flush(twins.seqs)
    twins.extend(1, 1, 1)
    twins.extend(1, 1, 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_accepted_is_held(family: str):
    go_through(Twins(small(family)))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("goes_on", ["verify", "extend", "flush"])
def test_a_snapshot_before_drafts_are_accepted_is_of_what_is_certain(family: str, goes_on: str):
    """A fork goes on after the certain token, the sequence after what is accepted later."""
    model = small(family)
    runner = Runner(model, **SIZES, page_size=4, compile=False, max_drafts=3, max_snapshots=2)
    plain = Runner(model, **SIZES, compile=False)
    [prompt, new, next_new] = tokens_of(random.Random(0), 9, 4, 3)
    [seq] = runner.new_sequences(1)
    runner.extend([seq], [prompt])
    runner.verify([seq], [new])
    handle = runner.snapshot(seq)
    [fork] = runner.new_sequences(1, start=handle)
    assert handle.num_tokens == seq.num_tokens == fork.num_tokens == 10
    runner.accept([seq], [2])
    assert (seq.num_tokens, fork.num_tokens) == (12, 10)
    [twin, other] = plain.new_sequences(2)
    plain.extend([twin, other], [[*prompt, *new[:3]], [*prompt, *new[:1]]])
    if goes_on == "flush":
        runner.flush([seq, fork])
    if goes_on == "verify":
        actual = runner.verify([seq, fork], [next_new, next_new])
    else:
        actual = runner.extend([seq, fork], [next_new, next_new], logits="all")
    expected = plain.extend([twin, other], [next_new, next_new], logits="all")
    assert relative_error(actual, expected) < 5e-5
    runner.free([seq, fork])
    runner.release(handle)
    assert runner.cache.pages.num_free == runner.cache.num_pages
    assert runner.cache.states.num_free == runner.cache.states.capacity


def test_padded_steps_on_static_inputs():
    """As they are captured on a GPU."""
    go_through(Twins(make_hybrid(), cuda_graphs="on"))


@pytest.mark.slow
def test_compiled_steps():
    """Steps with drafts by Inductor, others as traced, with an op that replays. With the model's
    own head: ``serving/speculation/test_head.py``."""
    with run_as_traced():
        twins = Twins(make_hybrid(), compile=True)
        twins.extend(1, 1, 1)
    report = go_through_compiled(twins)
    assert calls_of("gated_delta_step", report) == 1
    assert report.graphs["verify"].regions
    assert report.pool_clones == ()


def test_steps_as_traced():
    """By an op that is called twice for each layer, as Inductor compiles it in
    ``ops/test_every_op.py``."""
    with run_as_traced():
        report = go_through_compiled(Twins(small("recurrent_gemma"), compile=True))
    assert calls_of("rg_lru", report) == 2


def calls_of(op: str, report: Report) -> int:
    """How often a verify step calls an op."""
    ops = report.graphs["verify"].ops
    return sum(count for name, count in ops.items() if name.startswith(op))


def go_through_compiled(twins: Twins) -> Report:
    """Go through compiled steps, and return what the runner reports of them."""
    go_through(twins)
    report = twins.runner.report()
    assert {"decode", "extend", "verify"} == set(report.graphs)
    assert (report.recompiles, report.graph_breaks) == (0, 0)
    return report


@needs_cuda
@pytest.mark.parametrize("family", FAMILIES)
def test_captured_on_a_gpu(family: str):
    """Whole, in a CUDA graph, whatever was accepted."""
    torch._dynamo.reset()
    twins = Twins(small(family, "cuda"), compile=True)
    go_through(twins)
    report = twins.runner.report()
    assert report.not_captured == {}
    assert any(name.startswith("verify") for name in report.captured_graphs)
    assert (report.recompiles, report.graph_breaks, report.pool_clones) == (0, 0, ())


SIZES_OF_HEADS = {"head_k_dim": 128, "head_v_dim": 128, "num_v_heads": 32}


@needs_triton
@pytest.mark.parametrize(
    ("op", "implementations"),
    [
        ("gated_delta_step", gated_delta_step.IMPLEMENTATIONS),
        ("kimi_delta_step", kimi_delta_step.IMPLEMENTATIONS),
        ("ssd_step", ssd_step.IMPLEMENTATIONS),
        ("lightning_step", lightning_step.IMPLEMENTATIONS),
    ],
)
def test_what_a_gpu_takes_can_be_captured(op: str, implementations: dict[str, Implementation]):
    need = Need(
        device=torch.device("cuda"), dtype=torch.bfloat16, sizes=SIZES_OF_HEADS, features=VERIFY
    )
    choice = th.select(op, implementations, need, "auto")
    assert choice.impl == "triton"
    assert why_not_capturable([f"{op}[{choice.impl}]"]) == ()


def test_states_are_those_of_plain_decoding():
    """But for rounding: products of several rows have other last bits than those of one. That the
    mixers themselves have none is in their contract."""
    model = make_hybrid()
    runner = Runner(model, **SIZES, compile=False, max_drafts=DRAFTS)
    rng = random.Random(0)
    [first, second] = runner.new_sequences(2)
    [prompt, new, wrong] = tokens_of(rng, 9, 4, 3)
    runner.extend([first, second], [prompt, prompt])
    for token in new:
        runner.extend([first], [[token]])
    runner.verify([second], [[new[0], *wrong]])
    runner.accept([second], [0])
    runner.verify([second], [[*new[1:3], *wrong[:1]]])
    runner.accept([second], [1])
    runner.verify([second], [new[3:]])
    slots = [runner.cache.slot(seq) for seq in (first, second)]
    [pools] = runner.cache.pools["gated_delta_rule"]
    for name in ("conv", "state"):
        one, other = pools[name][slots]
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)


def test_drafts_that_nobody_accepts_are_rejected():
    model = make_hybrid()
    runner, plain = (Runner(model, **SIZES, compile=False, max_drafts=n) for n in (DRAFTS, 0))
    [seq], [twin] = runner.new_sequences(1), plain.new_sequences(1)
    runner.verify([seq], [[5, 6, 7]])
    assert runner.length(seq) == 1
    expected = plain.extend([twin], [[5, 8]])
    assert relative_error(runner.extend([seq], [[8]]), expected) < 5e-5
    with pytest.raises(ValueError, match="accepted must be within 0 and 0"):
        runner.accept([seq], [1])


def test_a_launch_after_drafts():
    """What runs ahead replays too."""
    model = make_hybrid()
    runner, plain = (Runner(model, **SIZES, compile=False, max_drafts=n) for n in (DRAFTS, 0))
    [seq], [twin] = runner.new_sequences(1), plain.new_sequences(1)
    runner.verify([seq], [[5, 6, 7]])
    runner.accept([seq], [2])
    greedy = Draw(Sampling())
    tokens = runner.launch([seq], [[8]], [greedy]).result()
    tokens += runner.launch([seq], [None], [greedy]).result()
    first = int(plain.extend([twin], [[5, 6, 7, 8]]).argmax())
    assert tokens == [first, int(plain.extend([twin], [[first]]).argmax())]


def test_pages_of_drafts_come_back():
    runner = Runner(make_hybrid(), **SIZES, page_size=2, compile=False, max_drafts=DRAFTS)
    [seq] = runner.new_sequences(1)
    before = runner.free_pages
    runner.verify([seq], [[5, 6, 7, 8]])
    assert runner.free_pages == before - 2
    runner.accept([seq], [0])
    assert runner.free_pages == before - 1
    runner.verify([seq], [[5, 6, 7, 8]])
    runner.accept([seq], [3])
    assert runner.free_pages == before - 3
    runner.free([seq])
    assert runner.free_pages == before


def test_what_is_refused_changes_nothing():
    runner = Runner(make_hybrid(), **SIZES, page_size=2, compile=False, max_drafts=DRAFTS)
    [seq, other] = runner.new_sequences(2)
    with pytest.raises(ValueError, match="one token and at most max_drafts = 3 drafts, got"):
        runner.verify([seq], [[1, 2, 3, 4, 5]])
    with pytest.raises(ValueError, match="every sequence needs at least one new token"):
        runner.verify([seq], [[]])
    with pytest.raises(ValueError, match="verify takes at least one sequence"):
        runner.verify([], [])
    runner.verify([seq], [[1, 2]])
    with pytest.raises(ValueError, match="accept takes a count for each of 1, got 2"):
        runner.accept([seq], [1, 0])
    with pytest.raises(ValueError, match="accepted must be within 0 and 0, the drafts of"):
        runner.accept([seq, other], [1, 1])
    runner.accept([seq], [1])
    assert (runner.length(seq), runner.length(other)) == (2, 0)
    with pytest.raises(UnsupportedError, match="max_drafts=0 verifies no drafts"):
        Runner(make_hybrid(), **SIZES, compile=False).verify([seq], [[1]])
    with pytest.raises(ValueError, match="max_drafts must be within 0 and 63"):
        Runner(make_hybrid(), **SIZES, compile=False, max_drafts=64)


def test_a_step_that_is_cut_off_breaks_its_sequences():
    model = make_hybrid()
    runner = Runner(model, **SIZES, compile=False, max_drafts=DRAFTS)
    [seq] = runner.new_sequences(1)

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    handle = model.layers[-1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        runner.verify([seq], [[1, 2]])
    handle.remove()
    with pytest.raises(ValueError, match="did not finish: free it"):
        runner.verify([seq], [[1, 2]])
    runner.free([seq])


def test_too_few_pages():
    runner = Runner(
        make_hybrid(),
        max_seqs=1,
        max_tokens=64,
        kv_tokens=4,
        page_size=2,
        compile=False,
        max_drafts=DRAFTS,
    )
    [seq] = runner.new_sequences(1)
    runner.extend([seq], [[1, 2]])
    with pytest.raises(CapacityError, match="KV page"):
        runner.verify([seq], [[1, 2, 3]])
    runner.verify([seq], [[1, 2]])
    runner.accept([seq], [1])
    assert runner.length(seq) == 4


def test_bytes_of_records_are_counted():
    model = make_hybrid()
    none, some = (
        Runner(model, **SIZES, compile=False, max_drafts=n).cache.costs() for n in (0, DRAFTS)
    )
    [spec] = {entry.spec for entry in model.table.of_kind("gated_delta_rule")}
    width = spec.conv_channels + 2 * spec.num_v_heads
    each = [b.per_sequence - a.per_sequence for a, b in zip(none, some, strict=True)]
    assert sum(each) == DRAFTS * width * 4
