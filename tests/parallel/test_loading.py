"""Ranks that load a checkpoint together: the model that they share, and errors that all hear of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.models import fp8_checkpoint, mtp_checkpoint, packed_checkpoint
from tests.models.checkpoint.test_block_fp8 import OPTIONS
from tests.parallel import loading
from tests.parallel.jobs import SEEDS, VOCAB_SIZE
from tests.parallel.processes import results, run_ranks
from tests.tiny_models import BUILDERS, make_model

FAMILIES = sorted(BUILDERS.keys() - {"kimi_linear"})  # whose three heads two ranks cannot share
MIXTURES = ["qwen3_next", "nemotron_h", "ring_2_5"]
WEIGHT = "model.layers.0.mlp.up_proj.weight"


def save(family: str, folder: Path) -> Path:
    folder.mkdir()
    model = make_model(family, seed=SEEDS.get(family, 0), vocab_size=VOCAB_SIZE)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("families", "experts"), [(FAMILIES, "tensor"), (MIXTURES, "all_to_all")])
def test_logits_are_those_of_one_process(families: list[str], experts: str, tmp_path: Path):
    folders = {family: save(family, tmp_path / family) for family in families}
    first, second = results(
        run_ranks(loading.load_together, 2, folders, experts, limit_s=300, timeout_s=200)
    )
    for family in families:
        error = first[family].error
        assert error < 2e-5, f"{family}: {error:.1e} of the largest logit"
        assert first[family].digest == second[family].digest, f"{family}: the ranks differ"


def test_quantized_weights_are_cut_as_they_lie(tmp_path: Path):
    options = OPTIONS["qwen3_next"] | {"linear_num_value_heads": 8}
    folders = {name: tmp_path / name for name in ("fp8", "compressed_with_zeros", "awq")}
    for name, folder in folders.items():
        model = make_model("qwen3_next", **fp8_checkpoint.SIZES, **options)
        if name == "fp8":
            fp8_checkpoint.save(model, folder)
        else:
            packed_checkpoint.save(model, folder, name)
        fp8_checkpoint.change_config(folder, dtype="float32")
    first, second = results(
        run_ranks(loading.load_together, 2, folders, limit_s=300, timeout_s=200)
    )
    for name in folders:
        assert first[name].error < 2e-5, name
        assert first[name].digest == second[name].digest, name


def test_heads_that_draft(tmp_path: Path):
    """Of attention and of latents, with experts: cut as the model's own layers are."""
    folders = {name: tmp_path / name for name in ("qwen3_next", "deepseek_v3")}
    for name, folder in folders.items():
        mtp_checkpoint.make_checkpoint(name, folder)
    for ended in results(run_ranks(loading.draft_together, 2, folders)):
        assert ended == dict.fromkeys(folders, True)


@pytest.mark.parametrize("broken", [0, 1])
def test_what_fails_on_one_rank_fails_on_both(broken: int, tmp_path: Path):
    """Before weights are read, and while they are."""
    folders = [save("qwen3_next_dense", tmp_path / str(rank)) for rank in range(2)]
    file = folders[broken] / "model.safetensors"
    weights = load_file(file)
    told = []
    weights[WEIGHT][:, 0] = float("nan")  # in the rows of either
    save_file(weights, file, {"format": "pt"})
    told.append(results(run_ranks(loading.load_from, 2, folders)))
    file.write_bytes(file.read_bytes()[:-1])
    told.append(results(run_ranks(loading.load_from, 2, folders)))
    for texts, reason in zip(told, ("NaN or infinite values", "must have"), strict=True):
        assert texts[broken].startswith("ValueError: ")
        assert reason in texts[broken]
        other = texts[1 - broken]
        assert other.startswith("ValueError: the model was not loaded on every rank; rank")
        assert f"rank {broken}: {texts[broken]}" in other


def test_heads_that_the_ranks_do_not_divide(tmp_path: Path):
    folder = save("kimi_linear", tmp_path / "kimi")
    for text in results(run_ranks(loading.load_from, 2, [folder] * 2)):
        assert text == (
            "UnsupportedError: the number of ranks must divide num_heads, got 2 ranks and 3"
        )


def test_a_width_that_the_ranks_do_not_divide(tmp_path: Path):
    folder = tmp_path / "narrow"
    make_model("qwen3_next", moe_intermediate_size=15).save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["moe_intermediate_size"] == 15
    for text in results(run_ranks(loading.load_from, 2, [folder] * 2)):
        assert "the width of the experts, got 2 ranks and 15" in text


def test_ranks_of_one_host_share_its_memory(tmp_path: Path):
    folder = save("qwen3_next_dense", tmp_path / "model")
    size = (folder / "model.safetensors").stat().st_size * 3 // 4
    texts = results(run_ranks(loading.load_with_room_for_one, 2, folder, "shared"))
    for text in texts:
        assert text.startswith("the weights need ")
        assert f"which has {size:,} bytes free: lower their precision" in text
        assert "(rank 0 " in text
        assert ", rank 1 " in text
    assert texts[0] == texts[1]
    assert results(run_ranks(loading.load_with_room_for_one, 2, folder, "own")) == ["loaded"] * 2


def test_a_rank_that_dies_is_not_waited_for(tmp_path: Path):
    folder = save("qwen3_next_dense", tmp_path / "model")
    alive, dead = run_ranks(loading.load_and_die, 2, folder, timeout_s=20)
    assert dead.error == "died"
    assert alive.result.startswith("RuntimeError: ")
    assert alive.seconds < 40
