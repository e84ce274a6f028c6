"""What is refused before weights are read, what while they are, and that nothing is left."""

from __future__ import annotations

import gc
import io
import json
import os
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import IncompleteSnapshotError
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

import torch_hybrid as th
from tests.models.checkpoint.bytes_read import count_bytes_read
from tests.tiny_models import make_model
from torch_hybrid.models.checkpoint.folder import fetch_weights

INDEX = "model.safetensors.index.json"
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of several files, with experts."""
    sizes = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    make_model("qwen3_next", **sizes).save_pretrained(tmp_path, max_shard_size="100KB")
    return tmp_path


def refusal(path: Path, error: type[Exception] = ValueError, **options: Any) -> str:
    with pytest.raises(error) as caught:
        th.from_pretrained(path, **options)
    return str(caught.value).replace(str(path), "PATH")


def refused_unread(path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> str:
    """The refusal, which comes before any weight is read."""
    with count_bytes_read(monkeypatch) as count:
        text = refusal(path, **options)
    assert count.total == 0
    return text


def edit_index(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    edit(index)
    (folder / INDEX).write_text(json.dumps(index))


def file_of(folder: Path, name: str) -> Path:
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][name]


def edit_weights(file: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    weights = load_file(file)
    edit(weights)
    save_file(weights, file, {"format": "pt"})


def test_a_shard_that_is_not_there(folder: Path, monkeypatch: pytest.MonkeyPatch):
    file = file_of(folder, EXPERT)
    file.unlink()
    text = refused_unread(folder, monkeypatch)
    assert text.startswith("the checkpoint PATH has missing keys: [")
    assert f"the index {INDEX} names a file, and {file.name} is not there: " in text


def test_a_tensor_that_its_file_does_not_have(folder: Path, monkeypatch: pytest.MonkeyPatch):
    edit_weights(file_of(folder, EXPERT), lambda weights: weights.pop(EXPERT))
    assert refused_unread(folder, monkeypatch) == (
        f"the checkpoint PATH has missing keys: ['{EXPERT}']; the index {INDEX} names tensors that "
        f"no file has: {EXPERT}"
    )


@pytest.mark.parametrize("has_file", [True, False])
def test_what_a_model_does_not_need_may_be_missing(folder: Path, has_file: bool):
    """A head's file that nobody fetched, or that lost the tensor."""
    if has_file:
        save_file({"mtp.norm.weight": torch.ones(3)}, folder / "mtp.safetensors")
    edit_index(folder, lambda i: i["weight_map"].update({"mtp.fc.weight": "mtp.safetensors"}))
    edit_index(folder, lambda index: index.pop("metadata"))
    th.from_pretrained(folder)


def test_files_that_an_index_names_are_fetched(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
):
    cache = tmp_path_factory.mktemp("cache")
    save_file({"mtp.fc.weight": torch.ones(3)}, folder / "mtp.safetensors")
    save_file({"a": torch.ones(3)}, folder / "unnamed.safetensors")
    edit_index(folder, lambda i: i["weight_map"].update({"mtp.fc.weight": "mtp.safetensors"}))

    def fetch(_repo: str, *, allow_patterns: Any, ignore_patterns: Any, **_options: Any) -> str:
        names = [path.name for path in folder.iterdir()]
        patterns = {"allow_patterns": allow_patterns, "ignore_patterns": ignore_patterns}
        for name in filter_repo_objects(names, **patterns):
            (cache / name).write_bytes((folder / name).read_bytes())
        return str(cache)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    th.from_pretrained("some/model")
    assert (cache / "mtp.safetensors").exists()
    assert not (cache / "unnamed.safetensors").exists()


