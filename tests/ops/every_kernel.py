"""Launches every Triton kernel on small ragged sequences, to be watched by a sanitizer.

    python -m tests.ops.every_kernel

Needs neither pytest nor a model; ``tests.ops.sanitize_kernels`` runs parts of it under
compute-sanitizer. With TRITON_INTERPRET=1 and ``--device cpu`` the kernels are interpreted;
``--dry`` notes what would be launched. Exits with 1 if a kernel never is, or if a result is not
finite. Those in Gluon need a Hopper GPU: on another device they are left out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import islice, product
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from tests.ops import kernels
from tests.ops.block_attention import cases as blocks
from tests.ops.causal_conv1d import cases as conv
from tests.ops.causal_conv1d import test_triton_backward as conv_backward
from tests.ops.delta_rule import gated as gdn
from tests.ops.delta_rule import kimi as kda
from tests.ops.delta_rule import step_gated_cases as gdn_step
from tests.ops.delta_rule import step_kimi_cases as kda_step
from tests.ops.delta_rule.backward import make_backward
from tests.ops.delta_rule.cases import Case as DeltaCase
from tests.ops.delta_rule.step_gated_cases import FAMILY as GATED
from tests.ops.delta_rule.step_kimi_cases import FAMILY as KIMI
from tests.ops.fused_experts import cases as experts
from tests.ops.fused_experts import training as experts_training
from tests.ops.gated_pooling import cases as pooling
from tests.ops.latent_attention import cases as latents
from tests.ops.linear import cases as linears
from tests.ops.lora import cases as loras
from tests.ops.ngram_embedding import cases as ngrams
from tests.ops.packed_backward import gradients, make_channels
from tests.ops.packed_backward import moved as arguments_moved
from tests.ops.paged_attention import cases as paged
from tests.ops.pooled_selection_step import cases as indexing
from tests.ops.ragged_attention import cases as ragged
from tests.ops.recurrent_triton import on_device
from tests.ops.registered import channel_recurrences, public_ops
from tests.ops.select_blocks import cases as selection
from tests.ops.selective_scan import backward as scan_backward
from tests.ops.selective_scan import cases as scans
from tests.ops.ssd import backward as ssd_backward
from tests.ops.ssd import cases as ssd
from tests.ops.ssd import step_lightning_cases as lightning_step_cases
from tests.ops.ssd import step_mamba2_cases as ssd_step_cases
from tests.ops.ssd.step_lightning_cases import FAMILY as LIGHTNING
from tests.ops.ssd.step_mamba2_cases import FAMILY as MAMBA2
from tests.ops.step_family import Family
from torch_hybrid.ops import (
    block_attention,
    causal_conv1d,
    delta_rule,
    draw_tokens,
    fused_experts,
    gated_pooling,
    head_linear,
    latent_attention,
    linear,
    lora,
    ngram_embedding,
    paged_attention,
    pooled_selection_step,
    power_sum,
    ragged_attention,
    route,
    select_blocks,
    selective_scan,
    top_k,
)
from torch_hybrid.ops import ssd as ssd_ops
from torch_hybrid.ops.core.recurrence import CHUNK, RECURRENT
from torch_hybrid.ops.delta_rule import op as delta_op
from torch_hybrid.ops.triton.devices import runs_gluon
from torch_hybrid.ops.triton.padding import set_padding

# Not a multiple of any tile; an empty sequence, and padding behind the last one.
LENGTHS = {"lengths": (5, 0, 1, 19), "num_padding_tokens": 3}
ODD = {"k_dim": 19, "v_dim": 27}
PAGED = ((1, 70), (13, 37), (0, 5), (3, 3))
DRAFTED = (3, 0, 1, 0)  # new tokens of steps that verify drafts
DTYPES = (torch.float32, torch.bfloat16)

Call = Callable[[str], Any]  # with a device


def moved(values: tuple[Any, ...], device: str) -> list[Any]:
    """Copies on the device, each in memory of its own."""
    copies: list[Any] = tree_map_only(Tensor, lambda x: x.to(device, copy=True), list(values))
    return copies


def run(op: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any], device: str) -> Any:
    options = tree_map_only(Tensor, lambda x: x.to(device, copy=True), options)
    return op(*moved(args, device), **{"impl": "triton", **options})


def linear_call(inputs: linears.Inputs, impl: str = "triton") -> Call:
    return partial(run, linear.linear, inputs.args(), {**inputs.options(), "impl": impl})


def with_records(inputs: Any) -> tuple[Any, dict[str, Any]]:
    """A decode step's inputs as those of a step that verifies drafts, of which some are accepted:
    arguments and options."""
    records = torch.randn_like(inputs.empty_records(2))
    accepted = torch.tensor([2, 0, 0, 1], dtype=torch.int32)
    return inputs.args(), {**inputs.options(), "records": records, "accepted": accepted}


def by_open_chunks(family: Family, inputs: Any) -> Iterator[tuple[str, Call]]:
    """A decode step by open chunks, and their closing."""
    options = {**inputs.options(), "chunk": inputs.empty_chunk(fill=0.0)}
    no_tokens = {"cu_seqlens": torch.zeros_like(inputs.cu_seqlens)}
    none = inputs.changed(**inputs.tokens(slice(0)), **no_tokens)
    for what, given in (("open chunks", inputs), ("closing", none)):
        yield f"{family.op.__name__}, {what}", partial(run, family.op, given.args(), options)


def recurrences(dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    """Both forms of each rule, and the segments of long sequences."""
    delta = DeltaCase(num_k_heads=1, num_v_heads=2, **LENGTHS, **ODD)
    kimi = kda.case(5, 0, 1, 19, num_padding_tokens=3, **ODD)
    scalar = ssd.Case(num_groups=1, num_heads=2, **LENGTHS)
    for op, inputs in (
        (delta_rule.gated_delta_rule, gdn.make_inputs(delta, dtype)),
        (delta_rule.kimi_delta_attention, kda.make_inputs(kimi, dtype)),
        (selective_scan.selective_scan, scans.make_inputs(scans.Case(**LENGTHS), dtype)),
        (ssd_ops.ssd, ssd.make_inputs(scalar, dtype)),
    ):
        for form in (RECURRENT, CHUNK):
            options = inputs.options() | {"chunk_size": 16, "impl": f"{form}_triton"}
            yield f"{op.__name__}, {form}", partial(run, op, inputs.args(), options)
    odd = {"num_padding_tokens": 3, "has_bias": True, **ODD}
    gdn_one = gdn_step.case(lengths=(1, 0, 1), **odd)
    for family, step in ((GATED, gdn_one), (KIMI, kda_step.case(1, 0, 1, **odd))):
        op, make_inputs = family.op, family.make_inputs
        inputs = make_inputs(step, dtype)
        yield op.__name__, partial(run, op, inputs.args(), inputs.options())
        inputs = make_inputs(replace(step, lengths=DRAFTED), dtype)
        yield f"{op.__name__}, drafts", partial(run, op, *with_records(inputs))
        several = make_inputs(replace(step, **LENGTHS), dtype)
        options = several.options() | {"impl": "triton_invariant"}
        yield f"{op.__name__}, any lengths", partial(run, op, several.args(), options)
        yield from by_open_chunks(family, make_inputs(step, dtype))
    for gate in ("before_norm", "no_norm"):
        mamba2 = ssd_step_cases.Case(lengths=(1, 0, 1), num_padding_tokens=3, gate=gate, **ODD)
        inputs = ssd_step_cases.make_inputs(mamba2, dtype)
        op = ssd_ops.ssd_step
        yield f"{op.__name__}, {gate}", partial(run, op, inputs.args(), inputs.options())
        inputs = ssd_step_cases.make_inputs(replace(mamba2, lengths=DRAFTED), dtype)
        yield f"{op.__name__}, drafts, {gate}", partial(run, op, *with_records(inputs))
        yield from by_open_chunks(MAMBA2, ssd_step_cases.make_inputs(mamba2, dtype))
    for gated in (True, False):
        mixer = lightning_step_cases.Case(
            lengths=(1, 0, 1), num_padding_tokens=3, gated=gated, dim=27, rotary_dim=6
        )
        inputs = lightning_step_cases.make_inputs(mixer, dtype)
        op = ssd_ops.lightning_step
        name = op.__name__ if gated else f"{op.__name__} without a gate"
        yield name, partial(run, op, inputs.args(), inputs.options())
        inputs = lightning_step_cases.make_inputs(replace(mixer, lengths=DRAFTED), dtype)
        yield f"{name}, drafts", partial(run, op, *with_records(inputs))
        yield from by_open_chunks(LIGHTNING, lightning_step_cases.make_inputs(mixer, dtype))
    lengths = {"lengths": (150, 0, 33), "num_padding_tokens": 2}
    for name in channel_recurrences():
        cases, op = import_module(f"tests.ops.{name}.cases"), public_ops()[name]
        for sizes, how in ((LENGTHS, ""), (lengths, " in segments")):
            walked = cases.make_inputs(replace(cases.CASES["odd"], **sizes), dtype)
            yield name + how, partial(run, op, walked.args(), {})
    inputs = ssd.make_inputs(ssd.Case(num_groups=1, num_heads=1, **lengths), dtype)
    options = inputs.options() | {"chunk_size": 16, "impl": "chunk_triton"}
    yield "ssd in segments", partial(run, ssd_ops.ssd, inputs.args(), options)
    inputs = scans.make_inputs(scans.Case(bias="own", **lengths), dtype)
    options = inputs.options() | {"impl": "chunk_triton"}
    op = selective_scan.selective_scan
    yield f"{op.__name__} in segments", partial(run, op, inputs.args(), options)


def attentions(dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    """Pages, pages of latents, and whole sequences."""
    heads = paged.Case(num_q_heads=6, num_kv_heads=2, head_dim=24, page_size=5, lengths=PAGED)
    rows = latents.Case(num_heads=5, rank=40, rope_dim=24, page_size=5, lengths=PAGED)
    for fp8 in (False, True):
        kept = ", 8 bits" * fp8
        inputs = paged.make_inputs(heads, dtype=dtype, padding=(3, 1), fp8=fp8)
        options = {"scale": 0.2, "window": 9, "softcap": 5.0, "kv_scales": inputs.kv_scales}
        op = paged_attention.paged_attention
        yield op.__name__ + kept, partial(run, op, inputs.args(), options)
        biases = paged.make_biases(inputs, reach=7)
        biased = partial(run, op, inputs.args(), options | {"relative_bias": biases})
        yield f"{op.__name__}, biases{kept}", biased
        held = latents.make_inputs(rows, dtype=dtype, padding=(3, 1), fp8=fp8)
        options = {"scale": rows.scale, "pool_scale": held.pool_scale}
        op = latent_attention.latent_attention
        yield op.__name__ + kept, partial(run, op, held.args(), options)
    pages = paged.Case(num_q_heads=6, num_kv_heads=2, head_dim=24, page_size=6, lengths=PAGED)
    picked = blocks.Case(pages=pages, block_size=3, top_k=4)
    args = blocks.make_inputs(picked, dtype=dtype, padding=(3, 1)).args()
    op = block_attention.block_attention
    yield op.__name__, partial(run, op, args, {"scale": 0.2, "block_size": 3})
    latent = blocks.Case(
        pages=replace(pages, num_kv_heads=1), block_size=3, top_k=4, has_values=False
    )
    args = blocks.make_inputs(latent, dtype=dtype, padding=(3, 1)).args()
    yield f"{op.__name__}, latents", partial(run, op, args, {"scale": 0.2, "block_size": 3})
    pools = pooling.Case(dim=19, block_size=3, lengths=((5, 5), (0, 4), (1, 6), (19, 23)))
    inputs = pooling.make_inputs(pools, dtype=dtype, padding=(3, 1))
    args = replace(inputs, state=inputs.state.nan_to_num(1.0)).args()
    op = gated_pooling.gated_pooling
    yield op.__name__, partial(run, op, args, {})
    index = selection.Case(
        num_heads=3, index_dim=24, block_size=3, top_k=4, page_size=6, lengths=PAGED
    )
    args = selection.make_inputs(index, dtype=dtype, padding=(3, 1)).args()
    op = select_blocks.select_blocks
    yield op.__name__, partial(run, op, args, {"block_size": 3, "top_k": 4})
    step = selection.Case(num_heads=3, index_dim=24, block_size=3, top_k=4, page_size=6,
                          lengths=((1, 36), (0, 5), (1, 1), (1, 71)))  # fmt: skip
    inputs = indexing.make_inputs(step, padding=(3, 1))
    held = {"state": inputs.state.nan_to_num(1.0), "block_keys": inputs.block_keys.nan_to_num(1.0)}
    if dtype == torch.bfloat16:
        op = pooled_selection_step.pooled_selection_step
        yield op.__name__, partial(run, op, replace(inputs, **held).args(), {"top_k": 4})
    text = ngrams.Case(dim=5, lengths=(5, 0, 1, 19), num_new=2)
    args = ngrams.make_inputs(text, dtype=dtype, padding=(3, 1)).args()
    op = ngram_embedding.ngram_embedding
    yield op.__name__, partial(run, op, args, {"eos": ngrams.EOS})
    lengths = ((7, 21), (0, 5), (19, 19))
    whole = ragged.Case(num_heads=2, num_k_heads=1, head_dim=24, v_head_dim=16, lengths=lengths)
    args = ragged.make_inputs(whole, dtype=dtype, padding=(3, 2, 1)).args()
    op = ragged_attention.ragged_attention_with_lse
    yield op.__name__, partial(run, op, args, {"scale": 0.2, "causal": True})


def long_queries() -> Iterator[tuple[str, Call]]:
    """The kernel for queries long enough to fill a GPU."""
    heads = paged.Case(num_q_heads=6, num_kv_heads=2, head_dim=24, page_size=5,
                       lengths=((150, 180), (47, 47), (1, 9)))  # fmt: skip
    op = paged_attention.paged_attention
    for fp8 in (False, True):
        inputs = paged.make_inputs(heads, dtype=torch.bfloat16, padding=(3, 1), fp8=fp8)
        options = {"scale": 0.2, "kv_scales": inputs.kv_scales}
        name = "paged_attention of long queries" + ", 8 bits" * fp8
        yield name, partial(run, op, inputs.args(), options)
        biases = paged.make_biases(inputs, reach=100)
        biased = partial(run, op, inputs.args(), options | {"relative_bias": biases})
        yield f"{name}, biases", biased


def on_hopper() -> Iterator[tuple[str, Call]]:
    """Of sizes that are served in Gluon, where that runs."""
    whole = ragged.Case(num_heads=2, num_k_heads=2, head_dim=192, v_head_dim=128,
                        lengths=((150, 180), (131, 0), (200, 200)))  # fmt: skip
    args = ragged.make_inputs(whole, dtype=torch.bfloat16, padding=(3, 2, 1)).args()
    op = ragged_attention.ragged_attention_with_lse
    yield "ragged_attention of long queries", partial(run, op, args, {"scale": 0.2, "causal": True})
    for lengths in (PAGED, PAGED * 33):  # split, and not
        rows = latents.Case(num_heads=70, page_size=5, lengths=lengths)
        args = latents.make_inputs(rows, dtype=torch.bfloat16, padding=(3, 1)).args()
        name = f"latent_attention of {len(lengths)} sequences"
        yield name, partial(run, latent_attention.latent_attention, args, {"scale": rows.scale})
    pages = paged.Case(num_q_heads=20, num_kv_heads=1, head_dim=512, page_size=6, lengths=PAGED)
    picked = blocks.Case(pages=pages, block_size=3, top_k=4, has_values=False)
    args = blocks.make_inputs(picked, dtype=torch.bfloat16, padding=(3, 1)).args()
    options = {"scale": 0.2, "block_size": 3}
    op = block_attention.block_attention
    yield f"{op.__name__}, latents of 20 heads", partial(run, op, args, options)
    pages = paged.Case(num_q_heads=24, num_kv_heads=2, head_dim=64, lengths=((520, 700), (1, 40)))
    picked = blocks.Case(pages=pages, block_size=4, top_k=60)
    args = blocks.make_inputs(picked, dtype=torch.bfloat16, padding=(3, 1)).args()
    options = {"scale": 0.2, "block_size": 4}
    yield f"{op.__name__}, tiles of queries", partial(run, op, args, options)
    heads = {"num_k_heads": 1, "num_v_heads": 2, "k_dim": 128, "v_dim": 128}
    rounded = delta_op.GATED_IMPLEMENTATIONS["chunk_triton_rounded"].load()
    rule = gdn.make_inputs(DeltaCase(**heads, **LENGTHS), torch.bfloat16)
    yield "gated_delta_rule, rounded", lambda device: rounded(on_device(rule, device))
    trained = partial(make_backward, qk_l2norm=True)
    wide = {"heads": (2, 4), "dims": (128, 128), "dtype": torch.bfloat16}
    for name, make in (
        ("gated_delta_rule_backward", trained),
        ("gated_delta_rule_backward, wide heads", partial(trained, **wide)),
        ("kimi_delta_attention_backward", partial(trained, by_channel=True)),
    ):
        yield name, lambda device, make=make: gradients(make(device=device))


def token_ops(dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    """Convolution, experts of few tokens and of many, a router's choice, and linear layers."""
    op = causal_conv1d.causal_conv1d
    for name, has_gates in ((op.__name__, False), (f"{op.__name__} with gates", True)):
        case = conv.Case(channels=37, has_bias=True, has_gates=has_gates, **LENGTHS)
        inputs = conv.make_inputs(case, dtype)
        yield name, partial(run, op, inputs.args(), inputs.options())
    backward = conv_backward.make_backward(dtype=dtype)
    name = "causal_conv1d_backward"
    yield name, lambda device: gradients(conv_backward.on(backward, device))
    scan = ssd_backward.make_backward(dtype=dtype)
    lru, mean = (make_channels(name, dtype=dtype) for name in ("rg_lru", "wkv"))
    selective = scan_backward.make_backward(dtype=dtype)
    backwards = {"ssd": scan, "rg_lru": lru, "wkv": mean, "selective_scan": selective}
    for name, call in backwards.items():
        yield f"{name}_backward", lambda device, call=call: gradients(arguments_moved(call, device))
    trained = experts_training.make_backward(experts.CASES["some_choices_empty"], dtype=dtype)
    yield (
        "fused_experts, forward and backward",
        lambda device: experts_training.made_by_both(arguments_moved(trained, device), "triton"),
    )
    for num_tokens in (3, 50):
        case = experts.Case(num_tokens=num_tokens, top_k=3, dim=77, width=45, routing="some_none")
        args = experts.make_inputs(case, dtype=dtype)
        op = fused_experts.fused_experts
        name = f"{op.__name__} of {num_tokens} tokens"
        yield name, partial(run, op, args, {"activation": case.activation})
        args, scales = experts.make_fp8_inputs(case, dtype=dtype)
        options = {"activation": case.activation, **scales}
        yield f"{name}, 8-bit weights", partial(run, op, args, options)
        yield f"{name}, in 8 bits", partial(run, op, args, options | {"impl": "triton_fp8"})
        for stored in ("int8", "int4_64_zeros", "nvfp4"):
            args, scales = experts.make_integer_inputs(case, stored, dtype=dtype)
            options = {"activation": case.activation, **scales}
            yield f"{name}, {stored}", partial(run, op, args, options)
    for num_rows in (3, 9):
        layers = linears.Case(num_rows=num_rows, depth=77, widths=(66, 7), biased=frozenset({1}))
        name = f"linear of {num_rows} rows"
        yield name, linear_call(linears.make_inputs(layers, dtype=dtype))
        fp8 = linears.make_fp8_inputs(layers, dtype=dtype)
        yield f"{name}, 8-bit weights", linear_call(fp8)
        yield f"{name}, in 8 bits", linear_call(fp8, impl="triton_fp8")
        if dtype == torch.bfloat16:
            mixed = linears.make_mixed_inputs(replace(layers, depth=1030), dtype=dtype)
            yield f"{name}, in 8 and 16 bits", linear_call(mixed, impl="triton_fp8")
    for num_rows, stored in product((1, 9, 70), ("int8", "int4_of_32", "nvfp4")):
        layers = linears.Case(num_rows=num_rows, depth=77, widths=(66, 7), biased=frozenset({1}))
        integers = linears.make_integer_inputs(layers, stored, dtype=dtype)
        yield f"linear of {num_rows} rows, {stored}", linear_call(integers)
    args = (torch.randn(5, 3, 37).to(dtype), torch.randn(3, 27, 37).to(dtype))
    yield "head_linear", partial(run, head_linear.head_linear, args, {})
    factors = loras.tensors(loras.make_inputs(loras.CASES["parts"], dtype=dtype))
    yield "lora", partial(run, lora.lora, (*factors,), {})
    for stored in (None, "fp8", "nvfp4"):
        case = experts.Case(num_tokens=7, num_experts=5, top_k=3, dim=77, width=45)
        *args, scales = experts.make_product(case, stored, dtype=dtype)
        op = fused_experts.expert_linear
        yield f"{op.__name__}, {stored}", partial(run, op, (*args,), {"scales": scales})
    yield "top_k", partial(run, top_k.top_k, (torch.randn(5, 37).to(dtype), 3), {})
    rows = torch.randn(5, 3, 37).to(dtype)
    for addend in (None, rows):
        yield "power_sum", partial(run, power_sum.power_sum, (rows, 2, addend), {})
    logits = torch.randn(5, 37).to(dtype)
    yield "route", partial(run, route.route, (logits, None, 3), {"score": "softmax"})
    logits = torch.randn(3, 2500).to(dtype)
    settings = torch.tensor([[1, 0.3, 0, 0.9, 0], [1, 0.5, 5, 0.5, 0], [0, 0, 0, 1, 0]]).double()
    options = {"draws": True, "num_ranked": 64, "has_wide_top_p": True}
    op = draw_tokens.draw_tokens
    yield op.__name__, partial(run, op, (logits, settings.t().contiguous()), options)


