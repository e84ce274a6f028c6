"""A small valid call of every op that is registered, and the range of each index that it takes.

``tests/hostile/test_indices.py`` holds this to ``REGISTERED`` and to the tensors of integers in the
calls, so that neither an op nor an index can be forgotten.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.ops.block_attention import cases as blocks
from tests.ops.causal_conv1d import cases as convolution
from tests.ops.contract import impls_on, skip_reason
from tests.ops.delta_rule import gated as gated_delta
from tests.ops.delta_rule import kimi as kimi_delta
from tests.ops.delta_rule import step_gated_cases as gated_delta_step
from tests.ops.delta_rule import step_kimi_cases as kimi_delta_step
from tests.ops.delta_rule.cases import Case as DeltaCase
from tests.ops.fused_experts import cases as experts
from tests.ops.gated_pooling import cases as pooling
from tests.ops.latent_attention import cases as latents
from tests.ops.linear import cases as linears
from tests.ops.lora import cases as loras
from tests.ops.ngram_embedding import cases as ngrams
from tests.ops.paged_attention import cases as pages
from tests.ops.pooled_selection_step import cases as pooled_selection
from tests.ops.previous_rows import cases as previous
from tests.ops.ragged_attention import cases as ragged
from tests.ops.registered import public_ops
from tests.ops.select_blocks import cases as selection
from tests.ops.selective_scan import cases as scans
from tests.ops.ssd import cases as ssd
from tests.ops.ssd import step_lightning_cases as lightning_step
from tests.ops.ssd import step_mamba2_cases as ssd_step
from tests.ops.state_copy import cases as copies
from tests.ops.step_family import Family
from torch_hybrid.ops.core.registration import NAMESPACE, REGISTERED

Range = tuple[int, int | None]  # the least that is right, and the least above it that is not


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call of a public op: its arguments by name, and the ranges of its indices.

    ``cu_seqlens`` need no range: they rise from 0 to the number of rows.
    """

    op: Callable[..., Any]
    given: Mapping[str, Any]
    ranges: Mapping[str, Range]

    def run(self, impl: str) -> Any:
        return self.op(**{**self.given, "impl": impl})

    def changed(self, **changes: Any) -> Call:
        """The same call but for some arguments, on tensors of its own."""
        own = tree_map_only(Tensor, Tensor.clone, dict(self.given))
        return replace(self, given={**own, **changes})

    def integers(self) -> dict[str, Tensor]:
        """The tensors of integers, by name."""
        tensors = {name: x for name, x in self.given.items() if isinstance(x, Tensor)}
        return {n: x for n, x in tensors.items() if x.dtype in (torch.int32, torch.int64)}

    def mutated(self) -> list[Tensor]:
        """The tensors that the op's schema says it writes."""
        schema = getattr(getattr(torch.ops, NAMESPACE), self.op.__name__).default._schema
        names = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
        given = [self.given[name] for name in names if self.given.get(name) is not None]
        return tree_leaves(given)


def op_of(name: str) -> str:
    """The op of a call in CALLS."""
    return name.partition(",")[0]


def torch_form(op: str) -> str:
    """Name of an op's implementation in torch, by chunks where it has two."""
    return [name for name in REGISTERED[op] if name.endswith("torch")][-1]


def impls_on_a_host(name: str) -> dict[str, str]:
    """The implementations whose indices are on the host, each with why it cannot run here, or "".

    Interpreted kernels run on a CPU too, but are made for indices that nobody reads.
    """
    found = {n: i for n, i in REGISTERED[op_of(name)].items() if "triton" not in n}
    return {n: skip_reason(i, "cpu") or "" for n, i in found.items() if n in impls_on("cpu", found)}


def call_of(name: str) -> Call:
    """A valid call of a registered op, of float32 and sizes that every implementation on a host
    takes. ``name`` is the op's, and may say what is particular: "gated_delta_step, drafts"."""
    torch.manual_seed(0)
    args, options, ranges = CALLS[name]()
    op = public_ops()[op_of(name)]
    bound = inspect.signature(op).bind(*args, **options, impl="")
    return Call(op=op, given=bound.arguments, ranges=ranges)


