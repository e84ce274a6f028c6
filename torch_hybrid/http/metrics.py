"""Metrics for Prometheus, under vLLM's names where the meaning is the same, and a log of calls."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from torch_hybrid.http.call import Call
from torch_hybrid.serving.request import Request, TokenEvent
from torch_hybrid.serving.stats import EngineStats

LOG = logging.getLogger("torch_hybrid.http.requests")
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300)
_LABEL = ["model_name"]


class Metrics(Collector):
    """Metrics of one server, kept in its event loop.

    Args:
        model: served name, the label of all metrics.
        stats: reads the engine's counts; None until there is an engine.
        logs: whether each call is logged: sizes and times, no texts.
    """

    def __init__(
        self, model: str, stats: Callable[[], EngineStats | None], *, logs: bool = False
    ) -> None:
        self._model, self._stats, self._logs = model, stats, logs
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self._prompt_tokens = self._counter("prompt_tokens").labels(model)
        self._tokens = self._counter("generation_tokens").labels(model)
        self._ended = self._counter("request_success", "finished_reason")
        self._first = self._seconds("time_to_first_token_seconds")
        self._between = self._seconds("inter_token_latency_seconds")
        self._whole = self._seconds("e2e_request_latency_seconds")

    def saw(self, call: Call, request: Request, events: Sequence[TokenEvent]) -> None:
        """Count the tokens that a request got in one delivery; each has the mean of their times."""
        num_tokens = sum(event.token is not None for event in events)
        if not num_tokens:
            return
        now = time.monotonic()
        before = call.last_token.get(request)
        call.last_token[request] = now
        self._tokens.inc(num_tokens)
        for _ in range(num_tokens - (before is None)):
            self._between.observe((now - (before or now)) / num_tokens)
        if before is not None:
            return
        call.first_token = call.first_token or now
        self._first.observe(now - call.begun)
        if request.sample == 0:
            self._prompt_tokens.inc(len(request.prompt))

    def left(self, call: Call) -> None:
        """Count the requests of a call that is over, and log it."""
        now, reasons = time.monotonic(), []
        for request in call.requests:
            reason = "abort" if request.output is None else request.output.finish_reason
            reasons.append("abort" if reason == "cancelled" else reason)
            self._ended.labels(self._model, reasons[-1]).inc()
            self._whole.observe(now - call.begun)
        if self._logs:
            LOG.info(
                "%s prompt=%d kept=%d generated=%d first=%.3fs whole=%.3fs %s",
                call.id,
                sum(len(first.prompt) for first in call.firsts),
                call.num_cached_tokens,
                sum(len(request.tokens) for request in call.requests),
                (call.first_token or now) - call.begun,
                now - call.begun,
                ",".join(reasons),
            )

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Read what the engine itself counts."""
        stats = self._stats()
        if stats is None:
            return
        kept, drafts = stats.prefix_cache, stats.drafts
        gauges = {
            "num_requests_running": stats.num_running,
            "num_requests_waiting": stats.num_waiting,
            "kv_cache_usage_perc": 1 - stats.free_pages / stats.num_pages,
        }
        counts = {
            "num_preemptions": stats.num_preemptions,
            "prefix_cache_queries": 0 if kept is None else kept.num_start_tokens,
            "prefix_cache_hits": 0 if kept is None else kept.num_hit_tokens,
            "spec_decode_num_drafts": drafts.steps,
            "spec_decode_num_draft_tokens": drafts.drafted,
            "spec_decode_num_accepted_tokens": drafts.accepted,
        }
        for kind, values in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counts)):
            for name, value in values.items():
                family = kind(f"vllm:{name}", name, labels=_LABEL)
                family.add_metric([self._model], value)
                yield family

    def _counter(self, name: str, *labels: str) -> Counter:
        return Counter(f"vllm:{name}", name, [*_LABEL, *labels], registry=self.registry)

    def _seconds(self, name: str) -> Histogram:
        return Histogram(
            f"vllm:{name}", name, _LABEL, registry=self.registry, buckets=_SECONDS
        ).labels(self._model)