def many_pairs() -> Iterator[tuple[str, Call]]:
    """The experts' kernels for more pairs than weights would be read for."""
    case = experts.Case(num_tokens=300, dim=192, width=320, routing="some_none")
    for activation in ("silu", "relu2"):
        args = experts.make_inputs(replace(case, activation=activation), dtype=torch.bfloat16)
        args = (args[0].contiguous(), *args[1:])
        op = fused_experts.fused_experts
        yield f"{op.__name__} of many pairs", partial(run, op, args, {"activation": activation})
        # Hidden activations that shared memory holds, and others that it does not.
        width = {"silu": 384, "relu2": 896}[activation]
        blocked = replace(case, dim=256, width=width, activation=activation)
        args, scales = experts.make_fp8_inputs(blocked, dtype=torch.bfloat16)
        options = {"activation": activation, **scales, "impl": "triton_fp8"}
        yield f"{op.__name__} of many pairs, in 8 bits", partial(run, op, args, options)


def around_flashinfer() -> Iterator[tuple[str, Call]]:
    """The kernels that translate for FlashInfer; in its place stands what fills outputs with 0."""
    delta = DeltaCase(num_k_heads=1, num_v_heads=2, **LENGTHS, k_dim=128, v_dim=128)
    inputs = gdn.make_inputs(delta, torch.bfloat16)

    def prefill(*_: Any, output: Tensor, output_state: Tensor, **__: Any) -> None:
        output.zero_()
        output_state.zero_()

    def beside(theirs: Callable[..., None], place: str, launch: Callable[[], Tensor]) -> Tensor:
        module, _, function = place.partition(":")
        packages = {"flashinfer": ModuleType(""), module: ModuleType("")}
        setattr(packages[module], function, theirs)
        with mock.patch.dict(sys.modules, packages):
            return launch()

    def chunk_rule(device: str) -> Tensor:
        launcher = delta_op.GATED_IMPLEMENTATIONS["chunk_flashinfer"].load()
        x = replace(on_device(inputs, device), planned=[torch.tensor([0, 0])])
        return beside(
            prefill, "flashinfer.gdn_prefill:chunk_gated_delta_rule", partial(launcher, x)
        )

    def padding(device: str) -> Tensor:
        out, lse = torch.randn(7, 3, 19, device=device), torch.randn(7, 3, device=device)
        set_padding(out, lse, torch.tensor([0, 2, 5], dtype=torch.int32, device=device))
        return out

    yield "gated_delta_rule around FlashInfer", chunk_rule
    yield "rows of padding", padding


