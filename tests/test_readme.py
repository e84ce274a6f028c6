"""Tables of what runs, made from the code: `python -m tests.test_readme` rewrites them."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.tiny_models import BUILDERS
from torch_hybrid.models.families import FAMILIES, NOT_SERVED, architecture_of
from torch_hybrid.models.ring_2_5.config import ARCHITECTURE as RING_2_5
from torch_hybrid.ops.block_attention import op as block_attention
from torch_hybrid.ops.capability import Implementation
from torch_hybrid.ops.causal_conv1d import op as causal_conv1d
from torch_hybrid.ops.draw_tokens import op as draw_tokens
from torch_hybrid.ops.fused_experts import op as fused_experts
from torch_hybrid.ops.gated_delta_rule import op as gated_delta_rule
from torch_hybrid.ops.gated_delta_step import op as gated_delta_step
from torch_hybrid.ops.gated_pooling import op as gated_pooling
from torch_hybrid.ops.head_linear import op as head_linear
from torch_hybrid.ops.kimi_delta_attention import op as kimi_delta_attention
from torch_hybrid.ops.kimi_delta_step import op as kimi_delta_step
from torch_hybrid.ops.latent_attention import op as latent_attention
from torch_hybrid.ops.lightning_step import op as lightning_step
from torch_hybrid.ops.linear import op as linear
from torch_hybrid.ops.merge_states import op as merge_states
from torch_hybrid.ops.ngram_embedding import op as ngram_embedding
from torch_hybrid.ops.paged_attention import op as paged_attention
from torch_hybrid.ops.pooled_selection_step import op as pooled_selection_step
from torch_hybrid.ops.power_sum import op as power_sum
from torch_hybrid.ops.previous_rows import op as previous_rows
from torch_hybrid.ops.ragged_attention import op as ragged_attention
from torch_hybrid.ops.rg_lru import op as rg_lru
from torch_hybrid.ops.route import op as route
from torch_hybrid.ops.select_blocks import op as select_blocks
from torch_hybrid.ops.selective_scan import op as selective_scan
from torch_hybrid.ops.ssd import op as ssd
from torch_hybrid.ops.ssd_step import op as ssd_step
from torch_hybrid.ops.state_copy import op as state_copy
from torch_hybrid.ops.top_k import op as top_k
from torch_hybrid.ops.wkv import op as wkv

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- generated: tests/test_readme.py -->\n", "<!-- end generated -->"

# Ops by the kind of layer that calls them, in order.
OPS: dict[str, dict[str, Mapping[str, Implementation]]] = {
    "paged_attention": {"paged_attention": paged_attention.IMPLEMENTATIONS},
    "latent_attention": {
        "latent_attention": latent_attention.IMPLEMENTATIONS,
        "store_latents": latent_attention.STORE_IMPLEMENTATIONS,
        "gather_latents": latent_attention.GATHER_IMPLEMENTATIONS,
        "ragged_attention_with_lse": ragged_attention.IMPLEMENTATIONS,
        "merge_states": merge_states.IMPLEMENTATIONS,
        "head_linear": head_linear.IMPLEMENTATIONS,
    },
    "indexed_attention, indexed_latent_attention": {
        "select_blocks": select_blocks.IMPLEMENTATIONS,
        "block_attention": block_attention.IMPLEMENTATIONS,
    },
    "indexed_latent_attention": {
        "gated_pooling": gated_pooling.IMPLEMENTATIONS,
        "pooled_selection_step": pooled_selection_step.IMPLEMENTATIONS,
    },
    "gated_delta_rule": {
        "gated_delta_step": gated_delta_step.IMPLEMENTATIONS,
        "gated_delta_verify": gated_delta_step.VERIFY_IMPLEMENTATIONS,
        "recurrent_gated_delta_rule": gated_delta_rule.RECURRENT_IMPLEMENTATIONS,
        "chunk_gated_delta_rule": gated_delta_rule.CHUNK_IMPLEMENTATIONS,
    },
    "kimi_delta_attention": {
        "kimi_delta_step": kimi_delta_step.IMPLEMENTATIONS,
        "kimi_delta_verify": kimi_delta_step.VERIFY_IMPLEMENTATIONS,
        "recurrent_kimi_delta_attention": kimi_delta_attention.RECURRENT_IMPLEMENTATIONS,
        "chunk_kimi_delta_attention": kimi_delta_attention.CHUNK_IMPLEMENTATIONS,
    },
    "ngram_embedding": {"ngram_embedding": ngram_embedding.IMPLEMENTATIONS},
    "previous_hidden": {"previous_rows": previous_rows.IMPLEMENTATIONS},
    "mamba2": {
        "ssd_step": ssd_step.IMPLEMENTATIONS,
        "ssd_verify": ssd_step.VERIFY_IMPLEMENTATIONS,
    },
    "mamba": {
        "recurrent_selective_scan": selective_scan.RECURRENT_IMPLEMENTATIONS,
        "chunk_selective_scan": selective_scan.CHUNK_IMPLEMENTATIONS,
    },
    "lightning_attention": {
        "lightning_step": lightning_step.IMPLEMENTATIONS,
        "lightning_verify": lightning_step.VERIFY_IMPLEMENTATIONS,
    },
    "mamba2, lightning_attention, mlstm": {
        "recurrent_ssd": ssd.RECURRENT_IMPLEMENTATIONS,
        "chunk_ssd": ssd.CHUNK_IMPLEMENTATIONS,
    },
    "rg_lru": {"rg_lru": rg_lru.IMPLEMENTATIONS},
    "time_mix": {"wkv": wkv.IMPLEMENTATIONS},
    "convolution of the mixers, gated or not": {"causal_conv1d": causal_conv1d.IMPLEMENTATIONS},
    "around the mixers": {
        "linear": linear.IMPLEMENTATIONS,
        "fused_experts": fused_experts.IMPLEMENTATIONS,
        "state_copy": state_copy.IMPLEMENTATIONS,
        "route": route.IMPLEMENTATIONS,
        "top_k": top_k.IMPLEMENTATIONS,
        "power_sum": power_sum.IMPLEMENTATIONS,
        "draw_tokens": draw_tokens.IMPLEMENTATIONS,
    },
}
NAMES = {
    "paged_attention": "full attention (GQA)",
    "latent_attention": "full attention (MLA)",
    "indexed_attention": "attention to blocks that an indexer picks",
    "indexed_latent_attention": "MLA of blocks that an indexer picks",
    "ngram_embedding": "embeddings of n-grams",
    "previous_hidden": "heads that predict further tokens",
    "gated_delta_rule": "gated delta rule",
    "kimi_delta_attention": "Kimi delta attention",
    "mamba": "Mamba",
    "mamba2": "Mamba2",
    "lightning_attention": "lightning attention",
    "mlstm": "matrix memories with exponential gates (mLSTM)",
    "rg_lru": "real-gated linear recurrent units",
    "time_mix": "RWKV's time mixing",
    "channel_mix": "RWKV's channel mixing",
    "short_convolution": "gated short convolution",
    "convolved_projection": "convolutions of queries and keys",
    "branch_convolution": "short convolutions of keys, values and branches",
}
SHOWN = {
    "cpp": "C++",
    "cpp_invariant": "C++ (batch-invariant)",
    "cudnn": "cuDNN",
    "triton_fp8": "Triton in 8 bits",
    "triton": "Triton",
    "triton_invariant": "Triton (batch-invariant)",
    "flashinfer": "FlashInfer",
    "triton_rounded": "Triton (rounded)",
    "flashinfer_trtllm": "FlashInfer with TensorRT-LLM (Blackwell, never run)",
    "flashinfer_cute_dsl": "FlashInfer with CuTe DSL (Blackwell, never run)",
    "torch": "torch",
}


def models_table() -> str:
    """Model types with their mixers, and those that are refused, with why."""
    lines = ["| model types | mixers | positions |", "|---|---|---|"]
    lines += sorted(_model_rows())
    refused = []
    for reason in sorted(set(NOT_SERVED.values())):
        types = ", ".join(name for name, why in NOT_SERVED.items() if why == reason)
        refused.append(f"{types} ({reason})")
    lines += ["", f"Not served: {'; '.join(refused)}."]
    return "\n".join(lines) + "\n"


def ops_table() -> str:
    """Ops by the mixers that call them, with their implementations."""
    lines = ["| mixer | op | on a CPU | on a CUDA GPU |", "|---|---|---|---|"]
    for kinds, ops in OPS.items():
        mixer = ", ".join(NAMES.get(kind, kind) for kind in kinds.split(", "))
        for op, implementations in ops.items():
            cells = [_on(implementations, device) for device in ("cpu", "cuda")]
            lines.append(f"| {mixer} | `{op}` | {cells[0]} | {cells[1]} |")
            mixer = ""
    return "\n".join(lines) + "\n"


GENERATED = {"README.md": models_table, "ops/README.md": ops_table}


def _model_rows() -> Iterator[str]:
    """A line for each family; its mixers are those of the tiny models that tests run."""
    mixers: dict[tuple[str, ...], dict[str, None]] = {}
    axes: dict[tuple[str, ...], int] = {}
    for build in BUILDERS.values():
        config = build().config
        family = FAMILIES[config.model_type]
        kinds = mixers.setdefault(family.model_types, {})
        kinds.update(dict.fromkeys(architecture_of(config).table.kinds))
        axes[family.model_types] = family.num_position_axes
    assert {model_type for types in mixers for model_type in types} == set(FAMILIES)
    for types, kinds in mixers.items():
        yield _row(types, kinds, axes[types])
    yield _row([RING_2_5], ("latent_attention", "lightning_attention"), 1)


def _row(types: Iterable[str], kinds: Iterable[str], num_axes: int) -> str:
    shown = ", ".join(f"`{model_type}`" for model_type in types)
    mixers = ", ".join(NAMES[kind] for kind in NAMES if kind in set(kinds))
    return f"| {shown} | {mixers} | {num_axes}-D |"


def _on(implementations: Mapping[str, Implementation], device: str) -> str:
    return ", ".join(
        SHOWN[name]
        for name, implementation in implementations.items()
        if device in implementation.capability.devices
        and not (name.startswith("triton") and device == "cpu")
    )


@pytest.mark.parametrize("path", GENERATED)
def test_tables_are_what_the_code_says(path):
    shown = (ROOT / path).read_text().split(BEGIN)[1].split(END)[0]
    assert shown == GENERATED[path]()


if __name__ == "__main__":
    for path, table in GENERATED.items():
        text = (ROOT / path).read_text()
        before, rest = text.split(BEGIN)
        (ROOT / path).write_text(before + BEGIN + table() + END + rest.split(END)[1])
