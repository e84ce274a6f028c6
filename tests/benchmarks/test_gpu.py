"""``benchmarks.gpu``: its runner, and that every case's inputs fit the op that it measures."""

from __future__ import annotations

import copy
import dataclasses
import sys
import time
from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from benchmarks.contestants import load_adapters
from benchmarks.gpu import (
    __main__,
    adapter_steps,
    attention,
    case,
    delta_rules,
    delta_steps,
    latents,
    lightning_steps,
    lora,
    mamba2_steps,
    report,
    sparse,
    state_spaces,
    steps,
    token_ops,
    verify_ops,
)
from benchmarks.gpu.case import Absent, Case, Inputs, Turns
from benchmarks.gpu.clock import Call, Rates, Time
from benchmarks.mixers import Row
from benchmarks.models import fill
from tests.ops.delta_rule.step_gated_cases import FAMILY as GATED
from tests.ops.delta_rule.step_kimi_cases import FAMILY as KIMI
from torch_hybrid import Runner
from torch_hybrid.ops.core.capability import Capability, Implementation

RATES = Rates(num_bytes=1e6, flops=1e8)


@pytest.fixture(autouse=True)
def no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call takes as many microseconds as there are turns, which are taken."""

    def time_of(calls: Sequence[Call]) -> Time:
        for call in calls:
            call()
        return Time(us=float(len(calls)), captured=True)

    monkeypatch.setattr(case, "time_of", time_of)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Counter(case.Inputs):
    """A call adds to its state, so that a second one gives something else."""

    changed = ("state",)
    state: Tensor
    indices: Tensor

    @property
    def num_bytes(self) -> float:
        return 1e8

    def count(self, impl: str = "torch") -> Tensor:
        self.state.add_(1)
        return self.state.clone()


def counter() -> Counter:
    return Counter(state=torch.zeros(3), indices=torch.arange(3))


def turns(inputs: Sequence[Counter]) -> Turns:
    return Turns(calls=[each.count for each in inputs])


def wrong(inputs: Sequence[Counter]) -> Turns:
    return Turns(calls=[each.count for each in inputs], output=lambda out: out * 1.1)


def absent(_: Sequence[Counter]) -> Turns:
    raise Absent("it is not installed")


def broken(*_: object) -> Turns:
    raise RuntimeError("no kernel\nfor this device")


def count_case(**others: case.Contestant) -> Case:
    return Case(
        op="count",
        model="none",
        shape="3",
        make=counter,
        reference=Counter.count,
        own={"triton": turns},
        others=others,
    )


def test_each_contestant_is_compared_on_the_same_state_then_timed() -> None:
    line = case.measure(
        count_case(again=turns, wrong=wrong, absent=absent, broken=broken), RATES, device="cpu"
    )
    assert line.own["triton"].us == 3.0  # of 1e8 bytes each: three turns leave nothing in L2
    assert line.others["again"].error == 0.0
    reasons = {name: cell.why_not for name, cell in line.others.items() if cell.us is None}
    assert reasons["absent"] == "it is not installed"
    assert reasons["broken"] == "RuntimeError: no kernel"
    assert reasons["wrong"] == "its result is 1.0e-01 of the largest output off"
    assert (line.floor_us, line.bound, line.best) == (100.0, "bytes", "triton")


def test_a_package_by_itself_is_not_our_implementation_of_its_name() -> None:
    line = case.measure(count_case(triton=wrong), RATES, device="cpu")
    assert line.own["triton"].us == line.cells["triton"].us == 3.0
    assert line.others["triton"].us is None
    assert line.cells["triton alone"].why_not.startswith("its result is")


def test_blank_cells_have_their_reasons_below_the_table() -> None:
    lines = [case.measure(count_case(absent=absent, again=turns), RATES, device="cpu")] * 2
    table = report.op_table(lines, RATES)
    assert [row[3:] for row in table.rows] == [["100", "3.0", "triton", "", "3.0", "0.03", "1"]] * 2
    assert table.notes == ["blank: absent: it is not installed (count 3, count 3)"]


def test_implementations_that_plan_are_given_what_was_planned() -> None:
    implementation = Implementation(
        capability=Capability(devices=frozenset({"cuda"}), features=frozenset({"extend"})),
        launcher="nobody:launches",
        planner="torch_hybrid.ops.cudnn_attention:plan",
    )
    told: list[tuple[str, list[int]]] = []

    def call(_: object, impl: str, planned: Sequence[torch.Tensor]) -> None:
        told.append((impl, planned[0].tolist()))

    inputs = [attention.Paged.make((4, 2, 16), 2, 150, num_new) for num_new in (150, 3)]
    for each in inputs:
        [contestant] = case.own({"some": implementation}, call, features=("extend",)).values()
        contestant([each]).calls[0]()
    assert told == [("some", [2]), ("some", [0])]
    [refused] = case.own({"some": implementation}, call, features=("window",)).values()
    with pytest.raises(Absent, match="it has no window"):
        refused(inputs)


def test_turns_share_indices_and_nothing_else() -> None:
    first = counter()
    second = first.another()
    assert second.indices is first.indices
    assert second.state.data_ptr() != first.state.data_ptr()
    assert torch.equal(second.state, first.state)


TINY_MODEL = {
    "vocab_size": 300,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
TINY_MIXER = lightning_steps.Mixer(
    num_heads=2, dim=16, rotary_dim=8, norm_groups=2, activation="silu"
)
TINY = {
    "gdn recurrent": delta_rules._case("GDN decode", "tiny", (1, 2, 16, 16), 3, 1),
    "gdn chunk": delta_rules._case("GDN prefill", "tiny", (1, 2, 16, 16), 2, 5),
    "kda recurrent": delta_rules._case("KDA decode", "tiny", (2, 2, 16, 16), 3, 1),
    "kda chunk": delta_rules._case("KDA prefill", "tiny", (2, 2, 16, 16), 2, 5),
    "gdn step": delta_steps._case(GATED, "tiny", (1, 2, 16, 16), 3),
    "kda step": delta_steps._case(KIMI, "tiny", (2, 2, 16, 16), 3),
    "ssd recurrent": state_spaces._case("SSD", "tiny", (1, 2, 16, 16), 3, 1),
    "ssd chunk": state_spaces._case("SSD", "tiny", (1, 2, 16, 16), 2, 5),
    "mamba2 step": mamba2_steps._case("tiny", (1, 2, 16, 16), 1, 3),
    "mamba2 step without a norm": mamba2_steps._case("tiny", (1, 2, 16, 16), 0, 3),
    "lightning step": lightning_steps._case("tiny", TINY_MIXER, 3),
    "lightning": state_spaces._case("lightning", "tiny", (2, 2, 16, 16), 2, 5),
}
TINY |= {
    f"{mixer.op} drafts step": verify_ops._case(
        dataclasses.replace(mixer, case=partial(mixer.case, **sizes)), 3, 4, 2
    )
    for mixer, sizes in zip(
        verify_ops.MIXERS,
        (
            {"num_k_heads": 1, "num_v_heads": 2, "k_dim": 16, "v_dim": 16},
            {"num_k_heads": 2, "num_v_heads": 2, "k_dim": 16, "v_dim": 16},
            {"num_groups": 1, "num_heads": 2, "k_dim": 16, "v_dim": 16, "norm_groups": 1},
            {"num_heads": 2, "dim": 16, "rotary_dim": 8, "norm_groups": 2},
        ),
        strict=True,
    )
}
SMALL_MODEL = dataclasses.replace(sparse.QWEN4_EXP, top_k=4, num_q_heads=4, head_dim=16)
SMALL_LATENTS = dataclasses.replace(sparse.GLM_5_3, top_k=2, num_q_heads=4, head_dim=16)
OTHER_INPUTS = {
    "paged": (partial(attention.Paged.make, (4, 2, 16), 2, 40, 3), attention.call),
    "latents": (partial(latents.Latents.make, 2, 2, 128, 3), latents.call),
    "sparse select": (partial(sparse.Selected.make, sparse.QWEN4_EXP, 1, 2100, 2), sparse.select),
    "sparse attend": (partial(sparse.Attended.make, SMALL_MODEL, 2, 70, 3), sparse.attend),
    "sparse latents": (partial(sparse.Attended.make, SMALL_LATENTS, 2, 70, 3), sparse.attend),
    "sparse pool": (partial(sparse.Pooled.make, sparse.GLM_5_3, 2, 70, 40), sparse.pool),
    "sparse index": (partial(sparse.Indexed.make, sparse.GLM_5_3, 2, 2080, 1), sparse.index),
    "expanded": (partial(latents.Expanded.make, 2, 2, 5), latents.call_expanded),
    "convolution": (partial(token_ops.Convolution.make, 8, 2, 3), token_ops.call_conv),
    "router": (partial(token_ops.Router.make, 8, 2, 3), token_ops.call_router),
    "squares of a norm": (partial(token_ops.Normed.make, 3, 2, 40), token_ops.call_squares),
    "whole router": (partial(token_ops.Router.make, 8, 2, 3), token_ops.call_route),
    "draw": (
        partial(token_ops.Drawn.make, "top-p 0.95", 300, 3),
        partial(token_ops.call_draw, asked="top-p 0.95"),
    ),
    "experts": (partial(token_ops.Experts.make, 8, 2, 16, 16, 3), token_ops.call_experts),
    "lora": (partial(lora.Adapted.make, 16, (8, 3), 5), lora.call),
    "linear": (partial(token_ops.Linear.make, 3, 16, 8), token_ops.call_linear),
}
INPUTS = {name: (tiny.make, tiny.reference) for name, tiny in TINY.items()} | {
    name: (make, partial(call, impl="torch")) for name, (make, call) in OTHER_INPUTS.items()
}


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_fit_their_op(name: str) -> None:
    make, reference = INPUTS[name]
    inputs = make().another()
    assert inputs.num_bytes > 0
    without = ("recurrent", "step", "norm", "convolution", "router", "draw", "pool")
    assert (inputs.flops > 0) == (name.split()[-1] not in without)
    out = reference(inputs)
    assert out.isfinite().all()
    assert out.any()


def _parts_of_a_step(module: ModuleType, inputs: Sequence[Inputs]) -> Turns:
    """As the contestant does, without the compiler."""
    return Turns(calls=[partial(module._parts, each, impl="torch") for each in inputs])


@pytest.mark.parametrize(
    "name", ["grouped experts", "torch.topk", "parts of Mamba2's step", "parts of lightning's step"]
)
def test_contestants_of_torch_agree(name: str) -> None:
    make, reference, contestant = {
        "grouped experts": (*INPUTS["experts"], token_ops._grouped_mm),
        "parts of Mamba2's step": (
            *INPUTS["mamba2 step"],
            partial(_parts_of_a_step, mamba2_steps),
        ),
        "parts of lightning's step": (
            *INPUTS["lightning step"],
            partial(_parts_of_a_step, lightning_steps),
        ),
        "torch.topk": (*INPUTS["router"], token_ops._torch_top_k),
    }[name]
    inputs = make()
    expected = reference(copy.deepcopy(inputs))
    found = contestant([inputs])
    torch.testing.assert_close(found.output(found.calls[0]()), expected, rtol=2e-2, atol=2e-2)


def test_cases_are_told_apart() -> None:
    names = [str(each) for make in __main__.OPS.values() for each in make()]
    assert len(set(names)) == len(names) > 80


def test_what_is_late_or_breaks_is_named_and_the_others_go_on() -> None:
    broke = dataclasses.replace(count_case(), make=lambda: broken([]))
    failures: list[str] = []
    run = partial(__main__.run, rates=RATES, failures=failures)
    measure = partial(case.measure, device="cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(__main__, "measure", measure)
        lines = list(run([broke, count_case()], late=time.monotonic() + 60))
        assert [line.op for line in lines] == ["count"]
        assert failures == ["count, none, 3: RuntimeError: no kernel\nfor this device"]
        assert list(run([count_case()], late=time.monotonic() - 1)) == []
        assert failures[1:] == ["count, none, 3: not begun in time"]


def test_steps_of_who_is_not_here_are_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failures: list[str] = []
    monkeypatch.setattr(__main__, "STEPS", {"steps": broken})
    monkeypatch.setattr(__main__, "why_not", lambda part: None if part == "steps" else "not here")
    assert __main__.run_steps("flashinfer_steps", RATES, failures) == []
    assert capsys.readouterr().out == "flashinfer_steps: not run: not here\n\n"
    assert failures == []
    assert __main__.run_steps("steps", RATES, failures) == []
    assert failures == ["steps: RuntimeError: no kernel\nfor this device"]


@pytest.mark.parametrize("name", ["A_log", "dt_bias", "norm.weight", "proj.weight"])
def test_weights_are_drawn_where_their_generator_is(name: str) -> None:
    """Not where tensors are made by default, which is another device here as it is on a GPU."""
    generator = torch.Generator("cpu").manual_seed(0)
    weight = torch.ones(3, 4, dtype=torch.bfloat16, device="cpu")
    with torch.device("meta"), torch.no_grad():
        fill(name, weight, generator)
    assert weight.isfinite().all()
    assert len(weight.unique()) > 4


def test_steps_are_those_that_their_floors_are_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "PREFILLS", ((1, 16), (2, 8)))
    monkeypatch.setattr(steps, "DECODES", (1, 3))
    monkeypatch.setattr(steps, "CONTEXT", 8)
    model = steps.make_model("cpu", **TINY_MODEL)
    runner = Runner(model, max_seqs=4, max_tokens=32, kv_tokens=256, compile=False)
    for (name, rows, run), num_rows in zip(steps._runs(runner), (1, 2, 1, 3), strict=True):
        logits = run()
        assert logits.shape == (num_rows, 300), name
        assert logits.isfinite().all(), name
        assert len(rows) == num_rows
        assert len(logits.unique(dim=0)) == num_rows  # alike, they would hit the same experts


@pytest.mark.parametrize("experts", [False, True])
def test_steps_with_adapters(monkeypatch: pytest.MonkeyPatch, *, experts: bool) -> None:
    """Adapters as they begin to be trained, whose sequences have the logits of plain ones."""
    for name, own in (("DECODES", (1, 3)), ("CONTEXT", 8), ("PROMPT", 16)):
        monkeypatch.setattr(adapter_steps, name, own)
    monkeypatch.setattr(steps, "CONTEXT", 8)
    model = steps.make_model("cpu", **TINY_MODEL).float()
    sizes: dict[str, Any] = {"max_seqs": 4, "max_tokens": 32, "kv_tokens": 256, "compile": False}
    adapted = Runner(model, **sizes, max_adapters=2, max_lora_rank=4, expert_adapters=experts)
    load_adapters(adapted, steps.make_empty(**TINY_MODEL), 2, 4, experts=experts)
    found = {}
    for name, rows, run in adapter_steps.runs(Runner(model, **sizes), adapted):
        found[name] = run()
        assert len(rows) == len(found[name])
    assert len(found) == 9
    for name, logits in found.items():
        plain = found[f"{name.split(',')[0]}, plain"]
        assert (logits - plain).norm() < 1e-4 * plain.norm()


def test_steps_that_verify_drafts_replay_what_was_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "VERIFIES", (2,))
    monkeypatch.setattr(steps, "CONTEXT", 8)
    model = steps.make_model("cpu", **TINY_MODEL)
    sizes = {"max_seqs": 2, "max_tokens": 32, "kv_tokens": 256, "max_drafts": steps.NUM_DRAFTS}
    runner = Runner(model, **sizes, compile=False)
    for (name, rows, run), num_rows in zip(steps._verify_runs(runner), (2, 8, 8), strict=True):
        for _ in range(2):
            logits = run()
            assert logits.shape == (num_rows, 300), name
            assert logits.isfinite().all(), name
        assert sum(row.num_new for row in rows) == num_rows
    assert runner.free_slots == 2


def test_an_engine_takes_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MAX_TOKENS": 16, "CONTEXT": 8, "ROOM": 44}.items():
        monkeypatch.setattr(steps, name, value)
    model = steps.make_model("cpu", **TINY_MODEL)
    runner = Runner(model, max_seqs=4, max_tokens=32, kv_tokens=256, compile=False)
    for rows, is_timed in (
        ([Row(1, 8)] * 3, True),
        ([Row(8, 0)] * 2, True),
        ([Row(8, 0)], False),
    ):
        assert (steps._engine_ms(runner, rows) is not None) == is_timed
        assert runner.free_slots == 4


def test_kernels_have_a_group() -> None:
    kernels = {
        "_gate_up_kernel": "experts",
        "_scaled_kernel": "experts",
        "_scan_kernel": "recurrence",
        "_walk_kernel": "recurrence",
        "_linear_kernel": "products",
        "triton_red_fused__softmax_sort_0": "generated",
        "nvjet_tst_128x256_64x4_2x1_v_bz_TNT": "products",
        "void at::native::sbtopk::gatherTopK<float>": "routers and sort",
        "Memcpy HtoD (Pinned -> Device)": "copies",
        "void at::native::vectorized_elementwise_kernel<4>": "other",
    }
    assert {name: steps.group_of(name) for name in kernels} == kernels
    times = dict.fromkeys(kernels, (2.0, 3))
    assert steps.in_groups(times | {"_chunk_kernel": (5.0, 1)})["recurrence"] == (9.0, 7)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", "--json", "never"])
    with pytest.raises(SystemExit, match=r"^benchmarks\.gpu needs a CUDA device: torch\.cuda"):
        __main__.main()
