"""Heads that predict further tokens train beside their model, and are served by what was saved."""

from __future__ import annotations

import copy
from itertools import pairwise
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

import torch_hybrid as th
from tests.models.mtp_checkpoint import Oracle, make_checkpoint
from tests.tiny_models import FEWEST_LAYERS, in_double, make_model
from tests.tiny_vision import make_vision_model
from tests.training.test_compiled import TOKENS, compiled_steps
from tests.training.twins import flattened, furthest, grads, make_rows

FAMILIES = ("qwen3_next", "qwen3_5", "bailing_hybrid", "nemotron_h")
WEIGHT = 0.3
LENGTHS = [40, 1, 3, 20]
SIZES: dict[str, Any] = {"max_seqs": 1, "max_tokens": 32, "kv_tokens": 64, "compile": False}
each_family = pytest.mark.parametrize("family", FAMILIES)
each_layout = pytest.mark.parametrize("family", ["qwen3_next", "bailing_hybrid"])


def load(folder: Path, **options: Any) -> Any:
    """Load the model of a checkpoint, and its head to train with it."""
    model = tf.AutoModelForCausalLM.from_pretrained(folder, **options).train()
    return th.make_trainable(model, mtp=folder, mtp_loss_weight=WEIGHT)


@pytest.fixture
def twin(tmp_path: Path) -> Any:
    make_checkpoint("qwen3_next_dense", tmp_path)
    return load(tmp_path)


def exactly(oracle: Oracle) -> Oracle:
    """Copy an oracle in float64, whose model has the weights of the head too."""
    model = oracle.model
    model.mtp = nn.ModuleDict({"layers": oracle.layers, **oracle.norms})
    model.mtp.fc = nn.Linear(*oracle.fc.shape[::-1], bias=False)
    model.mtp.fc.weight.data = oracle.fc
    model = in_double(model).requires_grad_()
    model.set_experts_implementation("eager")  # grouped products have no float64
    exact = copy.copy(oracle)
    exact.model, exact.base, exact.fc = model, model.base_model, model.mtp.fc.weight
    exact.layers = model.mtp.layers
    exact.norms = {name: model.mtp[name] for name in oracle.norms}
    return exact


def losses(oracle: Oracle, row: Tensor) -> Tensor:
    """Sum the cross entropies of one sequence: of the model, and of the head."""
    hidden = oracle.base(row, use_cache=False).last_hidden_state
    before = pad(hidden[:, :-1], (0, 0, 1, 0))
    further = oracle.norms["norm"](oracle._run(oracle._joined(row, before)))
    return torch.stack(
        [
            cross_entropy(oracle.model.lm_head(x)[0, :-1], row[0, 1:], reduction="sum")
            for x in (hidden, further)
        ]
    )


@each_family
def test_gradients_are_those_of_a_head_in_plain_pytorch(family: str, tmp_path: Path):
    """Of sequences one by one, in float64."""
    exact = exactly(make_checkpoint(family, tmp_path))
    ours = load(tmp_path, dtype=torch.float64)
    ours.set_experts_implementation("eager")
    rows = make_rows(LENGTHS)
    of_model, of_head = sum(losses(exact, row) for row in rows) / (sum(LENGTHS) - len(LENGTHS))
    loss = of_model + WEIGHT * of_head
    made = ours(**flattened(rows))
    for mine, other in ((made.mtp_loss, of_head), (made.loss, loss)):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=0.0)
    assert furthest(grads(ours, made.loss), grads(exact.model, loss)) < 1e-4


@each_layout
def test_what_was_trained_is_served(family: str, tmp_path: Path):
    """Drafts after each token are those of the trained head, saved by its names or in memory."""
    make_checkpoint(family, tmp_path)
    twin, row = load(tmp_path), make_rows([12])[0]
    optimizer = torch.optim.AdamW(twin.parameters(), lr=0.01)
    for _ in range(3):
        twin(row, labels=row).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    old, folder = load_file(tmp_path / "model.safetensors"), tmp_path / "trained"
    twin.save_pretrained(folder)
    new = load_file(folder / "model.safetensors")
    shared = {"model.layers.2.embed_tokens.weight", "model.layers.2.shared_head.head.weight"}
    assert new.keys() == old.keys() - shared
    taught = predictions(twin, row)
    assert drafts(th.from_pretrained(folder, mtp=True), row) == taught
    assert drafts(th.adapt(twin), row) == taught
    assert len(set(taught)) > 3


def predictions(model: Any, row: Tensor) -> list[int]:
    """Predict by a head that trains what follows each token but the first."""
    made: list[int] = []

    def take(_head: nn.Module, _inputs: Any, out: Tensor) -> None:
        made.extend(model.lm_head(out).argmax(-1).tolist())

    hook = model.mtp.register_forward_hook(take)
    model(row, labels=row)
    hook.remove()
    return made[1:]


