"""All ways to say where sequences begin give the same logits; contradictions are refused."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import torch_hybrid as th
from tests.training.twins import LENGTHS, flattened, make_rows, make_twin
from torch_hybrid.training.boundaries import packing_of

OFFSETS = torch.tensor([0, *LENGTHS]).cumsum(0)
STATED = ["position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx"]


def sent_by(*names: str) -> dict[str, Any]:
    """Collate all sequences, and keep of what states boundaries the arguments of these names."""
    sent = {**flattened(make_rows()), "packing": th.Packing(OFFSETS)}
    return {name: sent[name] for name in ("input_ids", *names)}


def plan(said: dict[str, Any]) -> list[torch.Tensor]:
    """Compute the tables of a packing, as a model does."""
    packing = packing_of(said)
    return [packing.cu_seqlens, packing.positions, packing.sequences]


def plan_compiled(said: dict[str, Any]) -> list[torch.Tensor]:
    torch._dynamo.reset()
    return torch.compile(plan, fullgraph=True, backend="aot_eager")(said)


# The forward of Mamba2 hands its decoder a mask alone, xLSTM's decoder its layers nothing.
KINDS = ["qwen3_next_dense", "mamba2", "recurrent_gemma", "inkling2", "rwkv", "xlstm", "zaya"]


@pytest.fixture(scope="module", params=KINDS)
def twin(request: pytest.FixtureRequest) -> Any:
    return make_twin(request.param)


@pytest.fixture(scope="module")
def alone(twin: Any) -> torch.Tensor:
    """Logits [T, V] of each sequence alone."""
    with torch.no_grad():
        return torch.cat([twin(row).logits[0] for row in make_rows()])


WAYS = [*((name,) for name in (*STATED, "packing")), (*STATED, "max_length_q", "max_length_k")]
each_way = pytest.mark.parametrize("names", WAYS, ids=", ".join)


@each_way
def test_each_way_alone_and_all_keep_sequences_apart(
    twin: Any, alone: torch.Tensor, names: tuple[str, ...]
):
    sent = sent_by(*names)
    with torch.no_grad():
        logits = twin(sent.pop("input_ids"), **sent).logits[0]
    torch.testing.assert_close(logits, alone, atol=1e-4, rtol=1e-4)


@each_way
def test_each_way_plans_the_same_in_a_graph(names: tuple[str, ...]):
    expected = plan(sent_by("packing"))
    assert all(map(torch.equal, plan(sent_by(*names)), expected))
    assert all(map(torch.equal, plan_compiled(sent_by(*names)), expected))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_plans_the_same_in_a_graph(side: str):
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[0, slice(2) if side == "left" else slice(-2, None)] = 0
    said = {"input_ids": mask, "attention_mask": mask}
    lengths = [2, 4, 6] if side == "left" else [4, 2, 6]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    assert all(map(torch.equal, plan(said), plan({**said, "packing": th.Packing(offsets)})))
    assert all(map(torch.equal, plan_compiled(said), plan(said)))


@pytest.mark.parametrize("stated", ["position_ids", "packing"])
def test_a_graph_keeps_sequences_apart(twin: Any, alone: torch.Tensor, stated: str):
    torch._dynamo.reset()
    step = torch.compile(twin, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        logits = step(**sent_by(stated)).logits[0]
    torch.testing.assert_close(logits, alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("stated", STATED)
def test_evaluation_keeps_sequences_apart(twin: Any, alone: torch.Tensor, stated: str):
    with torch.no_grad():
        out = twin.eval()(**sent_by(stated))
    twin.train()
    torch.testing.assert_close(out.logits[0], alone, atol=1e-4, rtol=1e-4)


def test_positional_arguments_are_those_of_transformers(twin: Any, alone: torch.Tensor):
    sent = sent_by("seq_idx", "position_ids")
    names = [*inspect.signature(type(twin).forward).parameters][1:]
    args = [sent.pop(name, None) for name in names[: names.index("labels")]]
    with torch.no_grad():
        logits = twin(*args, **sent).logits[0]
    torch.testing.assert_close(logits, alone, atol=1e-4, rtol=1e-4)
    with pytest.raises(TypeError, match=f"after labels must be named, got {len(args) + 2} pos"):
        twin(*args, args[0], True)


@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_padded_at_either_side(twin: Any, alone: torch.Tensor, side: str):
    ids = torch.zeros(len(LENGTHS), max(LENGTHS), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for n, row in enumerate(make_rows()):
        place = slice(-row.shape[1], None) if side == "left" else slice(row.shape[1])
        ids[n, place], mask[n, place] = row[0], 1
    with torch.no_grad():
        logits = twin(ids, attention_mask=mask).logits
        sent = {"attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
        losses = [twin.train(training)(ids, **sent).loss for training in (False, True)]
    torch.testing.assert_close(logits[mask.bool()], alone, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(*losses)


def test_labels_do_not_reach_into_the_next_sequence(twin: Any):
    sent = flattened(make_rows())
    assert (sent["labels"] == -100).sum() == len(LENGTHS)
    said = {"packing": th.Packing(OFFSETS), "labels": sent["input_ids"]}
    with torch.no_grad():
        whole = twin(sent["input_ids"], **said, skip_logits=False).loss
        torch.testing.assert_close(twin(sent["input_ids"], **said).loss, twin(**sent).loss)
        torch.testing.assert_close(whole, twin(**sent).loss)


MASK = torch.ones(2, 6, dtype=torch.long)
HOLE = MASK.clone().index_fill(1, torch.tensor([2]), 0)
PADDED = MASK.clone().index_fill(1, torch.tensor([5]), 0)
OF_FORM: dict[str, tuple[dict[str, Any], str]] = {
    "a 4-D mask": ({"attention_mask": MASK[:, None, None]}, r"shape \(2, 6\), got \(2, 1, 1, 6\)"),
    "masks of kinds of layers": ({"attention_mask": {}}, "got dict"),
    "another packing": ({"packing": th.Packing(torch.tensor([0, 5]))}, "12 tokens .* got one of 5"),
    "a packing elsewhere": (
        {"packing": th.Packing(torch.tensor([0, 12])).to("meta")}, "must be on cpu, got meta"
    ),
    "offsets of floats": (
        {"cu_seq_lens_q": torch.tensor([0.0, 12.0])}, "cu_seq_lens_q must have dtype .* got .*float"
    ),
    "offsets of rows": ({"cu_seq_lens_k": MASK}, r"cu_seq_lens_k must have 1 dim.*\[2, 6\]"),
    "positions of floats": ({"position_ids": MASK / 1}, "position_ids must have dtype"),
    "a list for offsets": (
        {"cu_seq_lens_q": [0, 12]}, "cu_seq_lens_q must be a tensor, got list"
    ),
    "offsets for a packing": ({"packing": torch.tensor([0, 12])}, "th.Packing, got Tensor"),
    "short positions": ({"position_ids": MASK[:, 1:]}, r"shape \[2, 6\], got \[2, 5\]"),
    "numbers of fewer rows": ({"seq_idx": MASK[:0]}, r"shape \[2, 6\], got \[0, 6\]"),
    "short labels": ({"labels": MASK[:, 1:]}, r"the 12 tokens .* shape \[2, 5\]"),
    "labels of int32": ({"labels": MASK.int()}, "labels must be torch.int64"),
    "a packing beside a cache": (
        {"packing": th.Packing(torch.tensor([0, 12])), "use_cache": True}, "got packing: leave"
    ),
    "offsets elsewhere": (
        {"cu_seq_lens_q": torch.tensor([0, 12]).to("meta")}, "cu_seq_lens_q must be on cpu"
    ),
    "no offsets": ({"cu_seq_lens_k": OFFSETS[:0]}, r"cu_seq_lens_k must have shape \[N \+ 1\]"),
    "positions elsewhere": ({"position_ids": MASK.to("meta")}, "position_ids must be on cpu"),
    "a mask elsewhere": ({"attention_mask": MASK.to("meta")}, "attention_mask must be on cpu"),
    "a list for positions": ({"position_ids": [[0] * 6] * 2}, "must be a tensor, got list"),
    "numbers of floats": ({"seq_idx": MASK / 1}, "seq_idx must have dtype"),
}  # fmt: skip
OF_VALUES: dict[str, tuple[dict[str, Any], str]] = {
    "holes": ({"attention_mask": HOLE}, "no holes"),
    "disagreement": ({"attention_mask": PADDED, "seq_idx": 0 * MASK}, "only where seq_idx does"),
    "offsets of keys alone": (
        {"cu_seq_lens_q": torch.tensor([0, 6, 12]), "cu_seq_lens_k": torch.tensor([0, 6, 8, 12])},
        "must be the same offsets",
    ),
    "offsets that end early": (
        {"cu_seq_lens_q": torch.tensor([0, 5])},
        "from 0 to the number of tokens",
    ),
    "offsets that fall": (
        {"cu_seq_lens_q": torch.tensor([0, 7, 5, 12])},
        "from 0 to the number of tokens",
    ),
    "offsets that end late": (
        {"cu_seq_lens_q": torch.tensor([0, 20])},
        "from 0 to the number of tokens",
    ),
    "offsets that begin late": (
        {"cu_seq_lens_k": torch.tensor([1, 12])},
        "from 0 to the number of tokens",
    ),
}


@pytest.mark.parametrize("case", OF_FORM | OF_VALUES)
def test_contradictions_are_refused(twin: Any, case: str):
    said, message = (OF_FORM | OF_VALUES)[case]
    with pytest.raises(ValueError, match=message):
        twin(torch.ones(2, 6, dtype=torch.long), **said)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("mask", [(), ("attention_mask",)])
def test_a_cache_beside_positions_that_restart_is_refused(
    twin: Any, training: bool, mask: tuple[str, ...]
):
    message = "got position_ids that restart: leave use_cache"
    said = {**sent_by("position_ids"), "use_cache": True}
    if mask:
        said["attention_mask"] = torch.ones_like(said["input_ids"])
    twin.train(training)
    with pytest.raises(ValueError, match=message):
        twin(**said)
    with pytest.raises(ValueError, match=message):
        twin(**said, labels=said["input_ids"])
    twin.train()


@pytest.mark.parametrize("training", [True, False])
def test_a_config_that_asks_for_a_cache_keeps_sequences_apart(
    twin: Any, alone: torch.Tensor, training: bool
):
    assert twin.config.use_cache
    with torch.no_grad():
        out = twin.train(training)(**sent_by("position_ids"))
    twin.train()
    assert out.get("past_key_values", out.get("cache_params")) is None
    torch.testing.assert_close(out.logits[0], alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_cache_takes_positions_of_padded_rows(twin: Any, side: str):
    """As ``generate`` sends them: padding has position 1."""
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[0, slice(2) if side == "left" else slice(-2, None)] = 0
    position = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    with torch.no_grad():
        out = twin(input_ids=mask, attention_mask=mask, position_ids=position, use_cache=True)
    caches = [out.get(name) for name in ("past_key_values", "cache_params", "state")]
    in_modules = twin.config.model_type == "recurrent_gemma"
    assert in_modules or any(cache is not None for cache in caches)


def test_calls_without_tokens_are_refused(twin: Any):
    for ids, came in ((None, "neither"), (MASK[0], r"shape \[6\]")):
        with pytest.raises(ValueError, match=f"must be given, got {came}"):
            twin(ids)
    for ids in (MASK[:, :0], MASK[:0]):
        with pytest.raises(ValueError, match="a token or more, got shape"):
            twin(ids, labels=ids)


@pytest.mark.parametrize("case", OF_VALUES)
def test_contradictions_are_refused_in_a_graph(case: str):
    said, message = OF_VALUES[case]
    with pytest.raises(RuntimeError, match=message):
        plan_compiled({"input_ids": torch.ones(2, 6, dtype=torch.long), **said})


def test_a_path_is_no_model_nor_is_what_holds_one(twin: Any):
    with pytest.raises(ValueError, match="in memory, got str"):
        th.make_trainable("a/path")
    with pytest.raises(ValueError, match="transformers or PEFT in memory, got Sequential"):
        th.make_trainable(torch.nn.Sequential(twin))