# Arguments, options and ranges.
_Made = tuple[Sequence[Any], Mapping[str, Any], Mapping[str, Range]]
_LENGTHS = {"lengths": (5, 0, 1, 19), "num_padding_tokens": 3}
_ONE_EACH = {"lengths": (1, 1, 0, 1), "num_padding_tokens": 3}
_DRAFTED = {"lengths": (3, 1, 0, 1), "num_padding_tokens": 3}
_PAGED = ((1, 23), (9, 30), (0, 5), (1, 1))
_PADDING = (3, 1)
_NUM_RECORDS = 2


def _slots(pool: Tensor) -> dict[str, Range]:
    return dict.fromkeys(("initial_indices", "state_indices"), (0, len(pool)))


def _rows_of_pages(num_pages: int, page_size: int) -> Range:
    return page_size, num_pages * page_size


def _pages(page_table: Tensor, num_pages: int, page_size: int) -> dict[str, Range]:
    """The first sequence has one new token."""
    return {
        "seq_lens": (1, page_table.shape[1] * page_size + 1),
        "page_table": (1, num_pages),
        "slot_mapping": _rows_of_pages(num_pages, page_size),
    }


def _recurrent(inputs: Any, **options: Any) -> _Made:
    return inputs.args(), {**inputs.options(), **options}, _slots(inputs.state)


def _of_own_cases(name: str) -> _Made:
    """A recurrence whose folder has its name: inputs are those of its cases."""
    cases = import_module(f"tests.ops.{name}.cases")
    return _recurrent(cases.make_inputs(cases.Case(**_LENGTHS)))


def _gated_delta() -> _Made:
    return _recurrent(gated_delta.make_inputs(DeltaCase(**_LENGTHS)), chunk_size=16)


def _kimi_delta() -> _Made:
    case = kimi_delta.case(*_LENGTHS["lengths"], num_padding_tokens=3)
    return _recurrent(kimi_delta.make_inputs(case), chunk_size=16)


def _ssd() -> _Made:
    return _recurrent(ssd.make_inputs(ssd.Case(**_LENGTHS)), chunk_size=16)


def _scan() -> _Made:
    return _recurrent(scans.make_inputs(scans.Case(bias="float32", **_LENGTHS)), chunk_size=16)


def _verify(family: Family) -> _Made:
    """A step that verifies drafts: records of the first sequence were accepted."""
    inputs = family.mixed(**_DRAFTED)
    args, options, ranges = _recurrent(inputs)
    records = torch.randn_like(inputs.empty_records(_NUM_RECORDS))
    accepted = torch.tensor([2, 0, 0, 1], dtype=torch.int32)
    options |= {"records": records, "accepted": accepted}
    return args, options, ranges | {"accepted": (0, _NUM_RECORDS + 1)}


def _convolution(**form: Any) -> _Made:
    inputs = convolution.make_inputs(convolution.Case(**_LENGTHS, **form))
    return inputs.args(), inputs.options(), _slots(inputs.conv_state)


def _trained(by: str, given: tuple[Any, ...], pool: Tensor, like: Tensor, **options: Any) -> _Made:
    """A forward without a pool, or its backward.

    Args:
        by: "forward" or "backward".
        given: arguments before the initial states; offsets are the last.
        pool: states of the op with a pool.
        like: what outputs are like.
        options: those of both.
    """
    initial = torch.randn_like(pool[: len(given[-1]) - 1])
    if by == "forward":
        return (*given, initial), {**options, "output_final_state": True}, {}
    return (*given, initial, torch.randn_like(like), torch.randn_like(initial)), options, {}


def _trained_rule(by: str, x: Any) -> _Made:
    options = {"scale": x.scale, "qk_l2norm": x.qk_l2norm}
    return _trained(by, (*x.args()[:5], x.cu_seqlens), x.state, x.v, **options)


def _trained_ssd(by: str) -> _Made:
    x = ssd.make_inputs(ssd.Case(**_LENGTHS))
    return _trained(by, (*x.args()[:6], x.cu_seqlens), x.state, x.v, scale=1.0)


def _trained_channels(op: str, by: str) -> _Made:
    """A recurrence of single channels: its rows and numbers, without the pool's indices."""
    cases = import_module(f"tests.ops.{op}.cases")
    *given, pool, cu_seqlens, _, _ = cases.make_inputs(cases.Case(**_LENGTHS)).args()
    return _trained(by, (*given, cu_seqlens), pool, given[0])


def _trained_scan(by: str) -> _Made:
    x = scans.make_inputs(scans.Case(bias="float32", **_LENGTHS))
    given = (x.x, x.dt, -x.A_log.exp(), x.B, x.C, x.D, x.z, x.dt_bias, x.cu_seqlens)
    return _trained(by, given, x.state, x.x)


