"""draw_tokens: public function, validation, schema and the list of implementations."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.core.capability import FLOATS, Capability, Implementation
from torch_hybrid.ops.core.registration import check_dtypes, check_impl, check_shapes, define_op
from torch_hybrid.ops.flashinfer.library import flashinfer_missing, with_flashinfer
from torch_hybrid.ops.triton.devices import triton_devices, triton_missing

NUM_SETTINGS = 5

_LARGEST_VOCAB = 1 << 18  # that the kernels which draw are made for
IMPLEMENTATIONS = with_flashinfer(
    "draw_tokens",
    {
        "triton": Implementation(
            capability=Capability(
                devices=triton_devices(),
                limits={"vocab_size": _LARGEST_VOCAB},
                cuda_graph=True,
                available=triton_missing,
            ),
            launcher="torch_hybrid.ops.draw_tokens._triton:draw_tokens",
        ),
        "torch": Implementation(
            capability=Capability(devices=frozenset({"cpu", "cuda"}), cuda_graph=True),
            launcher="torch_hybrid.ops.draw_tokens._torch:draw_tokens",
        ),
    },
    Implementation(
        capability=Capability(
            devices=frozenset({"cuda"}),
            limits={"vocab_size": _LARGEST_VOCAB},
            cuda_graph=True,
            available=flashinfer_missing(),
        ),
        launcher="torch_hybrid.ops.draw_tokens._flashinfer:draw_tokens",
        by_name="it is for steps with a top-k alone",
    ),
)


def draw_tokens(
    logits: Tensor,
    settings: Tensor,
    *,
    draws: bool,
    num_ranked: int,
    has_wide_top_p: bool,
    impl: str,
) -> Tensor:
    """Choose a token for each row of logits; nothing is read on the host.

    The filters keep what transformers' logits processors keep, in their order: temperature, top-k,
    top-p, min-p. Tokens that tie with the last one kept are kept too. The token is the one at which
    the running sum of what is left, in the order of ids, passes ``number``; sums are of integers,
    so that no order of adding changes them. Ties of the likeliest are the first of them.

    Args:
        logits: [N, vocab_size] float32, bfloat16 or float16; not changed.
        settings: [5, N] float64, for each row: temperature (0: the likeliest token), number (in
            [0, 1)), top-k (0: all tokens), top-p (1: all) and min-p (0: all).
        draws: some temperature is above 0.
        num_ranked: at least the largest top-k of rows that draw, or so many as there are tokens; 0
            where there is none.
        has_wide_top_p: some row that draws has a top-p below 1 and no top-k.
        impl: name in IMPLEMENTATIONS.

    Returns:
        [N] int64 token ids; -1 for a row with NaN or infinity among its logits (minus infinity
        bars a token and is allowed beside finite ones).

    Raises:
        ValueError: a shape, dtype or option is wrong.
    """
    if logits.dim() != 2 or not logits.shape[1]:
        raise ValueError(f"logits must be [N, vocab_size], got {list(logits.shape)}")
    if logits.dtype not in FLOATS:
        raise ValueError(f"logits must be a floating point tensor, got {logits.dtype}")
    check_shapes({"settings": (settings, (NUM_SETTINGS, logits.shape[0]))})
    check_dtypes({"settings": (settings, torch.float64)})
    if num_ranked < 0:
        raise ValueError(f"num_ranked must be at least 0, got {num_ranked}")
    check_impl(impl, IMPLEMENTATIONS, logits.device, {"vocab_size": logits.shape[1]})
    tokens: Tensor = DRAW_TOKENS(
        logits,
        settings,
        draws=draws,
        num_ranked=num_ranked,
        has_wide_top_p=has_wide_top_p,
        impl=impl,
    )
    return tokens


def _fake(logits: Tensor, settings: Tensor, **_: object) -> Tensor:
    return logits.new_empty(logits.shape[:1], dtype=torch.int64)


DRAW_TOKENS = define_op(
    "draw_tokens(Tensor logits, Tensor settings, *, bool draws, int num_ranked, "
    "bool has_wide_top_p, str impl) -> Tensor",
    fake=_fake,
    implementations=IMPLEMENTATIONS,
)
