"""Checks that all public ops share."""

import pytest
import torch
from expecttest import assert_expected_inline

from torch_hybrid.ops.linear import linear
from torch_hybrid.ops.ragged_attention import ragged_attention_with_lse


def test_an_implementation_gets_no_tensors_of_other_devices():
    x, weight = torch.empty(2, 8, device="meta"), torch.empty(4, 8, device="meta")
    with pytest.raises(ValueError, match="impl") as error:
        linear(x, [weight], [None], impl="cpp")
    assert_expected_inline(str(error.value), """impl 'cpp' runs on ['cpu'], got tensors on meta""")


def test_an_implementation_gets_no_sizes_that_it_cannot_take():
    q = torch.zeros(1, 1, 24)
    offsets = torch.tensor([0, 1], dtype=torch.int32)
    with pytest.raises(ValueError, match="impl") as error:
        ragged_attention_with_lse(
            q, q, q[..., :12], offsets, offsets, causal=True, scale=1.0, impl="cpp"
        )
    assert_expected_inline(
        str(error.value),
        """impl 'cpp' cannot take these sizes: head_dim 24 is not a multiple of 16; v_head_dim 12 is not a multiple of 16""",  # noqa: E501
    )


def test_an_implementation_gets_no_tensors_of_other_dtypes():
    x, weight = torch.empty(2, 8, dtype=torch.float16), torch.empty(4, 8, dtype=torch.float16)
    with pytest.raises(ValueError, match="impl") as error:
        linear(x, [weight], [None], impl="cpp")
    assert_expected_inline(
        str(error.value),
        """impl 'cpp' takes ['torch.bfloat16', 'torch.float32'], got tensors of torch.float16""",
    )
