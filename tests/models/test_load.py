"""What ``from_pretrained`` and ``adapt`` refuse, and what the refusal says."""

from __future__ import annotations

import json
import pickle
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from expecttest import assert_expected_inline
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import model_type_to_module_name

import torch_hybrid as th
from tests.models.changes_of_file import walk_through_loading
from tests.models.oracle import ask, assert_serves, make_texts
from tests.models.oracle import whole as whole_texts
from tests.tiny_models import FEWEST_LAYERS, LINEAR, MROPE, SIZES, VOCAB_SIZE, make_model, randomize
from torch_hybrid.models.families import FAMILIES, NOT_SERVED
from torch_hybrid.models.transformers_hooks import ATTENTION_NAME, register_attention

Weights = dict[str, Tensor]
SMALL = {"max_seqs": 1, "max_tokens": 64, "kv_tokens": 64, "compile": False}
UP_PROJ = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    make_model("qwen3_5", num_hidden_layers=2).save_pretrained(tmp_path)
    return tmp_path


def edit_config(path: Path, **fields: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def edit_weights(path: Path, edit: Callable[[Weights], object]) -> None:
    file = path / "model.safetensors"
    weights = load_file(file)
    edit(weights)
    save_file(weights, file, {"format": "pt"})


def refusal(path: Path, error: type[Exception], **options: Any) -> str:
    """What loading says, without the folder's name."""
    with pytest.raises(error) as caught:
        th.from_pretrained(path, **options)
    return str(caught.value).replace(str(path), "PATH")


def test_unknown_model_type(checkpoint: Path):
    edit_config(checkpoint, model_type="llama")
    assert refusal(checkpoint, th.UnsupportedError) == (
        f"model type 'llama' is not supported; supported are {sorted(FAMILIES)}"
    )


def test_a_hybrid_without_an_op_says_why(checkpoint: Path):
    edit_config(checkpoint, model_type="nemo_speechlm", text_config=None)
    assert refusal(checkpoint, th.UnsupportedError) == (
        "model type 'nemo_speechlm' is not supported: it has speech to transcribe, of which its "
        "text part alone hears nothing"
    )


def test_every_model_with_states_is_served_or_named():
    """By the sources of models that generate, and by the text parts that their configs name."""
    tasks = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SPEECH_SEQ_2_SEQ")
    names = [getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES") for task in tasks]
    types = {model_type for known in names for model_type in known}

    def source(model_type: str, kind: str) -> str:
        folder = Path(tf.__path__[0]) / "models" / model_type_to_module_name(model_type)
        return "".join(file.read_text() for file in folder.glob(f"{kind}_*.py"))

    signs = ("_is_stateful = True", r"\bupdate_(conv|recurrent)_state\(", '"linear_attention"')
    states = re.compile("|".join(signs))
    found = {each for each in types if states.search(source(each, "modeling"))}
    quoted = re.compile("|".join(f'"{each}"' for each in found))
    found |= {each for each in types if quoted.search(source(each, "configuration"))}
    assert types & FAMILIES.keys() - found == {"qwen3", "deepseek_v3"}  # the search finds all
    assert found - FAMILIES.keys() - NOT_SERVED.keys() == set()


def test_model_type_unknown_to_transformers(checkpoint: Path):
    edit_config(checkpoint, model_type="nonesuch")
    text = refusal(checkpoint, th.UnsupportedError)
    assert text.startswith("model type 'nonesuch' is not supported; supported are ['bailing_hy")


@pytest.mark.parametrize(
    ("family", "field", "value", "named"),
    [
        ("qwen3_5", "hidden_act", "gelu", "hidden_act must be one of ['silu'], got 'gelu'"),
        (
            "qwen3_5",
            "layer_types",
            ["linear_attention", "conv"],
            "layer_types must be one of ['full_attention', 'linear_attention'], got 'conv'",
        ),
        (
            "qwen3",
            "layer_types",
            ["full_attention", "linear_attention"],
            "layer_types must be one of ['full_attention'], got 'linear_attention'",
        ),
        (
            "qwen3",
            "rope_parameters",
            {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
            "rope_parameters.rope_type must be one of "
            "['default', 'linear', 'llama3', 'yarn'], got 'dynamic'",
        ),
    ],
)
def test_unknown_value_of_a_config_field(
    family: str, field: str, value: object, named: str, tmp_path: Path
):
    make_model(family, num_hidden_layers=2).save_pretrained(tmp_path)
    edit_config(tmp_path, **{field: value})
    (tmp_path / "model.safetensors").unlink()  # refused before any weight is read
    assert f"config field {named}" in refusal(tmp_path, th.UnsupportedError)


def test_heads_that_do_not_divide(checkpoint: Path):
    edit_config(checkpoint, linear_num_key_heads=3)
    assert_expected_inline(
        refusal(checkpoint, ValueError),
        """num_v_heads must be a multiple of num_k_heads, got 4 and 3""",
    )


def test_config_that_transformers_refuses(checkpoint: Path):
    edit_config(checkpoint, layer_types=["linear_attention", "nonesuch"])
    assert "layer_types" in refusal(checkpoint, ValueError)
    (checkpoint / "config.json").write_text("{garbage")
    assert "not a valid JSON file" in refusal(checkpoint, ValueError)


def test_missing_folder(tmp_path: Path):
    assert_expected_inline(
        refusal(tmp_path / "nonesuch", ValueError), """there is no folder PATH"""
    )


def test_missing_config(tmp_path: Path):
    assert refusal(tmp_path, ValueError).startswith("cannot read a model config from PATH: ")


def test_missing_weights_file(checkpoint: Path):
    (checkpoint / "model.safetensors").unlink()
    assert_expected_inline(
        refusal(checkpoint, ValueError),
        """cannot read the weights in PATH: no safetensors file found; weights of another format are not read. AutoModelForCausalLM.from_pretrained(path).save_pretrained(folder) of transformers makes safetensors of pickled ones""",  # noqa: E501
    )


@pytest.mark.parametrize("size", [0, 5, 20_000])
def test_truncated_weights_file(checkpoint: Path, size: int):
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    assert refusal(checkpoint, ValueError).startswith("cannot read the weights in PATH: ")


def test_missing_weight(checkpoint: Path):
    edit_weights(checkpoint, lambda weights: weights.pop(UP_PROJ))
    assert_expected_inline(
        refusal(checkpoint, ValueError),
        """the checkpoint PATH has missing keys: ['model.layers.1.mlp.up_proj.weight']""",
    )


def test_weight_of_the_wrong_shape(checkpoint: Path):
    edit_weights(checkpoint, lambda weights: weights.update({UP_PROJ: torch.zeros(3, 3)}))
    text = refusal(checkpoint, ValueError)
    assert all(part in text for part in ("mismatched keys", UP_PROJ, "[3, 3]", "[96, 64]"))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", [UP_PROJ, "model.layers.0.linear_attn.A_log"])
def test_weight_that_is_not_finite(checkpoint: Path, name: str, value: float):
    edit_weights(checkpoint, lambda weights: weights[name].view(-1)[-1:].fill_(value))
    assert refusal(checkpoint, ValueError) == f"weight {name} has 1 NaN or infinite values"


def test_finite_weights_whose_sum_overflows(checkpoint: Path):
    edit_weights(checkpoint, lambda weights: weights[UP_PROJ].fill_(1e38))
    th.from_pretrained(checkpoint)


def test_dtype(checkpoint: Path):
    assert th.from_pretrained(checkpoint, dtype="bfloat16").dtype is torch.bfloat16
    assert th.from_pretrained(checkpoint, dtype=torch.float16).dtype is torch.float16
    assert_expected_inline(
        refusal(checkpoint, ValueError, dtype="float31"),
        """dtype must be a torch.dtype of 16-bit floats or wider, or one of ['auto', 'bfloat16', 'float16', 'float32'], got 'float31'""",  # noqa: E501
    )
    assert "got torch.float8_e4m3fn" in refusal(checkpoint, ValueError, dtype=torch.float8_e4m3fn)
    assert refusal(checkpoint, TypeError, ranks=2).endswith("or None, got 2")


def test_adapt_refuses_what_is_no_causal_language_model():
    model = make_model("qwen3_5", num_hidden_layers=1)
    with pytest.raises(ValueError, match="must be a causal language model of transformers, got"):
        th.adapt(model.model)
    th.adapt(model)
    with pytest.raises(ValueError, match="was adapted before"):
        th.adapt(model)


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ([1], r"model\.layers must have the 2 layers of its config, got 1"),
        ([1, 0], r"must have a linear_attn, as the model's config says, got \['self_attn', "),
    ],
)
def test_adapt_refuses_other_layers_than_the_config_says(kept: list[int], message: str):
    model = make_model("qwen3_5", **FEWEST_LAYERS["qwen3_5"])
    layers = model.model.layers
    model.model.layers = torch.nn.ModuleList([layers[number] for number in kept])
    with pytest.raises(ValueError, match=message):
        th.adapt(model)
    model.model.layers = layers
    th.adapt(model)  # nothing was changed


def qwen3_5_of_two() -> tuple[Any, str]:
    text = tf.Qwen3_5TextConfig(**{**SIZES, **LINEAR, "head_dim": 64, "rope_parameters": MROPE})
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2}
    vision_config = {**vision, "out_hidden_size": 64}
    config = tf.Qwen3_5Config(text_config=text.to_dict(), vision_config=vision_config)
    return tf.Qwen3_5ForConditionalGeneration(config), "qwen3_5: {} the vision part"


