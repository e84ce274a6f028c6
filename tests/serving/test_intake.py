"""What the host does of a request before it is queued."""

from __future__ import annotations

import time
from types import SimpleNamespace

from torch_hybrid.sampling import Sampling
from torch_hybrid.serving.intake import Intake


def test_a_request_takes_the_same_time_whatever_the_vocabulary():
    runner = SimpleNamespace(takes_embeds=False, vocab_size=10**9, max_seq_len=100)
    intake = Intake(runner, None, frozenset({7, 10**9 + 1}))
    start = time.thread_time()
    for ignore_eos in (True, False):
        sampling = Sampling(ignore_eos=ignore_eos, min_new_tokens=1)
        [request] = intake.requests([1, 2], sampling, index=0, stream=False)
        assert request.packed.tolist() == [1, 2]
    assert time.thread_time() - start < 1.0  # a walk through it takes half a minute
