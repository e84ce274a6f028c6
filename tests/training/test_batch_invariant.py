"""A batch-invariant trainer's log-probabilities are those of such a server, bit for bit."""

from __future__ import annotations

import copy
import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import FP8Linear

import torch_hybrid as th
from tests.devices import needs_cuda
from tests.models import fp8_checkpoint
from tests.models.mtp_checkpoint import make_checkpoint
from tests.serving.test_batch_invariant import SIZES
from tests.tiny_models import FEWEST_LAYERS, VOCAB_SIZE, cast, make_model
from tests.training.histories import Histories
from tests.training.test_companions import TARGETS
from tests.training.twins import (
    FAMILIES,
    flattened,
    furthest,
    grads,
    make_pair,
    make_rows,
    make_twin,
)
from torch_hybrid.models.shared_weights import named_weights

EAGER = {"compile": False}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
CUTS = [0, 5, 6, 7, 47, 48, 400]  # of prompts in chunks, with single tokens between


def make_trainer(
    family: str = "qwen3_next_dense", dtype: torch.dtype = torch.float32, **options: Any
) -> Any:
    model = cast(make_pair(family)[0], dtype)
    return th.make_trainable(model, batch_invariant={**EAGER, **options})


def make_server(trainer: Any, **options: Any) -> th.Runner:
    """Serve the weights that a trainer has now."""
    model = th.adapt(copy.deepcopy(trainer))
    return th.Runner(model, **{**SIZES, "batch_invariant": True, **options})


def in_chunks(server: th.Runner, row: Tensor, **options: Any) -> Tensor:
    """Compute the logits of a row [1, T]."""
    [seq], tokens = server.new_sequences(1, **options), row[0].tolist()
    chunks = [tokens[start:end] for start, end in pairwise(CUTS) if start < len(tokens)]
    made = [server.extend([seq], [chunk], logits="all").clone() for chunk in chunks]
    server.free([seq])
    return torch.cat(made)


def assert_same_bits(trainer: Any, server: th.Runner, rows: list[Tensor], **options: Any) -> None:
    logits = torch.cat([in_chunks(server, row, **options) for row in rows])
    made = trainer(**flattened(rows)).logits[0]
    tokens = torch.cat(rows, 1)[0].to(made.device)
    assert torch.equal(made[:, : logits.shape[1]], logits.to(made.dtype))
    assert torch.equal(th.token_logprobs(made, tokens), th.token_logprobs(logits, tokens))


@pytest.mark.parametrize("family", ["minimax", "qwen4_exp", "inkling"])
def test_outputs_of_layers_are_recorded_beside_a_server(family: str):
    """By hooks of transformers on mixers whose weights the server takes."""
    twin, [row] = make_twin(family), make_rows([20])
    asked = {"labels": row, "output_router_logits": True, "output_hidden_states": True}
    expected = twin(row, **asked)
    made = th.make_trainable(twin, batch_invariant=EAGER)(row, **asked)
    torch.testing.assert_close(made.loss, expected.loss)
    torch.testing.assert_close(made.hidden_states, expected.hidden_states)
    adapted = th.adapt(twin)
    assert not any(module._forward_hooks for module in adapted.modules())
    assert not adapted.hf_model._forward_pre_hooks


@DTYPES
@pytest.mark.parametrize("family", FAMILIES)
def test_a_trainer_has_the_bits_of_a_server(family: str, dtype: torch.dtype):
    """Packed in any order, and after a step of an optimizer as well; whatever way it served."""
    trainer, rows = make_trainer(family, dtype), make_rows()
    before = make_server(trainer)
    assert_same_bits(trainer, before, rows)
    optimizer = torch.optim.SGD(trainer.parameters(), lr=0.1)
    trainer(**flattened(rows)).loss.backward()
    optimizer.step()
    after = make_server(trainer)
    assert not torch.equal(in_chunks(after, rows[0]), in_chunks(before, rows[0]))
    assert_same_bits(trainer, after, rows[::-1])
    histories = Histories(trainer, seed=13)
    histories.round(num_requests=3)
    counts = histories.counts
    assert min(counts.histories, counts.hits, counts.preemptions, counts.accepted) > 0


