"""Choice of torch's kernel for attention within packed sequences."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

from tests.ops.packed_attention.test_contract import OFFSETS, make_inputs
from torch_hybrid.training.packed_attention import packed_attention


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
