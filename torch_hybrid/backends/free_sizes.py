"""Sizes that ``torch.compile`` takes as symbols of their own.

With ``dynamic=True`` alone, sizes that are equal in the traced step become one symbol. A prompt
with as many tokens as a head has channels then gets a graph that serves no other length.
"""

from __future__ import annotations

from torch import Tensor


def free_sizes(*tensors: Tensor) -> None:
    """Mark every size of the tensors as dynamic; a graph may still specialise one.

    Has the effect of ``torch._dynamo.maybe_mark_dynamic`` without importing Dynamo. That import
    takes a second, for which a loop that compiles nothing would wait.
    """
    for tensor in tensors:
        marks = {"_dynamo_weak_dynamic_indices": {*range(tensor.ndim)}}
        vars(tensor).update(marks, _has_dynamo_dim_marking=True)
