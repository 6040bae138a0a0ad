"""A model's own chat template: turns to prompt parts, exactly as the template writes them.

Owns   the Jinja environment (the one that `transformers` documents for chat templates) and
       `TemplateChat`, the `Chat` of every model that brings a template.
Holds  the joined text of the parts is the template's own rendering of the real contents; what a
       turn says is `Text` (or its own `Tokens`) and never `Control`; every control token in a
       `Control` part is one that the template writes for harmless contents, too.
Used   by `checkpoint`.

Templates come with checkpoints from anywhere, so they run in Jinja's immutable sandbox.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.parser
import jinja2.sandbox
from jinja2 import nodes

from structgen.chat import Rendering, Turn
from structgen.errors import TemplateError
from structgen.models.provenance import Provenance, Render, Span, marker
from structgen.options import did_you_mean
from structgen.request import Control, Image, Part, Text, Tokens

# What template code can raise besides Jinja's own errors: it calls methods of str, list and dict.
_CODE_ERRORS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
# What every template is given; nobody else sets it.
_GIVEN = frozenset({"messages", "tools", "add_generation_prompt"})


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}`: marks what the model wrote; renders its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it so

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        """The body, in a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _refuse(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    return environment


class Template:
    """A compiled chat template.

    takes_tools whether it looks at the tools that it may be given
    reads       the variables that it looks at and may be given, but for messages and tools
    literals    all text in the template's source that it could write or look for
    constants   those of them that stand in expressions
    """

    def __init__(
        self, source: str, *, name: str, variables: Mapping[str, object] | None = None
    ) -> None:
        """Compile; `variables` (bos_token, ...) are visible to the template besides the messages.

        Raises `TemplateError` naming `name` and the line of a syntax error.
        """
        environment = _environment()
        try:
            tree = environment.parse(source)
            self._compiled = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"{name}, line {error.lineno}: {error.message}") from None
        self.name = name
        self.variables = dict(variables or {})
        self.constants = frozenset(
            node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)
        )
        self.literals = self.constants | {node.data for node in tree.find_all(nodes.TemplateData)}
        free = jinja2.meta.find_undeclared_variables(tree) - environment.globals.keys()
        self.takes_tools = "tools" in free
        self.reads = frozenset(free - _GIVEN - self.variables.keys())

    def with_tools(self, tools: Sequence[Mapping[str, object]]) -> Template:
        """The same template, which sees these tools."""
        other = copy.copy(self)
        other.variables = {**self.variables, "tools": list(tools)}
        return other

    def with_variables(self, variables: Mapping[str, object]) -> Template:
        """The same template with values for variables that it reads.

        Raises `TemplateError` for others.
        """
        for name in variables:
            if name in self.reads:
                continue
            if name in _GIVEN or name in self.variables:
                raise TemplateError(f"{name!r} is no variable to be set: the template is given it")
            known = ", ".join(sorted(self.reads)) or "no variables at all"
            raise TemplateError(
                f"the chat template does not read the variable {name!r}"
                f"{did_you_mean(name, self.reads)}; it reads {known}"
            )
        other = copy.copy(self)
        other.variables = {**self.variables, **variables}
        return other

    def render(
        self, roles: Sequence[str], contents: Sequence[str], *, add_generation_prompt: bool = False
    ) -> str:
        """Render messages; raises `TemplateError` with the template's own words if it refuses."""
        messages = [
            {"role": role, "content": content}
            for role, content in zip(roles, contents, strict=True)
        ]
        try:
            return self._compiled.render(
                {"tools": None, "documents": None, **self.variables},
                messages=messages,
                add_generation_prompt=add_generation_prompt,
            )
        except (jinja2.UndefinedError, *_CODE_ERRORS) as error:
            raise TemplateError(f"the chat template fails: {error}") from None
        except jinja2.TemplateError as error:
            raise TemplateError(str(error)) from None


