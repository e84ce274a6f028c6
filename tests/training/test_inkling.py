"""Inkling and Inkling-2: attention with biases, variants of both, and their multimodal forms."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn
from torch.autograd import forward_ad
from transformers.models.inkling import modeling_inkling as inkling

import torch_hybrid as th
from tests.tiny_models import FEWEST_LAYERS, make_model, randomize
from tests.training.twins import flattened, furthest, grads, make_pair, make_rows
from torch_hybrid.training.flex_attention import attend_with_biases
from torch_hybrid.training.mixers.inkling_attention import biased_attention

inkling2 = pytest.importorskip("transformers.models.inkling2.modeling_inkling2")
LENGTHS = [1, 0, 150, 7, 0]
OFFSETS = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
REACHES = [(50, None), (1, None), (200, None), (37, 37), (130, 130), (5, 3)]
each_reach = pytest.mark.parametrize(("reach", "window"), REACHES)


def make_inputs(reach: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Make q, k, v and biases: two heads of queries read one of keys."""
    generator = torch.Generator().manual_seed(0)
    sizes = (4, 16), (2, 16), (2, 24), (4, reach)
    return [
        torch.randn(158, *size, generator=generator, dtype=dtype).requires_grad_() for size in sizes
    ]


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    return out * (lse - sinks).sigmoid()[..., None]


def with_gradients(out: Tensor, lse: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """Return results, and gradients of a loss that reads both."""
    loss = with_sinks(out, lse, lse.detach().cos()).square().sum() + lse.sin().sum()
    return [out, lse, *torch.autograd.grad(loss, inputs)]


@each_reach
def test_outputs_are_those_of_transformers(reach: int, window: int | None):
    q, k, v, bias = (x.detach().float() for x in make_inputs(reach))
    sinks = torch.randn(len(q), 4, generator=torch.Generator().manual_seed(1))
    biases, module = inkling.InklingRelativeLogits(reach, reach), nn.Module()
    biases.proj, module.num_key_value_groups = nn.Parameter(torch.eye(reach)), 2
    plain, sunk = [], []
    for start, end in pairwise(OFFSETS):
        row = torch.arange(end - start)
        before = row[:, None] - row
        seen = (before >= 0) & (before < (len(q) if window is None else window))
        heads = [x[start:end].transpose(0, 1)[None] for x in (q, k, v)]
        mask = torch.where(seen, 0.0, -torch.inf)
        options = {"scaling": 0.3, "position_bias": biases(bias[None, start:end], row, row)}
        plain += inkling.eager_attention_forward(module, *heads, mask, **options)[0]
        options["sinks"] = sinks[start:end].T[None, ..., None]
        sunk += inkling2.eager_attention_forward(module, *heads, mask, **options)[0]
    out, lse = biased_attention(q, k, v, bias, OFFSETS, scale=0.3, window=window)
    torch.testing.assert_close(out, torch.cat(plain))
    torch.testing.assert_close(with_sinks(out, lse, sinks), torch.cat(sunk))


@each_reach
def test_gradients_are_those_of_one_mask(reach: int, window: int | None):
    """With all T x T weights; dropout of a probability that drops none takes that form."""
    inputs = make_inputs(reach)
    made = []
    for dropout in (0.0, 1e-30):
        outs = biased_attention(*inputs, OFFSETS, scale=0.3, window=window, dropout=dropout)
        made.append(with_gradients(*outs, inputs))
    torch.testing.assert_close(*made)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sequence_has_the_bits_that_it_has_alone(dtype: torch.dtype, window: int | None):
    inputs, whole = make_inputs(20, dtype), torch.tensor([0, 150], dtype=torch.int32)
    alone = [x[1:151].detach().requires_grad_() for x in inputs]
    bits = []
    for given, offsets, rows in ((inputs, OFFSETS, slice(1, 151)), (alone, whole, slice(None))):
        made = [x[rows] for x in biased_attention(*given, offsets, scale=0.3, window=window)]
        loss = torch.stack([x.float().square().sum() for x in made]).sum()
        bits.append([*made, *(x[rows] for x in torch.autograd.grad(loss, given))])
    assert all(map(torch.equal, *bits))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@each_reach
def test_flex_attention_has_the_same_gradients(
    reach: int, window: int | None, monkeypatch: pytest.MonkeyPatch
):
    """Without a kernel it has gradients on a CPU too, where torch refuses them."""
    monkeypatch.setattr(torch.nn.attention.flex_attention, "_validate_device", lambda *_: None)
    inputs = [x.detach().float().requires_grad_() for x in make_inputs(reach)]
    expected = with_gradients(*biased_attention(*inputs, OFFSETS, scale=0.3, window=window), inputs)
    made = with_gradients(*attend_with_biases(*inputs, OFFSETS, 0.3, window), inputs)
    torch.testing.assert_close(made, expected, atol=1e-4, rtol=1e-4)


def test_forward_mode_is_refused():
    q, *others = (x.detach() for x in make_inputs(5))
    with (
        forward_ad.dual_level(),
        pytest.raises(NotImplementedError, match="biased_attention has no forward-mode derivative"),
    ):
        biased_attention(forward_ad.make_dual(q, q), *others, OFFSETS, scale=0.3)


def losses(theirs: Any, ours: Any) -> tuple[Tensor, Tensor]:
    """Compute the mean loss of packed sequences, and of each one alone."""
    rows = make_rows([70, 1, 33])
    alone = [theirs(row, labels=row, use_cache=False).loss * (row.shape[1] - 1) for row in rows]
    return ours(**flattened(rows)).loss, (alone[0] + alone[2]) / 101


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("inkling", {"log_scaling_n_floor": None, "unpadded_vocab_size": 193}),
        ("inkling", {"rel_extent": 1, "sliding_window_size": 1, "conv_kernel_size": 2}),
        ("inkling2", {"unpadded_vocab_size": 193, "rel_extent": 300}),
        (
            "inkling2",
            {"num_hidden_layers": 5, "layer_types": ["hybrid", "hybrid_sliding"] * 2 + ["hybrid"]},
        ),
    ],
    ids=str,
)
def test_variants_train(family: str, options: dict[str, Any]):
    theirs, ours = make_pair(family, **options)
    packed, alone = losses(theirs, ours)
    torch.testing.assert_close(packed, alone)
    assert furthest(grads(ours, packed), grads(theirs, alone)) < 2e-4