def test_a_cache_that_is_not_whole_serves_offline(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """It lacks what the model does not need, and the hub is out of reach."""
    edit_index(folder, lambda i: i["weight_map"].update({"mtp.fc.weight": "mtp.safetensors"}))

    def fetch(repo: str, **_options: Any) -> str:
        raise IncompleteSnapshotError(repo, str(folder))

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    th.from_pretrained("some/model")
    file_of(folder, EXPERT).unlink()
    assert "missing keys" in refusal("some/model")  # type: ignore[arg-type]


def test_a_tensor_is_read_from_the_file_that_the_index_names(folder: Path):
    """A stale shard has it too, and a file that no index names may say what it will."""
    right = th.from_pretrained(folder).state_dict()
    other = next(path for path in folder.glob("*.safetensors") if path != file_of(folder, EXPERT))
    edit_weights(other, lambda weights: weights.update({EXPERT: torch.zeros(3)}))
    save_file({EXPERT: torch.zeros(3)}, folder / "stale.safetensors")
    read = th.from_pretrained(folder).state_dict()
    assert all(torch.equal(read[name], right[name]) for name in right)


@pytest.mark.parametrize("named", ["weights.safetensors", "parts.safetensors.index.json"])
def test_a_config_names_its_weights(folder: Path, named: str):
    right = th.from_pretrained(folder).state_dict()
    weights = {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}
    for path in folder.glob("model*"):
        path.unlink()
    save_file(weights, folder / "weights.safetensors")
    names = {"weight_map": dict.fromkeys(weights, "weights.safetensors")}
    (folder / "parts.safetensors.index.json").write_text(json.dumps(names))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"transformers_weights": named}))
    read = th.from_pretrained(folder).state_dict()
    assert all(torch.equal(read[name], right[name]) for name in right)


def test_a_link_whose_target_is_missing(folder: Path):
    for name in (file_of(folder, EXPERT).name, INDEX, "config.json"):
        (folder / name).unlink()
        (folder / name).symlink_to("../../blobs/gone")
        assert f"{name} is a link whose target ../../blobs/gone is missing" in refusal(folder)


def test_a_folder_of_gguf(folder: Path):
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    (folder / "model-q4.gguf").write_bytes(b"GGUF")
    told = refusal(folder, th.UnsupportedError)
    assert "has its weights in GGUF alone, which is not read: model-q4.gguf. AutoModel" in told


def test_a_folder_of_an_adapter(folder: Path):
    (folder / "adapter_config.json").write_text("{}")
    assert "merge it" in refusal(folder, th.UnsupportedError)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no index of tensors"),
        ("{}", "KeyError('weight_map')"),
        ('{"weight_map": {"a": 3}}', "is no index of tensors"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "names files outside of its folder"),
    ],
)
def test_an_index_that_is_none(folder: Path, content: str, message: str):
    (folder / INDEX).write_text(content)
    assert message in refusal(folder)


@pytest.mark.parametrize("num_bytes", [-1, 1])
def test_a_file_of_another_size_than_its_header_says(
    folder: Path, num_bytes: int, monkeypatch: pytest.MonkeyPatch
):
    file = file_of(folder, EXPERT)
    size = file.stat().st_size
    content = file.read_bytes() + b"\0"
    file.write_bytes(content[: size + num_bytes])
    assert refused_unread(folder, monkeypatch) == (
        f"cannot read the weights in PATH: {file.name} must have {size:,} bytes, "
        f"got {size + num_bytes:,}"
    )


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{}}", "has a header that is no JSON"),
        (b"[]", "has a header that is none of safetensors"),
        (b'{"a": {"dtype": "F32"}}', "has a header that is none of safetensors"),
        (
            b'{"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 4]}}',
            "has bytes 0 to 4 of tensor a, which do not make [3] of F32",
        ),
    ],
)
def test_a_header_that_cannot_be(tmp_path: Path, header: bytes, message: str):
    make_model("qwen3", num_hidden_layers=1).save_pretrained(tmp_path)
    content = len(header).to_bytes(8, "little") + header
    (tmp_path / "model.safetensors").write_bytes(content)
    assert message in refusal(tmp_path)


