"""New weights in the place of old ones: as a model that was loaded with them, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from threading import Lock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim.swa_utils import AveragedModel

import torch_hybrid as th
from tests.parallel.processes import results, run_ranks
from tests.tiny_models import BUILDERS, FEWEST_LAYERS, VOCAB_SIZE, make_model

SIZES = {"max_seqs": 2, "max_tokens": 64, "kv_tokens": 160, "compile": False}
PROMPT = [(7 * i) % VOCAB_SIZE for i in range(30)]
Weights = dict[str, Tensor]


def save(folder: Path, family: str, seed: int) -> Path:
    """A checkpoint of a tiny model."""
    make_model(family, seed=seed, **FEWEST_LAYERS[family]).save_pretrained(folder)
    return folder


def weights_of(folder: Path) -> Weights:
    weights: Weights = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights |= load_file(file)
    return weights


def logits(runner: th.Runner) -> Tensor:
    """After a prompt, cut once."""
    (seq,) = runner.new_sequences(1)
    runner.extend([seq], [PROMPT[:20]])
    out = runner.extend([seq], [PROMPT[20:]], logits="all")
    runner.free([seq])
    return out


@pytest.mark.parametrize("family", BUILDERS)
def test_new_weights_are_those_of_a_model_that_is_loaded_with_them(family: str, tmp_path: Path):
    old, new = save(tmp_path / "old", family, 0), save(tmp_path / "new", family, 1)
    runner = th.Runner(th.from_pretrained(old), **SIZES)
    before, expected = logits(runner), logits(th.Runner(th.from_pretrained(new), **SIZES))
    assert not torch.equal(before, expected)
    runner.update_weights(iter(weights_of(new).items()))  # some of which are not read
    assert torch.equal(logits(runner), expected)


def test_a_shared_weight_by_any_of_its_names(tmp_path: Path):
    """A file may have a tied head beside the embeddings; what is given for either is for both."""
    sizes = FEWEST_LAYERS["qwen3_next"]
    make_model("qwen3_next", tie_word_embeddings=True, **sizes).save_pretrained(tmp_path)
    weights, head = weights_of(tmp_path), "lm_head.weight"
    old = weights["model.embed_tokens.weight"]
    save_file({**weights, head: old.clone()}, tmp_path / "model.safetensors", {"format": "pt"})
    updated = []
    for names in (["model.embed_tokens.weight"], [head], [head, "model.embed_tokens.weight"]):
        runner = th.Runner(th.from_pretrained(tmp_path), **SIZES)
        before = logits(runner)
        runner.update_weights(dict.fromkeys(names, old.flip(0)), partial=True)
        updated.append(logits(runner))
        assert not torch.equal(updated[-1], before)
        assert torch.equal(updated[-1], updated[0])
    runner.update_weights(iter(weights.items()))
    assert torch.equal(logits(runner), before)
    with pytest.raises(ValueError, match=r"lm_head.weight and model.embed_tokens.weight are one, "):
        runner.update_weights({head: old.flip(0), **weights})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return tuple(save(folder / str(seed), "qwen3_next", seed) for seed in (0, 1))  # type: ignore[return-value]


def on_a_rank(old: Path, new: Path) -> bool:
    """Whether this rank's logits are those of its share of the new weights."""
    runner = th.Runner(th.from_pretrained(old, ranks=dist.group.WORLD), **SIZES)
    runner.update_weights(weights_of(new))
    loaded = th.Runner(th.from_pretrained(new, ranks=dist.group.WORLD), **SIZES)
    return torch.equal(logits(runner), logits(loaded))


def test_each_rank_takes_its_share(folders: tuple[Path, Path]):
    assert results(run_ranks(on_a_rank, 2, *folders)) == [True, True]


REFUSALS = [
    ({"lm_head.weight": torch.zeros(3, 64)}, r"lm_head.weight must have shape \[199, 64\], got"),
    (
        {"lm_head.weight": torch.zeros(VOCAB_SIZE, 64).bfloat16()},
        "lm_head.weight must have dtype torch.float32, got torch.bfloat16",
    ),
    ({"lm_head.wait": torch.zeros(3)}, "'lm_head.wait' is none of the checkpoint"),
    ({"lm_head.weight": torch.full((VOCAB_SIZE, 64), torch.nan)}, "has 12736 NaN or infinite"),
]


@pytest.mark.parametrize(("wrong", "told"), REFUSALS, ids=["shape", "dtype", "name", "NaN"])
def test_what_is_refused_changes_nothing(folders: tuple[Path, Path], wrong: Weights, told: str):
    runner = th.Runner(th.from_pretrained(folders[0]), **SIZES)
    before = logits(runner)
    with pytest.raises(ValueError, match=told):
        runner.update_weights(weights_of(folders[1]) | wrong)
    assert torch.equal(logits(runner), before)


def test_some_weights_are_asked_for(folders: tuple[Path, Path]):
    runner = th.Runner(th.from_pretrained(folders[0]), **SIZES)
    before, weights = logits(runner), weights_of(folders[1])
    some = {"model.norm.weight": weights["model.norm.weight"]}
    with pytest.raises(ValueError, match=r"weights are missing, lm_head.weight, .*partial=True"):
        runner.update_weights(some)
    with pytest.raises(ValueError, match=r"weight model.norm.weight comes twice"):
        runner.update_weights([*some.items(), *some.items()])
    assert torch.equal(logits(runner), before)
    runner.update_weights(some, partial=True)
    assert not torch.equal(logits(runner), before)