@pytest.mark.parametrize("family", ["qwen3_next", "mamba2", "rwkv", "xlstm", "inkling"])
def test_gradients_are_the_trainers(family: str):
    rows = make_rows()
    plain, trainer = make_pair(family)[1], make_trainer(family)
    expected = grads(plain, plain(**flattened(rows)).loss)
    loss = trainer(**flattened(rows)).loss
    torch.testing.assert_close(loss, plain(**flattened(rows)).loss)
    assert furthest(grads(trainer, loss), expected) < 1e-3


def test_nothing_is_computed_in_vain():
    """The head's product is the server's alone, and without gradients so are the layers."""
    trainer, [row] = make_trainer(), make_rows([20])
    trainer(row)  # makes the server, which would be a copy with hooks
    ran: list[Any] = []
    for part in (trainer.model, trainer.lm_head):
        part.register_forward_hook(lambda part, *_: ran.append(part))
    trainer(row, labels=row).loss.backward()
    assert ran == [trainer.model]
    for each in (trainer.train(), trainer.eval()):
        with torch.no_grad():
            made = each(row, labels=row, use_cache=False)
        torch.testing.assert_close(made.loss, trainer(row, labels=row).loss)
    ran.clear()
    with torch.no_grad():
        layers = trainer(row, output_hidden_states=True, use_cache=False).hidden_states
        assert trainer.requires_grad_(False)(row, use_cache=False).hidden_states is None
    assert len(layers) == 1 + trainer.config.num_hidden_layers
    assert ran == [trainer.model]


@pytest.mark.parametrize(
    ("family", "dtype"), [("qwen3_5", torch.bfloat16), ("bailing_hybrid", torch.float32)]
)
def test_a_head_that_drafts_and_trains(family: str, dtype: torch.dtype, tmp_path: Path):
    make_checkpoint(family, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).train()
    plain = th.make_trainable(copy.deepcopy(model), mtp=tmp_path)
    trainer = th.make_trainable(model, mtp=tmp_path, batch_invariant=EAGER)
    served = th.from_pretrained(tmp_path, dtype, mtp=True)
    rows, histories = make_rows(), Histories(trainer, 13, served)
    for _ in range(2):
        histories.round(num_requests=3)
        made, expected = (each(**flattened(rows)) for each in (trainer, plain))
        torch.testing.assert_close(made.mtp_loss, expected.mtp_loss)
        torch.testing.assert_close(made.loss, expected.loss, rtol=1e-2, atol=0.0)
        made.loss.backward()
        torch.optim.SGD(trainer.parameters(), lr=0.1).step()
        histories.runner.update_weights(trainer)
        plain.load_state_dict(trainer.state_dict())
    histories.round(num_requests=3)
    assert histories.counts.hits > 0


def test_rows_with_padding():
    trainer, (short, long) = make_trainer(), make_rows([9, 30])
    server = make_server(trainer)
    ids = torch.cat([torch.nn.functional.pad(short, (21, 0)), long])
    mask = torch.ones_like(ids)
    mask[0, :21] = 0
    made = trainer(input_ids=ids, attention_mask=mask, logits_to_keep=9).logits
    assert torch.equal(made[0], in_chunks(server, short))
    assert torch.equal(made[1], in_chunks(server, long)[-9:])


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_graph_of_the_trainer(mode: str):
    trainer, rows = getattr(make_trainer(), mode)(), make_rows()
    step = torch.compile(trainer, fullgraph=True, backend="aot_eager")
    made, expected = (each(**flattened(rows)) for each in (step, trainer))
    assert torch.equal(made.logits, expected.logits)
    torch.testing.assert_close(made.loss, expected.loss)
    made.loss.backward()


