"""The draw of a token for each row of logits."""

from torch_hybrid.ops.draw_tokens.op import draw_tokens

__all__ = ["draw_tokens"]