def drafts(model: Any, row: Tensor) -> list[int]:
    """Draft a token after each one but the first, with what was before."""
    runner, tokens, made = th.Runner(model, **SIZES, max_drafts=1), row[0].tolist(), []
    seqs = runner.new_sequences(1)
    for token, following in pairwise(tokens):
        runner.extend(seqs, [[token]])
        made += runner.draft(seqs, [following], [1])[0]
    return made


def test_the_text_part_of_a_checkpoint_that_sees(tmp_path: Path):
    make_checkpoint("qwen3_5", tmp_path)
    seeing = make_vision_model("qwen3_5", **FEWEST_LAYERS["qwen3_5"])
    seeing.save_pretrained(tmp_path / "seeing")
    file = tmp_path / "seeing/model.safetensors"
    head = {n: x for n, x in load_file(tmp_path / "model.safetensors").items() if "mtp" in n}
    save_file({**load_file(file), **head}, file, {"format": "pt"})
    load(file.parent).save_pretrained(tmp_path / "text")
    row = make_rows([9])[0]
    made, expected = (
        drafts(th.from_pretrained(tmp_path / name, mtp=True), row) for name in ("text", "seeing")
    )
    assert made == expected
    with pytest.raises(th.UnsupportedError, match="texts alone, as AutoModelForCausalLM loads it"):
        th.make_trainable(seeing, mtp=file.parent)


def test_rows_padded_at_either_side_have_the_loss_of_packed_ones(twin: Any):
    rows = make_rows([33, 20])
    packed = twin(**flattened(rows))
    for padding in ((13, 0), (0, 13)):
        ids, mask, labels = (
            torch.cat([x[0], pad(x[1], padding, value=value)])
            for x, value in ((rows, 0), ([torch.ones_like(row) for row in rows], 0), (rows, -100))
        )
        padded = twin(ids, attention_mask=mask, labels=labels)
        torch.testing.assert_close(padded.mtp_loss, packed.mtp_loss)
        torch.testing.assert_close(padded.loss, packed.loss)


def test_tokens_without_a_label_and_a_given_number_of_items(twin: Any):
    sent = flattened(make_rows(LENGTHS))
    whole = twin(**sent)
    parts = [sent["labels"].clone() for _ in range(2)]
    parts[0][:, 17:], parts[1][:, :17] = -100, -100
    count = torch.tensor(sum(LENGTHS) - len(LENGTHS))
    made = [twin(**{**sent, "labels": each}, num_items_in_batch=count) for each in parts]
    for name in ("loss", "mtp_loss"):
        torch.testing.assert_close(sum(each[name] for each in made), whole[name])


def test_embeddings_positions_and_logits_are_taken_and_given(twin: Any):
    sent = flattened(make_rows(LENGTHS))
    made = twin(**sent, skip_logits=False)
    embedded = twin.get_input_embeddings()(sent["input_ids"])
    of_embedded = twin(**{**sent, "input_ids": None}, inputs_embeds=embedded)
    assert torch.equal(of_embedded.mtp_loss, made.mtp_loss)
    logits = twin.eval()(sent["input_ids"], position_ids=sent["position_ids"]).logits
    torch.testing.assert_close(made.logits, logits)
    assert twin(**sent).keys() == {"loss", "logits"}


def test_positions_with_axes_are_those_of_texts(tmp_path: Path):
    make_checkpoint("qwen3_5", tmp_path)
    twin, sent = load(tmp_path), flattened(make_rows(LENGTHS))
    of_text, place = twin(**sent).mtp_loss, sent.pop("position_ids")
    assert torch.equal(twin(**sent, position_ids=place.expand(4, -1, -1)).mtp_loss, of_text)
    others = twin(**sent, position_ids=torch.stack([place, place, 3 * place, place]))
    assert not torch.equal(others.mtp_loss, of_text)


def test_routers_of_the_head_are_of_no_balance(tmp_path: Path):
    make_checkpoint("qwen3_next", tmp_path)
    plain = th.make_trainable(tf.AutoModelForCausalLM.from_pretrained(tmp_path)).train()
    sent = {**flattened(make_rows(LENGTHS)), "output_router_logits": True}
    made, expected = load(tmp_path)(**sent), plain(**sent)
    assert torch.equal(made.aux_loss, expected.aux_loss)
    torch.testing.assert_close(made.loss, expected.loss + WEIGHT * made.mtp_loss)


def test_no_packing_compiles_another_graph(twin: Any):
    torch._dynamo.reset()
    step = torch.compile(twin, fullgraph=True, backend="aot_eager")
    assert compiled_steps(twin, step, twin, [TOKENS, 160, 144]) < 1e-5


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_keeps_gradients(twin: Any, use_reentrant: bool):
    sent = flattened(make_rows(LENGTHS))
    plain = grads(twin, twin(**sent).loss)
    options = {"use_reentrant": use_reentrant}
    twin.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    twin.enable_input_require_grads()
    assert furthest(grads(twin, twin(**sent).loss), plain) < 1e-6