def forced(*, dry: bool) -> ExitStack:
    """Small sequences take the ways of long ones where ``recurrences`` and the others say so.

    What is not launched may be of a Hopper.
    """
    from torch_hybrid.ops.block_attention import _triton_hopper as blocks_hopper
    from torch_hybrid.ops.delta_rule import _hopper as rule_hopper
    from torch_hybrid.ops.delta_rule import _triton_gated as rule_chunk
    from torch_hybrid.ops.delta_rule.training import _hopper as rule_backward
    from torch_hybrid.ops.fused_experts import _hopper
    from torch_hybrid.ops.fused_experts.training import _torch as trained_experts
    from torch_hybrid.ops.latent_attention import _triton_hopper, _triton_tiles
    from torch_hybrid.ops.paged_attention import _triton_long
    from torch_hybrid.ops.selective_scan import _triton as _triton_scan
    from torch_hybrid.ops.ssd import _triton_chunk
    from torch_hybrid.ops.triton import channel_programs, hopper_attention

    stack = ExitStack()
    if dry:
        stack.enter_context(mock.patch.object(_triton_tiles, "is_hopper", return_value=True))
        stack.enter_context(mock.patch.object(rule_chunk, "is_hopper", return_value=True))
        rules = rule_hopper, rule_backward
        for module in (hopper_attention, _triton_hopper, blocks_hopper, _hopper, *rules):
            stack.enter_context(mock.patch.object(module, "runs_gluon", return_value=True))
        counts = mock.patch.object(trained_experts, "_counts", _no_counts)
        stack.enter_context(counts)  # no kernel found where the rows of an expert end
    stack.enter_context(mock.patch.object(_triton_long, "PROCESSORS", 1))
    stack.enter_context(mock.patch.object(_triton_long, "is_hopper", return_value=True))
    stack.enter_context(mock.patch.object(_triton_chunk, "_segment", _segment))
    for module in (channel_programs, _triton_scan):
        stack.enter_context(mock.patch.object(module, "_SEGMENT", 32))
    return stack


