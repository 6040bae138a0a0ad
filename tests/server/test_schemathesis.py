"""Requests of every kind that the OpenAPI document admits, and many that it does not.

`make fuzzer` installs what makes them. The bounded run is a test like any other; the long one is a
soak.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest

from structgen import State, program
from structgen.server import ServerConfig
from tests.engine.tiny import write_tiny_model
from tests.server.served import Served, serving

pytestmark = pytest.mark.anyio
FUZZER = Path(sys.prefix) / "schemathesis" / "bin" / "schemathesis"
GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/programs/{name}")
_COUNTED = re.compile(
    r'structgen:http_requests_total{method="POST",.*route="(?P<route>[^"]*)",'
    r'status="(?P<status>[0-9]+)"} (?P<count>[0-9.e+]+)'
)
CHECKS = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance"),
    *("response_schema_conformance", "response_headers_conformance", "unsupported_method"),
)


class Place(msgspec.Struct):
    name: Annotated[str, msgspec.Meta(min_length=1)]
    inner: Place | None = None


@program
async def visit(
    s: State,
    place: Place,
    words: Annotated[int, msgspec.Meta(ge=1, le=9)] = 3,
    tone: Literal["dry", "kind"] = "dry",
) -> Place:
    """Goes there."""
    s += f"{tone} {place.name}:"
    await s.gen("text", max_tokens=words)
    return place


@program
async def sides(s: State, idea: str = "") -> list[str]:
    """Takes both sides, and chooses one."""
    s += f"Idea: {idea}"
    async with s.fork(2) as branches:
        return list(await branches.map(lambda branch, _: branch.gen("side", max_tokens=4)))


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[Served]:
    """A server whose answers are short, since its model has little room."""
    config = ServerConfig(names=("tiny",), max_choices=8)
    model = write_tiny_model(folder, max_context=128)
    async with serving(model, programs=[visit, sides], config=config) as found:
        yield found


async def fuzzed(
    found: Served, cases: int, folder: Path, mode: Literal["all", "positive", "negative"] = "all"
) -> tuple[int, str]:
    """Exit code and report of a run with so many cases of each operation.

    mode   positive: what the document admits, and its examples; negative: what it does not
    """
    if not FUZZER.exists():
        pytest.skip("schemathesis is not installed: make fuzzer")
    process = await asyncio.create_subprocess_exec(
        *(str(FUZZER), "run", f"{found.url}/openapi.json"),
        *("--checks", ",".join(CHECKS), "--phases", "examples,fuzzing"),
        *("--mode", mode, "--max-examples", str(cases)),
        *("--continue-on-failure", "--request-timeout", "30", "--seed", "7", "--no-shrink"),
        # Slow is the machine, or the making of requests; neither says anything of the server.
        *("--suppress-health-check", "all", "--warnings", "off", "--no-color"),
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode or 0, output.decode()


def generated(report: str) -> int:
    counted = re.search(r"(\d+) generated", report)
    return int(counted[1]) if counted else 0


def left_over(found: Served) -> dict[str, Any]:
    """What of the requests is still in the engine."""
    statistics = found.engine.statistics()
    names = ("running", "waiting", "scopes", "slots_held", "slots_limbo")
    return {name: getattr(statistics, name) for name in names if getattr(statistics, name)}


async def answered(found: Served) -> dict[str, Counter[int]]:
    """How many requests of each route with a body had which status."""
    counts: dict[str, Counter[int]] = {}
    for line in (await found.get("/metrics")).text.splitlines():
        if (counted := _COUNTED.match(line)) is not None:
            statuses = counts.setdefault(counted["route"], Counter())
            statuses[int(counted["status"])] += round(float(counted["count"]))
    return counts


class TestTheServer:
    async def test_answers_whatever_it_is_sent_as_its_document_says(self, tmp_path: Path) -> None:
        async with served(tmp_path) as found:
            code, report = await fuzzed(found, 6, tmp_path)
            counts = await answered(found)

            assert code == 0, report
            assert generated(report) > 60
            assert [route for route in GENERATING if not counts[route][200]] == []
            assert left_over(found) == {}

    @pytest.mark.soak
    @pytest.mark.timeout(5400)
    async def test_answers_five_thousand_requests(self, tmp_path: Path) -> None:
        async with served(tmp_path) as found:
            admitted = await fuzzed(found, 420, tmp_path, "positive")
            fitting = await answered(found)
            runs = [admitted, await fuzzed(found, 210, tmp_path, "negative")]
            counts = await answered(found)

            for _, report in runs:
                sys.stdout.write(f"\n{report[-2000:]}")
            for route, statuses in sorted(counts.items()):
                sys.stdout.write(f"\n{route:24} {dict(sorted(statuses.items()))}")
            assert [code for code, _ in runs] == [0, 0]
            assert sum(generated(report) for _, report in runs) >= 5000
            for route in GENERATING:
                assert fitting[route].total() > 400, route
                assert fitting[route][200] > fitting[route].total() / 4, (route, fitting[route])
            assert left_over(found) == {}
