"""Prefixes of an engine: which requests start from which snapshot, and when snapshots are made.

    waiting    the request's tokens are a path of the tree. It starts from the deepest snapshot on
               the path, or waits while a running request is about to reach a deeper one
    running    chunks end where a snapshot is wanted: where another path diverges, at the end of the
               last message, after every N tokens. Snapshots are made there, at the end of the
               prompt, and at the end of the answer; none of them copies states or pages
    committed  once the request got a token, others may start from its snapshots: the logits were
               finite
    evicted    the snapshot of least worth, when its slot or pages are needed (``device_tier``).
               Within ``host_bytes`` it goes to the host, and comes back when a request starts from
               it

A model without states starts at any token that was run: its snapshots hold pages alone, and are
made at the ends of prompts and answers.

Decisions depend only on the requests and their tokens, in order: ranks that share a model decide
alike.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from torch_hybrid.errors import CapacityError
from torch_hybrid.serving.prefix_cache import file
from torch_hybrid.serving.prefix_cache.device_tier import DeviceTier, depth_before
from torch_hybrid.serving.prefix_cache.options import PrefixCache
from torch_hybrid.serving.prefix_cache.stats import PrefixStats
from torch_hybrid.serving.prefix_cache.tree import Node, Tree
from torch_hybrid.serving.scheduler import FROM_NOTHING, Start

if TYPE_CHECKING:
    from torch_hybrid.caches.snapshot import Snapshot
    from torch_hybrid.graphs.runner import Runner
    from torch_hybrid.serving.request import Request

_TREE_TOKENS = 4  # tokens that the tree remembers, in units of the longest sequence


@dataclass(slots=True)
class _Use:
    """A request's place in the tree."""

    node: Node  # end of the request's known tokens
    made: list[Node] = field(default_factory=list)  # nodes of its uncommitted snapshots