_ONE_LAYER = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}


def lfm2_vl() -> tuple[Any, str]:
    text = make_model("lfm2").config.to_dict()
    config = tf.Lfm2VlConfig(text_config=text, vision_config=_ONE_LAYER, projector_hidden_size=32)
    return tf.Lfm2VlForConditionalGeneration(config), "lfm2_vl: {} the vision part"


def lfm3_vl() -> tuple[Any, str]:
    text, vision = make_model("lfm3").config.to_dict(), {**_ONE_LAYER, "num_key_value_heads": 1}
    config = tf.Lfm3VlConfig(text_config=text, vision_config=vision, projector_hidden_size=32)
    return tf.Lfm3VlForConditionalGeneration(config), "lfm3_vl: {} the vision part"


def nemotron_h_omni() -> tuple[Any, str]:
    """Its text part has a head of its own."""
    sizes = {"vision_hidden_size": 32, "projector_hidden_size": 32}
    vision = {**_ONE_LAYER, "video_temporal_patch_size": 2, "image_size": 32, "max_img_size": 32}
    config = tf.NemotronH_Omni_Reasoning_V3_Config(
        text_config=make_model("nemotron_h").config.to_dict(), vision_config=vision, **sizes
    )
    return tf.NemotronH_Omni_Reasoning_V3(config), "nemotron_h_omni: {} the vision part"


