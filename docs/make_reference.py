"""Writes `reference.md` from the docstrings of the public names.

    python docs/make_reference.py            # write docs/reference.md
    python docs/make_reference.py --check    # 1 where that would change it, or a docstring lacks

Owns   the choice of what is public, and how a docstring becomes Markdown. Needs nothing but the
       package and the standard library.
Used   by people who changed a docstring, and by `tests/docs/test_reference.py`.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import NamedTuple, get_overloads, is_typeddict

import structgen
from structgen import errors, events, server, terms, testing, trace
from structgen.program import expression
from structgen.trace import spans

TARGET = Path(__file__).with_name("reference.md")
HEAD = """\
# Reference

Every public name, from its docstring. This page is written by `docs/make_reference.py`: change the
docstring and run it. Rules and reasons are in [semantics.md](semantics.md), options with their
defaults in [defaults.md](defaults.md).
"""
WIDTH = 100
# Classes that users call. Objects of the others are made by the language.
CONSTRUCTED = {"Engine", "ScriptedBackend", "ScriptedTokenizer"}
UNSPOKEN = {"__init__", "__new__", "__init_subclass__", "__aexit__", "__exit__", "__get__"}
# `name      what it is`; further lines are indented.
ENTRY = re.compile(r"(?P<names>\S+(?: \S+)*) {2,}(?P<text>\S.*)")
# Paragraphs of a module's docstring for people who read the source.
INTERNAL = re.compile(r"(Owns|Holds|Used) ")
QUALIFIED = re.compile(r"\b(?:structgen|typing)(?:\.\w+)*\.(?=\w)")
KEYWORD = inspect.Parameter.KEYWORD_ONLY


class Section(NamedTuple):
    """A module, and which of its names are shown: all public ones, unless some are named."""

    module: ModuleType
    only: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """The names, in the order in which they are shown."""
        if self.only:
            return list(self.only)
        if (listed := getattr(self.module, "__all__", None)) is not None:
            return [name for name in listed if name != "__version__"]
        return [
            name
            for name, value in vars(self.module).items()
            if not name.startswith("_")
            and getattr(value, "__module__", None) == self.module.__name__
        ]


SECTIONS = (
    Section(structgen),
    Section(expression, ("CallOptions", "SelectOptions")),
    Section(terms),
    Section(errors),
    Section(events),
    Section(server),
    Section(testing),
    Section(trace),
    Section(spans, ("RunSpan", "FrameSpan", "BranchSpan", "CallSpan")),
)


class Source(str):
    """What `repr` shows as it stands: an annotation without quotes, a default by its name."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


# ---------------------------------------------------------------- what is public


def members_of(cls: type) -> Iterator[tuple[str, object]]:
    """The public methods and properties that a class adds, and those of its private bases."""
    seen = set(UNSPOKEN)
    for base in cls.__mro__:
        own = base is cls or base.__name__.startswith("_")
        if not base.__module__.startswith("structgen") or not own:
            continue
        for name, value in vars(base).items():
            function = _function_of(value)
            if name in seen or (function is None and not isinstance(value, property)):
                continue
            seen.add(name)
            # Of operators those that say more than their names.
            spoken = name.startswith("__") and function is not None and bool(function.__doc__)
            if spoken or not name.startswith("_"):
                yield name, value


def undocumented() -> list[str]:
    """Public names, methods and properties without a docstring of their own."""
    found = []
    for section in SECTIONS:
        for name in section.names:
            value = getattr(section.module, name)
            where = f"{section.module.__name__}.{name}"
            if isinstance(value, type | FunctionType | ModuleType) and not value.__doc__:
                found.append(where)
            if isinstance(value, type):
                members = members_of(value)
                found += [f"{where}.{member}" for member, each in members if not _doc(each)]
    return found


def _function_of(value: object) -> FunctionType | None:
    if isinstance(value, classmethod | staticmethod):
        value = value.__func__
    return value if isinstance(value, FunctionType) else None


def _doc(value: object) -> str:
    return inspect.cleandoc((_function_of(value) or value).__doc__ or "")


# ---------------------------------------------------------------- signatures


def signatures(name: str, function: FunctionType, *, method: bool) -> list[str]:
    """How it can be called: as one writes it, each overload by itself."""
    inner = inspect.unwrap(function)
    if inner is not function and inspect.isgeneratorfunction(inner):
        prefix = "with "
    elif inner is not function and inspect.isasyncgenfunction(inner):
        prefix = "async with "
    else:
        prefix = "await " if inspect.iscoroutinefunction(inner) else ""
    return [
        _wrapped(prefix + name + _signature(each, method=method, scope=prefix.endswith("with ")))
        for each in (get_overloads(inner) or [inner])
    ]


def _signature(call: Callable[..., object], *, method: bool, scope: bool = False) -> str:
    found = inspect.signature(call)
    parameters = list(found.parameters.values())
    if method and parameters[0].name in {"self", "cls"}:
        del parameters[0]
    shown = [
        each.replace(annotation=_written(each.annotation), default=_default(each.default, call))
        for each in parameters
    ]
    returned = found.return_annotation
    if scope:  # a generator function, which yields what the block is given
        returned = re.sub(r"^(?:Async)?Iterator\[(.*)\]$", r"\1", str(returned))
    if returned == "None":
        returned = inspect.Signature.empty
    return str(inspect.Signature(shown, return_annotation=_written(returned)))


def _written(annotation: object) -> object:
    return Source(annotation) if isinstance(annotation, str) else annotation


