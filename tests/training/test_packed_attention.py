"""Choice of torch's kernel for attention within packed sequences."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from tests.ops.packed_attention.test_contract import OFFSETS, SHAPES, make_inputs
from torch_hybrid.ops.packed_attention.reference import masked_attention
from torch_hybrid.training.packed_attention import _varlen, packed_attention


def test_dropout_drops_weights_within_sequences():
    q, k, v = make_inputs()
    torch.manual_seed(0)
    out = packed_attention(q, k, v, OFFSETS, scale=0.3, dropout=0.5)
    first = packed_attention(q, k, v, OFFSETS, scale=0.3)[0]
    kept = torch.isclose(out[0], 2 * first).all(-1)
    assert (kept | out[0].eq(0).all(-1)).all()
    assert 0 < kept.sum() < len(kept)


def test_forward_mode_is_refused():
    q, k, v = (x.detach() for x in make_inputs())
    with (
        forward_ad.dual_level(),
        pytest.raises(NotImplementedError, match="packed_attention has no forward-mode derivative"),
    ):
        packed_attention(forward_ad.make_dual(q, q), k, v, OFFSETS, scale=0.3)


@pytest.mark.parametrize("shape", SHAPES)
def test_heads_of_one_width_go_to_varlen(shape: str, monkeypatch: pytest.MonkeyPatch):
    """Flash attention needs a GPU; a mask stands in for it here."""

    def varlen_attn(
        *given: Tensor | int, scale: float, window_size: tuple[int, int], enable_gqa: bool
    ) -> Tensor:
        q, k, v, offsets, _, *longest = given
        assert q.shape[2] == k.shape[2] == v.shape[2]
        assert q.shape[2] % 8 == 0
        assert (longest, window_size) == ([47, 47], (-1, 0))
        assert enable_gqa == (q.shape[1] != k.shape[1])
        return masked_attention(q, k, v, offsets, scale=scale)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    q, k, v = make_inputs(shape)
    q, k = q[..., :7], k[..., :7]
    expected = packed_attention(q, k, v, OFFSETS, scale=0.3)
    torch.testing.assert_close(_varlen(q, k, v, OFFSETS, 0.3), expected)