def test_a_graph_of_an_optimizers_step_and_a_forward():
    """In a graph, new weights are written in their places at its end."""
    trainer, [row] = make_trainer(), make_rows([20])
    before = trainer(row, labels=row)
    before.loss.backward()
    weights = list(trainer.parameters())
    grads = [weight.grad for weight in weights]

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step() -> Tensor:
        with torch.no_grad():  # as an optimizer, whose own step breaks graphs
            torch._foreach_add_(weights, grads, alpha=-0.1)
        return trainer(row).logits

    for _ in range(2):
        made = step()
        assert not torch.equal(made, before.logits)
        assert torch.equal(made, trainer(row).logits)


def test_the_op_is_what_its_schema_says():
    trainer, [row] = make_trainer(), make_rows([20])
    head = trainer.lm_head.weight
    hidden = torch.randn(1, 20, head.shape[1], requires_grad=True)
    offsets = torch.tensor([0, 12, 20], dtype=torch.int32)
    weights = [weight.detach() for _, weight in named_weights(trainer)]
    number = trainer.server.number
    given = (row, offsets, weights, 30.0, VOCAB_SIZE, torch.float32, number)
    op = torch.ops.torch_hybrid.served_logits.default
    torch.library.opcheck(op, (hidden, head, *given))
    torch.library.opcheck(op, (None, None, *given))


def test_adapters_and_checkpointing():
    trainer = make_trainer()
    targets = ["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "down_proj", "lm_head"]
    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    adapted = peft.get_peft_model(trainer, config)
    trainer.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    rows, weight = make_rows(), trainer.model.layers[0].linear_attn.out_proj.base_layer.weight
    kept = weight.clone()
    for _ in range(2):
        assert_same_bits(adapted, make_server(adapted), rows)
        adapted(**flattened(rows)).loss.backward()
        torch.optim.SGD(adapted.parameters(), lr=0.1).step()
    assert torch.equal(weight, kept)  # nothing was merged into the trainer


def over_fp8(folder: Path) -> Any:
    """Make a LoRA over a checkpoint in block-FP8, as transformers holds it."""
    sizes = {**FEWEST_LAYERS["qwen3_next_dense"], **fp8_checkpoint.SIZES}
    model = make_model("qwen3_next_dense", **sizes)
    fp8_checkpoint.save(model, folder)
    stored = load_file(folder / "model.safetensors")
    for name in [each.removesuffix("_scale_inv") for each in stored if "_scale_inv" in each]:
        path = name.removesuffix(".weight")
        linear = model.get_submodule(path)
        model.set_submodule(path, FP8Linear(linear.in_features, linear.out_features, (128, 128)))
    model.load_state_dict(stored)
    model.config.quantization_config = fp8_checkpoint.QUANTIZATION
    model.config._name_or_path = str(folder)
    return make_lora(model)


def over_integers(folder: Path) -> Any:
    """Make a LoRA over INT8 of torchao."""
    pytest.importorskip("torchao")
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = make_model("qwen3_next_dense", **FEWEST_LAYERS["qwen3_next_dense"])
    model.save_pretrained(folder)
    quantize_(model.model.requires_grad_(False), Int8WeightOnlyConfig())
    model.config.quantization_config = {"quant_method": "torchao"}
    model.config._name_or_path = str(folder)
    return make_lora(model)


def make_lora(model: Any) -> Any:
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=TARGETS, init_lora_weights=False)
    return peft.get_peft_model(model, config)


@pytest.mark.filterwarnings("ignore:TorchaoLoraLinear was instantiated")
@pytest.mark.parametrize("weights", ["auto", "int8"])
def test_an_adapter_over_a_quantized_base(weights: str, tmp_path: Path):
    make = over_fp8 if weights == "auto" else over_integers
    given = {} if weights == "auto" else {"weights": weights}
    adapted = th.make_trainable(make(tmp_path), batch_invariant={**EAGER, **given})
    rows, options = make_rows(), {**SIZES, "batch_invariant": True, "max_adapters": 1}
    server = th.Runner(th.from_pretrained(tmp_path, weights=weights), **options)
    step = torch.compile(adapted, fullgraph=True, backend="eager")
    for number in range(2):
        adapted.save_pretrained(tmp_path / str(number))
        for source in (adapted, tmp_path / str(number)):  # from memory or not
            server.load_adapter("policy", source)
            assert_same_bits(adapted, server, rows, adapter="policy")
            server.unload_adapter("policy")
        adapted(**flattened(rows)).loss.backward()
        torch.optim.SGD(adapted.parameters(), lr=0.1).step()
    assert torch.equal(step(**flattened(rows)).logits, adapted(**flattened(rows)).logits)
    with adapted.disable_adapter(), torch.no_grad():
        assert_same_bits(adapted, server, rows)


