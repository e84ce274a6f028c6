"""Log-probabilities of tokens: those of float64, and the bits that a row has alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import torch_hybrid as th
from torch_hybrid.ops.token_logprobs.reference import token_logprobs

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def make_rows(dtype: torch.dtype, count: int = 300, vocab: int = 1021) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    logits = 4 * torch.randn(count, vocab)
    logits[0, ::3] = -torch.inf
    return logits.to(dtype), torch.arange(1, count + 1) % vocab


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_and_gradients_are_those_of_float64(dtype: torch.dtype):
    logits, tokens = make_rows(dtype)
    exact = logits.double().requires_grad_()
    expected = token_logprobs(exact, tokens)
    made = th.token_logprobs(logits.requires_grad_(), tokens)
    assert made.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(made.double(), expected, rtol=1e-6, atol=1e-6)
    weights = torch.randn(len(tokens))
    [gradient] = torch.autograd.grad(made, logits, weights.to(made.dtype))
    [wanted] = torch.autograd.grad(expected, exact, weights.double())
    tolerance = 2**-8 if dtype is torch.bfloat16 else 1e-6
    torch.testing.assert_close(gradient.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("vocab", [5, 199, 1021, 32001])
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_a_row_has_the_bits_that_it_has_alone(dtype: torch.dtype, vocab: int, device: str):
    logits, tokens = (x.to(device) for x in make_rows(dtype, 261, vocab))
    made = th.token_logprobs(logits, tokens)
    for row in (0, 1, 2, 3, 255, 256, 260):
        alone = th.token_logprobs(logits[row : row + 1], tokens[row : row + 1])
        assert torch.equal(alone, made[row : row + 1])
    compiled = torch.compile(th.token_logprobs, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(logits, tokens), made)


def test_a_token_outside_the_vocabulary_is_refused():
    logits, tokens = make_rows(torch.float32)
    with pytest.raises(ValueError, match=r"token_ids must be from 0 to 1020, got \[1, 1021\]"):
        th.token_logprobs(logits, tokens.index_fill(0, torch.tensor([7]), 1021))
