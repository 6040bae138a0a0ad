"""Structured language-model programs as asyncio coroutines, with the engine in the same process.

    from structgen import Engine, State, program

    @program
    async def greet(s: State, name: str) -> str:
        s.user(f"Greet {name} in one sentence.")
        with s.assistant():
            return await s.gen("greeting", max_tokens=30)

    async with Engine("smollm2-135m") as engine:
        print((await greet.run(engine, "Ada")).value)

Everything that users import is here. `Engine` and `Compiled` are loaded on first use, because they
need torch: programs on another backend, types and errors do without. So are `record` and
`trace_plan`, which most programs never use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from structgen import errors
from structgen.backend import Backend, Capabilities
from structgen.chat import Message
from structgen.errors import StructgenError
from structgen.options import GenOptions
from structgen.output.choices import ChoiceScore
from structgen.output.tools import Called, ToolCall, describe_tools

# Python binds `structgen.program` to the folder when it is imported first, which is here: so the
# decorator, bound after it, stays.
from structgen.program.batch import BatchResults
from structgen.program.blocking import blocking
from structgen.program.branches import Branches
from structgen.program.combine import Vote, Winner
from structgen.program.expression import (
    CallOptions,
    Expression,
    SelectOptions,
    assistant,
    assistant_begin,
    assistant_end,
    gen,
    image,
    select,
    separate_reasoning,
    system,
    system_begin,
    system_end,
    user,
    user_begin,
    user_end,
)
from structgen.program.pieces import Piece
from structgen.program.program import Program, program
from structgen.program.result import Result
from structgen.program.state import State
from structgen.program.variables import Meta
from structgen.program.watch import RunStream
from structgen.request import (
    Choice,
    Completion,
    Control,
    Delta,
    Ebnf,
    Finish,
    Image,
    JsonSchema,
    Lineage,
    Namespace,
    Prompt,
    Regex,
    Request,
    Score,
    Scores,
    Structure,
    Text,
    TokenLogprob,
    Tokens,
    Usage,
)
from structgen.sampling import ModelDefaults, Sampling, Want

if TYPE_CHECKING:
    from structgen.engine.compiled import Compiled
    from structgen.engine.engine import Engine
    from structgen.trace import record, trace_plan

__version__ = "0.1.0"
__all__ = (
    "Backend",
    "BatchResults",
    "Branches",
    "CallOptions",
    "Called",
    "Capabilities",
    "Choice",
    "ChoiceScore",
    "Compiled",
    "Completion",
    "Control",
    "Delta",
    "Ebnf",
    "Engine",
    "Expression",
    "Finish",
    "GenOptions",
    "Image",
    "JsonSchema",
    "Lineage",
    "Message",
    "Meta",
    "ModelDefaults",
    "Namespace",
    "Piece",
    "Program",
    "Prompt",
    "Regex",
    "Request",
    "Result",
    "RunStream",
    "Sampling",
    "Score",
    "Scores",
    "SelectOptions",
    "State",
    "StructgenError",
    "Structure",
    "Text",
    "TokenLogprob",
    "Tokens",
    "ToolCall",
    "Usage",
    "Vote",
    "Want",
    "Winner",
    "__version__",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "blocking",
    "describe_tools",
    "errors",
    "gen",
    "image",
    "program",
    "record",
    "select",
    "separate_reasoning",
    "system",
    "system_begin",
    "system_end",
    "trace_plan",
    "user",
    "user_begin",
    "user_end",
)


def __getattr__(name: str) -> object:
    if name == "Engine":
        from structgen.engine.engine import Engine

        return Engine
    if name == "Compiled":
        from structgen.engine.compiled import Compiled

        return Compiled
    if name in {"record", "trace_plan"}:
        from structgen import trace

        found: object = getattr(trace, name)
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
