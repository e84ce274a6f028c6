"""kv_tokens="auto": the tokens that fit into a device's memory beside weights, states and steps."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from torch_hybrid.backends.select import Backends
from torch_hybrid.backends.step import opens_chunks
from torch_hybrid.caches.pools import pool_cost
from torch_hybrid.caches.room import byte_count, free_bytes
from torch_hybrid.caches.sizes import PoolSizes
from torch_hybrid.errors import CapacityError, UnsupportedError
from torch_hybrid.graphs.options.options import MakeTrial, Options, TrialRunner
from torch_hybrid.graphs.step import Model
from torch_hybrid.graphs.stepping.adapters import adapter_bytes, kinds_of
from torch_hybrid.ranks import Ranks
from torch_hybrid.specs import LayerTable

# The share of a GPU's memory left for captured graphs themselves and for fragmentation.
_RESERVED, _LEAST_RESERVED = 0.03, 512 << 20
_HOST_SHARE = 0.5  # share of a host's free memory: other processes need some


@dataclass(frozen=True, slots=True, kw_only=True)
class KvRoom:
    """Memory that ``kv_tokens="auto"`` measured, in bytes, and the number of tokens that fits."""

    free: int  # free beside the weights
    steps: int  # peak of the largest steps, measured; twice that if steps are captured
    states: int  # states of all sequences and snapshots
    reserve: int
    per_token: int  # bytes in the pools and in the page tables of steps
    num_tokens: int

    def __str__(self) -> str:
        counts = (self.free, self.steps, self.states, self.reserve)
        free, steps, states, reserve = map(byte_count, counts)
        return (
            f"{free} free, of which {steps} for steps, {states} for states and {reserve} in "
            f"reserve; {self.per_token:,} bytes a token"
        )


def measure_room(
    model: Model,
    options: Options,
    table: LayerTable,
    backends: Backends,
    make_trial: MakeTrial,
    *,
    captures: bool,
) -> KvRoom:
    """Measure how many tokens a runner has room for, by uncompiled steps of the largest sizes.

    ``table`` has keys and values in ``kv_dtype``. Raises as ``choose_kv_tokens`` does.
    """
    page_size = options.page_size

    def make(prefix_rows: int) -> TrialRunner:
        return make_trial(
            model,
            max_seqs=options.max_seqs,
            max_tokens=options.max_tokens,
            kv_tokens=prefix_rows + 2 * options.max_tokens + options.max_seqs * page_size,
            page_size=page_size,
            kv_dtype=options.kv_dtype,
            compile=False,
            backends=backends,
            prefill=options.prefill,
            takes_embeds=options.takes_embeds,
        )

    longest: int | None = getattr(model, "max_positions", None)
    return choose_kv_tokens(
        table,
        sizes_without_pages(model, options, table, backends),
        make,
        most=None if longest is None else options.max_seqs * longest,
        prefix_rows=backends.prefix.token_budget or 0,
        captures=captures,
        ranks=model.ranks,
        beside=adapter_bytes(
            model,
            options.max_adapters,
            options.max_lora_rank,
            kinds_of(options),
        ),
    )


def sizes_without_pages(
    model: Model, options: Options, table: LayerTable, backends: Backends
) -> PoolSizes:
    """Give the sizes of a runner's pools, all but the number of pages."""
    sizes = PoolSizes(
        num_pages=0,
        page_size=options.page_size,
        num_slots=options.max_seqs,
        num_snapshots=options.max_snapshots if table.has_states else 0,
        dtype=model.dtype,
        device=model.device,
        num_drafts=options.max_drafts,
    )
    return replace(sizes, opens_chunks=opens_chunks(table, sizes, backends))


def choose_kv_tokens(
    table: LayerTable,
    sizes: PoolSizes,
    make_trial: Callable[[int], TrialRunner],
    *,
    most: int | None,
    prefix_rows: int,
    captures: bool,
    ranks: Ranks | None,
    beside: int = 0,
) -> KvRoom:
    """Choose the most tokens that fit, in whole pages; all ranks get the same number.

    Args:
        table: the layers.
        sizes: sizes of the pools; the number of pages is ignored.
        make_trial: makes an uncompiled runner that holds that many tokens; used on a GPU alone.
        most: the most tokens that are of use; None if that is unknown.
        prefix_rows: tokens that a sequence must hold before a step needs its most memory.
        captures: whether steps are captured, and then keep the memory of a second run.
        ranks: the ranks that share the model; they call this together.
        beside: bytes of pools that are none of layers, which count as weights.

    Raises:
        CapacityError: there is no room for a page.
        UnsupportedError: the system does not tell how much memory is free.
    """
    device = sizes.device
    steps = 0
    if device.type == "cuda":
        steps = _peak_of_steps(make_trial, device, prefix_rows) * (1 + captures)
        gc.collect()
        torch.cuda.empty_cache()
    free = free_bytes(device)
    if free is None:
        raise UnsupportedError(
            f"kv_tokens='auto' asks how much memory is free, which {device} does not say: "
            "give a number"
        )
    free -= beside
    costs = [pool_cost(entry.spec, sizes) for entry in table.entries]
    num_states = sizes.num_slots + sizes.num_snapshots + 1
    states = num_states * sum(cost.per_sequence for cost in costs)
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        reserve = max(int(_RESERVED * total), _LEAST_RESERVED)
    else:
        free //= 1 if ranks is None else ranks.size  # the ranks may share a host
        reserve = int((1 - _HOST_SHARE) * free)
    # A step's page tables have a row for each sequence; the runner keeps a few of them.
    table_bytes = 4 * 4 * (sizes.num_slots + 1) / sizes.page_size
    per_token = int(sum(cost.per_token for cost in costs) + table_bytes + 1)
    left = free - steps - states - reserve
    pages = left // (per_token * sizes.page_size) - 1  # less the null page
    if most is not None:
        pages = min(pages, -(-most // sizes.page_size))
    if ranks is not None:
        pages = ranks.least(pages, device)
    room = KvRoom(
        free=free,
        steps=steps,
        states=states,
        reserve=reserve,
        per_token=per_token,
        num_tokens=max(0, pages) * sizes.page_size,
    )
    if not room.num_tokens:
        raise CapacityError(
            f"no room is left for a page of {sizes.page_size} tokens: {room}; lower max_seqs, now "
            f"{sizes.num_slots}, or max_tokens"
        )
    return room


def _peak_of_steps(
    make_trial: Callable[[int], TrialRunner], device: torch.device, rows: int
) -> int:
    """Measure the bytes of the largest steps, beside weights and pools.

    The steps are full chunks of one prompt, the last of them after ``rows`` tokens or more, and
    one token of every sequence.

    Raises:
        CapacityError: there is no room for such a step.
    """
    try:
        trial = make_trial(rows)
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        if trial.prefill:
            (seq,) = trial.new_sequences(1)
            for _ in range(1 + -(-rows // trial.max_tokens)):
                trial.extend([seq], [[0] * trial.max_tokens])
            trial.free([seq])
        seqs = trial.new_sequences(min(trial.max_seqs, trial.max_tokens))
        trial.extend(seqs, [[0] for _ in seqs])
        torch.cuda.synchronize(device)
    except torch.OutOfMemoryError as error:
        raise CapacityError(
            f"the largest step does not fit beside the weights: lower max_tokens, or max_seqs; "
            f"{error}"
        ) from error
    return torch.cuda.max_memory_allocated(device) - before
