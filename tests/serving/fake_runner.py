"""A runner without a model: it keeps the books of the real one and checks the engine's calls.

A sequence's next token depends on every token it holds, in order, so a mix-up of rows, slots or
chunks changes what comes out.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import torch

from torch_hybrid.errors import CapacityError
from torch_hybrid.graphs.turn import Turn
from torch_hybrid.sampling import Draw, DrawKind, RandomNumbers, draw_tokens, sample, settings_of

MODULUS = 1_000_003


@dataclass(eq=False)
class FakeSequence:
    num_tokens: int = 0
    digest: int = 1
    is_live: bool = True
    is_broken: bool = False
    last: int | None = None  # sampled by the last launch
    num_launched: int = 0  # steps that use it and were not waited for
    drafts: tuple[int, ...] = ()  # of the last verify, not accepted


@dataclass(eq=False)
class FakeLaunched:
    seqs: list
    tokens: list
    is_waited_for: bool = False

    def result(self):
        if not self.is_waited_for:
            self.is_waited_for = True
            for seq in self.seqs:
                seq.num_launched -= 1
        return self.tokens


class FakeRunner:
    """The contract of ``Runner``, over a table of random logits."""

    prefill = True
    captures = False
    takes_embeds = False
    model = SimpleNamespace(ranks=None, device=torch.device("cpu"))

    def __init__(
        self,
        *,
        max_seqs=8,
        max_tokens=32,
        page_size=4,
        num_pages=32,
        vocab_size=50,
        max_drafts=0,
    ):
        self.turn = Turn()
        self.lock = self.turn.lock
        self.max_seqs = max_seqs
        self.max_tokens = max_tokens
        self.max_drafts = max_drafts
        self.page_size = page_size
        self.vocab_size = vocab_size
        self.eos_token_ids = ()
        self.max_seq_len = num_pages * page_size
        self.num_pages = num_pages
        self.live = []
        self.num_extends = 0
        self.num_buckets = 0
        self.launches = []
        self.raise_at = {}  # number of an extend -> what it raises in the middle
        self.poisoned = set()  # digests after which the logits are NaN
        generator = torch.Generator().manual_seed(0)
        self.logits = torch.randn(997, vocab_size, generator=generator)

    def within(self):
        return self

    @property
    def free_slots(self):
        return self.max_seqs - len(self.live)

    @property
    def free_pages(self):
        return self.num_pages - sum(self._num_pages(seq.num_tokens) for seq in self.live)

    adapters = ()

    def new_sequences(self, n, adapter=None):
        if n > self.free_slots:
            raise CapacityError(f"asked {n} slots, {self.free_slots} are free")
        made = [FakeSequence() for _ in range(n)]
        self.live += made
        return made

    def pages_needed(self, seq, num_new_tokens):
        return self._num_pages(seq.num_tokens + num_new_tokens) - self._num_pages(seq.num_tokens)

    def length(self, seq):
        return seq.num_tokens

    def extend(self, seqs, tokens, *, logits="last", positions=None, embeds=None):
        assert positions is embeds is None, "no request has images"
        assert not any(seq.num_launched for seq in seqs), "the step before was not waited for"
        for seq in seqs:
            seq.last = None
        return self._run(seqs, tokens, logits=logits)

    def launch(self, seqs, tokens, draws, *, positions=None, embeds=None):
        """Tokens are there at once; what is checked is that nobody uses them before ``result``."""
        assert len([x for x in self.launches if not x.is_waited_for]) <= 1, "too far ahead"
        fed = [[seq.last] if new is None else new for seq, new in zip(seqs, tokens, strict=True)]
        assert [None] not in fed, "nothing was sampled for a sequence"
        rows = self._run(seqs, fed, logits="last")
        drawn = draw_tokens(rows, settings_of(draws, len(draws)), DrawKind.of(draws)).tolist()
        for seq, draw, token in zip(seqs, draws, drawn, strict=True):
            seq.last = None if draw is None else max(token, 0)
            seq.num_launched += 1
        self.launches = [x for x in self.launches if not x.is_waited_for]
        self.launches.append(FakeLaunched(seqs, drawn))
        return self.launches[-1]

    def verify(self, seqs, tokens, *, positions=None):
        """Drafts are tried and taken back, until they are accepted."""
        assert all(1 <= len(new) <= 1 + self.max_drafts for new in tokens), "too many drafts"
        before = [(seq.num_tokens, seq.digest) for seq in seqs]
        rows = self.extend(seqs, tokens, logits="all")
        for seq, (num_tokens, digest), new in zip(seqs, before, tokens, strict=True):
            seq.num_tokens, seq.digest = num_tokens, digest
            self._hold(seq, new[:1])
            seq.drafts = tuple(new[1:])
        return rows

    def accept(self, seqs, counts):
        for seq, count in zip(seqs, counts, strict=True):
            assert 0 <= count <= len(seq.drafts), "accepted what was not drafted"
            self._hold(seq, seq.drafts[:count])
            seq.drafts = ()

    def _hold(self, seq, tokens):
        seq.num_tokens += len(tokens)
        for token in tokens:
            seq.digest = (seq.digest * 131 + token + 7) % MODULUS

    def wait(self):
        for launched in self.launches:
            launched.result()

    def _run(self, seqs, tokens, *, logits):
        assert len(set(map(id, seqs))) == len(seqs) == len(tokens), "a sequence is there twice"
        assert all(seq.is_live and not seq.is_broken for seq in seqs), "a stale sequence"
        assert all(len(new) >= 1 for new in tokens), "a row without tokens"
        assert 0 < sum(map(len, tokens)) <= self.max_tokens, "over the token budget"
        needed = sum(
            self.pages_needed(seq, len(new)) for seq, new in zip(seqs, tokens, strict=True)
        )
        if needed > self.free_pages:
            raise CapacityError(f"asked {needed} pages, {self.free_pages} are free")
        self.num_extends += 1
        digests = []
        for seq, new in zip(seqs, tokens, strict=True):
            seq.is_broken, seq.drafts = True, ()
            for token in new:
                self._hold(seq, [token])
                digests.append(seq.digest)
        if self.num_extends in self.raise_at:
            raise self.raise_at[self.num_extends]
        for seq in seqs:
            seq.is_broken = False
        if logits == "last":
            digests = [seq.digest for seq in seqs]
        rows = self.logits[[digest % len(self.logits) for digest in digests]]
        rows[[digest in self.poisoned for digest in digests]] = float("nan")
        return rows

    def free(self, seqs):
        for seq in seqs:
            assert seq.is_live, "freed twice"
            assert not seq.num_launched, "freed while a step that uses it is under way"
            seq.is_live = False
            self.live.remove(seq)

    def _num_pages(self, num_tokens):
        return -(-num_tokens // self.page_size)


def digest_of(tokens):
    """What a sequence's digest is once it holds these tokens."""
    digest = 1
    for token in tokens:
        digest = (digest * 131 + token + 7) % MODULUS
    return digest


def alone(prompt, sampling, **sizes):
    """The tokens of a prompt served by itself: straight from the table, without an engine."""
    runner = FakeRunner(**{**sizes, "max_tokens": 10_000, "num_pages": 10_000})
    history, numbers = list(prompt), RandomNumbers.of(sampling)
    (seq,) = runner.new_sequences(1)
    new = history
    while True:
        number = 0.0 if numbers is None else numbers[len(history) - len(prompt)]
        (token,) = sample(runner.extend([seq], [new]), [Draw(sampling, number)])
        history, new = [*history, token], [token]
        generated = history[len(prompt) :]
        if len(generated) == sampling.max_new_tokens or token in sampling.stop_token_ids:
            return generated