def _trained_gated(by: str) -> _Made:
    return _trained_rule(by, gated_delta.make_inputs(DeltaCase(**_LENGTHS)))


def _trained_kimi(by: str) -> _Made:
    case = kimi_delta.case(*_LENGTHS["lengths"], num_padding_tokens=3)
    return _trained_rule(by, kimi_delta.make_inputs(case))


def _trained_convolution(by: str) -> _Made:
    x = convolution.make_inputs(convolution.Case(**_LENGTHS))
    given = (x.x, x.weight, x.bias, x.cu_seqlens)
    return _trained(by, given, x.conv_state, x.x, activation="silu")


def _ngram_embedding() -> _Made:
    inputs = ngrams.make_inputs(ngrams.Case(lengths=(5, 0, 1, 19), num_new=1), padding=_PADDING)
    num_rows, size = len(inputs.table), int(inputs.head_sizes[0])
    heads = {"head_sizes": (1, num_rows + 1), "head_offsets": (0, num_rows - size + 1)}
    return inputs.args(), {"eos": ngrams.EOS}, _slots(inputs.history) | heads


def _previous_rows() -> _Made:
    inputs = previous.make_inputs(previous.Case(lengths=(5, 0, 1, 9)), padding=_PADDING)
    return inputs.args(), {}, _slots(inputs.kept) | {"seq_lens": (5, None)}


def _gated_pooling() -> _Made:
    inputs = pooling.make_inputs(
        pooling.Case(lengths=((5, 9), (0, 4), (1, 6), (9, 23))), padding=_PADDING
    )
    return inputs.args(), {}, _slots(inputs.state) | {"seq_lens": (5, None)}


def _paged_attention() -> _Made:
    heads = pages.Case(num_q_heads=4, num_kv_heads=2, head_dim=32, lengths=_PAGED)
    inputs = pages.make_inputs(heads, padding=_PADDING)
    return inputs.args(), {"scale": 0.2}, _pages(inputs.page_table, *inputs.kv.shape[1:3])


def _block_attention() -> _Made:
    heads = pages.Case(num_q_heads=4, num_kv_heads=2, head_dim=32, lengths=_PAGED)
    case = blocks.Case(pages=heads, block_size=4, top_k=3)
    inputs = blocks.make_inputs(case, padding=_PADDING)
    ranges = _pages(inputs.page_table, *inputs.kv.shape[1:3])
    complete = _PAGED[0][1] // case.block_size
    return inputs.args(), {"scale": 0.2, "block_size": 4}, ranges | {"blocks": (-1, complete)}


def _latents() -> latents.Inputs:
    case = latents.Case(num_heads=4, rank=32, rope_dim=16, lengths=_PAGED)
    return latents.make_inputs(case, padding=_PADDING)


def _latent_attention() -> _Made:
    inputs = _latents()
    return inputs.args(), {"scale": 0.2}, _pages(inputs.page_table, *inputs.pool.shape[:2])


def _store_latents() -> _Made:
    x = _latents()
    ranges = {"slot_mapping": _rows_of_pages(*x.pool.shape[:2])}
    return (x.latent, x.k_rope, x.pool, x.slot_mapping, x.cu_seqlens), {}, ranges


def _gather_latents() -> _Made:
    pool = _latents().pool
    rows = torch.tensor([0, pool.shape[1]], dtype=torch.int32)
    return (pool, rows), {}, {"rows": (0, pool.shape[0] * pool.shape[1])}


def _select_blocks() -> _Made:
    inputs = selection.make_inputs(replace(selection.SMALL, lengths=_PAGED), padding=_PADDING)
    num_pages, page_blocks, _ = inputs.block_keys.shape
    ranges = _pages(inputs.page_table, num_pages, page_blocks * selection.SMALL.block_size)
    return inputs.args(), {"block_size": selection.SMALL.block_size, "top_k": 3}, ranges


def _pooled_selection_step() -> _Made:
    inputs = pooled_selection.make_inputs(pooled_selection.SMALL, padding=_PADDING)
    num_pages, page_blocks, _ = inputs.block_keys.shape
    ranges = _pages(inputs.page_table, num_pages, page_blocks * len(inputs.bias))
    return inputs.args(), {"top_k": 3}, ranges | _slots(inputs.state)


