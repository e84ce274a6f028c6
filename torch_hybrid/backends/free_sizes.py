"""Sizes that ``torch.compile`` is to take as symbols, each for itself.

With ``dynamic=True`` alone, sizes that are equal in the step that is traced become one symbol. A
prompt of as many tokens as a head has channels then gets a graph that serves no other length.
"""

from __future__ import annotations

from torch import Tensor


def free_sizes(*tensors: Tensor) -> None:
    """Mark every size of tensors; a graph that needs one to be constant makes it so.

    It does what ``torch._dynamo.maybe_mark_dynamic`` does, without the import of Dynamo: that
    takes a second, which a loop that compiles nothing would wait for.
    """
    for tensor in tensors:
        marks = {"_dynamo_weak_dynamic_indices": {*range(tensor.ndim)}}
        vars(tensor).update(marks, _has_dynamo_dim_marking=True)
