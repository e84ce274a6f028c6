"""Loss by chunks of logits against the loss of whole ones."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from torch_hybrid.ops.linear_cross_entropy import linear_cross_entropy_forward
from torch_hybrid.ops.linear_cross_entropy.reference import linear_cross_entropy
from torch_hybrid.training.linear_cross_entropy import LossHead

TOKENS, DIM, VOCAB = 600, 8, 37
BY = [*product(("cpp", "torch"), (torch.float32, torch.bfloat16)), ("torch", torch.float64)]


def make_head(
    dtype: torch.dtype = torch.float64, tokens: int = TOKENS
) -> tuple[LossHead, Tensor, Tensor]:
    torch.manual_seed(0)
    head = LossHead(DIM, VOCAB, bias=False, dtype=dtype)
    hidden = torch.randn(3, tokens // 3, DIM, dtype=dtype, requires_grad=True)
    targets = torch.randint(VOCAB, (3, tokens // 3))
    targets[0, ::7] = -100
    return head, hidden, targets


@pytest.mark.parametrize("rows", [256, TOKENS])  # of a chunk
@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize(("impl", "dtype"), BY)
def test_loss_and_gradients_are_those_of_whole_logits(
    impl: str,
    dtype: torch.dtype,
    softcap: float | None,
    rows: int,
    monkeypatch: pytest.MonkeyPatch,
):
    sizes = {"_BLOCK": 16, "_CACHED": 100 * VOCAB, "_FEWEST_ROWS_ON_A_CPU": rows}
    for name, size in sizes.items():
        monkeypatch.setattr(f"torch_hybrid.ops.linear_cross_entropy._torch.{name}", size)
    head, hidden, targets = make_head(dtype)
    exact = [x.detach().double().requires_grad_() for x in (hidden, head.weight)]
    whole = linear_cross_entropy(exact[0].flatten(0, 1), exact[1], targets.flatten(), softcap)
    loss, *_ = linear_cross_entropy_forward(
        *(hidden.flatten(0, 1), head.weight, targets.flatten()),
        of_hidden=True,
        of_weight=True,
        softcap=softcap,
        impl=impl,
    )
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
    rows, weight = hidden.flatten(0, 1).bfloat16(), head.weight.bfloat16()
    whole = linear_cross_entropy(rows, weight, targets.flatten())
    torch.testing.assert_close(loss, whole)


def test_second_derivatives_are_refused():
    head, hidden, targets = make_head()
    grad = torch.autograd.grad(head(hidden, targets), hidden, create_graph=True)[0]
    with pytest.raises(
        NotImplementedError, match="linear_cross_entropy can be differentiated once"
    ):
        grad.sum().backward()


def test_forward_mode_is_refused():
    head, hidden, targets = make_head()
    hidden = hidden.detach()
    with (
        forward_ad.dual_level(),
        pytest.raises(NotImplementedError, match="linear_cross_entropy has no forward-mode"),
    ):
        head(forward_ad.make_dual(hidden, torch.ones_like(hidden)), targets)


@pytest.mark.parametrize("target", [-1, VOCAB])
def test_targets_that_are_no_row_are_refused(target: int):
    head, hidden, targets = make_head()
    targets[1, 3] = target
    with pytest.raises(ValueError, match="targets must be -100 or from 0 to 36, got"):
        head(hidden, targets)


def test_the_functions_take_what_they_are_given():
    head, hidden, targets = make_head()
    given = hidden.flatten(0, 1), head.weight.float(), targets.flatten()
    with pytest.raises(ValueError, match=r"weight must have dtype torch.float64, got .*float32"):
        linear_cross_entropy_forward(*given, of_hidden=True, of_weight=True, impl="torch")


def test_rows_without_a_loss_may_hold_anything():
    head, hidden, targets = make_head()
    filled = hidden.detach().masked_fill((targets == -100)[..., None], torch.nan).requires_grad_()
    made = []
    for x in (hidden, filled):
        loss = head(x, targets)
        made.append([loss, *torch.autograd.grad(loss, (x, head.weight))])
    assert all(map(torch.equal, *made))


def test_no_tokens_have_no_loss():
    head, hidden, targets = make_head(tokens=0)
    loss = head(hidden, targets)
    loss.backward()
    assert loss == 0
    assert not head.weight.grad.any()
