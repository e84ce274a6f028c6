"""Whole models compiled, with experts and without, against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import torch_hybrid as th
from tests.graphs.as_traced import run_as_traced
from tests.models.oracle import (
    ask,
    assert_equal_logits,
    chunked,
    decoded,
    make_texts,
    mixed,
    serve,
    whole,
)
from tests.tiny_models import BUILDERS, FEWEST_LAYERS, kinds_of, make_model
from torch_hybrid.explain import sections as explain

pytestmark = pytest.mark.slow
LENGTHS = (5, 64, 131)
# Inductor's code around our ops: beside experts in torch and in C++, and without; latents expanded.
# Each op alone is in Inductor's code in ``ops/test_every_op.py``, with every pool that it mutates:
# layers hand them over whole.
BY_INDUCTOR = ("qwen3_5_moe", "bailing_hybrid", "falcon_h1_norm")
# Modules of these are parts of other families'.
PARTS = (
    *("qwen3", "qwen3_next", "qwen3_next_dense", "qwen3_5", "deepseek_v3", "falcon_h1"),
    *("granitemoehybrid_dense", "zamba", "falcon_mamba", "lfm2", "lfm2_moe", "inkling"),
)
# What is traced, copied and rewritten.
AS_TRACED = tuple(family for family in BUILDERS if family not in (*BY_INDUCTOR, *PARTS))
SEEDS = {"granitemoehybrid": 0, "kimi_k3": 1}  # without a near tie of routers; 2 for the others
# Latents are expanded, in one pass or in chunks; in Kimi Linear they are attended to as they are.
EXPANDED = th.Backends(prefix=th.PrefixPolicy(token_budget=96, absorbed="never"))
# By default experts and linear layers are served in C++.
IN_TORCH = th.Backends(experts="torch", products="torch")
BACKENDS = {"bailing_hybrid": EXPANDED, "qwen3_5_moe": IN_TORCH}


def test_every_kind_of_mixer_is_compiled_below():
    assert kinds_of((*BY_INDUCTOR, *AS_TRACED)) == kinds_of(BUILDERS)


@pytest.mark.parametrize("family", AS_TRACED)
def test_logits_as_traced(family: str, tmp_path: Path):
    with run_as_traced():
        check_logits(family, tmp_path)


@pytest.mark.parametrize("family", BY_INDUCTOR)
def test_logits(family: str, tmp_path: Path):
    runner = check_logits(family, tmp_path)
    report = runner.report()
    assert report.pool_clones == ()
    if BACKENDS.get(family) is EXPANDED:
        assert set(report.graphs) == {"decode", "extend, one shot", "extend, 2 chunks"}
    impl = "torch" if BACKENDS.get(family) is IN_TORCH else "cpp"
    called = set().union(*report.ops.values())
    assert {op for op in called if op.startswith("fused_experts")} <= {f"fused_experts[{impl}]"}
    assert ("linear[cpp]" in called) == (impl == "cpp")
    rows = explain.implementations(runner).rows
    taken = {takes for step, op, takes, _ in rows if (step, op) == ("every", "linear")}
    assert {takes.partition("\n")[0] for takes in taken} == {impl}  # figures may stand below


def check_logits(family: str, tmp_path: Path) -> th.Runner:
    """However tokens arrive; the runner that served them."""
    hf_model = make_model(family, seed=SEEDS.get(family, 2), **FEWEST_LAYERS[family])
    oracle = ask(hf_model, make_texts(LENGTHS))
    hf_model.save_pretrained(tmp_path)
    model = th.from_pretrained(tmp_path)
    runner = th.Runner(
        model, max_seqs=3, max_tokens=256, kv_tokens=320, backends=BACKENDS.get(family)
    )
    for steps in (
        whole(LENGTHS),
        chunked(LENGTHS, 50),
        decoded(LENGTHS, 4),
        mixed(LENGTHS, seed=0),
    ):
        assert_equal_logits(serve(runner, oracle.texts, steps), oracle)
    if model.num_position_axes == 3:
        generator = torch.Generator().manual_seed(0)
        positions = [torch.randint(0, 4, (3, n), generator=generator).cumsum(1) for n in LENGTHS]
        oracle = ask(hf_model, oracle.texts, positions)
        served = serve(runner, oracle.texts, decoded(LENGTHS, 4), positions)
        assert_equal_logits(served, oracle)
    report = runner.report()
    assert (report.recompiles, report.graph_breaks) == (0, 0)
    return runner
