"""A radix tree over tokens: every sequence seen is a path, and paths diverge at nodes.

An edge holds the tokens between two nodes as an array of type "q", which compares fast. There are
also nodes where a sequence ends, and where a snapshot is kept or wanted.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_hybrid.caches.pool_copies import HostCopy
    from torch_hybrid.caches.snapshot import Snapshot


@dataclass(eq=False, slots=True)
class Node:
    """A node of the tree: the tokens from the root to here.

    ``maker`` is the request that made the snapshot, until that request's next token is known to be
    finite. Until then no other request may use the snapshot.
    """

    parent: Node | None
    tokens: array[int]  # of the edge from the parent
    depth: int  # tokens from the root to here
    children: dict[int, Node] = field(default_factory=dict)  # by their first token
    snapshot: Snapshot | None = None
    on_host: HostCopy | None = None  # of an evicted snapshot
    maker: object | None = None
    is_wanted: bool = False  # a snapshot is to be made here
    num_users: int = 0  # requests that end here
    num_kept: int = 0  # snapshots here and in the subtree
    num_on_host: int = 0  # host copies here and in the subtree
    last_used: int = 0  # in starts, see ``DeviceTier.now``

    def path(self) -> Iterator[Node]:
        """Walk from this node up to the root, which is left out."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def keep(self, snapshot: Snapshot | None) -> None:
        """Set or clear the snapshot here, which holds the tokens from the root to here."""
        self._check_count(snapshot)
        change = (snapshot is not None) - (self.snapshot is not None)
        self.snapshot = snapshot
        for node in self.path():
            node.num_kept += change

    def keep_on_host(self, copy: HostCopy | None) -> None:
        """Set or clear the host copy here, which holds as many tokens."""
        self._check_count(copy)
        change = (copy is not None) - (self.on_host is not None)
        self.on_host = copy
        for node in self.path():
            node.num_on_host += change

    def _check_count(self, kept: Snapshot | HostCopy | None) -> None:
        if kept is not None and kept.num_tokens != self.depth:
            raise ValueError(f"a place of {self.depth} tokens cannot keep {kept.num_tokens}")

    @property
    def all_tokens(self) -> list[int]:
        """Tokens from the root to here."""
        return [token for node in reversed(list(self.path())) for token in node.tokens]

    @property
    def is_free(self) -> bool:
        """True if the node may be removed: no request uses it and it keeps nothing."""
        is_empty = self.snapshot is None and self.on_host is None
        return is_empty and not self.num_users and self.parent is not None


class Tree:
    """All paths, within a number of tokens.

    Args:
        max_tokens: beyond this many tokens, unused paths that keep nothing are forgotten, the
            oldest first.
    """

    def __init__(self, max_tokens: int) -> None:
        self.root = Node(None, array("q"), 0)
        self.num_tokens = 0
        self._max_tokens = max_tokens

    def insert(self, tokens: array[int]) -> tuple[Node, int]:
        """Insert a path; return its node, and how many of its tokens were known before."""
        node, known = self.root, 0
        while known < len(tokens):
            child = node.children.get(tokens[known])
            if child is None:
                return self._add(node, tokens[known:]), known
            common = _num_common(child.tokens, tokens, known)
            known += common
            node = child if common == len(child.tokens) else self._split(child, common)
        return node, known

    def _add(self, parent: Node, tokens: array[int]) -> Node:
        leaf = Node(parent, tokens, parent.depth + len(tokens), last_used=parent.last_used)
        parent.children[tokens[0]] = leaf
        self.num_tokens += len(tokens)
        return leaf

    def _split(self, node: Node, at: int) -> Node:
        """Split the edge to a node after ``at`` of its tokens; return the new node."""
        assert node.parent is not None
        upper = Node(
            node.parent,
            node.tokens[:at],
            node.parent.depth + at,
            {node.tokens[at]: node},
            num_kept=node.num_kept,
            num_on_host=node.num_on_host,
            last_used=node.last_used,
        )
        node.parent.children[node.tokens[0]] = upper
        node.parent, node.tokens = upper, node.tokens[at:]
        return upper

    def forget(self) -> None:
        """Remove free leaves, the oldest first, if the tree has too many tokens."""
        if self.num_tokens <= self._max_tokens:
            return
        while self.num_tokens > self._max_tokens * 3 // 4:
            leaves = [node for node in self._nodes() if not node.children and node.is_free]
            if not leaves:
                return
            for leaf in sorted(leaves, key=lambda node: node.last_used):
                if self.num_tokens > self._max_tokens * 3 // 4:
                    self._remove(leaf)

    def _nodes(self) -> Iterator[Node]:
        below = [*self.root.children.values()]
        while below:
            node = below.pop()
            below += node.children.values()
            yield node

    def _remove(self, leaf: Node) -> None:
        """Remove a leaf, and merge its parent into the only child left if the parent is free."""
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.tokens[0]]
        self.num_tokens -= len(leaf.tokens)
        if len(parent.children) == 1 and parent.is_free:
            (only,) = parent.children.values()
            assert parent.parent is not None
            only.tokens = parent.tokens + only.tokens
            only.parent = parent.parent
            parent.parent.children[only.tokens[0]] = only


def _num_common(edge: array[int], tokens: array[int], start: int) -> int:
    """Count the tokens of an edge that equal those from ``start`` on; the first one does."""
    length = min(len(edge), len(tokens) - start)
    if edge[:length] == tokens[start : start + length]:
        return length
    low, high = 1, length  # equal up to low, not up to high
    while high - low > 1:
        middle = (low + high) // 2
        if edge[low:middle] == tokens[start + low : start + middle]:
            low = middle
        else:
            high = middle
    return low
