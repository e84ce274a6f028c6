"""Peculiarities of Inkling-2's loops: each test fails when one is "fixed"."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from safetensors.torch import load_file, save_file

import torch_hybrid as th
from tests.models.oracle import make_texts, serve, whole
from tests.models.refused import refusals
from tests.models.test_quirks_inkling import LENGTHS, TINY, check
from tests.tiny_models import make_model

RUNS = [0, 1, *[2, 3, 4, 5] * 3, 6]  # layers, as a step runs them


@pytest.mark.parametrize(
    "options",
    [
        {"loop_num_passes": 1},
        {"loop_layer_index_end": 4, "num_hidden_layers": 4, "conv_kernel_size": 2},
        {"n_layers_per_attn_res_block": 1, "loop_layer_index_start": 1, "loop_num_passes": 2},
        {"layer_types": ["hybrid"] * 7, "num_key_value_heads": 1},
        {"layer_types": ["hybrid_sliding"] * 7, "sliding_window_size": 1, "loop_gate_rank": 1},
    ],
    ids=str,
)
def test_variants(options: dict[str, Any]):
    """One pass, one block that no other layer follows, blocks of one layer, layers of one kind; all
    experts are taken, so that no router comes near to others."""
    check(make_model("inkling2_loop", **{"num_experts_per_tok": 3, **options}))


def test_passes_share_modules_and_no_state():
    runner = check(make_model("inkling2_loop", seed=3))
    layers, table = runner.model.layers, runner.model.table
    assert len(layers) == len(table) == len(RUNS)
    for name in ("self_attn", "mlp", "post_mlp_convolution", "post_attention_convolution"):
        parts = [layer.get_submodule(name) for layer in layers]
        assert [parts.index(part) for part in parts] == [RUNS.index(number) for number in RUNS]
    specs = [[entry.spec for entry in entries] for entries in table.layers]
    assert specs == [specs[RUNS.index(number)] for number in RUNS]
    for entries in zip(*table.layers, strict=True):
        assert [entry.index for entry in entries] == [*range(len(RUNS))]
    seqs = runner.new_sequences(1)
    runner.extend(seqs, [make_texts([30])[0]])
    for kind, pools in runner.cache.pools.items():
        held = [torch.cat([part.float().flatten() for part in pool.values()]) for pool in pools]
        assert all(pool.abs().sum() > 0 for pool in held), kind
        assert len({tuple(pool.tolist()) for pool in held}) == len(RUNS), kind


def test_later_passes_hear_of_the_pass_before_and_not_of_what_came_before_the_loop():
    model = th.adapt(make_model("inkling2_loop", seed=3))
    heard = [layer.messages.bias.tolist() for layer in model.layers[6:14]]
    assert heard == [[0.0, -torch.inf]] * 8  # the last block's sum is the stream itself
    assert [layer.begins_pass for layer in model.layers[6:14]] == [True, False, False, False] * 2


def test_gates_stay_in_float32():
    model = th.adapt(make_model("inkling2_loop", seed=3).bfloat16())
    gates = model.layers[6].message_gates
    assert {gate.gate.weight.dtype for gate in gates} == {torch.float32}
    assert {gate.down_proj.weight.dtype for gate in gates} == {torch.bfloat16}


def test_a_checkpoint_may_name_the_loop_in_one_field(tmp_path: Path):
    """As published ones do."""
    hf_model = make_model("inkling2_loop", seed=3)
    hf_model.save_pretrained(tmp_path)
    config = hf_model.config.to_dict()
    loop = {"core_start": "loop_layer_index_start", "core_end": "loop_layer_index_end"}
    loop |= {"num_passes": "loop_num_passes", "gate_rank": "loop_gate_rank"}
    config["loop_config"] = {name: config.pop(field) for name, field in loop.items()}
    type(hf_model.config).from_dict(config).save_pretrained(tmp_path)
    texts = make_texts(LENGTHS)
    models = th.from_pretrained(tmp_path), th.adapt(hf_model)
    loaded, adapted = (serve(th.Runner(each, **TINY), texts, whole(LENGTHS)) for each in models)
    assert all(map(torch.equal, loaded, adapted))


def test_experts_of_fewer_bits_are_refused(tmp_path: Path):
    make_model("inkling2_loop").save_pretrained(tmp_path)
    [path] = tmp_path.glob("*.safetensors")
    tensors = load_file(path)
    [name, *_] = [name for name in tensors if name.endswith("experts.w13_weight")]
    tensors[f"{name}_scale"] = torch.ones(3, 64, 2, dtype=torch.uint8)
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(th.UnsupportedError, match="experts in NVFP4 or MXFP8 are not read"):
        th.from_pretrained(tmp_path)


REFUSED = [
    {"hidden_act": "gelu"},
    {"conv_kernel_size": 17},
    {"loop_layer_index_end": 2},
    {"loop_layer_index_end": 8},
]


def test_refusals(tmp_path: Path):
    assert_expected_inline(
        refusals(tmp_path, "inkling2_loop", REFUSED),
        """\
inkling2_loop_text: config field hidden_act must be one of ['silu'], got 'gelu'
inkling2_loop_text: config field conv_kernel_size must be within 2 and 16, got 17
inkling2_loop_text: config field loop_layer_index_end must be within 3 and 7, got 2
inkling2_loop_text: config field loop_layer_index_end must be within 3 and 7, got 8""",
    )
