"""Lightning attention and mLSTM to train with: values and gradients of every implementation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from tests.functional.rules import (
    Tensors,
    assert_same_bits_on_threads,
    offsets,
    packing,
    with_gradients,
)
from tests.functional.test_ssd import LENGTHS, on_each
from tests.ops.contract import assert_same_bits, assert_within_budget
from torch_hybrid.functional import lightning_attention, mlstm

HEADS, K, V, MEMORY = 3, 16, 24, 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A function, and the names of its arguments; states come last."""

    function: Callable[..., tuple[Tensor, Tensor | None]]
    names: list[str]

    @property
    def by_token(self) -> list[bool]:
        """Tell which arguments have a row for each token."""
        return [name not in ("slopes", "state") for name in self.names]

    def inputs(self, lengths: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensors:
        """Make arguments; heads forget within a token or hardly ever, gates reach their caps."""
        T, work = sum(lengths), torch.promote_types(dtype, torch.float32)
        q, k, v = torch.randn(T, HEADS, K), torch.randn(T, HEADS, K), torch.randn(T, HEADS, V)
        if self.function is lightning_attention:
            gates, state = [torch.tensor([20.0, 0.3, 0.0])], torch.randn(len(lengths), HEADS, V, K)
        else:
            gates = [15 * torch.tanh(5 * torch.randn(T, HEADS) / 15) for _ in range(2)]
            state = torch.randn(len(lengths), HEADS, V + 1, K)
            state = torch.cat([state, *[state[:, :, V:]] * (MEMORY - V - 1)], 2)
        return [x.to(dtype) for x in (q, k, v)] + [x.to(work) for x in (*gates, state)]

    def run(self, xs: Tensors, lengths: Sequence[int] | None, impl: str) -> tuple[Tensor, Tensor]:
        packed = None if lengths is None else packing(lengths)
        o, final_state = self.function(*xs[:-1], packed, xs[-1], impl=impl)
        assert final_state is not None
        return o, final_state

    def exact(self, xs: Tensors, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Walk token by token, in the dtype of the inputs."""
        q, k, v, *gates, states = xs
        if self.function is lightning_attention:
            decay, weight = (-gates[0]).exp().expand(v.shape[:2]), torch.ones_like(v[..., 0])
        else:
            decay, weight = gates[1].sigmoid(), gates[0].exp()
            v = pad(v, (0, MEMORY - V), value=1.0)
        out, final = [v.new_empty(0, *v.shape[1:])], []
        for S, (start, end) in zip(states, pairwise(offsets(lengths).tolist()), strict=True):
            for t in range(start, end):
                write = (weight[t, :, None] * v[t])[..., None] * k[t, :, None]
                S = decay[t, :, None, None] * S + write
                out.append(K**-0.5 * (S @ q[t, ..., None])[None, ..., 0])
            final.append(S)
        o = torch.cat(out)
        if self.function is mlstm:
            o = o[..., :V] / o[..., V:][..., :1].abs().clamp(min=1.0)
        return o, torch.stack(final)

    def theirs(self, xs: Tensors, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Run transformers' chunks of mLSTM, sequence by sequence; of lightning, the walk."""
        if self.function is lightning_attention:
            return self.exact(xs, lengths)
        from transformers.models.xlstm import modeling_xlstm as xlstm

        out, final = [xs[2].new_empty(0, HEADS, V)], []
        rows = zip(*(x.split(list(lengths)) for x in xs[:5]), strict=True)
        for S, parts in zip(xs[5], rows, strict=True):
            if len(parts[0]):
                q, k, v, i, f = (x.transpose(0, 1)[None] for x in parts)
                h, (C, n, m) = xlstm.wrap_chunkwise_arbitrary_sequence_length(
                    xlstm.mlstm_chunkwise_native_autograd,
                    xlstm.mlstm_recurrent_sequence_native,
                    xlstm.mlstm_recurrent_step_native,
                    *(q, k, v, f, i, S[:, :V].mT[None], S[:, V][None], S.new_zeros(1, HEADS, 1)),
                    eps=0.0,
                )
                S = torch.cat([C[0].mT, *[n[0, :, None]] * (MEMORY - V)], 1) * m[0, ..., None].exp()
                out.append(h[0].transpose(0, 1))
            final.append(S)
        return torch.cat(out), torch.stack(final)

    def weights(self, xs: Tensors) -> Tensors:
        """Make random weights of outputs and final states; of several normalizers, of one."""
        states = torch.randn(xs[-1].shape)
        states[:, :, V + 1 :] = 0.0
        return [torch.randn(xs[2].shape), states]


FORMS = {
    "lightning": Form(function=lightning_attention, names=["q", "k", "v", "slopes", "state"]),
    "mlstm": Form(function=mlstm, names=["q", "k", "v", "i", "f", "state"]),
}
each_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@on_each
@each_form
def test_gradients_within_twice_the_error_of_others(
    form: Form, impl: str, lengths: tuple[int, ...]
) -> None:
    """Of transformers, and of a walk in float32."""
    xs = form.inputs(lengths)
    w = form.weights(xs)
    made = with_gradients(lambda x: form.run(x, lengths, impl), xs, w)
    wide = with_gradients(lambda x: form.exact(x, lengths), [x.double() for x in xs], w)
    other = with_gradients(lambda x: form.theirs(x, lengths), xs, w)
    for name, a, b, c in zip(["o", "final", *form.names], made, wide, other, strict=True):
        try:
            assert_within_budget(a, b, c)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@on_each
@each_form
def test_packed_has_the_bits_of_single(form: Form, impl: str) -> None:
    """Gradients of slopes, which all sequences share, are sums of theirs within rounding."""
    lengths = (70, 1, 0, 64, 20, 33)
    xs = form.inputs(lengths)
    w = form.weights(xs)
    o, final, *grads = with_gradients(lambda x: form.run(x, lengths, impl), xs, w)
    shared = torch.zeros(HEADS)
    for n, (start, end) in enumerate(pairwise(offsets(lengths).tolist())):
        rows, seq = slice(start, end), slice(n, n + 1)
        by_token = form.by_token
        own = [x[rows] if of_token else x for x, of_token in zip(xs, by_token, strict=True)]
        own[-1] = xs[-1][seq]
        alone = with_gradients(lambda x: form.run(x, None, impl), own, [w[0][rows], w[1][seq]])
        assert_same_bits(alone[0], o[rows])
        assert_same_bits(alone[1], final[seq])
        assert_same_bits(alone[-1], grads[-1][seq])
        for a, b, of_token in zip(alone[2:-1], grads, by_token, strict=False):
            if of_token:
                assert_same_bits(a, b[rows])
            else:
                shared += a
    if form.function is lightning_attention:
        torch.testing.assert_close(shared, grads[3], rtol=1e-5, atol=1e-4)


@on_each
@each_form
def test_bits_depend_on_no_run_and_no_number_of_threads(form: Form, impl: str) -> None:
    lengths = (40, 90, 3)
    xs = form.inputs(lengths)
    w = form.weights(xs)
    assert_same_bits_on_threads(lambda: with_gradients(lambda x: form.run(x, lengths, impl), xs, w))


@on_each
@each_form
def test_bfloat16(form: Form, impl: str) -> None:
    """Within a few roundings of results from float32 arithmetic on the rounded inputs."""
    lengths = (40, 7)
    xs = form.inputs(lengths, torch.bfloat16)
    w = [x.bfloat16().float() for x in form.weights(xs)]
    made, wide = (
        with_gradients(lambda x: form.run(x, lengths, impl), each, w)
        for each in (xs, [x.float() for x in xs])
    )
    for a, b in zip(made, wide, strict=True):
        torch.testing.assert_close(a.float(), b, rtol=2**-6, atol=2**-8 * b.abs().max().item())


@on_each
@each_form
def test_without_states_and_tokens(form: Form, impl: str) -> None:
    xs = form.inputs((9,))
    o, final = form.function(*xs[:-1], impl=impl, output_final_state=False)
    assert final is None
    zeros = form.function(*xs[:-1], None, torch.zeros_like(xs[-1]), impl=impl)[0]
    assert_same_bits(o, zeros)
    none = form.inputs((0,))
    _, final, *grads = with_gradients(lambda x: form.run(x, (0,), impl), none, form.weights(none))
    assert_same_bits(final, none[-1])
    assert [x.shape for x in grads] == [x.shape for x in none]


@each_form
def test_gradcheck_of_the_torch_form(form: Form) -> None:
    lengths = (35, 0, 1)
    xs = [x.requires_grad_() for x in form.inputs(lengths, torch.float64)]
    torch.autograd.gradcheck(lambda *x: form.run([*x], lengths, "torch"), xs, fast_mode=True)
