"""FlashInfer's compiled kernels of prefill by their documentation, without a GPU."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Documented:
    """FlashInfer's compiled kernels by their documentation, in one of the two forms."""

    def __init__(self, form: str) -> None:
        self.form = form

    def plan(
        self,
        float_workspace_buffer: Tensor,
        int_workspace_buffer: Tensor,
        page_locked_int_workspace_buffer: Tensor,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_len_arr: Tensor,
        total_num_rows: int,
        batch_size: int,
        num_qo_heads: int,
        num_kv_heads: int,
        page_size: int,
        enable_cuda_graph: bool,
        head_dim_qk: int,
        head_dim_vo: int,
        causal: bool,
        window_left: int,
        fixed_split_size: int = -2,
        disable_split_kv: bool = True,
        num_colocated_ctas: int = -2,
        uniform_q_len: int = -2,
    ) -> list[int]:
        """Parts of one size, of which the last three say where each sequence is."""
        assert enable_cuda_graph
        assert causal
        cutting = (fixed_split_size, disable_split_kv, num_colocated_ctas, uniform_q_len)
        assert cutting == ((-1, False, 0, 0) if self.form == "fa2" else (-2, True, -2, -2))
        assert len(qo_indptr) == len(kv_indptr) == len(kv_len_arr) + 1 == batch_size + 1
        ints = page_locked_int_workspace_buffer.view(torch.int32)
        part = -(-(batch_size + 1) // 4) * 4
        for i, told in enumerate((qo_indptr, kv_indptr, kv_len_arr)):
            ints[(5 + i) * part : (5 + i) * part + len(told)] = told
        offsets = [4 * part * i for i in range(8)]
        if self.form == "fa3":
            return [*offsets, 0]
        rows = 4 * num_qo_heads * total_num_rows
        return [4 * part, total_num_rows, *offsets, 0, head_dim_vo * rows, 7 * 4 * part, 1, 1]

    def paged_run(
        self,
        float_workspace_buffer: Tensor,
        int_workspace_buffer: Tensor,
        plan_info_vec: list[int],
        q: Tensor,
        paged_k_cache: Tensor,
        paged_v_cache: Tensor,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        o: Tensor,
        maybe_lse: Tensor | None,
        mask_mode: int,
        layout: int,
        window_left: int,
        enable_pdl: bool,
        maybe_custom_mask: Tensor | None,
        maybe_mask_indptr: Tensor | None,
        maybe_alibi_slopes: Tensor | None,
        maybe_prefix_len_ptr: Tensor | None,
        maybe_token_pos_in_items_ptr: Tensor | None,
        maybe_max_item_len_ptr: Tensor | None,
        logits_soft_cap: float,
        sm_scale: float,
        scale_q: Tensor | None,
        scale_k: Tensor | None,
        scale_v: Tensor | None,
        rope_scale: float,
        rope_theta: float,
        token_pos_in_items_len: int,
        workspace_size: int,
    ) -> None:
        """Rows of sequences alone are written; keys are found as each form finds them."""
        assert (mask_mode, layout) == (1, 0)
        page_size, num_seqs = paged_k_cache.shape[1], len(paged_kv_last_page_len)
        if self.form == "fa3":
            places = self.parts(int_workspace_buffer, plan_info_vec, num_seqs)
            queries, first_pages, lengths = places
        else:
            assert float_workspace_buffer.numel() >= plan_info_vec[11] + 4 * q.shape[0] * q.shape[1]
            queries, first_pages = qo_indptr.tolist(), paged_kv_indptr.tolist()
            lengths = [
                max(after - before - 1, 0) * page_size + last
                for before, after, last in zip(
                    first_pages, first_pages[1:], paged_kv_last_page_len.tolist(), strict=False
                )
            ]
        for n in range(num_seqs):
            rows = slice(queries[n], queries[n + 1])
            position = torch.arange(lengths[n])
            page = paged_kv_indices[first_pages[n] + position // page_size].long()
            keys, values = (
                pool[page, position % page_size].float() for pool in (paged_k_cache, paged_v_cache)
            )
            dense = attend_densely(q[rows], keys, values, sm_scale, window_left, logits_soft_cap)
            o[rows] = dense.to(o.dtype)

    def ragged_run(
        self,
        float_workspace_buffer: Tensor,
        int_workspace_buffer: Tensor,
        plan_info_vec: list[int],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        o: Tensor,
        maybe_lse: Tensor | None,
        mask_mode: int,
        layout: int,
        window_left: int,
        enable_pdl: bool,
        maybe_custom_mask: Tensor | None,
        maybe_mask_indptr: Tensor | None,
        maybe_alibi_slopes: Tensor | None,
        maybe_prefix_len_ptr: Tensor | None,
        maybe_token_pos_in_items_ptr: Tensor | None,
        maybe_max_item_len_ptr: Tensor | None,
        logits_soft_cap: float,
        sm_scale: float,
        rope_scale: float,
        rope_theta: float,
        token_pos_in_items_len: int,
    ) -> None:
        """As ``paged_run``, of keys that lie one after another; the sums are of base 2."""
        assert (self.form, mask_mode, layout) == ("fa3", 1, 0)
        num_seqs = len(qo_indptr) - 1
        queries, first_keys, lengths = self.parts(int_workspace_buffer, plan_info_vec, num_seqs)
        for n in range(num_seqs):
            rows = slice(queries[n], queries[n + 1])
            keys = slice(first_keys[n], first_keys[n] + lengths[n])
            own = (q[rows], k[keys].float(), v[keys].float(), sm_scale, window_left)
            o[rows] = attend_densely(*own, logits_soft_cap).to(o.dtype)
            if maybe_lse is not None:
                sums = logits_of(*own[:2], *own[3:], logits_soft_cap).logsumexp(-1)
                maybe_lse[rows] = sums.T / math.log(2)

    @staticmethod
    def parts(schedule: Tensor, plan_info_vec: list[int], num_seqs: int) -> list[list[int]]:
        """Where queries and keys of the sequences begin, and how many keys there are."""
        ints = schedule.view(torch.int32)
        return [ints[plan_info_vec[i] // 4 :][: num_seqs + 1].tolist() for i in (5, 6, 7)]


def attend_densely(
    q: Tensor, keys: Tensor, values: Tensor, scale: float, window_left: int, softcap: float
) -> Tensor:
    """FlashInfer's attention of the last queries of one sequence to its keys."""
    values = values.repeat_interleave(q.shape[1] // keys.shape[1], 1)
    logits = logits_of(q, keys, scale, window_left, softcap)
    return torch.einsum("hqk,khd->qhd", logits.softmax(-1), values)


def logits_of(q: Tensor, keys: Tensor, scale: float, window_left: int, softcap: float) -> Tensor:
    """[H, queries, keys], hidden ones -inf."""
    keys = keys.repeat_interleave(q.shape[1] // keys.shape[1], 1)
    logits = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
    if softcap > 0:
        logits = softcap * (logits / softcap).tanh()
    behind = torch.arange(len(q))[:, None] + len(keys) - len(q) - torch.arange(len(keys))
    hidden = (behind < 0) | ((behind > window_left) if window_left >= 0 else False)
    return logits.masked_fill(hidden, -math.inf)
