"""Adapters of requests: outputs are those that each has alone; what cannot be served is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import torch_hybrid as th
from tests.models.mtp_checkpoint import make_checkpoint
from tests.models.oracle import make_texts
from tests.tiny_models import make_hybrid, make_model

peft = pytest.importorskip("peft", reason="peft is not installed")

TEXTS = make_texts([20, 7, 33])
GREEDY = th.Sampling(max_new_tokens=14, ignore_eos=True)
CACHE = th.PrefixCache(min_tokens=4)
TWO_LAYERS = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "layer_types": ["linear_attention", "full_attention"],
}


def save(folder: Path, *, seed: int = 1, base: dict[str, Any] | None = None, **options: Any) -> Any:
    torch.manual_seed(seed)
    options = {"target_modules": ["in_proj_qkvz", "in_proj_ba", "q_proj", "o_proj"], **options}
    config = peft.LoraConfig(init_lora_weights=False, **{"r": 4, "lora_alpha": 16, **options})
    model = peft.get_peft_model(
        make_model("qwen3_next_dense", **{**TWO_LAYERS, **(base or {})}), config
    )
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp(name) for name in ("a", "b", "c")}
    for seed, folder in enumerate(made.values()):
        save(folder, seed=seed)
    return made


def make_engine(adapters: dict[str, Path] | None = None, **options: Any) -> th.Engine:
    engine_options = {
        name: options.pop(name) for name in ("prefix_cache", "speculate") if name in options
    }
    sizes = {"max_seqs": 8, "max_tokens": 128, "kv_tokens": 1024, "max_adapters": 2}
    runner = th.Runner(make_hybrid(), compile=False, **{**sizes, **options})
    return th.Engine(runner, adapters=adapters, **engine_options)


def tokens_of(engine: th.Engine, prompts: Any, **options: Any) -> list[list[int]]:
    outputs = sorted(engine.generate(prompts, GREEDY, **options), key=lambda out: out.index)
    assert all(output.finish_reason == "length" for output in outputs)
    return [output.tokens for output in outputs]


@pytest.fixture(scope="module")
def alone(folders: dict[str, Path]) -> dict[str | None, list[list[int]]]:
    """What each text gets by itself: merged into the weights by peft, or of the base."""
    found: dict[str | None, list[list[int]]] = {None: tokens_of(make_engine(max_adapters=0), TEXTS)}
    base = {**TWO_LAYERS}
    for name, folder in folders.items():
        model = peft.PeftModel.from_pretrained(make_model("qwen3_next_dense", **base), folder)
        runner = th.Runner(
            th.adapt(model), compile=False, max_seqs=8, max_tokens=128, kv_tokens=1024
        )
        found[name] = tokens_of(th.Engine(runner), TEXTS)
    assert len({str(tokens) for tokens in found.values()}) == 4
    return found


def test_prompts_of_several_adapters_and_none(folders: Any, alone: Any) -> None:
    engine = make_engine({name: folders[name] for name in "ab"})
    names = ["a", None, "b"]
    assert tokens_of(engine, TEXTS, adapter=names) == [alone[n][i] for i, n in enumerate(names)]
    assert tokens_of(engine, TEXTS, adapter="b") == alone["b"]
    assert tokens_of(engine, TEXTS) == alone[None]


@pytest.mark.parametrize("max_snapshots", [0, 40])
def test_least_recently_used_adapters_are_evicted(
    folders: Any, alone: Any, max_snapshots: int
) -> None:
    """Three adapters in two slots: the names stay, also with prefixes that were kept meanwhile."""
    engine = make_engine(
        folders, max_snapshots=max_snapshots, prefix_cache=CACHE if max_snapshots else False
    )
    assert engine.adapters == ("a", "b", "c")
    for name in ("a", "b", "a", None, "c", "b", "a"):
        assert tokens_of(engine, TEXTS, adapter=name) == alone[name], name
    if max_snapshots:
        assert engine.stats().prefix_cache.num_hits > 0


def test_evicted_adapters_are_read_while_steps_may_run(
    folders: Any, alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(folders)
    model, taken = engine.runner.model, []

    def read(*args: Any) -> Any:
        def take() -> None:
            taken.append(engine.runner.lock.acquire(timeout=5))
            if taken[-1]:
                engine.runner.lock.release()

        thread = Thread(target=take)
        thread.start()
        thread.join()
        return type(model).read_adapter(model, *args)

    monkeypatch.setattr(model, "read_adapter", read)
    assert tokens_of(engine, TEXTS, adapter="a") == alone["a"]
    assert taken == [True]


def test_adapters_in_use_are_neither_evicted_nor_unloaded(folders: Any, alone: Any) -> None:
    engine = make_engine({name: folders[name] for name in "ab"})
    requests = [engine.submit(TEXTS[0], GREEDY, adapter=name) for name in "ab"]
    with pytest.raises(ValueError, match="adapter 'a' is in use"):
        engine.unload_adapter("a")
    with pytest.raises(th.CapacityError, match="all 2 are in use: the runner's max_adapters"):
        engine.load_adapter("c", folders["c"])
    engine.step()
    with pytest.raises(ValueError, match="adapter 'b' is in use"):
        engine.unload_adapter("b")
    while engine.has_unfinished:
        engine.step()
    assert [request.output.tokens for request in requests] == [alone["a"][0], alone["b"][0]]
    engine.unload_adapter("a")
    engine.load_adapter("a", folders["c"])
    assert tokens_of(engine, TEXTS, adapter="a") == alone["c"]


def test_a_prefix_is_of_one_adapter_alone(folders: Any, alone: Any) -> None:
    engine = make_engine({"a": folders["a"]}, max_snapshots=40, prefix_cache=CACHE)
    for name in ("a", None) * 3:
        assert tokens_of(engine, TEXTS, adapter=name) == alone[name]
    assert engine.stats().prefix_cache.num_hits == 6
    engine.unload_adapter("a")
    engine.load_adapter("a", folders["b"])  # what was kept under the name is another adapter's
    assert tokens_of(engine, TEXTS, adapter="a") == alone["b"]


def test_snapshots_keep_their_adapter(folders: Any) -> None:
    runner = make_engine({"a": folders["a"]}, max_snapshots=2).runner
    (seq,) = runner.new_sequences(1, adapter="a")
    runner.extend([seq], [TEXTS[0][:-1]])
    kept = runner.snapshot(seq)
    expected = runner.extend([seq], [TEXTS[0][-1:]]).clone()
    (fork,) = runner.new_sequences(1, start=kept, adapter="a")
    assert torch.equal(runner.extend([fork], [TEXTS[0][-1:]]), expected)
    with pytest.raises(ValueError, match="has adapter 'a', and sequences with None start"):
        runner.new_sequences(1, start=kept)
    runner.free([seq, fork])
    runner.unload_adapter("a")
    runner.load_adapter("a", folders["b"])
    with pytest.raises(ValueError, match="has adapter 'a', which was unloaded meanwhile, and"):
        runner.new_sequences(1, start=kept, adapter="a")


def test_drafts(folders: Any, alone: Any) -> None:
    speculate = th.Speculation("ngram", num_drafts=2)
    engine = make_engine({"a": folders["a"]}, max_drafts=2, speculate=speculate)
    assert tokens_of(engine, TEXTS, adapter=["a", None, "a"]) == [
        alone["a"][0], alone[None][1], alone["a"][2]
    ]  # fmt: skip


def test_drafts_of_a_head(tmp_path: Path) -> None:
    """Tokens are those without drafts; the head drafts for the base, and is accepted less."""
    make_checkpoint("qwen3_next_dense", tmp_path)
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.manual_seed(0)
    config = peft.LoraConfig(init_lora_weights=False, target_modules="all-linear", r=4)
    peft.get_peft_model(base, config).save_pretrained(tmp_path / "a")
    sizes = {"max_seqs": 4, "max_tokens": 64, "kv_tokens": 512, "max_adapters": 1}
    found = []
    for has_head in (False, True):
        model = th.from_pretrained(tmp_path, mtp=has_head)
        runner = th.Runner(model, compile=False, max_drafts=2 * has_head, **sizes)
        speculate = th.Speculation("mtp", num_drafts=2, adapts=False) if has_head else None
        engine = th.Engine(runner, adapters={"a": tmp_path / "a"}, speculate=speculate)
        found.append(tokens_of(engine, TEXTS, adapter=["a", None, "a"]))
    assert found[0] == found[1]
    assert engine.stats().drafts.drafted > 0


def test_preempted_requests(folders: Any, alone: Any) -> None:
    engine = make_engine({"a": folders["a"]}, kv_tokens=64)
    assert tokens_of(engine, TEXTS, adapter=["a", None, "a"]) == [
        alone["a"][0], alone[None][1], alone["a"][2]
    ]  # fmt: skip
    assert engine.stats().num_preemptions > 0


def changed(folder: Path, to: Path, **fields: Any) -> Path:
    shutil.copytree(folder, to)
    path = to / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return to


def test_what_cannot_be_loaded_disturbs_nothing(folders: Any, alone: Any, tmp_path: Path) -> None:
    engine = make_engine({"a": folders["a"]}, max_lora_rank=4)
    request = engine.submit(TEXTS[0], GREEDY, adapter="a")
    engine.step()

    def refused(kind: type[Exception], told: str, folder: Path) -> None:
        with pytest.raises(kind, match=told):
            engine.load_adapter("new", folder)
        assert engine.adapters == ("a",)

    save(tmp_path / "wide", base={"hidden_size": 64})
    refused(ValueError, "is of another base: it adapts model.layers.0", tmp_path / "wide")
    save(tmp_path / "high", r=5)
    refused(ValueError, "has rank 5 in .*, and the runner's max_lora_rank is 4", tmp_path / "high")
    (tmp_path / "empty").mkdir()
    refused(ValueError, "cannot read an adapter's config from", tmp_path / "empty")
    bare = changed(folders["b"], tmp_path / "bare")
    (bare / "adapter_model.safetensors").unlink()
    refused(ValueError, "has no weights of an adapter: there is no adapter_model", bare)
    save(tmp_path / "long", base={"num_hidden_layers": 3, "layer_types": None})
    refused(
        ValueError, r"adapts model.layers.1\..*, which the model does not have", tmp_path / "long"
    )
    tensors = load_file(folders["b"] / "adapter_model.safetensors")
    next(iter(tensors.values()))[0] = torch.nan
    wrong = changed(folders["b"], tmp_path / "nan")
    save_file(tensors, wrong / "adapter_model.safetensors")
    refused(ValueError, "has NaN or infinite values", wrong)
    save(tmp_path / "dora", use_dora=True)
    refused(th.UnsupportedError, "adapter_config.json has use_dora True", tmp_path / "dora")
    save(tmp_path / "bias", lora_bias=True)
    refused(th.UnsupportedError, "adapter_config.json has lora_bias True", tmp_path / "bias")
    save(tmp_path / "saved", modules_to_save=["norm"])
    refused(th.UnsupportedError, "brings .*norm.weight: the runner needs saved", tmp_path / "saved")
    pissa = changed(folders["b"], tmp_path / "pissa", init_lora_weights="pissa")
    refused(th.UnsupportedError, "init_lora_weights 'pissa'", pissa)
    other = changed(folders["b"], tmp_path / "ia3", peft_type="IA3")
    refused(th.UnsupportedError, "is of peft_type 'IA3'", other)
    with pytest.raises(ValueError, match="an adapter 'a' is loaded already"):
        engine.load_adapter("a", folders["b"])
    with pytest.raises(ValueError, match="no adapter 'b' is loaded; loaded are"):
        engine.unload_adapter("b")
    with pytest.raises(ValueError, match=r"prompt 1: no adapter 'b' is loaded; loaded are \['a'\]"):
        engine.generate(TEXTS, adapter=["a", "b", None])
    with pytest.raises(ValueError, match="prompt 0: no adapter 3 is loaded"):
        engine.generate(TEXTS, adapter=3)
    with pytest.raises(TypeError, match=r"adapters must map names to folders, got \['a'\]"):
        th.Engine(engine.runner, adapters=["a"])
    while engine.has_unfinished:
        engine.step()
    assert request.output.tokens == alone["a"][0]


def test_runners_without_adapters(folders: Any) -> None:
    with pytest.raises(th.UnsupportedError, match="max_adapters=0 takes no adapters"):
        make_engine({"a": folders["a"]}, max_adapters=0)
    with pytest.raises(ValueError, match="max_lora_rank must be within 1 and 256, got 300"):
        make_engine(max_lora_rank=300)


def test_an_adapter_of_a_model_in_memory_is_that_of_its_folder(alone: Any, tmp_path: Path) -> None:
    """It is a copy, and is not evicted: there is nothing to read it from again."""
    engine = make_engine(max_adapters=1)
    model = save(tmp_path, seed=0)
    engine.runner.load_adapter("a", model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    assert tokens_of(engine, TEXTS, adapter="a") == alone["a"]
    with pytest.raises(th.CapacityError, match="needs a slot"):
        engine.runner.load_adapter("b", tmp_path)
    with pytest.raises(ValueError, match=r"must have one active adapter, got Linear with \[\]"):
        engine.runner.load_adapter("b", torch.nn.Linear(2, 2))
