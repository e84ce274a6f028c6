"""Checks that all public ops share."""

import pytest
import torch
from expecttest import assert_expected_inline

from torch_hybrid.ops.linear import linear


def test_an_implementation_gets_no_tensors_of_other_devices():
    x, weight = torch.empty(2, 8, device="meta"), torch.empty(4, 8, device="meta")
    with pytest.raises(ValueError, match="impl") as error:
        linear(x, [weight], [None], impl="cpp")
    assert_expected_inline(str(error.value), """impl 'cpp' runs on ['cpu'], got tensors on meta""")
