"""Tables of what runs, made from the code: `python -m tests.test_readme` rewrites them."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.ops.registered import public_ops
from tests.tiny_models import BUILDERS, MISSING
from torch_hybrid.backends.step import _BACKENDS
from torch_hybrid.models.families import BY_ARCHITECTURE, FAMILIES, NOT_SERVED, architecture_of
from torch_hybrid.ops.core.capability import Implementation
from torch_hybrid.ops.core.recurrence import CHUNK, RECURRENT, of_form
from torch_hybrid.ops.core.registration import REGISTERED

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- generated: tests/test_readme.py -->\n", "<!-- end generated -->"

# Ops by the kind of layer that calls them, in order.
OPS: dict[str, tuple[str, ...]] = {
    "paged_attention": ("paged_attention",),
    "latent_attention": (
        "latent_attention",
        "store_latents",
        "gather_latents",
        "ragged_attention_with_lse",
        "merge_states",
        "head_linear",
    ),
    "indexed_attention, indexed_latent_attention": ("select_blocks", "block_attention"),
    "indexed_latent_attention": ("gated_pooling", "pooled_selection_step"),
    "gated_delta_rule": ("gated_delta_step", "gated_delta_rule"),
    "kimi_delta_attention": ("kimi_delta_step", "kimi_delta_attention"),
    "ngram_embedding": ("ngram_embedding",),
    "previous_hidden": ("previous_rows",),
    "mamba2": ("ssd_step",),
    "mamba": ("selective_scan",),
    "lightning_attention": ("lightning_step",),
    "mamba2, lightning_attention, mlstm": ("ssd",),
    "rg_lru": ("rg_lru",),
    "time_mix": ("wkv",),
    "convolution of the mixers, gated or not": ("causal_conv1d",),
    "to train with": tuple(
        sorted(
            (op for op in public_ops() if op.endswith(("_forward", "_backward"))),
            key=lambda op: (op.rsplit("_", 1)[0], op.endswith("_backward")),
        )
    ),
    "around the mixers": (
        "linear",
        "lora",
        "fused_experts",
        "expert_linear",
        "state_copy",
        "route",
        "top_k",
        "power_sum",
        "draw_tokens",
    ),
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
    "jet_block": "JetBlock",
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
    public_ops()  # imports all families
    lines = ["| mixer | op | on a CPU | on a CUDA GPU |", "|---|---|---|---|"]
    for kinds, ops in OPS.items():
        mixer = ", ".join(NAMES.get(kind, kind) for kind in kinds.split(", "))
        for op in ops:
            cells = [_on(REGISTERED[op], device) for device in ("cpu", "cuda")]
            lines.append(f"| {mixer} | `{op}` | {cells[0]} | {cells[1]} |")
            mixer = ""
    return "\n".join(lines) + "\n"


GENERATED = {"README.md": models_table, "ops/README.md": ops_table}


def _model_rows() -> Iterator[str]:
    """A line for each family; its mixers are those of the tiny models that tests run."""
    mixers: dict[tuple[str, ...], dict[str, None]] = {}
    axes: dict[tuple[str, ...], int] = {}
    for build in BUILDERS.values():
        architecture = architecture_of(build().config)
        family = architecture.family
        types = (family.hf_architecture,) if family.hf_architecture else family.model_types
        mixers.setdefault(types, {}).update(dict.fromkeys(architecture.table.kinds))
        axes[types] = family.num_position_axes
    assert {name for types in mixers for name in types} == FAMILIES.keys() | BY_ARCHITECTURE.keys()
    for types, kinds in mixers.items():
        yield _row(types, kinds, axes[types])


def _row(types: Iterable[str], kinds: Iterable[str], num_axes: int) -> str:
    shown = ", ".join(f"`{model_type}`" for model_type in types)
    mixers = ", ".join(NAMES[kind] for kind in NAMES if kind in set(kinds))
    return f"| {shown} | {mixers} | {num_axes}-D |"


def _on(implementations: Mapping[str, Implementation], device: str) -> str:
    forms = {"": implementations}
    if of_form(implementations, CHUNK):
        forms = {f"{form}: ": of_form(implementations, form) for form in (RECURRENT, CHUNK)}
    shown = {
        form: ", ".join(
            SHOWN[name.removeprefix("recurrent_").removeprefix("chunk_")]
            for name, implementation in known.items()
            if device in implementation.capability.devices
            and not ("triton" in name and device == "cpu")
            and not implementation.is_traced  # which has no kernel of its own
        )
        for form, known in forms.items()
    }
    return "; ".join(f"{form}{names}" for form, names in shown.items())


def test_no_op_and_no_kind_of_layer_is_forgotten():
    shown = [op for ops in OPS.values() for op in ops]
    beside = {op for op in public_ops() if op.removesuffix("_with_lse") in shown}
    assert len(shown) == len(set(shown))
    assert {*shown, *beside} == set(REGISTERED)
    assert set(NAMES) == set(_BACKENDS)


@pytest.mark.parametrize("path", GENERATED)
def test_tables_are_what_the_code_says(path):
    if MISSING:
        pytest.skip(f"transformers lacks {', '.join(MISSING)}")
    shown = (ROOT / path).read_text().split(BEGIN)[1].split(END)[0]
    assert shown == GENERATED[path]()


if __name__ == "__main__":
    for path, table in GENERATED.items():
        text = (ROOT / path).read_text()
        before, rest = text.split(BEGIN)
        (ROOT / path).write_text(before + BEGIN + table() + END + rest.split(END)[1])