@pytest.mark.parametrize("family", ["inkling", "inkling2"])
def test_dropout_is_of_training_alone(family: str):
    ours = make_pair(family, attention_dropout=0.5)[1]
    sent = flattened(make_rows([70, 33]))
    torch.manual_seed(0)
    first = ours(**sent).loss
    assert not torch.equal(ours(**sent).loss, first)
    assert all(each.isfinite().all() for each in grads(ours, first).values())
    assert torch.equal(ours.eval()(**sent).loss, ours(**sent).loss)


IMAGE, AUDIO = 197, 198


def make_seeing(family: str) -> tuple[Any, dict[str, Tensor]]:
    """Make a multimodal model, and what a processor gives of an image and, to Inkling, a sound."""
    tower = {"patch_size": 4, "num_hidden_layers": 4, "text_hidden_size": 64}
    parts: dict[str, Any] = {
        "text_config": make_model(family, **FEWEST_LAYERS[family]).config.to_dict(),
        "vision_config": tower,
        "image_token_id": IMAGE,
    }
    ids = make_rows([20])[0]
    ids[0, 3:9] = IMAGE
    generator = torch.Generator().manual_seed(0)
    if family == "inkling":
        sound = {"text_hidden_size": 64, "n_mel_bins": 4, "mel_vocab_size": 8}
        config: Any = tf.InklingConfig(**parts, audio_config=sound, audio_token_id=AUDIO)
        model: Any = tf.InklingForConditionalGeneration(config)
        ids[0, 12:14] = AUDIO
        seen = {
            "pixel_values": torch.randn(6, 2, 4, 4, 3, generator=generator),
            "audio_input_ids": torch.randint(0, 8, (1, 2, 4), generator=generator),
        }
    else:
        tower |= {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
        tower |= {"posemb_grid_size": 4, "projection_hidden_dim": 48}
        model = tf.Inkling2ForConditionalGeneration(tf.Inkling2Config(**parts))
        seen = {
            "pixel_values": torch.randn(6, 8, 8, 3, generator=generator),
            "image_grid_thw": torch.tensor([[1, 2, 3]]),
        }
    randomize(model.requires_grad_(False), 0)
    return model.requires_grad_().train(), {"input_ids": ids, **seen}


@pytest.mark.parametrize("family", ["inkling", "inkling2"])
def test_multimodal_models_train_with_images_and_packed_texts(family: str):
    theirs, seen = make_seeing(family)
    ours = th.make_trainable(copy.deepcopy(theirs))
    labels = seen["input_ids"]
    mine, other = ours(**seen, labels=labels), theirs(**seen, labels=labels, use_cache=False)
    torch.testing.assert_close(mine.loss, other.loss)
    assert furthest(grads(ours, mine.loss), grads(theirs, other.loss)) < 2e-4
    packed, alone = losses(theirs, ours)
    torch.testing.assert_close(packed, alone)
    rows = make_rows([20, 9])
    mask = torch.cat([torch.zeros(1, 4), torch.ones(1, 20)], 1).long()
    with torch.no_grad():
        for stated in ("position_ids", "seq_idx"):
            sent = flattened(rows)
            logits = ours(sent["input_ids"], **{stated: sent[stated]}).logits[0]
            single = torch.cat([theirs(row, use_cache=False).logits[0] for row in rows])
            torch.testing.assert_close(logits, single, atol=2e-4, rtol=2e-4)
        padded = ours(torch.cat([rows[1][:, :4], rows[0]], 1), attention_mask=mask).logits[0, 4:]
        torch.testing.assert_close(padded, single[:20], atol=2e-4, rtol=2e-4)
    options = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
    assert torch.equal(*(model.eval().generate(**seen, **options) for model in (theirs, ours)))
    with pytest.raises(ValueError, match="got seq_idx: leave use_cache"):
        ours(**seen, seq_idx=labels, use_cache=True)