@pytest.mark.parametrize(
    ("options", "trained"),
    [
        ({"target_modules": ["q_proj"], "exclude_modules": r"mtp\..*"}, None),
        ({"target_modules": ["q_proj"]}, "lora"),
        ({"target_modules": ["q_proj", "lm_head"], "modules_to_save": ["mtp"]}, "modules_to_save"),
    ],
)
def test_adapters_train_what_they_target_in_the_head(
    twin: Any, options: dict[str, Any], trained: str | None, tmp_path: Path
):
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, init_lora_weights=False, **options)
    adapted = peft.get_peft_model(twin, config)
    sent = flattened(make_rows(LENGTHS))
    made = adapted(**sent)
    of_head = [name for name in grads(adapted, made.loss) if ".mtp." in name]
    assert bool(of_head) == (trained is not None)
    assert all(trained in name for name in of_head)
    adapted.save_pretrained(tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(load(tmp_path), tmp_path / "adapter", is_trainable=True)
    again = loaded.train()(**sent)
    torch.testing.assert_close(again.mtp_loss, made.mtp_loss)
    row = make_rows([9])[0]
    taught = predictions(loaded.get_base_model(), row)
    assert drafts(th.adapt(loaded), row) == taught


def test_trainers_resume_from_what_was_saved(twin: Any, tmp_path: Path):
    """By names of files, which are not all those of modules."""
    sent = flattened(make_rows(LENGTHS))
    fresh = copy.deepcopy(twin)
    for weight in twin.parameters():
        weight.data.mul_(1.1)
    twin.save_pretrained(tmp_path / "trained")
    for weights in (load_file(tmp_path / "trained/model.safetensors"), twin.state_dict()):
        made = copy.deepcopy(fresh)
        made.load_state_dict(weights)
        assert torch.equal(made(**sent).loss, twin(**sent).loss)


def test_a_frozen_model_trains_its_head_alone(tmp_path: Path):
    make_checkpoint("qwen3_next_dense", tmp_path)
    model = tf.AutoModelForCausalLM.from_pretrained(tmp_path).requires_grad_(False).train()
    th.make_trainable(model, mtp=tmp_path)
    made = grads(model, model(**flattened(make_rows(LENGTHS))).loss)
    assert made.keys() == {f"mtp.{name}" for name, _ in model.mtp.named_parameters()}
    kept = copy.deepcopy(model)
    assert th.make_trainable(kept, mtp="nowhere") is kept  # it has its head


def test_a_model_that_trains_takes_a_head_later(tmp_path: Path):
    make_checkpoint("qwen3_next_dense", tmp_path)
    model = th.make_trainable(tf.AutoModelForCausalLM.from_pretrained(tmp_path)).train()
    sent, names = flattened(make_rows(LENGTHS)), list(model.state_dict())
    assert not any("mtp" in name for name in names)
    loss = model(**sent).loss
    made = th.make_trainable(model, mtp=tmp_path)(**sent)
    torch.testing.assert_close(made.loss, loss + 0.1 * made.mtp_loss)
    assert [name for name in model.state_dict() if not name.startswith("mtp.")] == names


def test_losses_without_that_of_the_head_are_refused(twin: Any):
    [row] = make_rows([9])
    with pytest.raises(th.UnsupportedError, match="TRL's own head leaves out the loss of an MTP"):
        twin(row, labels=row, fused_lm_head=True)


def test_what_is_refused(tmp_path: Path):
    full = tmp_path / "full"
    make_checkpoint("qwen3_next_dense", full)
    model = tf.AutoModelForCausalLM.from_pretrained(full)
    kind = type(model)
    bare, other = tmp_path / "bare", tmp_path / "other"
    make_model("qwen3_next_dense", num_hidden_layers=2).save_pretrained(bare)
    make_checkpoint("qwen3_next_dense", other, hidden_size=32)
    for path, told in [
        (tmp_path / "none", "there is no folder .*none"),
        (bare, "bare has no MTP head: there is no tensor mtp.fc.weight"),
        (other, r"hidden_size, .* are .*64, .* got .*32"),
    ]:
        with pytest.raises(ValueError, match=told):
            th.make_trainable(model, mtp=path)
    for weight in (-0.1, float("nan")):
        with pytest.raises(ValueError, match="mtp_loss_weight must be finite and at least 0"):
            th.make_trainable(model, mtp=full, mtp_loss_weight=weight)
    assert type(model) is kind
    unknown = make_model("mamba2", num_hidden_layers=1)
    unknown.save_pretrained(bare)
    with pytest.raises(th.UnsupportedError, match="'mamba2' has no MTP head that is known here"):
        th.make_trainable(unknown, mtp=bare)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(th.UnsupportedError, match="call make_trainable first, then get_peft"):
        th.make_trainable(adapted, mtp=full)
