"""The command line on an engine that says what it is told to, in this process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import msgspec
import pytest

from structgen.chat import Chat, Turn, turns_from
from structgen.cli import main
from structgen.cli.engine import OpenEngine
from structgen.engine.observe import Statistics
from structgen.errors import ModelNotFoundError
from structgen.options import GenOptions, request_from
from structgen.request import Text
from structgen.testing import Script, ScriptedBackend


class Output(msgspec.Struct, frozen=True):
    """What a command left behind."""

    code: int
    out: str
    err: str


class ScriptedEngine(ScriptedBackend):
    """A scripted backend with as much of an engine around it as the commands use."""

    def __init__(self, script: Script, *, chat: Chat | None) -> None:
        super().__init__(script, chat=chat)
        self.opened: list[tuple[str, dict[str, Any]]] = []

    def open(self, model: str, **options: Any) -> Self:
        """In place of `Engine(model, **options)`; the model "missing" is not there."""
        if model == "missing":
            raise ModelNotFoundError("there is no model 'missing'")
        self.opened.append((model, options))
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass

    def stream(self, prompt: str | Sequence[dict[str, str]], **options: Any) -> Any:
        """As `Engine.stream`."""
        if isinstance(prompt, str):
            return self.generate(request_from((Text(prompt),), options))
        assert self.chat is not None, "messages go to an engine with a chat format only"
        turns = [*turns_from(prompt), Turn("assistant", (), open=True)]
        return self.generate(request_from(self.chat.render(turns).parts, options))

    def statistics(self) -> Statistics:
        """A snapshot in which only the steps are counted, one for each request."""
        zero = dict.fromkeys(Statistics.__struct_fields__, 0)
        return Statistics(**{**zero, "steps": len(self.requests)})


class CommandLine:
    """`structgen ...` as a function, on one scripted engine."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.engine = ScriptedEngine("a reply", chat=None)

    def script(self, script: Script, *, chat: Chat | None = None) -> ScriptedEngine:
        """Replace the engine by one with that script."""
        self.engine = ScriptedEngine(script, chat=chat)
        return self.engine

    def __call__(self, *arguments: str | Path) -> Output:
        code = main([str(argument) for argument in arguments], open_engine=self._open)
        captured = self._capsys.readouterr()
        return Output(code, captured.out, captured.err)

    @property
    def _open(self) -> OpenEngine:
        return cast("OpenEngine", self.engine.open)


def options_of(engine: ScriptedEngine) -> GenOptions:
    """The sampling options of the only request, those that were given."""
    (request,) = engine.requests
    return cast("GenOptions", msgspec.to_builtins(request.sampling))
