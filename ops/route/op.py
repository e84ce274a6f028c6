"""route: public function, validation, schema and the list of implementations."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.core.capability import FLOATS, Capability, Implementation
from torch_hybrid.ops.core.registration import check_dtypes, check_impl, check_shapes, define_op
from torch_hybrid.ops.triton.devices import triton_devices, triton_missing

SCORES = ("softmax", "sigmoid")

IMPLEMENTATIONS = {
    "triton": Implementation(
        capability=Capability(
            devices=triton_devices(),
            limits={"num_experts": 1024, "k": 32, "num_groups": 32},
            cuda_graph=True,
            available=triton_missing,
        ),
        launcher="torch_hybrid.ops.route._triton:route",
    ),
    "torch": Implementation(
        capability=Capability(devices=frozenset({"cpu", "cuda"}), cuda_graph=True),
        launcher="torch_hybrid.ops.route._torch:route",
    ),
}


def route(
    logits: Tensor,
    bias: Tensor | None,
    k: int,
    *,
    score: str,
    num_groups: int = 1,
    num_best_groups: int = 1,
    renormalise: bool = True,
    epsilon: float = 0.0,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
    impl: str,
) -> tuple[Tensor, Tensor]:
    """The k experts of each token, the best first, and their weights.

    Experts have scores, a softmax or sigmoids of the logits in float32. Those with the largest
    scores, ``bias`` added, are chosen, the first of equal ones; weights are the bare scores. With
    groups, they are chosen within the groups whose two best have the largest sums (DeepSeek-V3,
    arXiv 2412.19437).

    Args:
        logits: [T, E] float32, bfloat16 or float16.
        bias: [E] float32, added to scores for the choice alone; or None.
        k: at least 1, at most the experts of the best groups.
        score: "softmax" or "sigmoid".
        num_groups: equal parts of the E experts, of at least two each unless it is 1.
        num_best_groups: so many of them are chosen from.
        renormalise: divide by the sum of the k scores, ``epsilon`` added.
        epsilon: see there.
        scale: of the weights.
        dtype: of the weights; they are computed in float32.
        impl: name in IMPLEMENTATIONS.

    Returns:
        Weights [T, k] and expert ids [T, k] int64. Of a token with NaN among its logits they have
        no meaning, but for ids that are experts.

    Raises:
        ValueError: a size, dtype or option is wrong.
    """
    if logits.dim() != 2 or logits.dtype not in FLOATS:
        raise ValueError(
            f"logits must be [T, E] of floating point, got {list(logits.shape)} of {logits.dtype}"
        )
    num_experts = logits.shape[1]
    check_shapes({"bias": (bias, (num_experts,))})
    check_dtypes({"bias": (bias, torch.float32)})
    if score not in SCORES:
        raise ValueError(f"score must be one of {list(SCORES)}, got {score!r}")
    if dtype not in FLOATS:
        raise ValueError(f"dtype must be float32, bfloat16 or float16, got {dtype}")
    _check_groups(num_experts, num_groups, num_best_groups, k)
    sizes = {"num_experts": num_experts, "k": k, "num_groups": num_groups}
    check_impl(impl, IMPLEMENTATIONS, logits.device, sizes)
    weights, ids = ROUTE(
        logits,
        bias,
        k,
        score=score,
        num_groups=num_groups,
        num_best_groups=num_best_groups,
        renormalise=renormalise,
        epsilon=epsilon,
        scale=scale,
        dtype=dtype,
        impl=impl,
    )
    return weights, ids


def _check_groups(num_experts: int, num_groups: int, num_best_groups: int, k: int) -> None:
    if (
        num_groups < 1
        or num_experts % num_groups
        or (num_groups > 1 and num_experts < 2 * num_groups)
    ):
        raise ValueError(
            f"num_groups must be equal parts of {num_experts} experts, of two at least, "
            f"got {num_groups}"
        )
    if not 1 <= num_best_groups <= num_groups:
        raise ValueError(
            f"num_best_groups must be within 1 and {num_groups}, got {num_best_groups}"
        )
    eligible = num_best_groups * (num_experts // num_groups)
    if not 1 <= k <= eligible:
        raise ValueError(f"k must be within 1 and {eligible}, got {k}")


def _fake(
    logits: Tensor, bias: Tensor | None, k: int, *, dtype: torch.dtype, **_: object
) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], k)
    return logits.new_empty(shape, dtype=dtype), logits.new_empty(shape, dtype=torch.int64)


ROUTE = define_op(
    "route(Tensor logits, Tensor? bias, int k, *, str score, int num_groups, int num_best_groups, "
    "bool renormalise, float epsilon, float scale, ScalarType dtype, str impl) -> (Tensor, Tensor)",
    fake=_fake,
    implementations=IMPLEMENTATIONS,
)
