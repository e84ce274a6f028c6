"""Log-probabilities of tokens, with the bits that a server reports."""

from torch_hybrid.ops.token_logprobs.op import token_logprobs_backward, token_logprobs_forward
from torch_hybrid.ops.token_logprobs.rows import log_softmax

__all__ = ["log_softmax", "token_logprobs_backward", "token_logprobs_forward"]