def _no_counts(ends: Tensor, rows: Tensor) -> list[int]:
    return [0] * len(ends) + [len(rows)]


def _segment(num_tokens: int, _: int, chunk: int) -> int:
    return chunk if num_tokens > 100 else 0


def calls() -> Iterator[tuple[str, Call]]:
    """What is run, and its name."""
    for dtype in DTYPES:
        for family in (recurrences, attentions, token_ops):
            for name, call in family(dtype):
                yield f"{name} {str(dtype).removeprefix('torch.')}", call
    yield from long_queries()
    yield from many_pairs()
    yield from on_hopper()
    yield from around_flashinfer()


def is_finite(result: Any) -> bool:
    """The first output of an op; a log-sum-exp may be infinite."""
    out: Tensor = result[0] if isinstance(result, tuple) else result
    return bool(out.isfinite().all())


def never_launched(launched: set[kernels.Kernel], *, gluon: bool) -> list[str]:
    """A line for each kernel that no call launched."""
    missing = kernels.all_kernels(gluon=gluon) - launched
    return [f"never launched: {module} {name}" for module, name in sorted(missing)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dry", action="store_true", help="note what is launched, launch nothing")
    said = "every Nth call, from the Ith on; says which kernels it launched"
    parser.add_argument("--part", nargs=2, type=int, default=(0, 1), metavar=("I", "N"), help=said)
    options = parser.parse_args()
    device = options.device
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("tests.ops.every_kernel needs a CUDA device")
    wrong = []
    with forced(dry=options.dry), kernels.launched_kernels(dry=options.dry) as launched:
        for name, call in islice(calls(), options.part[0], None, options.part[1]):
            result = call(device)
            print(name, flush=True)
            if not options.dry and not is_finite(result):
                wrong.append(f"{name}: not finite")
    if options.part[1] > 1:
        print(*(f"launched: {module} {name}" for module, name in sorted(launched)), sep="\n")
    else:
        gluon = options.dry or runs_gluon(torch.device(device))
        wrong += never_launched(launched, gluon=gluon)
    print(f"{len(launched)} kernels launched")
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
