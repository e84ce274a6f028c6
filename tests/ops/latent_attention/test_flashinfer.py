"""FlashInfer attends to latents: plans and calls without a GPU, and all of it on one."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.devices import needs_cuda
from tests.ops.flashinfer_source import (
    native_parameters_of,
    needs_flashinfer,
    parameters_of,
    source_of,
)
from tests.ops.latent_attention.cases import TENSORS, Case, Inputs, make_inputs
from tests.ops.step_lengths import step_lengths
from tests.ops.triton_compile import SHARED_LIMITS, launches_on, needs_cross_compiler
from tests.ops.triton_interpreter import needs_interpreter, needs_triton
from tests.ops.triton_resources import assert_all_fit, resources_of
from torch_hybrid.ops.core.capability import Need
from torch_hybrid.ops.core.planning import Planned
from torch_hybrid.ops.latent_attention import latent_attention, reference
from torch_hybrid.ops.latent_attention.op import EXTEND, IMPLEMENTATIONS

PROGRAMS, ROOM = 3, 64  # of the device that is documented, and for pieces in a schedule
DECODE = Case(num_heads=80, rank=128, lengths=((1, 1), (1, 40), (1, 18)))
# Parts of a schedule, in the order of a plan's values from the third on.
PARTS = (
    "q_indptr",
    "kv_indptr",
    "partial_indptr",
    "merge_start",
    "merge_end",
    "merge_partial_start",
    "merge_partial_end",
    "merge_stride",
    "q_len",
    "kv_len",
    "q_start",
    "kv_start",
    "kv_end",
    "work_indptr",
)


class Documented:
    """FlashInfer's compiled kernel by its documentation; it cuts each sequence in pieces of 64."""

    @property
    def _module(self) -> Documented:
        """What it wraps a function around, which stages what was planned on the device."""
        return self

    def plan(
        self,
        float_workspace_buffer: Tensor,
        int_workspace_buffer: Tensor,
        page_locked_int_workspace_buffer: Tensor,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_len: Tensor,
        num_heads: int,
        head_dim_o: int,
        causal: bool,
    ) -> tuple[list[int], int]:
        assert not causal
        ints = page_locked_int_workspace_buffer.view(torch.int32)
        ints.fill_(-7)  # of an earlier step
        pieces = [
            (n, tile, begin)
            for n in range(len(kv_len))
            if qo_indptr[n + 1] > qo_indptr[n]
            for tile in range(-(-num_heads // 64))
            for begin in range(0, int(kv_len[n]), 64)
        ]
        dealt = [pieces[k::PROGRAMS] for k in range(PROGRAMS)]
        flat = [piece for own in dealt for piece in own]
        columns = {
            "q_indptr": [int(qo_indptr[n]) for n, _, _ in flat],
            "kv_indptr": [int(kv_indptr[n]) for n, _, _ in flat],
            "q_len": [1 for _ in flat],
            "kv_len": [int(kv_len[n]) for n, _, _ in flat],
            "q_start": [64 * tile for _, tile, _ in flat],
            "kv_start": [begin for _, _, begin in flat],
            "kv_end": [min(begin + 64, int(kv_len[n])) for n, _, begin in flat],
            "merge_stride": [8, 9, 10],
            "work_indptr": [sum(map(len, dealt[:k])) for k in range(PROGRAMS + 1)],
        }
        for i, name in enumerate(PARTS):
            for j, entry in enumerate(columns.get(name, ())):
                ints[ROOM * i + j] = entry
        return [1, PROGRAMS, *(4 * ROOM * i for i in range(len(PARTS))), 0, 4096], 4 * ROOM * 14

    def run(
        self,
        float_workspace_buffer: Tensor,
        int_workspace_buffer: Tensor,
        plan_info_vec: list[int],
        q_nope: Tensor,
        q_pe: Tensor,
        ckv_cache: Tensor,
        kpe_cache: Tensor,
        kv_indices: Tensor,
        o: Tensor,
        maybe_lse: Tensor,
        mask_mode_code: int,
        num_heads: int,
        page_size: int,
        sm_scale: float,
        return_lse_base_on_e: bool,
        ckv_scale: float,
        kpe_scale: float,
        maybe_ckv_scale_arr: Tensor | None,
    ) -> None:
        """Rows of the pieces alone are written."""
        assert (mask_mode_code, num_heads, page_size) == (0, q_nope.shape[1], ckv_cache.shape[1])
        assert return_lse_base_on_e
        assert (ckv_scale, kpe_scale, maybe_ckv_scale_arr) == (1.0, 1.0, None)
        assert float_workspace_buffer.numel() > plan_info_vec[17]
        ints = int_workspace_buffer.view(torch.int32)
        places = zip(PARTS, plan_info_vec[2:16], strict=True)
        part = {name: ints[offset // 4 :].tolist() for name, offset in places}
        assert part["merge_stride"][:PROGRAMS] == [8, 9, 10]
        logits: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
        for i in range(part["work_indptr"][PROGRAMS]):
            position = torch.arange(part["kv_start"][i], part["kv_end"][i])
            page = kv_indices[part["kv_indptr"][i] + position // page_size].long()
            latents = ckv_cache[page, position % page_size].float()
            keys = torch.cat([latents, kpe_cache[page, position % page_size].float()], 1)
            row, first = part["q_indptr"][i], part["q_start"][i]
            heads = slice(first, min(first + 64, num_heads))
            query = torch.cat([q_nope[row, heads], q_pe[row, heads]], 1).float()
            logits.setdefault((row, first), []).append((query @ keys.T * sm_scale, latents))
        for (row, first), pieces in logits.items():
            heads = slice(first, min(first + 64, num_heads))
            whole = torch.cat([x for x, _ in pieces], 1)
            o[row, heads] = (whole.softmax(1) @ torch.cat([x for _, x in pieces])).to(o.dtype)
            maybe_lse[row, heads] = whole.logsumexp(1)


def plan_for(inputs: Inputs, device: str) -> Planned:
    """What the planner makes of the lengths, which it is told on the host."""
    planner = IMPLEMENTATIONS["flashinfer"].load_planner()
    assert planner is not None
    lengths = step_lengths(
        inputs.cu_seqlens,
        len(inputs.q_latent),
        seq_lens=inputs.seq_lens,
        page_table=inputs.page_table,
    )
    return planner(
        lengths,
        num_heads=inputs.q_latent.shape[1],
        rank=inputs.q_latent.shape[2],
        rope_dim=inputs.q_rope.shape[2],
        dtype=inputs.q_latent.dtype,
        device=torch.device(device),
    )


@pytest.fixture
def documented(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_hybrid.ops.latent_attention import _flashinfer

    monkeypatch.setattr(_flashinfer, "_module", lambda *_: Documented())


@needs_interpreter
@pytest.mark.usefixtures("documented")
@pytest.mark.parametrize("num_heads", [16, 80], ids=["16 heads", "80 heads"])
def test_attends_by_documentation(num_heads: int):
    """Pieces of two sequences that are cut; rows of padding, and every row of the pool."""
    case = replace(DECODE, num_heads=num_heads, lengths=((1, 1), (1, 70), (1, 130)))
    inputs = make_inputs(case, dtype=torch.float16, unused=0.0, padding=(2, 2))
    planned = plan_for(inputs, "cpu")
    given = [*planned.tensors, torch.tensor(planned.values)]
    own, exact = replace(inputs.fresh(), planned=given), inputs.to(torch.float64).fresh()
    out = IMPLEMENTATIONS["flashinfer"].load()(own)
    expected = reference.latent_attention(exact)
    torch.testing.assert_close(out.double(), expected, rtol=0.002, atol=0.002)
    assert torch.equal(own.pool.double(), exact.pool)


@needs_triton
@pytest.mark.usefixtures("documented")
def test_shapes_of_a_plan_follow_from_shapes():
    full = make_inputs(DECODE, padding=(2, 2))
    empty = replace(full, cu_seqlens=full.cu_seqlens * 0, seq_lens=full.seq_lens * 0)
    plans = [plan_for(inputs, "cpu") for inputs in (full, empty)]
    assert plans[0].values == plans[1].values
    assert plans[0].tensors[0].shape == plans[1].tensors[0].shape
    assert plans[0].tensors[0].numel() < 14 * ROOM


@needs_flashinfer
def test_its_functions_take_what_the_documentation_says():
    run = list(inspect.signature(Documented.run).parameters)[1:]
    assert native_parameters_of("batch_mla_sm90_run.cu", "BatchMLAPagedAttentionSM90Run") == run
    plan = list(inspect.signature(Documented.plan).parameters)[1:]
    assert native_parameters_of("batch_mla_sm90_plan.cu", "BatchMLAPagedAttentionSM90Plan") == plan
    assert "self._module = module" in source_of("jit/attention/modules.py")
    assert parameters_of("mla/_batch_mla/_backends/_fa_common.py", "get_batch_mla_module") == [
        "backend",
        "dtype_q",
        "dtype_kv",
        "dtype_o",
        "dtype_idx",
        "head_dim_ckv",
        "head_dim_kpe",
        "use_profiler",
    ]


def test_more_than_one_query_of_a_sequence_is_refused():
    """FlashInfer drops a key that a query sees where a block ends among a query's heads."""
    need = Need(
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
        sizes={"rank": 512, "rope_dim": 32},
        features=EXTEND,
    )
    reasons = IMPLEMENTATIONS["flashinfer"].capability.why_not(need)
    assert "it has no extend" in reasons
    assert "rope_dim 32 is not one of [64]" in reasons


@needs_cuda
@needs_flashinfer
@pytest.mark.parametrize("num_heads", [16, 20, 64, 128])
def test_on_a_gpu(num_heads: int):
    batches = [
        make_inputs(
            Case(num_heads=num_heads, lengths=tuple((1, n) for n in lengths)),
            dtype=torch.bfloat16,
            padding=(3, 3),
        )
        for lengths in ((900, 17, 5000), (3, 400, 801))
    ]
    for inputs in batches:
        planned = plan_for(inputs, "cuda")
        moved = replace(inputs, **{name: getattr(inputs, name).to("cuda") for name in TENSORS})
        held = [*(x.to("cuda") for x in planned.tensors), torch.tensor(planned.values)]
        out = latent_attention(*moved.args(), scale=192**-0.5, planned=held, impl="flashinfer")
        exact = replace(inputs.to(torch.float64).fresh(), scale=192**-0.5)
        expected = reference.latent_attention(exact)
        error = (out.double().cpu() - expected).abs().max()
        assert error <= 2**-6 * expected.abs().max(), f"error {error:.1e}"
        num_tokens = int(inputs.cu_seqlens[-1])
        assert not out[num_tokens:].any()


@needs_cross_compiler
def test_compiles_without_spills() -> None:
    """What sets rows of padding, which FlashInfer leaves alone."""
    from torch_hybrid.ops.triton.padding import set_padding

    rows = []
    for target in SHARED_LIMITS:
        for shape, unit in (("128 heads", 1.0), ("128 heads, LSE of base 2", math.log(2))):
            with launches_on(target) as launches, torch.device("meta"):
                out = torch.empty(64, 128, 512, dtype=torch.bfloat16)
                lse, offsets = torch.empty(64, 128), torch.empty(65, dtype=torch.int32)
                set_padding(out, lse, offsets, lse_unit=unit)
            rows.append(resources_of(launches["_padding_kernel"], target, shape))
    assert_all_fit(rows, Path(__file__).with_name("resources_flashinfer.txt"))
