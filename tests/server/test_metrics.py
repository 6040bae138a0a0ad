"""`/metrics`: the names that dashboards know, and figures that are true."""

from __future__ import annotations

import asyncio
import time

from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as open_metrics,
)
from prometheus_client.parser import text_string_to_metric_families

from structgen import State, program
from structgen.server import ServerConfig
from tests.server.served import Serve, Served, wait_until

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hello"}]
BODY = {"messages": HI, "max_tokens": 5, "ignore_eos": True, "temperature": 0}
GAUGES = (
    *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
    *("sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:token_usage"),
    *("sglang:cache_hit_rate", "structgen:num_requests_running", "structgen:stalled_seconds"),
)
COUNTERS = (
    *("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:prefix_cache_hits_total"),
    *("vllm:prefix_cache_queries_total", "vllm:num_preemptions_total"),
    *("sglang:prompt_tokens_total", "sglang:generation_tokens_total"),
    *("sglang:cached_tokens_total", "sglang:num_aborted_requests_total"),
    *("structgen:forced_tokens_total", "structgen:requests_finished_total"),
)
HISTOGRAMS = (
    *("vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds"),
    *("vllm:e2e_request_latency_seconds", "vllm:request_queue_time_seconds"),
    *("vllm:request_prompt_tokens", "vllm:request_generation_tokens"),
    *("sglang:time_to_first_token_seconds", "structgen:time_to_first_token_seconds"),
)


@program
async def shout(s: State) -> str:
    s += "done"
    return s.text()


@program
async def stumble(s: State) -> str:
    s += "done"
    raise LookupError("it cannot be found")


def counts(text: str) -> dict[str, float]:
    """What is counted in a scrape, read without a parser: for those who read a hundred."""
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    ends = ("_total", "_count", "_bucket")
    return {name: float(value) for name, _, value in lines if name.partition("{")[0].endswith(ends)}


class Figures:
    """One scrape."""

    def __init__(self, text: str) -> None:
        self.families = list(text_string_to_metric_families(text))
        self.values = {
            (sample.name, *(v for k, v in sorted(sample.labels.items()) if k != "model_name")): (
                sample.value
            )
            for family in self.families
            for sample in family.samples
        }

    def __getitem__(self, name: str) -> float:
        return self.values[name,]

    @property
    def counters(self) -> dict[tuple[str, ...], float]:
        """Counters, and what histograms count."""
        return {
            key: value
            for family in self.families
            if family.type in {"counter", "histogram"}
            for key, value in self.values.items()
            if key[0].startswith(family.name)
        }


async def scrape(served: Served) -> Figures:
    answer = await served.get("/metrics")
    assert answer.status == 200
    assert answer.headers["Content-Type"].startswith("text/plain; version=")
    return Figures(answer.text)


class TestAFreshServer:
    async def test_has_all_names_and_has_counted_nothing(self, serve: Serve) -> None:
        async with serve(config=ServerConfig(names=("the-model",))) as served:
            figures = await scrape(served)
            labels = {
                sample.labels["model_name"]
                for family in figures.families
                for sample in family.samples
            }

        names = {key[0] for key in figures.values}
        assert {*GAUGES, *COUNTERS, *(f"{name}_bucket" for name in HISTOGRAMS)} <= names
        assert set(figures.counters.values()) == {0.0}
        assert labels == {"the-model"}

    async def test_has_each_name_once(self, serve: Serve) -> None:
        async with serve() as served:
            names = [family.name for family in (await scrape(served)).families]

        assert len(names) == len(set(names))

    async def test_is_read_by_a_parser_of_open_metrics_too(self, serve: Serve) -> None:
        accept = "application/openmetrics-text; version=1.0.0"
        async with serve() as served:
            await served.post(CHAT, BODY)
            answer = await served.get("/metrics", Accept=accept)

        assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
        families = {each.name for each in open_metrics(answer.text)}  # type: ignore[no-untyped-call]  # not ours
        assert "vllm:generation_tokens" in families


