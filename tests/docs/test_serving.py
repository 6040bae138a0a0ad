"""The page on serving: its tables have every route, field, flag and figure, and no others."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from structgen.cli.serve_options import ServeOptions
from structgen.server.config import ServerConfig
from structgen.server.openai.wire import ChatBody, CompletionBody
from structgen.server.programs import ProgramBody
from structgen.server.routes import ROUTES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
SERVER = ROOT / "src" / "structgen" / "server"


def rows(heading: str) -> list[list[str]]:
    """The rows of the first table under a heading, cell by cell."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    table = re.search(r"(?:^\|.*\n)+", section, re.MULTILINE)
    assert table is not None
    cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in table[0].splitlines()]
    return [[cell.strip() for cell in row] for row in cells[2:]]


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


class TestThePageOnServing:
    def test_has_every_route_and_who_may_call_it(self) -> None:
        listed = {(name, access) for names, access, _ in rows("Routes") for name in quoted(names)}

        words = {"open": "everybody", "user": "who has a key", "admin": "who has an admin's key"}
        served = {
            (f"{route.method} {re.sub(r':[^}]*}', '}', route.path)}", words[route.access])
            for route in ROUTES
        }
        assert listed == served

    def test_has_every_field_of_the_generating_routes(self) -> None:
        listed = [name for names, *_ in rows("Fields") for name in quoted(names)]

        fields = {*ChatBody.__struct_fields__, *CompletionBody.__struct_fields__}
        assert len(listed) == len(set(listed))
        assert set(listed) == fields

    def test_says_which_route_takes_a_field(self) -> None:
        chat, completion = set(ChatBody.__struct_fields__), set(CompletionBody.__struct_fields__)
        for names, routes, _ in rows("Fields"):
            listed, takers = quoted(names), routes.split(", ")
            if len(takers) == 1:
                takers *= len(listed)
            for name, taker in zip(listed, takers, strict=True):
                found = {(True, True): "both", (True, False): "chat", (False, True): "completions"}
                assert found[name in chat, name in completion] == taker, name

    def test_lists_as_meaningless_what_has_any_type(self) -> None:
        ignored = {
            field.name
            for field in msgspec.inspect.type_info(ChatBody).fields  # type: ignore[attr-defined] # a StructType has them
            if isinstance(field.type, msgspec.inspect.AnyType)
        }

        listed = {
            n
            for names, _, said in rows("Fields")
            for n in quoted(names)
            if "without a meaning" in said
        }
        assert listed == ignored

    def test_has_every_field_of_a_program(self) -> None:
        listed = [name for names, _ in rows("Programs") for name in quoted(names)]

        assert set(listed) == set(ProgramBody.__struct_fields__)

    def test_has_every_code_of_an_error(self) -> None:
        listed = {code for _, _, codes in rows("Errors") for code in quoted(codes)}

        source = "".join(path.read_text(encoding="utf-8") for path in SERVER.rglob("*.py"))
        given = set(re.findall(r"code=\"(\w+)\"", source))
        given |= set(re.findall(r"_Meaning\(\d+, \w+, \"(\w+)\"", source))
        assert given - listed == set()
        assert [code for code in listed if f'"{code}"' not in source] == []

    def test_names_figures_that_there_are(self) -> None:
        source = (SERVER / "observe" / "metrics.py").read_text(encoding="utf-8")

        named = re.findall(r"`(?:vllm|sglang|structgen):(\w+)", PAGE)
        assert len(named) > 10
        assert [name for name in named if name.removesuffix("_total") not in source] == []

    def test_names_options_that_there_are(self) -> None:
        flags = {name.replace("_", "-") for name in ServeOptions.__struct_fields__} | {
            "help",
            "json",
        }
        fields = set(ServerConfig.__struct_fields__)

        assert set(re.findall(r" `?--([a-z][a-z-]+)", PAGE)) - flags == set()
        assert set(re.findall(r"ServerConfig[.(](\w+)", PAGE)) - fields == set()