def test_an_iterator_that_fails_says_what_is_in(folders: tuple[Path, Path]):
    runner = th.Runner(th.from_pretrained(folders[0]), **SIZES)
    expected = logits(th.Runner(th.from_pretrained(folders[1]), **SIZES))
    weights = weights_of(folders[1])

    def broken() -> Iterator[tuple[str, Tensor]]:
        yield from list(weights.items())[:3]
        raise ConnectionError("the trainer is gone")

    with pytest.raises(ConnectionError) as caught:
        runner.update_weights(broken())
    assert caught.value.__notes__ == ["3 weights are new by now, and the others as they were"]
    with pytest.raises(ValueError, match="are missing") as missing:
        runner.update_weights(iter(list(weights.items())[:5]))
    assert missing.value.__notes__ == ["5 weights are new by now, and the others as they were"]
    runner.update_weights(weights)
    assert torch.equal(logits(runner), expected)


def test_what_is_held_is_of_the_old_weights(folders: tuple[Path, Path], tmp_path: Path):
    runner = th.Runner(th.from_pretrained(folders[0]), **SIZES, max_snapshots=4)
    (seq,) = runner.new_sequences(1)
    runner.extend([seq], [PROMPT])
    handle = runner.snapshot(seq)
    weights = weights_of(folders[1])
    with pytest.raises(ValueError, match="1 sequences and 1 snapshots are held"):
        runner.update_weights(weights)
    runner.free([seq])
    runner.release(handle)
    options = th.PrefixCache(min_tokens=8, host_bytes=1 << 20)
    engines = [th.Engine(runner, prefix_cache=options) for _ in range(3)]
    longer, greedy = [*PROMPT, 5], th.Sampling(max_new_tokens=4, ignore_eos=True)
    for engine in engines[:2]:
        list(engine.generate([PROMPT], greedy))
    kept = tmp_path / "kept"
    assert engines[1].save_prefixes(kept) == engines[2].load_prefixes(kept) > 0
    (first,) = engines[0].generate([longer], greedy)
    assert first.num_cached_tokens == len(PROMPT)
    beside = th.Runner(runner.model, **SIZES)
    with pytest.raises(ValueError, match="another runner of the model holds"):
        beside.update_weights(weights)
    runner.update_weights(weights)
    fresh = th.Engine(th.Runner(th.from_pretrained(folders[1]), **SIZES))
    (expected,) = fresh.generate([longer], greedy)
    for engine in engines:  # with prefixes on the device, on the host, and from a file
        (second,) = engine.generate([longer], greedy)
        assert second.num_cached_tokens == 0
        assert second.tokens == expected.tokens != first.tokens
    (third,) = engine.generate([[*longer, 6]], greedy)
    assert third.num_cached_tokens == len(PROMPT)


class Logger:
    """What counts calls, and cannot be copied."""

    def __init__(self) -> None:
        self.lock = Lock()

    def hook(self, *_: object) -> None: ...


def test_a_model_that_a_logger_listens_to():
    trained = make_model("qwen3_next", seed=1, **FEWEST_LAYERS["qwen3_next"])
    runner = th.Runner(th.adapt(make_model("qwen3_next", **FEWEST_LAYERS["qwen3_next"])), **SIZES)
    for layer in trained.model.layers:
        layer.register_forward_hook(Logger().hook)
        layer.loggers = {"own": Logger()}
    runner.update_weights(trained)
    assert torch.equal(logits(runner), logits(th.Runner(th.adapt(trained), **SIZES)))


def test_a_wrapper_around_a_model_is_named():
    peft = pytest.importorskip("peft", reason="peft is not installed")
    runner = th.Runner(th.adapt(make_model("qwen3_next")), **SIZES, max_adapters=1)
    model = peft.get_peft_model(
        make_model("qwen3_next"), peft.LoraConfig(target_modules=["q_proj"])
    )
    for take in (runner.update_weights, partial(runner.load_adapter, "a")):
        with pytest.raises(ValueError, match=r"of transformers, got <class .*AveragedModel"):
            take(AveragedModel(model))


def test_models_that_take_none(folders: tuple[Path, Path]):
    weights = weights_of(folders[1])
    adapted = th.Runner(th.adapt(make_model("qwen3_next")), **SIZES)
    with pytest.raises(th.UnsupportedError, match=r"must come from th\.from_pretrained"):
        adapted.update_weights(weights)
    smaller = th.Runner(th.from_pretrained(folders[0], weights="int8"), **SIZES)
    with pytest.raises(th.UnsupportedError, match="with weights='auto'"):
        smaller.update_weights(weights)
    model = th.from_pretrained(folders[0])
    th.quantize(model, "int8")
    with pytest.raises(th.UnsupportedError, match="sharded or quantized in memory"):
        th.Runner(model, **SIZES).update_weights(weights)
    with pytest.raises(th.UnsupportedError, match="a quantized model takes no new weights"):
        th.Runner(model, **SIZES).update_weights(make_model("qwen3_next"))
