"""When cuDNN is taken for callable, and for which steps."""

from __future__ import annotations

import inspect

import pytest
import torch

from tests.ops import cudnn_oracle
from tests.ops.step_lengths import step_lengths
from tests.ops.triton_interpreter import needs_triton
from torch_hybrid.backends import measured
from torch_hybrid.backends.select import select
from torch_hybrid.ops import cudnn_attention
from torch_hybrid.ops.core.capability import Need
from torch_hybrid.ops.paged_attention.op import FEATURES, IMPLEMENTATIONS


def test_torch_takes_what_the_oracle_takes():
    [overload] = cudnn_attention.forward.overloads()
    theirs = getattr(cudnn_attention.forward, overload)._schema.arguments
    ours = list(inspect.signature(cudnn_oracle.forward).parameters)
    assert [argument.name for argument in theirs][: len(ours)] == ours


@pytest.mark.parametrize(
    ("version", "capability", "reason"),
    [
        (91900, (9, 0), None),
        (91800, (9, 0), "cuDNN must be 91900 or later, got 91800"),
        (None, (9, 0), "cuDNN must be 91900 or later, got None"),
        (91900, (8, 0), "it was measured on sm_90 alone, the device is sm_80"),
    ],
)
def test_what_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch,
    version: int | None,
    capability: tuple[int, int],
    reason: str | None,
):
    pretend(monkeypatch, version, capability)
    assert cudnn_attention.cudnn_missing() == reason


def test_refusals():
    need = Need(
        device=torch.device("cuda"),
        dtype=torch.float32,
        sizes={"head_dim": 132},
        features=FEATURES - {"extend"},
    )
    reasons = IMPLEMENTATIONS["cudnn"].capability.why_not(need)
    for reason in (
        "dtype torch.float32 is not in ['torch.bfloat16', 'torch.float16']",
        "head_dim 132 is not a multiple of 8",
        "head_dim 132 is over the limit 128",
        "it has no sliding_window",
        "it has no softcap",
        "it is for extend alone",
    ):
        assert reason in reasons


@needs_triton
@pytest.mark.parametrize(
    ("head_dim", "features", "capability", "chosen"),
    [
        (128, {"extend"}, (9, 0), "cudnn"),
        (256, {"extend"}, (9, 0), "triton"),
        (128, {"extend", "sliding_window"}, (9, 0), "triton"),
        (128, set(), (9, 0), "triton"),
        (128, {"extend"}, (8, 0), "triton"),
    ],
)
def test_auto_takes_it_where_it_was_measured_to_be_faster(
    monkeypatch: pytest.MonkeyPatch,
    head_dim: int,
    features: set[str],
    capability: tuple[int, int],
    chosen: str,
):
    pretend(monkeypatch, 91900, capability)
    need = Need(
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
        sizes={"head_dim": head_dim, "page_size": 16},
        features=frozenset(features),
    )
    assert select("paged_attention", IMPLEMENTATIONS, need).impl == chosen


def pretend(
    monkeypatch: pytest.MonkeyPatch, version: int | None, capability: tuple[int, int]
) -> None:
    """A GPU of that capability, of which nothing was measured, with that cuDNN, and Triton."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    monkeypatch.setattr(cudnn_attention, "triton_missing", lambda: None)
    monkeypatch.setattr(measured, "device_name", lambda _: "")


@pytest.mark.parametrize(
    ("new", "totals", "num_tokens", "num_prompts"),
    [
        ((512,), (512,), 512, 1),
        ((0, 256, 256, 0), (0, 256, 256, 0), 512, 2),
        ((512,), (513,), 512, 0),  # a prefix
        ((512, 0), (512, 7), 512, 0),
        ((500,), (500,), 512, 0),  # padding
        ((300, 212), (300, 212), 512, 0),  # other lengths
        ((64,) * 8, (64,) * 8, 512, 0),  # short ones
        ((0, 0), (0, 0), 512, 0),
    ],
)
def test_prompts_that_fill_a_step_are_a_value_of_its_plan(
    new: tuple[int, ...], totals: tuple[int, ...], num_tokens: int, num_prompts: int
):
    cu_seqlens = torch.tensor([0, *new]).cumsum(0).int()
    lengths = step_lengths(cu_seqlens, num_tokens, seq_lens=torch.tensor(totals).int())
    planned = cudnn_attention.plan(lengths, head_dim=64)
    assert (planned.tensors, planned.values) == ((), (num_prompts,))


def test_calls_that_cudnn_cannot_count_are_not_for_it():
    """By shapes, which a captured graph is of."""
    wide = torch.empty(70_000, 512, 64, device="meta")[:, :2]
    few = wide[:60_000]
    planned = [torch.tensor([4])]
    assert cudnn_attention.num_prompts(few, few, few, planned) == 4
    assert cudnn_attention.num_prompts(few, wide, few, planned) == 0
