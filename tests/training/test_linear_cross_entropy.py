"""Loss by chunks of logits against the loss of whole ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from torch_hybrid.training.linear_cross_entropy import LossHead

TOKENS, DIM, VOCAB = 150, 8, 37  # 3 chunks of rows


def make_head(dtype: torch.dtype = torch.float64) -> tuple[LossHead, Tensor, Tensor]:
    torch.manual_seed(0)
    head = LossHead(DIM, VOCAB, bias=False, dtype=dtype)
    hidden = torch.randn(3, TOKENS // 3, DIM, dtype=dtype, requires_grad=True)
    targets = torch.randint(VOCAB, (3, TOKENS // 3))
    targets[0, ::7] = -100
    return head, hidden, targets


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_loss_and_gradients_are_those_of_whole_logits(dtype: torch.dtype):
    head, hidden, targets = make_head(dtype)
    exact = [x.detach().double().requires_grad_() for x in (hidden, head.weight)]
    whole = cross_entropy((exact[0] @ exact[1].T).flatten(0, 1), targets.flatten(), reduction="sum")
    loss = head(hidden, targets)
    made = torch.autograd.grad(loss / 3, (hidden, head.weight))
    expected = torch.autograd.grad(whole / 3, exact)
    tolerance = (
        {"rtol": 1e-5, "atol": 1e-6}
        if dtype is not torch.bfloat16
        else {"rtol": 3e-2, "atol": 3e-2}
    )
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(loss.double(), whole, **tolerance)
    for mine, other in zip(made, expected, strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine.double(), other, **tolerance)


def test_a_frozen_head_gets_no_gradient():
    head, hidden, targets = make_head()
    head.weight.requires_grad_(False)
    head(hidden, targets).backward()
    assert hidden.grad is not None
    assert head.weight.grad is None


def test_autocast_reaches_the_product():
    head, hidden, targets = make_head(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = head(hidden, targets)
    logits = (hidden.bfloat16() @ head.weight.bfloat16().T).float()
    whole = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    torch.testing.assert_close(loss, whole)


def test_opcheck():
    head, hidden, targets = make_head()
    args = hidden.flatten(0, 1), head.weight, targets.flatten(), True, True
    torch.library.opcheck(torch.ops.torch_hybrid.linear_cross_entropy.default, args)


def test_second_derivatives_are_refused():
    head, hidden, targets = make_head()
    grad = torch.autograd.grad(head(hidden, targets), hidden, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="no autograd formula"):
        grad.sum().backward()
