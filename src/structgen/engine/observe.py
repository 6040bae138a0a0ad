"""What the engine can tell about itself: one frozen snapshot, and the lag of the event loop."""

from __future__ import annotations

import asyncio
from collections import deque

import msgspec

from structgen.core.core import Core

LAG_INTERVAL = 0.02  # seconds between two looks at the clock
LAG_WINDOW = 3000  # samples kept: one minute of work


class Statistics(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of an engine. Counters only grow; token counts are tokens, times are seconds.

    running, waiting        requests
    waiting_tokens          of the waiting ones, prompts and what retracted ones wrote
    stalled                 since there has been work and no step has ended, 0 without work
    slots_*                 free + cached + held + limbo == total: cached ones are evictable,
                            held ones belong to running requests or open fork scopes
    prompt_tokens           of admitted requests
    cached_tokens           of those, how many another request had computed
    prefilled_tokens        rows computed for prompts, recomputation after retraction included
    generated_tokens        of outputs, end tokens included
    forced_tokens           of those, how many a constraint left no choice about: taken without
                            being drawn
    hit_rate                cached_tokens / prompt_tokens, 0 before the first request
    batch_size_*            requests per step
    retractions             running requests sent back to the queue for want of slots
    loop_lag_*              how late the event loop ran a timer while the engine worked
    """

    running: int
    waiting: int
    waiting_tokens: int
    stalled: float
    slots_total: int
    slots_free: int
    slots_cached: int
    slots_held: int
    slots_limbo: int
    scopes: int
    steps: int
    prompt_tokens: int
    cached_tokens: int
    prefilled_tokens: int
    generated_tokens: int
    forced_tokens: int
    evicted_tokens: int
    hit_rate: float
    requests_finished: int
    requests_aborted: int
    requests_failed: int
    retractions: int
    batch_size_mean: float
    batch_size_max: int
    loop_lag_p50: float
    loop_lag_p99: float
    loop_lag_max: float


class LagMeter:
    """Measures how late timers fire on this event loop, while there is work."""

    def __init__(self) -> None:
        self._lags: deque[float] = deque(maxlen=LAG_WINDOW)

    async def run(self, busy: asyncio.Event) -> None:
        """Measure until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await busy.wait()
            before = loop.time()
            await asyncio.sleep(LAG_INTERVAL)
            self._lags.append(max(0.0, loop.time() - before - LAG_INTERVAL))

    def quantiles(self) -> tuple[float, float, float]:
        """Median, 99th percentile and maximum of the last minute of work, in seconds."""
        lags = sorted(self._lags)
        if not lags:
            return 0.0, 0.0, 0.0
        return lags[len(lags) // 2], lags[min(len(lags) - 1, len(lags) * 99 // 100)], lags[-1]


def snapshot(core: Core, lag: LagMeter, *, stalled: float) -> Statistics:
    """Read the counters of a core; `stalled` is for the loop to say."""
    schedule, pool, totals = core.schedule, core.pool, core.totals
    counters = schedule.counters
    cached = schedule.radix.evictable
    p50, p99, largest = lag.quantiles()
    return Statistics(
        running=len(schedule.running),
        waiting=len(schedule.waiting),
        waiting_tokens=schedule.waiting_tokens,
        stalled=stalled,
        slots_total=pool.total,
        slots_free=pool.free,
        slots_cached=cached,
        slots_held=pool.total - pool.free - pool.in_limbo - cached,
        slots_limbo=pool.in_limbo,
        scopes=len(schedule.scopes),
        steps=totals.steps,
        prompt_tokens=counters.prompt_tokens,
        cached_tokens=counters.cached_tokens,
        prefilled_tokens=counters.prefilled_tokens,
        generated_tokens=totals.generated_tokens,
        forced_tokens=totals.forced_tokens,
        evicted_tokens=counters.evicted_tokens,
        hit_rate=counters.cached_tokens / max(1, counters.prompt_tokens),
        requests_finished=totals.finished,
        requests_aborted=totals.aborted,
        requests_failed=totals.failed,
        retractions=counters.retractions,
        batch_size_mean=totals.batch_sequences / max(1, totals.steps),
        batch_size_max=totals.batch_max,
        loop_lag_p50=p50,
        loop_lag_p99=p99,
        loop_lag_max=largest,
    )