def test_copies_and_longer_sequences():
    trainer, rows = make_trainer(), make_rows()
    trainer(rows[0])
    copies = [copy.deepcopy(trainer), pickle.loads(pickle.dumps(trainer))]
    with torch.no_grad():
        trainer.lm_head.weight += 1
    assert_same_bits(trainer, make_server(trainer), rows)
    for each in copies:
        assert_same_bits(each, make_server(each), rows)
    [long] = make_rows([2300])
    longer = make_server(trainer, kv_tokens=4800, max_tokens=2300)
    [seq] = longer.new_sequences(1)
    expected = longer.extend([seq], long.tolist(), logits="all")
    assert torch.equal(trainer(long).logits[0], expected)


def test_a_step_that_fails_holds_nothing(monkeypatch: pytest.MonkeyPatch):
    trainer, [row] = make_trainer(), make_rows([20])
    expected = trainer(row).logits
    with monkeypatch.context() as patched:
        patched.setattr(th.Runner, "extend", Mock(side_effect=th.CapacityError("no room")))
        with pytest.raises(th.CapacityError):
            trainer(row)
    assert torch.equal(trainer(row).logits, expected)


def test_calls_with_a_cache_and_a_model_that_is_adapted_are_as_before():
    trainer, [row] = make_trainer(), make_rows([20])
    plain = make_pair()[1].eval()
    made = trainer.eval().generate(row, max_new_tokens=5, do_sample=False)
    assert torch.equal(made, plain.generate(row, max_new_tokens=5, do_sample=False))
    assert "server" not in vars(th.adapt(trainer).hf_model)


def test_what_cannot_be_had_is_refused():
    trainer, [row] = make_trainer(), make_rows([20])
    with pytest.raises(ValueError, match="takes input_ids alone, got inputs_embeds"):
        trainer(inputs_embeds=trainer.get_input_embeddings()(row))
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(ValueError, match=r"runs in the dtype of its weights, .*, got autocast"),
    ):
        trainer(row)
    decoder = make_pair()[0].model
    with pytest.raises(th.UnsupportedError, match="batch_invariant is for a causal language model"):
        th.make_trainable(decoder, batch_invariant=True)
    for method, missing in (("torchao", "'weights': 'int8'"), ("fp8", "name_or_path is empty")):
        base = make_pair()[0]
        base.config.quantization_config = {"quant_method": method}
        with pytest.raises(th.UnsupportedError, match=missing):
            th.make_trainable(make_lora(base), batch_invariant=True)
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        make_trainer(colour="red")(row)


@needs_cuda
@DTYPES
@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1", "olmo_hybrid"])
def test_on_a_gpu(family: str, dtype: torch.dtype):
    trainer = cast(make_pair(family)[0], dtype).cuda()
    th.make_trainable(trainer, batch_invariant=True)
    rows = [row.cuda() for row in make_rows()]
    for _ in range(2):
        server = make_server(trainer, compile=True)
        logits = torch.cat([in_chunks(server, row) for row in rows])
        ends = torch.tensor([0, *(row.shape[1] for row in rows)]).cumsum(0)
        out = trainer(torch.cat(rows, 1), packing=th.Packing(ends).to("cuda"))
        assert torch.equal(out.logits[0], logits)
        out.logits.float().square().mean().backward()
        torch.optim.SGD(trainer.parameters(), lr=0.1).step()
