"""An op implementation of your own: register it, select it, and compare it with the others.

Here it is one file. In the repository the function goes into ``ops/causal_conv1d/_einsum.py`` and
the entry into ``ops/causal_conv1d/op.py``, where the contract suite picks it up.
"""

import torch
from torch import Tensor

import torch_hybrid as th
from torch_hybrid.ops.causal_conv1d.op import IMPLEMENTATIONS, CausalConv1d, causal_conv1d
from torch_hybrid.ops.core.capability import Capability, Implementation, Need


def einsum_conv1d(x: CausalConv1d) -> Tensor:
    """Compute the convolution of the op's arguments."""
    out = torch.zeros_like(x.x)
    width = x.weight.shape[1]
    for n, (initial, slot) in enumerate(zip(x.initial_indices, x.state_indices, strict=True)):
        start, end = x.cu_seqlens[n].item(), x.cu_seqlens[n + 1].item()
        if start == end:
            continue
        history = x.conv_state[initial] if initial else torch.zeros_like(x.conv_state[0])
        inputs = torch.cat([history, x.x[start:end]])
        windows = inputs.unfold(0, width, 1)  # [tokens, channels, width]
        mixed = torch.einsum("tcw,cw->tc", windows, x.weight)
        mixed = mixed if x.bias is None else mixed + x.bias
        out[start:end] = torch.nn.functional.silu(mixed) if x.silu else mixed
        if slot:
            x.conv_state[slot] = inputs[-(width - 1) :]
    return out


def main() -> None:
    """Register the implementation, select it by name, and compare it with the torch one."""
    IMPLEMENTATIONS["einsum"] = Implementation(
        capability=Capability(devices=frozenset({"cpu"}), dtypes=frozenset({torch.float32})),
        launcher=f"{__name__}:einsum_conv1d",
    )
    need = Need(device=torch.device("cpu"), dtype=torch.float32)
    choice = th.select("causal_conv1d", IMPLEMENTATIONS, need, "einsum")
    print(f"selected {choice.impl}; refused:")
    for name, reasons in choice.refused.items():
        print(f"  {name}: {'; '.join(reasons)}")

    torch.manual_seed(0)
    x, weight = torch.randn(7, 8), torch.randn(8, 4)
    index = {
        "cu_seqlens": torch.tensor([0, 5, 7], dtype=torch.int32),
        "initial_indices": torch.tensor([2, 0], dtype=torch.int32),
        "state_indices": torch.tensor([2, 1], dtype=torch.int32),
    }
    results = {}
    for impl in ("torch", "einsum"):
        state = torch.ones(3, 3, 8)
        out = causal_conv1d(x, weight, None, state, **index, activation="silu", impl=impl)
        results[impl] = (out, state)
    torch.testing.assert_close(results["einsum"], results["torch"])
    print("einsum agrees with torch, outputs and states")


if __name__ == "__main__":
    main()
