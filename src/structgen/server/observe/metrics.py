"""Figures for Prometheus: the engine's own, read when they are asked for, and those of calls.

Owns   the names: `structgen:` with vLLM's words where vLLM has one for the same thing, and the
       `vllm:` and `sglang:` names that dashboards know as further spellings of the same figures.
Holds  counters only grow. Nothing is registered globally: each server has a registry of its own.
Used   by `call`, which tells it what happens, and by `health`, which serves `/metrics`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder

from structgen.engine.observe import Statistics
from structgen.errors import EngineError
from structgen.request import Delta

if TYPE_CHECKING:
    from structgen.server.call import Call
    from structgen.server.service import Service

_MODEL = "model_name"
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_LONG = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


class _Figure(NamedTuple):
    """A figure of the engine: its name, what it is, where it stands, and its other names."""

    name: str
    says: str
    read: Callable[[Statistics], float]
    others: tuple[str, ...] = ()


_COUNTERS = (
    _Figure(
        "prompt_tokens",
        "Tokens of the prompts of requests that were started.",
        lambda s: s.prompt_tokens,
        ("vllm:prompt_tokens", "sglang:prompt_tokens", "vllm:prefix_cache_queries"),
    ),
    _Figure(
        "prompt_tokens_cached",
        "Those of them whose keys and values another request had computed.",
        lambda s: s.cached_tokens,
        ("vllm:prompt_tokens_cached", "sglang:cached_tokens", "vllm:prefix_cache_hits"),
    ),
    _Figure(
        "generation_tokens",
        "Tokens of outputs, end tokens included.",
        lambda s: s.generated_tokens,
        ("vllm:generation_tokens", "sglang:generation_tokens"),
    ),
    _Figure(
        "forced_tokens",
        "Those of them that a constraint left no choice about: jump-forward took them undrawn.",
        lambda s: s.forced_tokens,
    ),
    _Figure(
        "prefilled_tokens",
        "Tokens of prompts that were computed.",
        lambda s: s.prefilled_tokens,
    ),
    _Figure(
        "evicted_tokens",
        "Tokens that the cache dropped for others.",
        lambda s: s.evicted_tokens,
        ("sglang:evicted_tokens",),
    ),
    _Figure(
        "num_preemptions",
        "Running requests that were sent back to the queue for want of room.",
        lambda s: s.retractions,
        ("vllm:num_preemptions",),
    ),
    _Figure("steps", "Steps that the model computed.", lambda s: s.steps),
    _Figure("requests_finished", "Requests that ended.", lambda s: s.requests_finished),
    _Figure(
        "requests_aborted",
        "Requests that were left before they had ended.",
        lambda s: s.requests_aborted,
        ("sglang:num_aborted_requests",),
    ),
    _Figure("requests_failed", "Requests that failed.", lambda s: s.requests_failed),
)
_GAUGES = (
    _Figure(
        "num_requests_running",
        "Requests in the batch.",
        lambda s: s.running,
        ("vllm:num_requests_running", "sglang:num_running_reqs"),
    ),
    _Figure(
        "num_requests_waiting",
        "Requests in the queue.",
        lambda s: s.waiting,
        ("vllm:num_requests_waiting", "sglang:num_queue_reqs"),
    ),
    _Figure("waiting_tokens", "Tokens of the requests in the queue.", lambda s: s.waiting_tokens),
    _Figure(
        "kv_cache_usage_perc",
        "Part of the cache that running requests and open scopes hold, from 0 to 1.",
        lambda s: s.slots_held / s.slots_total,
        ("vllm:kv_cache_usage_perc", "sglang:token_usage"),
    ),
    _Figure(
        "cache_hit_rate",
        "Cached tokens of all prompt tokens, from 0 to 1.",
        lambda s: s.hit_rate,
        ("sglang:cache_hit_rate",),
    ),
    _Figure("batch_size_mean", "Requests in a step, on average.", lambda s: s.batch_size_mean),
    _Figure("batch_size_max", "Requests in the largest step.", lambda s: s.batch_size_max),
    _Figure("fork_scopes", "Open fork scopes.", lambda s: s.scopes),
    _Figure("stalled_seconds", "Time without a step, while there is work.", lambda s: s.stalled),
)


class _Histogram:
    """How often a value fell into each of some ranges."""

    def __init__(self, name: str, says: str, bounds: Iterable[float], *others: str) -> None:
        self.names = (f"structgen:{name}", *others)
        self._says, self._bounds = says, tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def families(self, model: str) -> Iterator[Metric]:
        """As Prometheus has it, under each of its names."""
        limits = [*(f"{bound:g}" for bound in self._bounds), "+Inf"]
        buckets = list(zip(limits, accumulate(self._counts), strict=True))
        for name in self.names:
            family = HistogramMetricFamily(name, self._says, labels=[_MODEL])
            family.add_metric([model], buckets, self._sum)
            yield family


class Generation:
    """When the first and the last token of a generation came, and how many there were."""

    def __init__(self, first: float) -> None:
        self.first = self.last = first
        self.tokens = 0


class Metrics:
    """The figures of one server."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._first_token = _Histogram(
            "time_to_first_token_seconds",
            "From the beginning of a call to its first token.",
            _SHORT + _LONG[8:],
            *_both("time_to_first_token_seconds"),
        )
        self._between = _Histogram(
            "inter_token_latency_seconds",
            "Between two steps that brought tokens of one generation.",
            _SHORT,
            *_both("inter_token_latency_seconds"),
        )
        self._whole = _Histogram(
            "e2e_request_latency_seconds",
            "Of a call that generated, from its beginning to its end.",
            _LONG,
            *_both("e2e_request_latency_seconds"),
        )
        self._queued = _vllm("request_queue_time_seconds", "In the queue.", _SHORT + _LONG[8:])
        self._prefill = _vllm(
            "request_prefill_time_seconds", "From the queue to the first token.", _LONG
        )
        self._decode = _vllm(
            "request_decode_time_seconds",
            "From the first token of a generation to its last.",
            _LONG,
        )
        self._per_token = _vllm(
            "request_time_per_output_token_seconds", "Mean time between its tokens.", _SHORT
        )
        self._prompt = _vllm("request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self._output = _vllm("request_generation_tokens", "Tokens of an output.", _TOKENS)
        self._success: Counter[tuple[str, ...]] = Counter({("stop",): 0, ("length",): 0})
        self._calls: Counter[tuple[str, ...]] = Counter()
        self._refused: Counter[tuple[str, ...]] = Counter()
        self._programs: Counter[tuple[str, ...]] = Counter(
            {(name, outcome): 0 for name in service.programs for outcome in ("done", "failed")}
        )
        self._registry = CollectorRegistry()
        self._registry.register(self)

    # ------------------------------------------------------------ what happens

    def came(self, call: Call, delta: Delta, now: float) -> None:
        """A delta of one of a call's generations came."""
        times = call.generations.get(delta.request)
        if delta.tokens:
            if times is None:
                times = call.generations[delta.request] = Generation(now)
            else:
                self._between.observe(now - times.last)
            times.last = now
            times.tokens += len(delta.tokens)
        if delta.finish is None:
            return
        finish, usage = delta.finish, delta.finish.usage
        self._success[finish.reason,] += 1
        self._queued.observe(finish.waited)
        self._prompt.observe(usage.prompt_tokens)
        self._output.observe(usage.completion_tokens)
        if times is not None:
            self._prefill.observe(max(0.0, times.first - call.started - finish.waited))
            self._decode.observe(times.last - times.first)
            if times.tokens > 1:
                self._per_token.observe((times.last - times.first) / (times.tokens - 1))

    def ended(self, call: Call, status: int, seconds: float) -> None:
        """A call was answered, or its client left."""
        self._calls[call.request.method, call.route, str(status)] += 1
        if call.first_token is not None:
            self._first_token.observe(call.first_token)
        if call.finishes:
            self._whole.observe(seconds)
        if call.failure is not None and call.failure.status in {429, 503}:
            self._refused[call.failure.code or "unavailable",] += 1
        if call.program in self._service.programs:
            done = status == 200 and call.failure is None
            self._programs[call.program, "done" if done else "failed"] += 1

    # ------------------------------------------------------------ what is told

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """All figures in a format that a client takes, and the content type of that."""
        encoder, content_type = choose_encoder(accept)
        return encoder(self._registry), content_type

    def describe(self) -> Iterable[Metric]:
        """Nothing ahead: what there is depends on what was loaded. Asked for by the registry."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Everything; until the model is loaded, only what is not the engine's."""
        service = self._service
        try:
            statistics, model = service.engine.statistics(), service.names[0]
        except EngineError:
            statistics, model = None, next(iter(service.config.names), "")
        yield from _one("ready", "Whether it takes work.", model, float(service.ready))
        yield from _one("http_requests_live", "Calls that are being answered.", model, service.live)
        if statistics is not None:
            yield from _of_engine(statistics, model)
        yield from self._of_calls(model, aborted=statistics.requests_aborted if statistics else 0)
        for histogram in vars(self).values():
            if isinstance(histogram, _Histogram):
                yield from histogram.families(model)

    def _of_calls(self, model: str, aborted: int) -> Iterator[Metric]:
        success = {**self._success, ("abort",): aborted}
        both = ("request_success", "vllm:request_success")
        yield from _counted(both, "Ends of generations.", model, ["finished_reason"], success)
        both = ("admission_rejections", "vllm:admission_rejections")
        yield from _counted(
            both, "Calls that were told to come again.", model, ["reason"], self._refused
        )
        labels = ["method", "route", "status"]
        yield from _counted(("http_requests",), "Calls that ended.", model, labels, self._calls)
        labels = ["program", "outcome"]
        yield from _counted(("program_runs",), "Runs of programs.", model, labels, self._programs)


def _both(name: str) -> tuple[str, str]:
    return f"vllm:{name}", f"sglang:{name}"


def _vllm(name: str, says: str, bounds: Iterable[float]) -> _Histogram:
    return _Histogram(name, f"{says}", bounds, f"vllm:{name}")


def _of_engine(statistics: Statistics, model: str) -> Iterator[Metric]:
    for figures, kind in ((_COUNTERS, CounterMetricFamily), (_GAUGES, GaugeMetricFamily)):
        for figure in figures:
            for name in (f"structgen:{figure.name}", *figure.others):
                family = kind(name, figure.says, labels=[_MODEL])
                family.add_metric([model], figure.read(statistics))
                yield family
    slots = GaugeMetricFamily("structgen:slots", "Tokens of the cache.", labels=[_MODEL, "state"])
    for state in ("free", "cached", "held", "limbo"):
        slots.add_metric([model, state], getattr(statistics, f"slots_{state}"))
    yield slots
    lag = GaugeMetricFamily(
        "structgen:loop_lag_seconds",
        "How late the event loop was in the last minute of work.",
        labels=[_MODEL, "quantile"],
    )
    for quantile, name in (("0.5", "p50"), ("0.99", "p99"), ("1", "max")):
        lag.add_metric([model, quantile], getattr(statistics, f"loop_lag_{name}"))
    yield lag


def _one(name: str, says: str, model: str, value: float) -> Iterator[Metric]:
    family = GaugeMetricFamily(f"structgen:{name}", says, labels=[_MODEL])
    family.add_metric([model], value)
    yield family


def _counted(
    names: Iterable[str],
    says: str,
    model: str,
    labels: list[str],
    counts: Mapping[tuple[str, ...], int],
) -> Iterator[Metric]:
    for name in names:
        whole = name if ":" in name else f"structgen:{name}"
        family = CounterMetricFamily(whole, says, labels=[_MODEL, *labels])
        for values, count in counts.items():
            family.add_metric([model, *values], count)
        yield family
