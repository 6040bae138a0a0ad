"""`structgen serve`: its options, and what it refuses before anything is loaded."""

from __future__ import annotations

import resource
import socket
import ssl
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from structgen.cli import main, source
from structgen.cli.failure import CommandError
from structgen.cli.serve_options import ServeOptions
from structgen.cli.sockets import allow, listening
from structgen.engine.config import config_from
from structgen.server import ServerConfig
from tests.cli.scripted import CommandLine

PROGRAMS = """
from structgen import State, program

@program
async def first(s: State) -> None: ...

@program
async def second(s: State) -> None: ...
"""


class TestOptions:
    def test_become_those_of_the_engine(self) -> None:
        options = ServeOptions(
            max_running_requests=3,
            max_total_tokens=1000,
            chunked_prefill_size=64,
            max_model_len=512,
            max_queued_requests=0,
            max_queued_tokens=99,
            dtype="float32",
            disable_radix_cache=True,
            disable_jump_forward=True,
            deterministic=True,
            grammar_backend="xgrammar",
        )

        config = config_from(options.engine())  # type: ignore[arg-type]  # checked there

        assert (config.max_running, config.slots, config.chunk_size) == (3, 1000, 64)
        assert (config.max_context, config.max_waiting, config.max_waiting_tokens) == (512, 0, 99)
        assert (config.radix, config.jump_forward, config.xgrammar) == (False, False, True)
        assert config.deterministic

    def test_become_those_of_the_server(self) -> None:
        options = ServeOptions(
            served_model_name=["a", "b"],
            api_key=["k"],
            admin_api_key=["r"],
            drain_timeout=2.0,
            stall_timeout=3.0,
            request_timeout=4.0,
            max_body_bytes=5,
            key_concurrency=6,
            key_requests_per_minute=7,
            key_tokens_per_minute=8,
            allowed_origins=["*"],
            reasoning_parser="qwen3",
            tool_call_parser="hermes",
        )

        config = ServerConfig(**options.server())

        assert (config.names, config.api_keys, config.admin_keys) == (("a", "b"), ("k",), ("r",))
        assert (config.drain, config.stall, config.request_timeout) == (2.0, 3.0, 4.0)
        assert (config.max_body, config.key_concurrency) == (5, 6)
        assert (config.key_requests, config.key_tokens) == (7, 8)
        assert (config.reasoning, config.tool_form) == ("qwen3", "hermes")

    def test_that_were_not_given_leave_the_defaults(self) -> None:
        assert ServeOptions().engine() == {}
        assert ServeOptions().server() == {}

    def test_that_have_one_value_here_may_say_it(self) -> None:
        ServeOptions(page_size="1", schedule_policy="lpm", load_format="auto", device="cpu").check()


class TestWhatIsRefused:
    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--port", "70000"], "70000"),
            (["--host", "203.0.113.1"], "203.0.113.1"),
            (["--host", ""], "--host is empty"),
            (["--uds", "/no/such/folder/s.sock"], "/no/such/folder"),
            (["--uds", "x.sock", "--port", "1"], "--uds is in place of"),
            (["--ssl-keyfile", "key.pem"], "--ssl-certfile"),
            (["--ssl-certfile", "/no/such/cert.pem"], "/no/such/cert.pem"),
            (["--page-size", "16"], "--page-size 16: pages of the cache are single tokens"),
            (["--schedule-policy", "fcfs"], "lpm"),
            (["--load-format", "gguf"], "safetensors or GGUF"),
            (["--device", "tpu"], "--device tpu: expected cpu, cuda or cuda:0"),
            (["--grammar-backend", "outlines"], "llguidance or xgrammar"),
            (["--allowed-origins", "page.example"], "https://"),
            (["--max-running-request", "3"], "did you mean --max-running-requests"),
        ],
        ids=lambda each: " ".join(each) if isinstance(each, list) else "-",
    )
    def test_is_named_in_one_line(
        self, structgen: CommandLine, arguments: list[str], said: str
    ) -> None:
        done = structgen("serve", "a-model", *arguments)

        assert done.code == 2
        assert said in done.err
        assert len(done.err.splitlines()) == 1
        assert structgen.engine.opened == [], "nothing was loaded"

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--drain-timeout", "-1"], "--drain-timeout: "),
            (["--reasoning-parser", "none"], "--reasoning-parser: unknown 'none'"),
            (["--tool-call-parser", "llama"], "--tool-call-parser: expected auto"),
            (["--key-concurrency", "0"], "--key-concurrency: "),
        ],
        ids=lambda each: " ".join(each) if isinstance(each, list) else "-",
    )
    def test_is_called_as_the_command_line_calls_it(
        self, structgen: CommandLine, arguments: list[str], said: str
    ) -> None:
        done = structgen("serve", "a-model", "--port", "0", *arguments)

        assert done.code == 2
        assert f"structgen: {said}" in done.err
        assert len(done.err.splitlines()) == 1

    def test_is_an_option_of_the_engine(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "config.json").write_text("{}")
        code = main(["serve", str(tmp_path), "--port", "0", "--max-running-requests", "0"])

        assert code == 2
        assert (
            "structgen: --max-running-requests: expected a whole number" in capfd.readouterr().err
        )

    def test_is_a_port_that_another_has(self, structgen: CommandLine) -> None:
        with closing(socket.create_server(("127.0.0.1", 0))) as taken:
            port = taken.getsockname()[1]
            done = structgen("serve", "a-model", "--port", str(port))

        assert done.code == 2
        assert f"port {port} of 127.0.0.1 is in use" in done.err
        assert structgen.engine.opened == []

    def test_is_a_certificate_that_is_none(self, structgen: CommandLine, tmp_path: Path) -> None:
        certificate = tmp_path / "cert.pem"
        certificate.write_text("nothing of the kind")

        done = structgen("serve", "a-model", "--ssl-certfile", certificate)

        assert done.code == 2
        assert str(certificate) in done.err
        assert not isinstance(done.err, ssl.SSLError)

    def test_is_a_model_that_is_not_there(self, structgen: CommandLine) -> None:
        done = structgen("serve", "missing", "--port", "0")

        assert done.code == 2
        assert "missing" in done.err
        assert done.out.startswith("listening on http://127.0.0.1:")