def inkling_mm() -> tuple[Any, str]:
    """Whose weights have other names in a checkpoint than in its text part."""
    vision = {"hidden_size": 32, "num_hidden_layers": 5, "patch_size": 4}
    config = tf.InklingConfig(
        text_config=make_model("inkling").config.to_dict(),
        vision_config=vision,
        audio_config={"n_mel_bins": 4, "mel_vocab_size": 8},
    )
    hf_model = tf.InklingForConditionalGeneration(config)
    randomize(hf_model.requires_grad_(False), 0)
    return hf_model, "inkling_mm_model: {} the audio and vision part"


def inkling2(family: str = "inkling2", whole: str = "Inkling2") -> tuple[Any, str]:
    """The same."""
    text = make_model(family).config.to_dict()
    vision = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "patch_size": 4}
    vision |= {"text_hidden_size": text["hidden_size"], "projection_hidden_dim": 16}
    config = getattr(tf, f"{whole}Config")(text_config=text, vision_config=vision)
    hf_model = getattr(tf, f"{whole}ForConditionalGeneration")(config)
    randomize(hf_model.requires_grad_(False), 3)
    return hf_model, f"{family}: {{}} the vision part"


def inkling2_loop() -> tuple[Any, str]:
    """The same, with queries of messages that a checkpoint has in two tensors."""
    return inkling2("inkling2_loop", "Inkling2Loop")


MULTIMODAL = [qwen3_5_of_two, lfm2_vl, lfm3_vl, nemotron_h_omni, inkling_mm]
MULTIMODAL += [inkling2, inkling2_loop]


@pytest.mark.parametrize("make", MULTIMODAL)
def test_text_part_of_a_multimodal_checkpoint(make: Callable[[], Any], tmp_path: Path):
    hf_model, dropped = make()
    hf_model.eval().save_pretrained(tmp_path)
    oracle = ask(hf_model, make_texts([40]))
    dropped = dropped.format("the text part alone is served, without")
    for load in (lambda: th.from_pretrained(tmp_path), lambda: th.adapt(hf_model)):
        with pytest.warns(UserWarning, match=dropped) as warned:
            model = load()
        assert len(warned) == 1
        runner = th.Runner(model, **SMALL)
        assert_serves(runner, oracle, whole_texts([40]))
        assert model.eos_token_ids == ()
        assert model.vocab_size == VOCAB_SIZE


@pytest.mark.parametrize(("whole", "text"), [(True, False), (False, True), (False, False)])
@pytest.mark.parametrize("make", [qwen3_5_of_two, lfm2_vl])
def test_a_head_is_tied_as_the_whole_model_has_it(
    make: Callable[[], Any], whole: bool, text: bool, tmp_path: Path
):
    config = make()[0].config
    config.tie_word_embeddings, config.text_config.tie_word_embeddings = whole, text
    hf_model = type(make()[0])(config).eval()
    hf_model.save_pretrained(tmp_path)
    oracle = ask(hf_model, make_texts([20]))
    model = th.from_pretrained(tmp_path)
    runner = th.Runner(model, **SMALL)
    assert_serves(runner, oracle, whole_texts([20]))
    assert (model.head.weight is model.embedding.weight) == whole


