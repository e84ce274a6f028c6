"""The tree against lists of tokens that are compared one by one."""

from __future__ import annotations

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from torch_hybrid.caches.snapshot import Snapshot
from torch_hybrid.serving.prefix_cache.tree import Node, Tree

PATHS = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=12).map(lambda path: array("q", path)),
    min_size=1,
    max_size=12,
)


def tokens_of(node: Node) -> array[int]:
    return array("q", (x for each in reversed(list(node.path())) for x in each.tokens))


def common(first: array[int], second: array[int]) -> int:
    pairs = zip(first, second, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


@settings(max_examples=300)
@given(paths=PATHS)
def test_a_path_is_found_where_it_parts_from_all_others(paths):
    tree, seen, nodes = Tree(10**6), [], []
    for path in paths:
        node, known = tree.insert(path)
        assert known == max((common(path, other) for other in seen), default=0)
        seen.append(path)
        nodes.append(node)
    for path, node in zip(paths, nodes, strict=True):
        assert tokens_of(node) == path
        assert node.depth == len(path)
        assert tree.insert(path) == (node, len(path))
    prefixes = {tuple(path[:n]) for path in paths for n in range(1, len(path) + 1)}
    assert tree.num_tokens == len(prefixes)


@given(paths=PATHS, max_tokens=st.integers(1, 30))
def test_it_forgets_what_nobody_uses_or_keeps(paths, max_tokens):
    tree = Tree(max_tokens)
    nodes = [tree.insert(path)[0] for path in paths]
    used, kept = nodes[0], nodes[-1]
    used.num_users += 1
    kept.keep(Snapshot(1, kept.depth, object()))
    tree.forget()
    assert tokens_of(used) == paths[0]
    assert tokens_of(kept) == paths[-1]
    assert tree.num_tokens <= max(
        max_tokens, len({*map(id, used.path()), *map(id, kept.path())}) * 12
    )
    used.num_users -= 1
    kept.keep(None)
    tree.forget()
    assert tree.num_tokens <= max_tokens
    assert tree.root.num_kept == 0


def test_what_was_used_last_is_forgotten_last():
    tree = Tree(8)
    old, new = (tree.insert(array("q", [first] * 6))[0] for first in (1, 2))
    old.last_used, new.last_used = 1, 2
    tree.forget()
    assert tree.insert(array("q", [2] * 6)) == (new, 6)
    assert tree.insert(array("q", [1] * 6))[1] == 0
