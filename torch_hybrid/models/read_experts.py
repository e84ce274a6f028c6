"""Factors of experts in an adapter, in both forms that peft has.

experts.lora_A, experts.base_layer.lora_A   all experts' at once (``target_parameters``): one
                                            wrapper about another for each weight of the module
experts.3.gate_proj.lora_A                  of an expert's own linear layers, as older
                                            checkpoints have them
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from torch_hybrid.models.low_rank import (
    LowRank,
    check_pair,
    named,
    rank_of,
    read_factors,
    scale_of,
)

Halves = dict[str, dict[str, Tensor]]
Stacks = Mapping[str, tuple[int, ...]]

_EXPERT = re.compile(r"(.+\.layers\.\d+\.)(?:.+\.)?experts\.(\d+)\.(\w+)")
# Which part of a stack of experts an expert's own linear layer is: gate, up or down.
_GATE, _UP, _DOWN = range(3)
_PARTS = {
    **dict.fromkeys(("gate_proj", "w1"), _GATE),
    **dict.fromkeys(("up_proj", "w3"), _UP),
    **dict.fromkeys(("down_proj", "w2"), _DOWN),
}


def take_experts(
    halves: Halves, stacks: Stacks, config: Mapping[str, Any], where: object, max_rank: int
) -> dict[str, LowRank]:
    """Take the factors of experts out of those of an adapter.

    Args:
        halves: "A" and "B" of each layer by its name; those of experts are removed.
        stacks: shapes [E, outputs, inputs] of transformers' weights of experts, in the order of
            their modules.
        config: of the adapter.
        where: the adapter is.
        max_rank: largest rank of a factor.

    Returns:
        By the names of the weights, a [E, rank, inputs] and b [E, outputs, rank] in float32.

    Raises:
        ValueError: factors are of another base, or of experts that it does not have.
    """
    modules: dict[str, list[str]] = {}
    for name in stacks:
        modules.setdefault(name.rpartition(".")[0], []).append(name)
    wrapped: dict[str, list[str]] = {}
    single: dict[str, dict[int, dict[int, LowRank]]] = {}
    for name in list(halves):
        module = name.removesuffix(".weight").split(".base_layer")[0]
        if module in modules:
            wrapped.setdefault(module, []).append(name)
        elif found := _stack_of(name, modules, stacks, where):
            weight, part, expert = found
            own = read_factors(name, halves.pop(name), config, where, max_rank)
            single.setdefault(weight, {}).setdefault(part, {})[expert] = own
    made = {name: _of_each(name, own, stacks[name], where) for name, own in single.items()}
    for module, names in wrapped.items():
        # The innermost wrapper is of the weight that the module has first.
        names.sort(key=len, reverse=True)
        weights = _targets(modules[module], config)
        if len(weights) != len(names):
            raise ValueError(
                f"{where} has {len(names)} pairs of factors of {module}, and its config's "
                f"target_parameters name {weights} there"
            )
        for weight, name in zip(weights, names, strict=True):
            made[weight] = _of_all(weight, halves.pop(name), stacks[weight], config, where)
    return made


def _targets(weights: Iterable[str], config: Mapping[str, Any]) -> list[str]:
    """List the weights that a config names, in their order."""
    ends = tuple(f".{named(name)}" for name in config.get("target_parameters") or ())
    return [weight for weight in weights if f".{weight}".endswith(ends)]


def _stack_of(
    name: str, modules: Mapping[str, list[str]], stacks: Stacks, where: object
) -> tuple[str, int, int] | None:
    """Find the stack, the part of it and the expert that are the linear layer of an expert."""
    found = _EXPERT.fullmatch(name)
    stacked = (module for module in modules if module.endswith(".experts"))
    own = [module for module in stacked if found and module.startswith(found[1])]
    if found is None or len(own) != 1 or found[3] not in _PARTS:
        return None
    expert, part = int(found[2]), _PARTS[found[3]]
    first, last = modules[own[0]]
    weight = last if part == _DOWN else first
    if part == _GATE and not weight.endswith("gate_up_proj"):
        return None
    if expert >= stacks[weight][0]:
        raise ValueError(
            f"{where} adapts expert {expert} of {own[0]}, which has {stacks[weight][0]}"
        )
    return weight, part, expert


def _of_each(
    name: str, parts: Mapping[int, Mapping[int, LowRank]], shape: tuple[int, ...], where: object
) -> LowRank:
    """Stack factors of single experts: ranks of gate stand before those of up."""
    num_experts, outputs, inputs = shape
    rows = outputs // 2 if name.endswith("gate_up_proj") else outputs
    ranks = {part: max(len(each.a) for each in own.values()) for part, own in parts.items()}
    a = torch.zeros(num_experts, sum(ranks.values()), inputs, dtype=torch.float32, device="cpu")
    b = torch.zeros(num_experts, outputs, len(a[0]), dtype=torch.float32, device="cpu")
    place = 0
    for part, own in sorted(parts.items()):
        first = rows if part == _UP and rows < outputs else 0
        for expert, each in own.items():
            found, rank = (each.b.shape[0], each.a.shape[1]), len(each.a)
            if found != (rows, inputs):
                raise ValueError(
                    f"{where} is of another base: it adapts expert {expert} of {name} by "
                    f"{[*found]}, and the model has {[rows, inputs]}"
                )
            a[expert, place : place + rank] = each.a
            b[expert, first : first + rows, place : place + rank] = each.b
        place += ranks[part]
    return LowRank(a=a, b=b)


def _of_all(
    name: str,
    halves: Mapping[str, Tensor],
    shape: tuple[int, ...],
    config: Mapping[str, Any],
    where: object,
) -> LowRank:
    """Divide factors of all experts: rows of A lie expert by expert, columns of B rank by rank."""
    a, b = check_pair(name, halves, where)
    num_experts, outputs, inputs = shape
    rank = rank_of(config, name)
    expected = [rank * num_experts, inputs], [outputs, rank * num_experts]
    if ([*a.shape], [*b.shape]) != expected:
        raise ValueError(
            f"{where} is of another base: {name} has factors {[*a.shape]} and {[*b.shape]}, and "
            f"for rank {rank} the model has {expected[0]} and {expected[1]}"
        )
    return LowRank(
        a=a.float().view(num_experts, rank, inputs),
        b=b.float().view(outputs, rank, num_experts).permute(2, 0, 1) * scale_of(config, name),
    )