def test_text_part_of_another_family(tmp_path: Path):
    hf_model, _ = lfm2_vl()
    hf_model.config.text_config = make_model("qwen3").config
    with pytest.raises(th.UnsupportedError) as caught:
        th.adapt(hf_model)
    assert str(caught.value) == (
        "lfm2_vl: config field text_config.model_type must be one of "
        "['lfm2', 'lfm2_moe', 'lfm2_vl'], got 'qwen3'"
    )


def test_a_text_model_warns_of_nothing(checkpoint: Path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        th.from_pretrained(checkpoint)


@pytest.mark.parametrize("family", ["glm5_next", "inkling", "inkling2"])
def test_a_model_of_a_class_that_transformers_lacks_is_pickled(family: str, tmp_path: Path):
    make_model(family, **FEWEST_LAYERS[family]).save_pretrained(tmp_path)
    model = th.from_pretrained(tmp_path)
    made = pickle.loads(pickle.dumps(model))
    assert type(made.hf_model) is type(model.hf_model)
    for ours, theirs in zip(made.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_the_models_own_generate_says_what_to_use():
    model = th.adapt(make_model("qwen3_5"))
    tokens = torch.tensor([[1, 2, 3]])
    for call in (model.hf_model.generate, model.hf_model, model.hf_model.model):
        with pytest.raises(th.UnsupportedError) as caught:
            call(tokens)
        assert "use th.Engine(th.Runner(th.adapt(hf_model))).generate(prompts)" in str(caught.value)
        assert "\n" not in str(caught.value)
    assert th.Runner(model, **SMALL).extend([], []).shape[0] == 0


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_our_attention_in_a_model_of_transformers_says_what_to_use(family: str):
    register_attention()
    hf_model = make_model(family, num_hidden_layers=1)
    hf_model.set_attn_implementation(ATTENTION_NAME)
    with pytest.raises(th.UnsupportedError, match=r"use th\.Engine"):
        hf_model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=2)


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        (None, TypeError, "a folder or a hub id, as a str or a Path, got None"),
        (5, TypeError, "a folder or a hub id, as a str or a Path, got 5"),
        ("", ValueError, "there is no folder ''"),
        ("./gone", ValueError, "there is no folder ./gone"),
        ("~/gone", ValueError, "there is no folder ~/gone"),
        (Path("gone"), ValueError, "there is no folder gone"),
        (__file__, ValueError, "path_or_id must be a folder, got the file"),
    ],
)
def test_what_is_no_checkpoint_is_named_as_it_was_typed(path: Any, error: Any, message: str):
    with pytest.raises(error, match=re.escape(message)):
        th.from_pretrained(path)


@pytest.mark.parametrize(
    ("device", "error", "message"),
    [
        ("gpu", ValueError, "device must be 'cpu', 'cuda' or 'cuda:N', got 'gpu'"),
        (None, ValueError, "device must be 'cpu', 'cuda' or 'cuda:N', got None"),
        ("meta", th.UnsupportedError, "device must be a CPU or CUDA device, got 'meta'"),
        ("cuda:99", th.UnsupportedError, "device 'cuda:99' is not there: torch sees"),
    ],
)
def test_a_device_that_is_not_there(tmp_path: Path, device: Any, error: Any, message: str):
    with pytest.raises(error, match=re.escape(message)):
        th.from_pretrained(tmp_path, device=device)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": None}, "the config of PATH names no model_type, got None"),
        ({"model_type": ["qwen3_5"]}, "the config of PATH names no model_type, got ['qwen3_5']"),
        ({"hidden_size": "large"}, "cannot read a model config from PATH: "),
        ({"model_type": "bamba"}, "cannot read a model config from PATH: "),
        ({"rope_parameters": {"rope_type": "longrope"}}, "cannot read a model config from PATH: "),
    ],
)
def test_a_config_that_cannot_be_is_one_line(checkpoint: Path, fields: Any, message: str):
    edit_config(checkpoint, **fields)
    text = refusal(checkpoint, ValueError)
    assert text.startswith(message)
    assert "\n" not in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot read PATH/generation_config.json: "),
        ('{"eos_token_id": "<end>"}', "eos_token_id of the generation config must be tokens"),
    ],
)
def test_a_generation_config_that_cannot_be_is_named(checkpoint: Path, text: str, message: str):
    (checkpoint / "generation_config.json").write_text(text)
    assert refusal(checkpoint, ValueError).startswith(message)


def test_few_changes_of_file():
    """A reader of the loader turns half as many pages as when each part asked for the family."""
    assert walk_through_loading().changes <= 644
