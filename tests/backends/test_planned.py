"""What an implementation plans reaches its launcher at every step, however the step runs."""

from __future__ import annotations

import pytest
import torch

import torch_hybrid as th
from tests.backends import planning
from tests.graphs.as_traced import run_as_traced
from tests.tiny_models import make_model
from torch_hybrid.models.adapt import adapt
from torch_hybrid.ops.delta_rule import op as delta_op
from torch_hybrid.ops.paged_attention import op
from torch_hybrid.ops.ragged_attention import op as ragged_op

SIZES = {"max_seqs": 4, "max_tokens": 64, "kv_tokens": 256}
PLANNING = th.Backends(full="planning")


@pytest.fixture(autouse=True)
def among_the_implementations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(op.IMPLEMENTATIONS, "planning", planning.PLANNING)
    monkeypatch.setitem(ragged_op.IMPLEMENTATIONS, "planning", planning.EXPANDED)
    for rules in (delta_op.GATED_IMPLEMENTATIONS, delta_op.KIMI_IMPLEMENTATIONS):
        monkeypatch.setitem(rules, "chunk_planning", planning.CHUNK_RULE)
    planning.LAUNCHED.clear()


def steps(runner: th.Runner) -> torch.Tensor:
    """Prompts of several lengths where the runner has prefill, then tokens one by one."""
    seqs = runner.new_sequences(3)
    out = []
    if runner.prefill:
        out.append(runner.extend(seqs, [[5] * 7, [3, 1], [4] * 20]))
        out.append(runner.extend(seqs[:2], [[2] * 30, [6, 7]]))
    for count in (3, 1, 2, 3):
        out.append(runner.extend(seqs[:count], [[9]] * count))
    runner.free(seqs)
    return torch.cat(out)


@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize("cuda_graphs", ["off", "on"])
def test_every_step_is_given_its_own_plan(cuda_graphs: str, overlap: str):
    model = adapt(make_model("qwen3", seed=1))
    options = {**SIZES, "compile": False, "cuda_graphs": cuda_graphs, "two_batch_overlap": overlap}
    expected = steps(th.Runner(model, backends=th.Backends(full="torch"), **options))
    runner = th.Runner(model, backends=PLANNING, **options)
    assert torch.equal(steps(runner), expected)
    assert len(set(planning.LAUNCHED)) > 3


def test_a_bucket_is_captured_for_each_of_the_values():
    runner = th.Runner(
        adapt(make_model("qwen3", seed=1)),
        backends=PLANNING,
        compile=False,
        cuda_graphs="on",
        prefill=False,
        **SIZES,
    )
    [seq] = runner.new_sequences(1)
    for _ in range(3):
        runner.extend([seq], [[9]])
    assert runner.report().captured_graphs == ("decode: 1 sequence of 16 pages",) * 3


@pytest.mark.parametrize(
    ("policy", "planned"),
    [
        (th.PrefixPolicy(absorbed="never"), {(1,), (0,)}),
        (th.PrefixPolicy(absorbed="never", one_shot=False, token_budget=16), {(1,)}),
    ],
    ids=["one shot", "chunks"],
)
def test_expanded_latents_are_planned_with_the_keys_of_the_causal_call(
    policy: th.PrefixPolicy, planned: set[tuple[int, ...]]
):
    """All that a sequence holds in one shot, and new tokens alone where the prefix has chunks."""
    model = adapt(make_model("deepseek_v3", seed=1))
    named = {"ragged_attention_with_lse": "planning"}
    options = {**SIZES, "compile": False, "cuda_graphs": "on"}
    expected = steps(th.Runner(model, backends=th.Backends(full="torch", prefix=policy), **options))
    backends = th.Backends(full="torch", ops=named, prefix=policy)
    assert torch.equal(steps(th.Runner(model, backends=backends, **options)), expected)
    assert set(planning.LAUNCHED) == planned


@pytest.mark.parametrize(
    ("family", "rule"),
    [("qwen3_next", "gated_delta_rule"), ("kimi_linear", "kimi_delta_attention")],
)
def test_rules_are_planned_with_what_is_known_of_their_layers(family: str, rule: str):
    model = adapt(make_model(family, seed=1))
    options = {**SIZES, "compile": False, "cuda_graphs": "on"}
    expected = steps(th.Runner(model, backends=th.Backends(linear="torch"), **options))
    backends = th.Backends(linear="torch", ops={f"extend {rule}": "planning"})
    assert torch.equal(steps(th.Runner(model, backends=backends, **options)), expected)
    assert {values[0] for values in planning.LAUNCHED} == {20, 30}


@pytest.mark.slow
def test_a_compiled_step_holds_no_value_of_the_host():
    one_layer = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    model = adapt(make_model("qwen3", seed=1, **one_layer))
    with run_as_traced():
        runner = th.Runner(model, backends=PLANNING, prefill=False, **SIZES)
        served = steps(runner)
    plain = th.Runner(model, compile=False, prefill=False, **SIZES)
    torch.testing.assert_close(served, steps(plain))
    assert {values[0] for values in planning.LAUNCHED} > {1, 2, 3}
    assert runner.report().recompiles == 0
