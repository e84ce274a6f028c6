"""README's table of what runs is made from the code. `python -m tests.test_readme` rewrites it."""

from collections.abc import Mapping
from pathlib import Path

from torch_hybrid.models.load import FAMILIES
from torch_hybrid.ops.capability import Implementation
from torch_hybrid.ops.causal_conv1d import op as causal_conv1d
from torch_hybrid.ops.fused_experts import op as fused_experts
from torch_hybrid.ops.gated_delta_rule import op as gated_delta_rule
from torch_hybrid.ops.linear import op as linear
from torch_hybrid.ops.paged_attention import op as paged_attention
from torch_hybrid.ops.state_copy import op as state_copy

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- generated: tests/test_readme.py -->\n", "<!-- end generated -->"

OPS: dict[str, Mapping[str, Implementation]] = {
    "`paged_attention`, `paged_attention_with_lse`": paged_attention.IMPLEMENTATIONS,
    "`recurrent_gated_delta_rule`": gated_delta_rule.RECURRENT_IMPLEMENTATIONS,
    "`chunk_gated_delta_rule`": gated_delta_rule.CHUNK_IMPLEMENTATIONS,
    "`causal_conv1d`": causal_conv1d.IMPLEMENTATIONS,
    "`linear`": linear.IMPLEMENTATIONS,
    "`fused_experts`": fused_experts.IMPLEMENTATIONS,
    "`state_copy`": state_copy.IMPLEMENTATIONS,
}
MIXERS = {True: "full attention, gated delta rule", False: "full attention"}
SHOWN = {"cpp": "C++", "triton": "Triton", "torch": "torch"}


def generated() -> str:
    """The two tables: models, and ops with their implementations by device."""
    lines = ["| model type | layers | positions |", "|---|---|---|"]
    for model_type, family in sorted(FAMILIES.items()):
        positions = "3-D" if family.num_position_axes == 3 else "1-D"
        mixers = MIXERS[family.mixer is not None]
        lines.append(f"| `{model_type}` | {mixers} | {positions} |")
    lines += ["", "| op | on a CPU | on a CUDA GPU |", "|---|---|---|"]
    for op, implementations in OPS.items():
        cells = [
            ", ".join(
                SHOWN[name]
                for name, implementation in implementations.items()
                if device in implementation.capability.devices
                and (name, device) != ("triton", "cpu")
            )
            for device in ("cpu", "cuda")
        ]
        lines.append(f"| {op} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines) + "\n"


def test_the_table_is_what_the_code_says():
    shown = README.read_text().split(BEGIN)[1].split(END)[0]
    assert shown == generated()


if __name__ == "__main__":
    text = README.read_text()
    before, rest = text.split(BEGIN)
    README.write_text(before + BEGIN + generated() + END + rest.split(END)[1])