@dataclass(eq=False)
class Prefixes:
    """The prefixes that an engine keeps on its runner.

    Raises:
        ValueError: the model has states, and the runner keeps no snapshots.
    """

    runner: Runner  # the engine's runner, which takes kept pages and slots back when it runs short
    options: PrefixCache  # options of the cache

    def __post_init__(self) -> None:
        self._cache = self.runner.cache
        self._has_states = self._cache.table.has_states
        if self._has_states and not self.runner.max_snapshots:
            raise ValueError(
                "a prefix cache of states needs room: "
                "the runner's max_snapshots must be at least 1, got 0"
            )
        self._tree = Tree(_TREE_TOKENS * self.runner.max_seq_len)
        self._uses: dict[Request, _Use] = {}
        self._makers: dict[Request, None] = {}  # requests that started, and got no token yet
        self._kept = DeviceTier(self.runner, self.options.host_bytes)
        self._num_hits = self._num_hit_tokens = self._num_start_tokens = self._num_returned = 0

    @property
    def stats(self) -> PrefixStats:
        """Counts of starts, hits and evictions, and of what is kept now."""
        return PrefixStats(
            num_starts=self._kept.now,
            num_hits=self._num_hits,
            num_hit_tokens=self._num_hit_tokens,
            num_start_tokens=self._num_start_tokens,
            num_snapshots=self._kept.num_snapshots,
            num_bytes=self._kept.num_bytes,
            num_evictions=self._kept.num_evictions,
            num_host_bytes=self._kept.host.num_bytes,
            num_returned=self._num_returned,
        )

    def clear(self) -> None:
        """Release everything that is kept."""
        self._kept.clear()

    def save(self, path: Path) -> int:
        """Save all committed prefixes, for ``Engine.save_prefixes``; return their number."""
        prefixes = self._kept.copies()
        file.save(path, prefixes, self._facts())
        return len(prefixes)

    def load(self, path: Path) -> int:
        """Load prefixes into the host tier, for ``Engine.load_prefixes``; return their number."""
        num_kept = 0
        for tokens, copy in file.load(path, self._facts()):
            node, _ = self._tree.insert(array("q", tokens))
            is_new = node.snapshot is None and node.on_host is None
            num_kept += is_new and self._kept.keep_on_host(node, copy)
        return num_kept

    def _facts(self) -> dict[str, str]:
        """Name the facts that a file must match for its prefixes to hold here."""
        cache, sizes = self._cache, self._cache.sizes
        scales = {layer_id: worth.tolist() for layer_id, worth in cache.scales.items()}
        return file.facts_of(
            self.runner.model,
            (cache.table, scales),
            page_size=sizes.page_size,
            dtype=sizes.dtype,
            batch_invariant=self.runner.batch_invariant,
        )

    # Events of a request, in order.

    def add(self, request: Request) -> None:
        """Insert the path of a request that waits, and note where it diverges from others."""
        tokens = request.path
        node, num_known = self._tree.insert(tokens)
        node.num_users += 1
        self._uses[request] = _Use(node)
        if not self._has_states:
            return
        # The last token is always run, for its logits.
        self._want(tokens, min(num_known, len(tokens) - 1))
        if request.message_end is not None:
            self._want(tokens, request.message_end)

    def start(self, job: Request, admitted: Sequence[Request]) -> Start | None:
        """Choose the prefix that a waiting request starts from; see ``scheduler.Starts``."""
        if job.needs_prompt_logits:
            return FROM_NOTHING
        found = self._deepest(job)
        length = 0 if found is None else found[1]
        expected = max((self._reach(job, maker) for maker in (*self._makers, *admitted)), default=0)
        if expected - length >= self.options.min_tokens:
            return None
        if found is None or length < self.options.min_tokens:
            return FROM_NOTHING
        snapshot = found[0].snapshot
        if snapshot is None:  # on the host: all pages are allocated, and the last one is copied
            size = self.runner.page_size
            return Start(length, length // size - -(-length // size))
        return Start(length, self._cache.snapshots.num_shared_pages(snapshot, length), snapshot)

    def begin(self, requests: Sequence[Request], starts: Sequence[Start]) -> None:
        """Give each admitted request a sequence.

        Requests that start from the host come last, since they may evict other snapshots. A request
        whose snapshot was evicted, or finds no room, starts from nothing.
        """
        pairs = list(zip(requests, starts, strict=True))
        for request, start in sorted(pairs, key=lambda pair: _is_on_host(pair[1])):
            snapshot, length = start.snapshot, start.num_tokens
            if _is_on_host(start):
                snapshot = self._return(request, length)
                length = 0 if snapshot is None else length
            (request.sequence,) = self.runner.new_sequences(
                1,
                start=snapshot,
                length=None if snapshot is None else length,
                adapter=request.adapter_name,
            )
            self._note_start(request, length)

    def _return(self, request: Request, length: int) -> Snapshot | None:
        """Restore a request's snapshot from the host, if it is still there and fits."""
        found = self._deepest(request)
        if found is None or found[1] != length or (copy := found[0].on_host) is None:
            return None
        snapshot = self._kept.bring_back(found[0], copy)
        self._num_returned += snapshot is not None
        return snapshot

    def _note_start(self, request: Request, length: int) -> None:
        """Count a request's start after ``length`` kept tokens."""
        self._kept.now += 1
        self._num_hits += length > 0
        self._num_hit_tokens += length
        self._num_start_tokens += len(request.history)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = length
        self._makers[request] = None
        for node in self._uses[request].node.path():
            if node.depth <= length or not self._has_states:
                node.last_used = self._kept.now

    def limit(self, job: Request, num_held: int, chunk: int) -> int:
        """Cut a chunk at the next wanted snapshot; see ``scheduler.Starts``."""
        if chunk == 1 or not self._has_states:
            return chunk
        end = num_held + chunk
        if (every := self.options.every) is not None:
            end = min(end, (num_held // every + 1) * every)
        due = [node.depth for node in self._due(self._uses[job].node) if node.depth > num_held]
        return min([*due, end]) - num_held

    def num_freed_by(self, job: Request) -> int:
        """Count the pages that preempting a running request frees; see ``scheduler.Starts``."""
        return 0 if job.sequence is None else self._cache.num_freed_by(job.sequence)

    def run(self, requests: Sequence[Request]) -> None:
        """Make the snapshots that are wanted after a step of these requests, which has started.

        Snapshots hold what the step writes: any later step reads it after it is written.
        """
        for request in requests:
            if request not in self._makers:
                continue
            end, held = self._uses[request].node, request.num_held
            every = self.options.every
            if held == end.depth:
                self._make(end, request)
            elif self._has_states and held < end.depth:
                nodes = {node.depth: node for node in self._due(end)}
                if every is not None and held % every == 0:
                    nodes.setdefault(held, self._tree.insert(request.path[:held])[0])
                if held in nodes:
                    self._make(nodes[held], request)

    def finish(self, requests: Sequence[Request]) -> None:
        """Commit the snapshots of requests that got a token from finite logits."""
        for request in requests:
            if request in self._makers and request.is_finite and not _has_failed(request):
                del self._makers[request]
                for node in self._uses[request].made:
                    self._settle(node, request)
                self._uses[request].made.clear()

    def leave(self, request: Request) -> None:
        """Keep a snapshot of a request that is about to lose its sequence.

        Nothing is kept if its logits were not finite, or if it ended before its first token or with
        an error. A preempted request may come back for its own snapshot.
        """
        sequence = request.sequence
        is_certain = request not in self._makers and not _has_failed(request)
        if sequence is None or not request.is_finite or not (is_certain or request.output is None):
            return
        length = self.runner.length(sequence)
        if 0 < length <= len(request.history):  # else the host does not know its last token yet
            node, _ = self._tree.insert(request.path[:length])
            self._make(node, request)
            if is_certain:
                self._settle(node, request)

    def wait_again(self, request: Request) -> None:
        """Move an unfinished request that lost its sequence to the end of its current path."""
        self._makers.pop(request, None)
        use = self._uses[request]
        use.node.num_users -= 1
        use.node, _ = self._tree.insert(request.path)
        use.node.num_users += 1

    def give_up(self, request: Request) -> None:
        """Forget the sequence of a request after a step raised: it waits again, or has ended."""
        if request.output is not None:
            self.discard(request)
        elif request in self._uses:
            self.wait_again(request)

    def discard(self, request: Request) -> None:
        """Forget an ended request and its uncommitted snapshots, if it was ever added."""
        self._makers.pop(request, None)
        use = self._uses.pop(request, None)
        if use is None:
            return
        use.node.num_users -= 1
        for node in use.made:
            if node.maker is request:
                self._kept.drop(node)
        self._tree.forget()

    # Lookup and creation of snapshots.

    def _want(self, tokens: array[int], depth: int) -> None:
        """Mark where the next request to run these tokens makes a snapshot."""
        if depth >= self.options.min_tokens:
            self._tree.insert(tokens[:depth])[0].is_wanted = True

    def _due(self, end: Node) -> Iterator[Node]:
        """Find the nodes on a path where a snapshot is wanted and saves enough tokens."""
        for node in end.path():
            if node.is_wanted and node.snapshot is None and self._saves_enough(node):
                yield node

    def _saves_enough(self, node: Node) -> bool:
        return node.depth - depth_before(node) >= self.options.min_tokens

    def _deepest(self, request: Request) -> tuple[Node, int] | None:
        """Find the deepest node to start a request from, and how many tokens that saves.

        At least one token of the request is left to run.
        """
        last = len(request.history) - 1
        for node in self._uses[request].node.path():
            if not self._has_states:
                found = _certain(node, request) or _on_host(node)
                if found is not None:
                    return found, min(node.depth, last)
            elif node.depth <= last and (_is_for(node, request) or node.on_host is not None):
                return node, node.depth
        return None

    def _reach(self, request: Request, maker: Request) -> int:
        """Predict the longest prefix of a request that another one is about to keep, in tokens."""
        end, last = self._uses[maker].node, len(request.history) - 1
        if maker is request:
            return 0
        own = set(self._uses[request].node.path())
        common = next((node for node in end.path() if node in own), None)
        if common is None:
            return 0
        if not self._has_states:
            return min(common.depth, last)
        depths = (
            node.depth
            for node in common.path()
            if node.depth <= last
            and (
                node.maker is maker
                or (node.depth > maker.num_held and (node.is_wanted or node is end))
            )
        )
        return max(depths, default=0)

    def _make(self, node: Node, request: Request) -> None:
        """Make a snapshot of a request at a node that has none, if it saves enough tokens."""
        assert request.sequence is not None
        if node.snapshot is not None:
            node.last_used = self._kept.now
        if node.snapshot is not None or not self._saves_enough(node):
            return
        self.runner.flush([request.sequence])
        try:
            snapshot = self._cache.snapshot(request.sequence, spare=True)
        except CapacityError:  # the user holds all of them
            return
        self._kept.keep(node, snapshot)
        node.maker = request
        self._uses[request].made.append(node)

    def _settle(self, node: Node, request: Request) -> None:
        """Let all requests start from the snapshot that a request made at a node."""
        if node.maker is not request:  # evicted meanwhile
            return
        node.maker = None
        if self._has_states:
            return
        # Without states, a snapshot serves all prefixes of its tokens.
        for earlier in list(node.path())[1:]:
            if earlier.snapshot is not None:
                self._kept.drop(earlier)


def _is_on_host(start: Start) -> bool:
    return start.num_tokens > 0 and start.snapshot is None


def _has_failed(request: Request) -> bool:
    return request.output is not None and request.output.finish_reason == "error"


def _is_for(node: Node, request: Request) -> bool:
    """Tell whether a request may start from the snapshot at a node."""
    return node.snapshot is not None and node.maker in (None, request)


def _certain(node: Node, request: Request) -> Node | None:
    """Find a snapshot, at a node or below, from which a request may start."""
    below = [node]
    while below:
        found = below.pop()
        if _is_for(found, request):
            return found
        below += [child for child in found.children.values() if child.num_kept]
    return None


def _on_host(node: Node) -> Node | None:
    """Find a node, at a node or below, that has a copy on the host."""
    if not node.num_on_host:
        return None
    while node.on_host is None:
        node = next(child for child in node.children.values() if child.num_on_host)
    return node