class TemplateChat:
    """The `Chat` of a template; see `structgen.chat.Chat` for the contract."""

    def __init__(self, template: Template, control: Sequence[str] = ()) -> None:
        """`control`: how the control tokens of the model are spelled."""
        self.template = template
        self._provenance = Provenance(template.constants)
        longest_first = sorted(control, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def render(self, turns: Sequence[Turn]) -> Rendering:
        """Render turns; raises `TemplateError` where the template refuses them.

        `rewritten` is set where the template leaves out text of a turn, or cuts into tokens.
        An open turn is not seen by the template: its content follows the opening as it is.
        """
        if not turns:
            raise TemplateError("a chat needs at least one turn")
        if any(turn.open for turn in turns[:-1]):
            raise TemplateError("only the last turn of a chat can be open")
        seen = turns[:-1] if turns[-1].open else turns
        roles, contents = [turn.role for turn in seen], [turn.text for turn in seen]
        render = self._renderer(turns, contents)
        rendering = render(contents)
        found = self._provenance.search(render, roles, contents, rendering)
        layout = _Layout(seen, rendering, found.spans)
        if not found.proven:
            self._check_control(render, contents, layout.parts)
        parts, starts = layout.parts, layout.starts
        if turns[-1].open:
            starts.append(len(parts))
            parts.extend(turns[-1].content)
        return Rendering(tuple(parts), tuple(starts), layout.rewritten)

    def closing(self, turns: Sequence[Turn]) -> str:
        """What the template writes after the content of the last turn."""
        if not turns:
            return ""
        contents = [turn.text for turn in turns[:-1]]
        mark = marker(contents)
        rendering = self.template.render([turn.role for turn in turns], [*contents, mark])
        before, found, after = rendering.rpartition(mark)
        if not found:
            raise TemplateError(
                f"the chat template leaves out the content of a turn of role {turns[-1].role!r}"
            )
        return after if before or after else ""

    def with_tools(self, tools: Sequence[Mapping[str, object]]) -> TemplateChat:
        """See `Chat.with_tools`."""
        if not self.template.takes_tools:
            return self
        self._check_markup(list(tools), "the tools", "their names, descriptions and defaults")
        return self._of(self.template.with_tools(tools))

    def with_variables(self, variables: Mapping[str, object]) -> TemplateChat:
        """See `Chat.with_variables`."""
        found = self.template.with_variables(variables)
        self._check_markup(dict(variables), "the variables", "their values")
        return self._of(found)

    def _of(self, template: Template) -> TemplateChat:
        other = copy.copy(self)
        other.template = template
        return other

    def _check_markup(self, value: object, what: str, where: str) -> None:
        """Raise `TemplateError` for control tokens in what becomes markup: they would be real."""
        if (found := self._control.search(_json(value))) is not None:
            raise TemplateError(
                f"{what} spell the control token {found[0]!r}; take it out of {where}"
            )

    def _renderer(self, turns: Sequence[Turn], contents: Sequence[str]) -> Render:
        """Contents of the turns that are not open to text, up to where an open turn begins."""
        template, roles = self.template, [turn.role for turn in turns]
        if not turns[-1].open:
            return lambda texts: template.render(roles, texts)
        if roles[-1] == "assistant":
            return lambda texts: template.render(roles[:-1], texts, add_generation_prompt=True)
        # Of a private-use character that is not that of the search, which is nearer to U+E000.
        mark = "\uf8ff"
        if any(mark in text for text in contents):
            raise TemplateError("a message contains U+F8FF, which stands for an open turn")

        def opening(texts: Sequence[str]) -> str:
            before, found, _ = template.render(roles, [*texts, mark]).partition(mark)
            if not found:
                raise TemplateError(
                    f"the chat template leaves out the content of a turn of role {roles[-1]!r}"
                )
            return before

        return opening

    def _check_control(
        self, render: Render, contents: Sequence[str], parts: Sequence[Part]
    ) -> None:
        """Raise `TemplateError` unless the template writes these control tokens of its own accord.

        Needed where not all of the contents was proven to stand where it was found: a control
        token that a content spells could then stand in a `Control` part.
        """
        mark = marker(contents)
        harmless = render([f"{mark}{turn}{mark}" for turn in range(len(contents))])
        expected = iter(self._control.findall(harmless))
        written = (
            spelling
            for part in parts
            if isinstance(part, Control)
            for spelling in self._control.findall(part.text)
        )
        if not all(spelling in expected for spelling in written):
            raise TemplateError(
                "the chat template rewrites a message that spells control tokens, so that its "
                "text cannot be told from the template's; take the control tokens out"
            )


class _Layout:
    """A rendering cut into parts.

    parts       markup and contents in order
    starts      part index at which each turn's content begins
    lost        text of each turn that no part holds
    rewritten   whether any of it is more than white space, or cuts into tokens
    """

    def __init__(self, turns: Sequence[Turn], rendering: str, spans: Sequence[Span]) -> None:
        self.parts: list[Part] = []
        first: dict[int, int] = {}
        at = 0
        for span in spans:
            if span.at > at:
                self.parts.append(Control(rendering[at : span.at]))
            first.setdefault(span.turn, len(self.parts))
            self.parts += sliced(turns[span.turn].content, span.start, span.stop)
            at = span.end
        if at < len(rendering):
            self.parts.append(Control(rendering[at:]))
        self.starts = _starts(len(turns), first)
        kept: list[list[tuple[int, int]]] = [[] for _ in turns]
        for span in spans:
            kept[span.turn].append((span.start, span.stop))
        self.lost = [_lost(turn.text, each) for turn, each in zip(turns, kept, strict=True)]
        self.rewritten = any(text.strip() for text in self.lost) or self._cuts_tokens(turns)

    def _cuts_tokens(self, turns: Sequence[Turn]) -> bool:
        kept = {id(part) for part in self.parts}
        return any(
            isinstance(part, Tokens) and id(part) not in kept
            for turn in turns
            for part in turn.content
        )


def _starts(count: int, first: Mapping[int, int]) -> list[int]:
    """Where each turn begins; one that was left out begins where the one before it does."""
    starts: list[int] = []
    for turn in range(count):
        starts.append(first.get(turn, starts[-1] if starts else 0))
    return starts


def _lost(text: str, spans: Sequence[tuple[int, int]]) -> str:
    """What of a turn's text is in none of its spans, given by where they start and stop."""
    kept: list[str] = []
    at = 0
    for start, stop in sorted(spans):
        kept.append(text[at:start])
        at = max(at, stop)
    return "".join([*kept, text[at:]])


def sliced(content: Sequence[Part], start: int, stop: int) -> list[Part]:
    """The parts between two positions of their joined text; tokens that are cut become text."""
    found: list[Part] = []
    at = 0
    for part in content:
        text = "" if isinstance(part, Image) else part.text
        begin, end = max(at, start), min(at + len(text), stop)
        whole = begin == at and end == at + len(text)
        if whole and start <= at <= stop:
            found.append(part)
        elif begin < end:
            found.append(Text(text[begin - at : end - at]))
        at += len(text)
    return found
