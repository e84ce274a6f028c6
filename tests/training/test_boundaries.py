"""All ways to say where sequences begin give the same logits; contradictions are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torch_hybrid as th
from tests.training.twins import LENGTHS, flattened, make_rows, make_twin

OFFSETS = torch.tensor([0, *LENGTHS]).cumsum(0)
STATED = ["position_ids", "cu_seq_lens_q", "seq_idx"]


@pytest.fixture(scope="module")
def twin() -> Any:
    return make_twin()


@pytest.fixture(scope="module")
def alone(twin: Any) -> torch.Tensor:
    """Logits [T, V] of each sequence alone."""
    with torch.no_grad():
        return torch.cat([twin(row).logits[0] for row in make_rows()])


@pytest.mark.parametrize("stated", [*STATED, "packing"])
def test_each_way_alone_keeps_sequences_apart(twin: Any, alone: torch.Tensor, stated: str):
    sent = {**flattened(make_rows()), "packing": th.Packing(OFFSETS)}
    with torch.no_grad():
        logits = twin(sent["input_ids"], **{stated: sent[stated]}).logits[0]
    torch.testing.assert_close(logits, alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("stated", STATED)
def test_evaluation_keeps_sequences_apart(twin: Any, alone: torch.Tensor, stated: str):
    sent = flattened(make_rows())
    with torch.no_grad():
        out = twin.eval()(input_ids=sent["input_ids"], **{stated: sent[stated]})
    twin.train()
    torch.testing.assert_close(out.logits[0], alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_padded_at_either_side(twin: Any, alone: torch.Tensor, side: str):
    ids = torch.zeros(len(LENGTHS), max(LENGTHS), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for n, row in enumerate(make_rows()):
        place = slice(-row.shape[1], None) if side == "left" else slice(row.shape[1])
        ids[n, place], mask[n, place] = row[0], 1
    with torch.no_grad():
        logits = twin(ids, mask).logits
    torch.testing.assert_close(logits[mask.bool()], alone, atol=1e-4, rtol=1e-4)


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
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "holes": ({"attention_mask": HOLE}, "no holes"),
    "a 4-D mask": ({"attention_mask": MASK[:, None, None]}, r"shape \(2, 6\), got \(2, 1, 1, 6\)"),
    "masks of kinds of layers": ({"attention_mask": {}}, "got dict"),
    "disagreement": ({"attention_mask": PADDED, "seq_idx": 0 * MASK}, "only where seq_idx does"),
    "another packing": ({"packing": th.Packing(torch.tensor([0, 5]))}, "12 tokens .* got one of 5"),
    "offsets that end early": ({"cu_seq_lens_q": torch.tensor([0, 5])}, "from 0 to the 12 tokens"),
    "offsets that fall": ({"cu_seq_lens_q": torch.tensor([0, 7, 5, 12])}, "from 0 to the 12"),
    "offsets that begin late": ({"cu_seq_lens_q": torch.tensor([1, 12])}, "from 0 to the 12"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_contradictions_are_refused(twin: Any, case: str):
    said, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        twin(torch.ones(2, 6, dtype=torch.long), **said)