def _ragged_attention() -> _Made:
    case = ragged.Case(num_heads=2, num_k_heads=1, head_dim=32, v_head_dim=16,
                       lengths=((7, 21), (0, 5), (9, 9)))  # fmt: skip
    return ragged.make_inputs(case, padding=(3, 2, 1)).args(), {"causal": True, "scale": 0.2}, {}


def _fused_experts() -> _Made:
    case = experts.Case(num_tokens=5)
    ranges = {"expert_ids": (0, case.num_experts + 1)}
    return experts.make_inputs(case), {"activation": case.activation}, ranges


def _expert_linear() -> _Made:
    *args, _ = experts.make_product(experts.Case(num_tokens=5))
    return (*args,), {}, {"expert_ids": (0, len(args[2]) + 1)}


def _trained_experts(by: str) -> _Made:
    args, options, ranges = _fused_experts()
    args = (*args, None, None)
    if by == "forward":
        return args, options, ranges
    out, projected = torch.ops.torch_hybrid.fused_experts_forward(*args, **options, impl="torch")
    needs = {"needs_gate_up": True, "needs_down": True}
    return (*args, projected, torch.randn_like(out)), options | needs, ranges


def _state_copy() -> _Made:
    case = copies.CASES["slots"]
    size = case.pools[0][0][case.dim]
    ranges = dict.fromkeys(("src", "dst"), (0, size))
    return copies.make_inputs(case), {"dim": case.dim}, ranges


def _packed_attention(by: str) -> _Made:
    offsets = torch.tensor([0, 5, 5, 8], dtype=torch.int32)
    q, k, v = torch.randn(9, 4, 16), torch.randn(9, 2, 16), torch.randn(9, 2, 24)
    picked = torch.tensor([-1, -1, 0, 0, 1, -1, -1, 0, -1], dtype=torch.int32)[:, None]
    args = (q, k, v, offsets, picked, torch.randn(9, 4, 3))
    options = {"scale": 0.25, "block_size": 2}
    ranges = {"blocks": (-1, 2)}
    if by == "forward":
        return args, options, ranges
    made = torch.ops.torch_hybrid.packed_attention_forward(*args, **options, impl="torch")
    return (*args, *made, *map(torch.randn_like, made)), options, ranges


def _cross_entropy(by: str) -> _Made:
    hidden, weight = torch.randn(9, 16), torch.randn(37, 16)
    if by == "backward":
        return _without_indices(hidden, weight, hidden, weight, torch.randn(()))
    targets, options = torch.arange(9), {"of_hidden": True, "of_weight": True}
    return (hidden, weight, targets), options, {"targets": (0, 37)}


def _token_logprobs(by: str) -> _Made:
    logits, tokens = torch.randn(9, 37), torch.arange(9)
    more = (torch.randn(9),) if by == "backward" else ()
    return (logits, tokens, *more), {}, {"token_ids": (0, 37)}


def _gated_norm(by: str) -> _Made:
    rows = torch.randn(2 + (by == "backward"), 9, 32)
    options = {"group_size": 16, "eps": 1e-5, "activation": "silu", "gates_first": True}
    return _without_indices(*rows[:2], torch.randn(32), *rows[2:], **options)


def _lora() -> _Made:
    args = loras.tensors(loras.make_inputs(loras.CASES["decode"]))
    return args, {}, {"slots": (0, 4), "ranks": (0, 9), "starts": (0, 97)}


def _without_indices(*args: Any, **options: Any) -> _Made:
    return args, options, {}