def test_a_dtype_that_torch_does_not_have(tmp_path: Path):
    make_model("qwen3", num_hidden_layers=1).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    edit_weights(file, lambda weights: weights.update(unwanted=torch.ones(2)))
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    whole = json.loads(content[8 : 8 + length])

    def of_other_dtype(name: str) -> None:
        header = json.dumps(whole | {name: whole[name] | {"dtype": "F4"}}).encode()
        file.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])

    of_other_dtype("unwanted")
    with pytest.warns(UserWarning, match="unexpected keys"):
        th.from_pretrained(tmp_path)
    of_other_dtype("model.norm.weight")
    text = refusal(tmp_path, th.UnsupportedError)
    assert "tensor model.norm.weight has dtype F4" in text


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_quantized_weights_without_a_word_in_the_config(
    folder: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    edit_weights(file_of(folder, EXPERT), lambda w: w.update({EXPERT: w[EXPERT].to(dtype)}))
    text = refused_unread(folder, monkeypatch, error=th.UnsupportedError)
    assert text == f"weight {EXPERT} is stored as {dtype}: quantized checkpoints are not read"


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("bitsandbytes", ": its numbers of 4 bits are picked from a table (NF4)"),
        ("modelopt", ": NVFP4 has 4-bit floats"),
        ("something_new", "; weights='int8', 'int4', 'mxfp4' or 'nvfp4' quantizes a"),
    ],
)
def test_a_quantized_checkpoint(
    method: str, reason: str, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    file = folder / "config.json"
    quantized = {"quantization_config": {"quant_method": method}}
    file.write_text(json.dumps(json.loads(file.read_text()) | quantized))
    text = refused_unread(folder, monkeypatch, error=th.UnsupportedError)
    start = f"qwen3_next: checkpoints of this quantization are not served, got {method!r}{reason}"
    assert text.startswith(start)


def test_a_gguf_file(tmp_path: Path):
    file = tmp_path / "model.Q4_K_M.gguf"
    file.touch()
    for path in (file, tmp_path):
        with pytest.raises(th.UnsupportedError, match="is GGUF, whose blocks"):
            th.from_pretrained(path)


@pytest.mark.parametrize("change", ["missing", "mismatched"])
def test_a_wrong_weight_is_named_before_others_are_made(
    folder: Path, change: str, monkeypatch: pytest.MonkeyPatch
):
    name = "model.layers.1.self_attn.q_proj.weight"

    def edit(weights: dict[str, Tensor]) -> None:
        weight = weights.pop(name)
        if change == "mismatched":
            weights[name] = weight[1:].contiguous()

    edit_weights(file_of(folder, name), edit)
    if change == "missing":
        edit_index(folder, lambda index: index["weight_map"].pop(name))
    for made in ("_move_missing_keys_from_meta_to_device", "_initialize_missing_keys"):
        monkeypatch.setattr(PreTrainedModel, made, lambda *_: pytest.fail("weights are made"))
    text = refused_unread(folder, monkeypatch)
    assert text.startswith(f"the checkpoint PATH has {change} keys: [")
    assert name in text


def test_an_expert_that_is_missing(folder: Path, monkeypatch: pytest.MonkeyPatch):
    edit_weights(file_of(folder, EXPERT), lambda weights: weights.pop(EXPERT))
    edit_index(folder, lambda index: index["weight_map"].pop(EXPERT))
    text = refused_unread(folder, monkeypatch)
    assert text == f"the checkpoint PATH has missing keys: ['{EXPERT}']"


def test_an_expert_of_another_shape(folder: Path, monkeypatch: pytest.MonkeyPatch):
    edit_weights(file_of(folder, EXPERT), lambda w: w.update({EXPERT: torch.zeros(3, 3)}))
    assert refused_unread(folder, monkeypatch) == (
        f"the checkpoint PATH has mismatched keys: ['{EXPERT} [3, 3]'], where the other experts "
        "have [32, 64]"
    )


def test_fewer_experts_than_the_config_says(folder: Path, monkeypatch: pytest.MonkeyPatch):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_experts": 6}))
    text = refused_unread(folder, monkeypatch)
    assert "mismatched keys" in text
    assert "mlp.experts.gate_up_proj" in text


def test_a_tensor_in_two_files(tmp_path: Path):
    make_model("qwen3", num_hidden_layers=1).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    for name in ("a", "b"):
        save_file(weights, tmp_path / f"{name}.safetensors")
    assert "both a.safetensors and b.safetensors have a tensor" in refusal(tmp_path)


def test_a_tensor_that_nothing_wants_is_named(folder: Path):
    name = "model.layers.1.mlp.slope"
    edit_weights(file_of(folder, EXPERT), lambda weights: weights.update({name: torch.ones(3)}))
    with pytest.warns(UserWarning, match=re.escape(f"has unexpected keys: ['{name}']")):
        th.from_pretrained(folder)


def test_no_room(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch_hybrid.caches.room.free_bytes", lambda _: 1000)
    text = refused_unread(folder, monkeypatch, error=th.CapacityError)
    assert "the weights need" in text
    assert "cpu has 1,000 bytes" in text


def test_a_card_that_is_full_meanwhile(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def allocate(*_: Any) -> None:
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    monkeypatch.setattr("torch_hybrid.models.checkpoint.read.weight_memory", allocate)
    with pytest.raises(th.CapacityError) as error:
        th.from_pretrained(folder)
    assert str(error.value) == (
        "cpu had no room left while weights were read: tried to allocate 2 GiB"
    )


def test_a_disk_that_is_full(monkeypatch: pytest.MonkeyPatch, folder: Path):
    """Weights of a hub id are fetched first."""

    def fetch(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    with pytest.raises(ValueError, match=r"cannot read the weights in some/model: .*No space left"):
        fetch_weights("some/model", Path("some/folder"))


@pytest.mark.parametrize("change", ["written to", "replaced", "removed", "truncated"])
def test_a_file_that_changes_while_it_is_read(
    folder: Path, change: str, monkeypatch: pytest.MonkeyPatch
):
    file, preadv, changed = file_of(folder, EXPERT), os.preadv, threading.Event()

    def read(descriptor: int, buffers: Any, offset: int) -> int:
        if not changed.is_set():
            changed.set()
            content = file.read_bytes()
            if change in ("replaced", "removed"):
                file.unlink()
            if change != "removed":
                file.write_bytes(content[:200] if change == "truncated" else content)
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", read)
    text = refusal(folder)
    assert text.startswith("cannot read the weights in PATH: ")
    assert file.name in text


def test_an_error_of_the_disk_ends_it(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def read(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    tqdm(total=1, disable=False, leave=False, file=io.StringIO()).close()  # starts its own thread

    def running() -> set[threading.Thread]:
        """But for those that build kernels for an earlier test's runner, and end when they have."""
        return {each for each in threading.enumerate() if each.name != "build-ahead"}

    threads, before = torch.get_num_threads(), running()
    monkeypatch.setattr(os, "preadv", read)
    assert "Input/output error" in refusal(folder)
    assert torch.get_num_threads() == threads
    assert running() == before


def test_every_weight_that_is_not_finite_is_counted(folder: Path):
    first, second = "model.embed_tokens.weight", "model.layers.0.linear_attn.A_log"
    edit_weights(file_of(folder, first), lambda w: w[first][:2].fill_(float("nan")))
    edit_weights(file_of(folder, second), lambda w: w[second][:1].fill_(float("inf")))
    assert refusal(folder) == (f"weight {first} has 128, {second} has 1 NaN or infinite values")


@pytest.mark.skipif(sys.platform != "linux", reason="/proc says how much memory is held")
def test_nothing_is_left(tmp_path: Path):
    """After a refusal while reading: no memory, no open file."""
    make_model("qwen3", num_hidden_layers=2, vocab_size=100_000).save_pretrained(tmp_path)
    name = "model.norm.weight"
    edit_weights(tmp_path / "model.safetensors", lambda w: w[name].fill_(float("nan")))
    refusal(tmp_path)
    gc.collect()
    held, files = anonymous_bytes(), os.listdir("/proc/self/fd")
    for _ in range(3):
        refusal(tmp_path)
    gc.collect()
    size = (tmp_path / "model.safetensors").stat().st_size
    assert anonymous_bytes() - held < 0.5 * size
    assert os.listdir("/proc/self/fd") == files


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))
