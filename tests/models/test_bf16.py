"""bfloat16: no further from the exact logits than transformers' own bfloat16 is."""

from __future__ import annotations

import pytest
import torch

import torch_hybrid as th
from tests.models.oracle import (
    Oracle,
    ask,
    assert_rounds_like,
    chunked,
    decoded,
    make_texts,
    serve,
    whole,
)
from tests.tiny_models import BUILDERS, cast, in_double, make_model

LENGTHS = (2, 3, 65, 200)
# All experts, and all blocks, are taken, so that no router can be tipped over by rounding.
_THREE = {"num_experts_per_tok": 3}
_TWO_GROUPS = {"n_group": 2, "topk_group": 2, "num_experts_per_tok": 4}
ALL_EXPERTS = {
    "qwen3_next": {**_THREE, "num_experts": 3},
    "qwen3_5_moe": {**_THREE, "num_experts": 3},
    "lara_mini": {**_THREE, "num_experts": 3},
    "qwen4_exp": {**_THREE, "num_experts": 3, "indexer_budget": 256},
    "glm5_next": {**_THREE, "n_routed_experts": 3, "index_topk": 256},
    "granitemoehybrid": {**_THREE, "num_local_experts": 3},
    "minimax": {**_THREE, "num_local_experts": 3},
    "jamba": {**_THREE, "num_experts": 3},
    "lfm2_moe": {**_THREE, "num_experts": 3},
    "zaya": {"num_experts": 1},
    "inkling2": {**_THREE, "n_routed_experts": 3},
    "inkling2_loop": _THREE,
    "deepseek_v3": {**_TWO_GROUPS, "n_routed_experts": 4},
    "nemotron_h": {**_TWO_GROUPS, "n_routed_experts": 4},
    "kimi_linear": {**_TWO_GROUPS, "num_local_experts": 4},
    "bailing_hybrid": {**_TWO_GROUPS, "num_local_experts": 4},
    # Without a cache, transformers' chunks mix dtypes: a text is to be shorter than one.
    "xlstm": {"chunk_size": 256},
}


@pytest.fixture(scope="module", params=BUILDERS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """A runner on bf16 weights from disk, transformers' logits, and the exact ones."""
    options = ALL_EXPERTS.get(request.param, {})
    hf_model = cast(make_model(request.param, **options), torch.bfloat16)
    texts = make_texts(LENGTHS)
    exact = ask(in_double(hf_model), texts)
    theirs = ask(hf_model, texts)
    path = tmp_path_factory.mktemp("checkpoint")
    hf_model.save_pretrained(path)
    model = th.from_pretrained(path)
    assert model.dtype is torch.bfloat16
    runner = th.Runner(model, max_seqs=4, max_tokens=512, kv_tokens=512, compile=False)
    return runner, theirs, exact


@pytest.mark.parametrize(
    "steps",
    [whole(LENGTHS), list(chunked(LENGTHS, 64)), list(decoded(LENGTHS, 1))],
    ids=["whole", "chunked", "decoded"],
)
def test_tolerance(served: tuple[th.Runner, Oracle, Oracle], steps):
    runner, theirs, exact = served
    assert_rounds_like(serve(runner, exact.texts, steps), theirs, exact, torch.bfloat16)
