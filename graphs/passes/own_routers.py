"""A graph pass: the part of an MoE router between its logits and its weights becomes one op."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from torch_hybrid.graphs.passes.marks import maker
from torch_hybrid.graphs.passes.values import called_name, value_of
from torch_hybrid.ops.core.capability import FLOATS, Need
from torch_hybrid.ops.route.op import IMPLEMENTATIONS, ROUTE

# Spellings of the choice, from scores to expert ids: among all experts, and among those of the best
# groups (DeepSeek-V3 and its kin).
_BY_ALL = ("topk", "getitem")
_OF_GROUPS = "view topk getitem sum topk getitem zeros_like scatter_ unsqueeze expand reshape bool"
_BY_GROUPS = (*_OF_GROUPS.split(), "invert", "masked_fill", *_BY_ALL)


def own_routers(graph: Graph) -> None:
    """Replace each router by the op ``route``: its scores, choice, renormalisation and scale.

    Contract: the graph chooses the same experts, of equal ones the first; weights are the same but
    for rounding. On a GPU the op is one launch, in the place of ``topk`` and two to seven kernels
    around it. Nothing changes where the op has no native implementation (a CPU), nor for other
    spellings.

    for each softmax or sigmoid of logits whose scores go into a topk, plainly or by best groups:
        find the weights: the scores of the k best, divided by their sum, scaled, of a dtype
        weights, ids = route(logits, bias, k, ...)
    """
    for node in list(graph.nodes):
        if (router := _router(node)) is not None and _is_served(router):
            _replace(graph, router)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Router:
    """Nodes of a router, and the options of the op that replaces it."""

    logits: Node
    bias: Node | None
    chosen: Node  # the last topk
    ids: Node
    weights: Node
    inner: tuple[Node, ...]  # all nodes that the op replaces, in order
    options: dict[str, Any]  # of the op, k among them


def _router(scores: Node) -> _Router | None:
    """Find the router whose scores a node is; None if it is no router."""
    score = {"softmax": "softmax", "sigmoid": "sigmoid"}.get(called_name(scores))
    if score is None or not _is_float_scores(scores):
        return None
    choice = _choice(scores)
    ids = next((node for node in reversed(choice) if called_name(node) == "getitem"), None)
    if ids is None or ids.args[1] != 1:
        return None
    bias = _bias(choice[0], scores)
    chosen, bare = ids.args[0], _bare_weights(scores, ids)
    options = _groups(choice if bias is None else choice[1:])
    if not isinstance(chosen, Node) or not bare or options is None:
        return None
    [logits] = scores.all_input_nodes
    if called_name(logits) == "float":
        [logits] = logits.all_input_nodes
    options |= {"k": _k(chosen), "score": score}
    router = _Router(
        logits=logits,
        bias=bias,
        chosen=chosen,
        ids=ids,
        weights=bare[-1],
        inner=(scores, *choice, *bare),
        options=options | {"renormalise": False, "epsilon": 0.0, "scale": 1.0},
    )
    return _with_dtype(_scaled(_renormalised(router)))


def _groups(choice: Sequence[Node]) -> dict[str, Any] | None:
    """Find the numbers of all groups and of the best groups; None for another choice."""
    names = tuple(map(called_name, choice))
    ranks = [_k(node) for node in choice if called_name(node) == "topk"]
    if names == _BY_ALL and None not in ranks:
        return {"num_groups": 1, "num_best_groups": 1}
    if names == _BY_GROUPS and None not in ranks and ranks[0] == 2:
        return {"num_groups": value_of(choice[0]).shape[1], "num_best_groups": ranks[1]}
    return None


def _is_float_scores(scores: Node) -> bool:
    """Tell whether scores are [T, E] in float32, over the last dim."""
    value = value_of(scores)
    if not isinstance(value, Tensor) or value.dim() != 2 or value.dtype != torch.float32:
        return False
    dim = scores.kwargs.get("dim", scores.args[1] if len(scores.args) > 1 else None)
    return called_name(scores) == "sigmoid" or dim in (-1, 1)


def _choice(scores: Node) -> list[Node]:
    """Collect the nodes from the scores, in order, up to the ids of the chosen experts.

    Of scores that choose nothing these are more than a choice has.
    """
    reached, found = {scores}, list[Node]()
    node = scores
    while (node := node.next).op != "output" and len(found) <= 1 + len(_BY_GROUPS):
        if reached.isdisjoint(node.all_input_nodes):
            continue  # reads no scores: a node of the other half, for example
        if _is_behind(node, found):
            break
        reached.add(node)
        found.append(node)
    if _is_plain(found):  # the values of the topk are the weights: no part of the choice
        return [node for node in found if called_name(node) != "getitem" or node.args[1] == 1]
    return found


def _is_behind(node: Node, found: Sequence[Node]) -> bool:
    """Tell whether a node reads the result of the choice."""
    if not {"topk", "getitem"} <= set(map(called_name, found)):
        return False
    return called_name(node) == "gather" or (_is_plain(found) and called_name(node) != "getitem")


def _is_plain(found: Sequence[Node]) -> bool:
    """Tell whether the scores go into a topk directly."""
    return bool(found) and called_name(found[0]) == "topk"


def _bias(first: Node, scores: Node) -> Node | None:
    """Find the bias that is added to the scores for the choice; None if there is none."""
    if called_name(first) == "add" and first.args[0] is scores and isinstance(first.args[1], Node):
        return first.args[1]
    return None


def _bare_weights(scores: Node, ids: Node) -> list[Node]:
    """Find the scores of the chosen experts: a gather by their ids, or the values of the topk.

    A cast to the dtype that the scores have already (LFM2) counts as part of the gather.
    """
    for node in ids.users:
        if called_name(node) == "gather":
            given = dict(zip(("input", "dim", "index"), node.args, strict=False)) | node.kwargs
            if given["input"] is scores and given["index"] is ids:
                [*users] = node.users
                casts = users if len(users) == 1 and called_name(users[0]) == "type_as" else []
                are_none = all(value_of(cast).dtype == value_of(scores).dtype for cast in casts)
                return [node, *casts] if are_none else [node]
    chosen = ids.args[0]
    assert isinstance(chosen, Node)
    if chosen.args[0] is not scores:
        return []
    return [node for node in chosen.users if node.args[1] == 0]


def _renormalised(router: _Router) -> _Router:
    """Add the division by the sum to a router, if there is one."""
    weights = router.weights
    total = next((node for node in weights.users if called_name(node) == "sum"), None)
    if total is None or len(weights.users) != 2 or len(total.users) != 1:
        return router
    if value_of(total).shape[1:] != torch.Size([1]):
        return router
    divisor, epsilon = total, 0.0
    [user] = total.users
    if called_name(user) == "add" and isinstance(user.args[1], float) and len(user.users) == 1:
        divisor, epsilon = user, user.args[1]
    [quotient] = divisor.users
    if called_name(quotient) not in ("truediv", "itruediv") or quotient.args != (weights, divisor):
        return router
    inner = tuple(dict.fromkeys((*router.inner, total, divisor, quotient)))
    options = router.options | {"renormalise": True, "epsilon": epsilon}
    return replace(router, weights=quotient, inner=inner, options=options)


def _scaled(router: _Router) -> _Router:
    """Add the factor of the weights to a router, if there is one."""
    [*users] = router.weights.users
    if (
        len(users) != 1
        or called_name(users[0]) != "mul"
        or not isinstance(users[0].args[1], float | int)
    ):
        return router
    options = router.options | {"scale": float(users[0].args[1])}
    return replace(router, weights=users[0], inner=(*router.inner, users[0]), options=options)


def _with_dtype(router: _Router) -> _Router:
    """Add the dtype that the weights are cast to, if there is a cast."""
    [*users] = router.weights.users
    dtype = users[0].args[1:] if len(users) == 1 and called_name(users[0]) == "to" else ()
    if len(dtype) != 1 or dtype[0] not in FLOATS:
        return replace(router, options=router.options | {"dtype": torch.float32})
    options = router.options | {"dtype": dtype[0]}
    return replace(router, weights=users[0], inner=(*router.inner, users[0]), options=options)


def _is_served(router: _Router) -> bool:
    """Tell whether the native implementation serves a router, and no other node reads inside it."""
    within = {*router.inner, router.ids}
    is_open = any(
        not within.issuperset(node.users)
        for node in router.inner
        if node not in (router.ids, router.weights)
    )
    logits = value_of(router.logits)
    bias = None if router.bias is None else value_of(router.bias)
    if is_open or not isinstance(logits.shape[-1], int):
        return False
    if bias is not None and (bias.dtype != torch.float32 or bias.shape != logits.shape[-1:]):
        return False
    options = router.options
    sizes = {"num_experts": logits.shape[-1], "k": options["k"]}
    sizes["num_groups"] = options["num_groups"]
    need = Need(device=logits.device, dtype=logits.dtype, sizes=sizes)
    return not IMPLEMENTATIONS["triton"].capability.why_not(need)


def _replace(graph: Graph, router: _Router) -> None:
    options, made = {**router.options, "impl": "triton"}, maker(graph, router.chosen)
    with graph.inserting_before(router.chosen):
        routed = made(ROUTE, router.logits, router.bias, options.pop("k"), **options)
        weights, ids = made(operator.getitem, routed, 0), made(operator.getitem, routed, 1)
    router.weights.replace_all_uses_with(weights)
    router.ids.replace_all_uses_with(ids)
    place = {node: i for i, node in enumerate(graph.nodes)}
    for node in sorted(router.inner, key=place.__getitem__, reverse=True):
        graph.erase_node(node)


def _k(node: Node) -> int | None:
    """Read the k of a topk of the largest along the last dim; None of another."""
    options = dict(zip(("k", "dim", "largest", "sorted"), node.args[1:], strict=False))
    options |= node.kwargs
    k, dim = options.get("k"), options.get("dim", -1)
    is_last = dim in (-1, value_of(node)[0].dim() - 1) and options.get("largest", True)
    return k if isinstance(k, int) and is_last else None
