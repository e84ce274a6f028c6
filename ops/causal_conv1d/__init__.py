"""Short depthwise causal convolution over ragged sequences, with its state kept by slot."""

from torch_hybrid.ops.causal_conv1d.op import causal_conv1d

__all__ = ["causal_conv1d"]