def _default(value: object, call: object) -> object:
    """A default as its source has it, where its `repr` would not say that."""
    if value is ...:
        return Source("...")
    if isinstance(value, type):
        return value if value is inspect.Parameter.empty else Source(value.__name__)
    if isinstance(value, str):
        return Source(json.dumps(value))
    if type(value).__module__ == "builtins":
        return value
    for name, each in getattr(call, "__globals__", {}).items():
        if each is value:
            return Source(name)
    return Source(f"{type(value).__name__}()")


def _wrapped(signature: str) -> str:
    """One parameter a line where they do not fit into one."""
    if len(signature) <= WIDTH:
        return signature
    start = signature.index("(")
    depth, cuts = 0, [start]
    for at in range(start, len(signature)):
        character = signature[at]
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 1:
            cuts.append(at)
        if depth == 0:
            break
    inner = [signature[a + 1 : b].strip() for a, b in zip(cuts, [*cuts[1:], at], strict=True)]
    return "\n".join([signature[: start + 1], *(f"    {each}," for each in inner), signature[at:]])


def fields_of(cls: type) -> list[str]:
    """Fields of a struct or keys of a TypedDict, as one would write them."""
    if is_typeddict(cls):
        annotations = cls.__annotations__.items()
        return [f"{key}: {getattr(each, '__forward_arg__', each)}" for key, each in annotations]
    written: dict[str, object] = {}
    for base in reversed(cls.__mro__):
        written |= vars(base).get("__annotations__", {})
    found = inspect.signature(cls).parameters.values()
    return [
        str(
            each.replace(
                annotation=_written(written.get(each.name, each.annotation)),
                default=_default(each.default, cls),
                kind=KEYWORD,
            )
        )
        for each in found
    ]


# ---------------------------------------------------------------- Markdown


def markdown(doc: str) -> str:
    """A docstring as Markdown: tables of names become lists, what is indented is shown as code."""
    parts: list[str] = []
    code = False
    for paragraph in re.split(r"\n\s*\n", doc):
        indented = paragraph.startswith("    ")
        if indented and code:
            parts[-1] = f"{parts[-1].removesuffix('```')}\n{textwrap.dedent(paragraph)}\n```"
        elif indented:
            parts.append(f"```\n{textwrap.dedent(paragraph)}\n```")
        else:
            parts.append(_paragraph(paragraph))
        code = indented
    return "\n\n".join(parts)


def _paragraph(text: str) -> str:
    items: list[str] = []
    for line in text.splitlines():
        if found := ENTRY.fullmatch(line):
            items.append(f"- `{found['names']}`: {found['text']}")
        elif line.startswith(" ") and items:
            items[-1] += f" {line.strip()}"
        else:
            return text
    return "\n".join(items)


def code(lines: Sequence[str]) -> str:
    """A block that is shown, and neither run by the tests nor formatted by ruff."""
    return "\n".join(["```text", *lines, "```"])


def link(section: Section) -> str:
    """A link to a section of the page."""
    name = section.module.__name__
    return f"[{name}](#{name.replace('.', '')})"


def described(section: Section, name: str) -> Iterator[str]:
    """What the page says of one name."""
    value = getattr(section.module, name)
    yield f"### {name}"
    # What the package takes over from a module that has a section of its own is described there.
    for other in SECTIONS[1:] if section is SECTIONS[0] else ():
        if value is other.module or name in other.names:
            yield f"See {link(other)}."
            return
    if isinstance(value, FunctionType):
        yield code(signatures(name, value, method=False))
        yield markdown(_doc(value))
    elif isinstance(value, type):
        yield from _class(name, value)
    else:
        yield code([f"{name} = {QUALIFIED.sub('', str(value))}"])


def _class(name: str, cls: type) -> Iterator[str]:
    bases = [base.__name__ for base in cls.__bases__ if base.__module__.startswith("structgen")]
    if issubclass(cls, BaseException):
        bases = [base.__name__ for base in cls.__bases__]
    head = f"class {name}({', '.join(bases)})" if bases else f"class {name}"
    if hasattr(cls, "__struct_fields__") or is_typeddict(cls):
        fields = [f"    {field}" for field in fields_of(cls)]
        yield code([f"{head}:", *fields] if fields else [head])
    elif name in CONSTRUCTED:
        yield code([_wrapped(name + _signature(vars(cls)["__init__"], method=True))])
    else:
        yield code([head])
    yield markdown(_doc(cls))
    for member, value in members_of(cls):
        function = _function_of(value)
        if function is None:
            yield f"**`{name}.{member}`**"
        else:
            yield code(signatures(f"{name}.{member}", function, method=True))
        yield markdown(_doc(value))


def reference() -> str:
    """The whole page."""
    parts = [HEAD.rstrip(), " ·\n".join(map(link, SECTIONS))]
    for section in SECTIONS:
        parts.append(f"## {section.module.__name__}")
        said = re.split(r"\n\s*\n", _doc(section.module))
        if not section.only:
            parts.append(markdown("\n\n".join(each for each in said if not INTERNAL.match(each))))
        for name in section.names:
            parts += described(section, name)
    return "\n\n".join(parts) + "\n"


def main() -> int:
    """Write the page, or check it; returns the exit code."""
    parser = argparse.ArgumentParser(description="Write docs/reference.md from the docstrings.")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if it would change")
    check = parser.parse_args().check
    lacking = undocumented()
    for name in lacking:
        sys.stderr.write(f"{name} has no docstring\n")
    text = reference()
    if not check:
        TARGET.write_text(text, encoding="utf-8")
        return int(bool(lacking))
    stale = not TARGET.exists() or TARGET.read_text(encoding="utf-8") != text
    if stale:
        sys.stderr.write("docs/reference.md is out of date: run python docs/make_reference.py\n")
    return int(bool(lacking) or stale)


if __name__ == "__main__":
    sys.exit(main())