class TestFigures:
    async def test_are_those_of_the_work(self, serve: Serve) -> None:
        async with serve() as served:
            first = (await served.post(CHAT, BODY)).json["usage"]
            second = (await served.post(CHAT, {**BODY, "stream": True})).chunks
            figures = await scrape(served)
            statistics = served.engine.statistics()

        assert second
        prompt, cached = first["prompt_tokens"], statistics.cached_tokens
        assert figures["vllm:generation_tokens_total"] == 10
        assert figures["vllm:prompt_tokens_total"] == 2 * prompt
        assert figures["vllm:prefix_cache_hits_total"] == cached > 0
        assert figures["structgen:requests_finished_total"] == 2
        assert figures.values["vllm:request_success_total", "length"] == 2
        assert figures.values["vllm:request_success_total", "stop"] == 0
        assert figures["vllm:time_to_first_token_seconds_count"] == 2
        assert figures["vllm:e2e_request_latency_seconds_count"] == 2
        assert figures["vllm:request_generation_tokens_sum"] == 10
        assert figures["vllm:request_prompt_tokens_sum"] == 2 * prompt
        assert figures["vllm:inter_token_latency_seconds_count"] == 8
        assert figures["structgen:steps_total"] == statistics.steps
        calls = figures.values["structgen:http_requests_total", "POST", CHAT, "200"]
        assert calls == 2

    async def test_have_the_same_value_under_all_their_names(self, serve: Serve) -> None:
        async with serve() as served:
            await served.post(CHAT, BODY)
            figures = await scrape(served)

        for name in ("generation_tokens_total", "time_to_first_token_seconds_sum"):
            found = {figures[f"{prefix}:{name}"] for prefix in ("structgen", "vllm", "sglang")}
            assert len(found) == 1
            assert found != {0.0}

    async def test_count_who_left_and_forget_what_they_held(self, serve: Serve) -> None:
        async with serve() as served:
            body = served.named({**BODY, "max_tokens": 3000, "stream": True})
            async with served.client.post(CHAT, json=body) as response:
                await response.content.readline()
                during = await scrape(served)
                response.close()
            await wait_until(lambda: served.engine.statistics().running == 0)
            after = await scrape(served)

        assert during["vllm:num_requests_running"] == 1
        assert during["vllm:kv_cache_usage_perc"] > 0
        assert after["vllm:num_requests_running"] == after["vllm:kv_cache_usage_perc"] == 0
        assert after["sglang:num_aborted_requests_total"] == 1
        assert after.values["vllm:request_success_total", "abort"] == 1
        assert after["structgen:requests_finished_total"] == 0

    async def test_count_who_was_refused(self, serve: Serve) -> None:
        async with serve(max_running=1, max_waiting=0) as served:
            body = {**BODY, "max_tokens": 3000}
            running = asyncio.create_task(served.post(CHAT, body))
            await wait_until(lambda: served.engine.statistics().running == 1)
            refused = await served.post(CHAT, BODY)
            running.cancel()
            await wait_until(lambda: served.service.live == 0)
            figures = await scrape(served)

        assert (refused.status, refused.error["code"]) == (503, "overloaded")
        assert int(refused.headers["Retry-After"]) >= 1
        assert figures.values["vllm:admission_rejections_total", "overloaded"] == 1

    async def test_count_the_runs_of_programs(self, serve: Serve) -> None:
        async with serve(programs=[shout, stumble]) as served:
            for name in ("shout", "stumble", "unknown"):
                await served.post(f"/v1/programs/{name}", {"arguments": {}})
            figures = await scrape(served)

        runs = {key[1:]: v for key, v in figures.values.items() if "program_runs" in key[0]}
        assert runs == {
            ("done", "shout"): 1,
            ("failed", "shout"): 0,
            ("done", "stumble"): 0,
            ("failed", "stumble"): 1,
        }

    async def test_never_decrease_and_come_at_once_while_there_is_work(self, serve: Serve) -> None:
        async with serve(slots=16_000) as served:
            body = {**BODY, "max_tokens": 3000}
            running = [asyncio.create_task(served.post(CHAT, body)) for _ in range(4)]
            await wait_until(lambda: served.engine.statistics().running == 4)
            last: dict[str, float] = {}
            slowest = 0.0
            for _ in range(30):
                before = time.perf_counter()
                answer = await served.get("/metrics")
                slowest = max(slowest, time.perf_counter() - before)
                now = counts(answer.text)
                assert all(now[key] >= value for key, value in last.items())
                last = now
            for each in running:
                each.cancel()
            await wait_until(lambda: served.service.live == 0)

        assert last
        assert slowest < 0.1


class TestTwoServers:
    async def test_count_apart(self, serve: Serve) -> None:
        async with serve() as one, serve() as two:
            await one.post(CHAT, BODY)

            assert (await scrape(one))["vllm:generation_tokens_total"] == 5
            assert (await scrape(two))["vllm:generation_tokens_total"] == 0
