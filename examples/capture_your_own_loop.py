"""Captured steps in a loop of your own: three lines around the step that you already run.

Your loop owns its inputs at fixed addresses (StaticInputs). It captures each bucket once, on null
inputs, which change no state. Then every step refreshes the inputs and replays. On a GPU that is
one CUDA graph per bucket. On a CPU the same lines call the step, so you can try all of it there.
"""

import torch
from torch import Tensor

from torch_hybrid.graphs.capturing.cuda_graph import CapturedSteps
from torch_hybrid.graphs.capturing.static_inputs import StaticInputs
from torch_hybrid.ops.delta_rule import gated_delta_rule

HEADS, DIM, SLOTS = 2, 16, 9
BUCKETS = (2, 4, 8)


def main() -> None:
    """Decode a few sequences that come and go, and compare with steps that are not captured."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    impl = "recurrent_triton" if device.type == "cuda" else "recurrent_torch"
    torch.manual_seed(0)
    state = torch.zeros(SLOTS, HEADS, DIM, DIM, device=device)
    check = state.clone()

    def step(inputs: dict[str, Tensor], pool: Tensor) -> Tensor:
        x = inputs["x"]
        offsets = torch.arange(len(x) + 1, dtype=torch.int32, device=device)
        decay = torch.full((len(x), HEADS), -0.1, device=device)
        q, k, v = x.unbind(1)
        slots = inputs["slots"]
        return gated_delta_rule(
            q, k, v, decay, decay.exp(), pool, offsets, slots, slots,
            scale=DIM**-0.5, qk_l2norm=True, impl=impl,
        )  # fmt: skip

    largest = {
        "x": torch.zeros(BUCKETS[-1], 3, HEADS, DIM),
        "slots": torch.zeros(BUCKETS[-1], dtype=torch.int32),
    }
    static, captured = StaticInputs(largest, device), CapturedSteps(device)
    worst = 0.0
    for slots in ([1, 2, 3], [4], [1, 2, 3, 4, 5, 6, 7], [2, 7], [3]):
        size = next(bucket for bucket in BUCKETS if bucket >= len(slots))
        if size not in captured:
            null = static.refresh({name: leaf[:size] for name, leaf in largest.items()})
            captured.capture(size, lambda inputs=null: step(inputs, state))
        planned = {name: leaf[:size].clone() for name, leaf in largest.items()}
        planned["x"][: len(slots)] = torch.randn(len(slots), 3, HEADS, DIM)
        planned["slots"][: len(slots)] = torch.tensor(slots)
        static.refresh(planned)
        out = captured.replay(size)[: len(slots)]
        expected = step({name: leaf.to(device) for name, leaf in planned.items()}, check)
        worst = max(worst, float((out - expected[: len(slots)]).abs().max()))
    print(f"{device.type}: buckets {', '.join(captured.names)}; largest difference {worst:.1e}")
    assert worst < 1e-6
    assert torch.equal(state, check)


if __name__ == "__main__":
    main()