class TestSockets:
    def test_get_a_port_that_is_free(self) -> None:
        with listening("127.0.0.1", 0, None) as address:
            port = address.sockets[0].getsockname()[1]

            assert address.url == f"http://127.0.0.1:{port}"
            assert address.is_local
            with closing(socket.create_connection(("127.0.0.1", port), timeout=5)):
                pass
        with closing(socket.create_server(("127.0.0.1", port))):
            pass

    def test_of_a_name_are_all_its_addresses_on_one_port(self) -> None:
        with listening("localhost", 0, None) as address:
            ports = {each.getsockname()[1] for each in address.sockets}

            assert len(ports) == 1
            assert address.is_local

    def test_for_everybody_are_not_local(self) -> None:
        with listening("0.0.0.0", 0, None) as address:
            assert not address.is_local

    def test_are_not_shared(self) -> None:
        with (
            listening("127.0.0.1", 0, None) as address,
            pytest.raises(CommandError, match="in use"),
            listening("127.0.0.1", address.sockets[0].getsockname()[1], None),
        ):
            pass

    def test_of_unix_take_the_place_of_one_that_was_left(self, tmp_path: Path) -> None:
        path = tmp_path / "s.sock"
        with closing(socket.socket(socket.AF_UNIX)) as left:
            left.bind(str(path))
        with listening("", 0, path) as address:
            assert address.url == f"unix:{path}"
            with (
                pytest.raises(CommandError, match="another server listens"),
                listening("", 0, path),
            ):
                pass
        assert not path.exists()

    def test_of_unix_take_the_place_of_no_file(self, tmp_path: Path) -> None:
        path = tmp_path / "a-file"
        path.write_text("precious")
        with pytest.raises(CommandError, match="no socket"), listening("", 0, path):
            pass
        assert path.read_text() == "precious"


class TestPrograms:
    def test_of_a_file_are_all_in_it(self, tmp_path: Path) -> None:
        file = tmp_path / "some_programs.py"
        file.write_text(PROGRAMS)

        assert [p.function.__name__ for p in source.programs(str(file))] == ["first", "second"]
        assert [p.function.__name__ for p in source.programs(f"{file}:second")] == ["second"]

    def test_of_a_module_are_those_that_it_defines(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "programs_of_mine.py").write_text(PROGRAMS)
        monkeypatch.chdir(tmp_path)

        found = source.programs("programs_of_mine")

        assert [program.function.__name__ for program in found] == ["first", "second"]

    @pytest.mark.parametrize(
        ("target", "said"),
        [
            ("/no/such/file.py", "does not exist"),
            ("no_such_module_here", "no such module"),
            ("json", "has no program"),
            ("structgen.examples.tips:nothing", "no program 'nothing'"),
        ],
    )
    def test_that_are_not_there_are_named(self, target: str, said: str) -> None:
        with pytest.raises(CommandError, match=said):
            source.programs(target)


class TestHelp:
    def test_names_the_flags(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["serve", "--help"]) == 0

        text = capsys.readouterr().out
        for flag in ("--port", "--uds", "--api-key", "--max-running-requests", "--chat-template"):
            assert flag in text


class TestConnections:
    @pytest.fixture(autouse=True)
    def limits(self) -> Iterator[tuple[int, int]]:
        """How many files this process may open, as it is before and after a test."""
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        yield before
        resource.setrlimit(resource.RLIMIT_NOFILE, before)

    def test_may_be_as_many_as_were_asked_for(self, limits: tuple[int, int]) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (300, limits[1]))
        allow(200)

        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 200

    def test_are_refused_where_the_system_has_not_so_many(self, limits: tuple[int, int]) -> None:
        if limits[1] == resource.RLIM_INFINITY:
            pytest.skip("the system has no limit")
        with pytest.raises(CommandError, match=r"--max-connections .* write at most"):
            allow(limits[1])