CALLS: dict[str, Callable[[], _Made]] = {
    "block_attention": _block_attention,
    "causal_conv1d": _convolution,
    "causal_conv1d, gates": partial(_convolution, has_gates=True, has_bias=True),
    "causal_conv1d, taps of each token": partial(_convolution, num_heads=5),
    "causal_conv1d_backward": lambda: _trained_convolution("backward"),
    "causal_conv1d_forward": lambda: _trained_convolution("forward"),
    "draw_tokens": lambda: _without_indices(
        torch.randn(3, 37),
        torch.tensor([[1, 0, 0.5], [0.3, 0, 0.9], [5, 0, 0], [0.9, 1, 0.8], [0, 0, 0]]).double(),
        draws=True,
        num_ranked=5,
        has_wide_top_p=True,
    ),
    "expert_linear": _expert_linear,
    "fused_experts": _fused_experts,
    "fused_experts_backward": lambda: _trained_experts("backward"),
    "fused_experts_forward": lambda: _trained_experts("forward"),
    "gated_delta_rule": _gated_delta,
    "gated_delta_rule_backward": lambda: _trained_gated("backward"),
    "gated_delta_rule_forward": lambda: _trained_gated("forward"),
    "gated_delta_step": lambda: _recurrent(
        gated_delta_step.make_inputs(gated_delta_step.case(**_ONE_EACH, has_bias=True))
    ),
    "gated_delta_step, drafts": lambda: _verify(gated_delta_step.FAMILY),
    "gated_norm_backward": lambda: _gated_norm("backward"),
    "gated_norm_forward": lambda: _gated_norm("forward"),
    "gated_pooling": _gated_pooling,
    "gather_latents": _gather_latents,
    "head_linear": lambda: _without_indices(
        torch.randn(5, 3, 32), torch.randn(3, 16, 32), bias=torch.randn(3, 16)
    ),
    "kimi_delta_attention": _kimi_delta,
    "kimi_delta_attention_backward": lambda: _trained_kimi("backward"),
    "kimi_delta_attention_forward": lambda: _trained_kimi("forward"),
    "kimi_delta_step": lambda: _recurrent(
        kimi_delta_step.make_inputs(
            kimi_delta_step.case(1, 1, 0, 1, num_padding_tokens=3, has_bias=True)
        )
    ),
    "kimi_delta_step, drafts": lambda: _verify(kimi_delta_step.FAMILY),
    "latent_attention": _latent_attention,
    "lightning_step": lambda: _recurrent(
        lightning_step.make_inputs(lightning_step.Case(**_ONE_EACH))
    ),
    "lightning_step, drafts": lambda: _verify(lightning_step.FAMILY),
    "lightning_step, ungated": lambda: _recurrent(
        lightning_step.make_inputs(replace(lightning_step.CASES["ungated"], **_ONE_EACH))
    ),
    "linear": lambda: _without_indices(*linears.make_inputs(linears.CASES["five_rows_odd"]).args()),
    "linear_cross_entropy_backward": lambda: _cross_entropy("backward"),
    "linear_cross_entropy_forward": lambda: _cross_entropy("forward"),
    "lora": _lora,
    "matrix_product_forward": lambda: _without_indices(torch.randn(40, 33), torch.randn(50, 33).T),
    "merge_states": lambda: _without_indices(*(torch.randn(2, 3, 16), torch.randn(2, 3)) * 2),
    "ngram_embedding": _ngram_embedding,
    "packed_attention_backward": lambda: _packed_attention("backward"),
    "packed_attention_forward": lambda: _packed_attention("forward"),
    "paged_attention": _paged_attention,
    "paged_attention_with_lse": _paged_attention,
    "pooled_selection_step": _pooled_selection_step,
    "power_sum": lambda: _without_indices(torch.randn(5, 37), 2),
    "previous_rows": _previous_rows,
    "ragged_attention_with_lse": _ragged_attention,
    "route": lambda: _without_indices(torch.randn(5, 16), torch.randn(16), 3, score="softmax"),
    "select_blocks": _select_blocks,
    "selective_scan": _scan,
    "selective_scan_backward": lambda: _trained_scan("backward"),
    "selective_scan_forward": lambda: _trained_scan("forward"),
    "ssd": _ssd,
    "ssd_backward": lambda: _trained_ssd("backward"),
    "ssd_forward": lambda: _trained_ssd("forward"),
    "ssd_step": lambda: _recurrent(ssd_step.make_inputs(ssd_step.Case(**_ONE_EACH))),
    "ssd_step, drafts": lambda: _verify(ssd_step.FAMILY),
    "state_copy": _state_copy,
    "store_latents": _store_latents,
    "token_logprobs_backward": lambda: _token_logprobs("backward"),
    "token_logprobs_forward": lambda: _token_logprobs("forward"),
    "top_k": lambda: _without_indices(torch.randn(5, 37), 3),
}
CALLS |= {
    name: partial(_trained_channels, *name.rsplit("_", 1))
    for name in public_ops()
    if name not in CALLS and name.endswith(("_forward", "_backward"))
}
CALLS |= {name: partial(_of_own_cases, name) for name in public_ops() if name not in CALLS}
# Integers that are values and name no place.
VALUES = frozenset({"tokens", "kept_tokens", "multipliers", "history"})
