"""What can be appended to a State besides text: expressions, which say what is to be done there.

Owns   nothing: an expression is frozen, can be appended many times, and composes with `+`.
Used   by programs (`s += assistant("It is " + gen("x"))`) and by `State`, whose `gen` and
       `select` make the same objects and run them at once.

The names are those of SGLang's frontend language (Zheng et al., 2024).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypedDict, Unpack

import msgspec

from structgen.chat import Role
from structgen.errors import OptionError, UnsupportedError
from structgen.options import GenOptions, constraining, frozen, request_from, unknown_option
from structgen.output.choices import Method, check_method, checked_choices
from structgen.output.reasoning import check_family
from structgen.output.types import Form, form_of
from structgen.sampling import check_flag, check_range, check_whole
from structgen.terms import Term

_WIDE = 64  # parts of a sum before it becomes a part itself
_OF_GEN = ("by", "choices", "n", "pick", "type")  # keywords that are no `CallOptions`
_UNBOUND = "a constraint binds the whole output, and reasoning has no form; drop one of the two"


class Expression(msgspec.Struct, frozen=True):
    """Something that a State can be told to do. `+` puts two, or one and a text, in a row."""

    def __add__(self, other: Expression | str) -> Expression:
        # A sum that grows in a loop stays shallow, and is not copied whole at each step.
        if isinstance(self, Chain) and len(self.parts) < _WIDE:
            return Chain((*self.parts, expression_of(other)))
        return Chain((self, expression_of(other)))

    def __radd__(self, other: str) -> Expression:
        return Chain((expression_of(other), self))

    def __format__(self, _: str) -> str:
        raise TypeError("an expression is no text: write 'It is ' + gen('x'), not an f-string")

    def __bool__(self) -> bool:
        raise TypeError("an expression has no value yet: append it, `await s`, then read s['x']")


class Chain(Expression, frozen=True):
    """One after the other."""

    parts: tuple[Expression, ...]


class Words(Expression, frozen=True):
    """Text, as it is."""

    text: str


class OpenRole(Expression, frozen=True):
    """A turn of the chat begins."""

    role: Role


class CloseRole(Expression, frozen=True):
    """It ends."""

    role: Role


class OpenScope(Expression, frozen=True):
    """A variable begins here: see `State.var_scope`. Two scopes of one name differ by `number`."""

    name: str
    number: int


class CloseScope(Expression, frozen=True):
    """What was said since the scope opened becomes its variable."""

    name: str
    number: int


Pick = int | Callable[[list[Any]], int]


class Gen(Expression, frozen=True, kw_only=True):
    """Generate, append what was generated, set a variable.

    form       how the text is read as a value, None for plain text
    samples    None for one completion; a number for a list of that many
    pick       which of them goes into the text: an index, or a function of the list of values
    reasoning  family of models whose reasoning is split off, None for none
    timeout    seconds that the caller waits at most
    retries    more attempts after an output that is whole and yet wrong
    verb       what the call is named in messages
    """

    name: str | None
    options: Mapping[str, Any]
    form: Form[Any] | None = None
    samples: int | None = None
    pick: Pick = 0
    reasoning: str | None = None
    timeout: float | None = None
    retries: int = 0
    verb: str = "gen"

    def __str__(self) -> str:
        return f"{self.verb}({self.name!r})" if self.name else f"{self.verb}()"


class Select(Expression, frozen=True, kw_only=True):
    """Choose one of several texts by its probability, append it, set a variable."""

    name: str | None
    choices: tuple[str, ...]
    by: Method = "token_length_normalized"
    temperature: float = 0.0
    seed: int | None = None
    heal: bool = True
    timeout: float | None = None

    def __str__(self) -> str:
        return f"select({self.name!r})" if self.name else "select()"


class CallOptions(GenOptions, total=False):
    """Keywords of `gen` and `stream`: those of every generation, and three for programs.

    timeout     seconds until the call ends by `DeadlineError`; `deadline` tells the backend, this
                bounds the wait for whatever reason it lasts
    reasoning   "deepseek-r1", "qwen3", "gpt-oss" or "kimi": what the model thinks aloud goes to
                the variable `{name}_reasoning_content`, the answer to the variable itself
    retries     more attempts, 0 by default, after an output that is whole and yet not what was
                asked for: where only a check of the finished text can tell (`InvalidOutputError`).
                Each has a seed of its own, derived from that of the call; a call at temperature 0,
                which would say the same again, is retried at temperature 0.7. Not for streams
    """

    timeout: float | None
    reasoning: str | None
    retries: int


class SelectOptions(TypedDict, total=False):
    """Keywords of `select`.

    by            how scores become a decision: "token_length_normalized" (the default: mean
                  log-probability of a token), "sum", "greedy_token_selection",
                  "unconditional_likelihood_normalized"
    temperature   0 takes the best; above, the choice is drawn from the exact distribution over the
                  choices at that temperature
    seed          of that draw
    heal          a single space at the end of the text before the choices is scored, and kept, as
                  the beginning of each choice, where tokenizers have it
    timeout       seconds until the call ends by `DeadlineError`
    """

    by: Method
    temperature: float | None
    seed: int | None
    heal: bool
    timeout: float | None


def expression_of(value: Expression | str) -> Expression:
    """`value` as an expression. Raises `TypeError` for anything else, and says what to write."""
    if isinstance(value, str):
        return Words(value)
    if isinstance(value, Expression):
        return value
    raise TypeError(how_to_append(value))


def atoms(value: Expression) -> Iterator[Expression]:
    """What an expression consists of, in order."""
    left = [value]  # no recursion: what was added up in a loop is as deep as it was long
    while left:
        each = left.pop()
        if isinstance(each, Chain):
            left.extend(reversed(each.parts))
        else:
            yield each


# ---------------------------------------------------------------- what users write


def gen(
    name: str | Term | None = None,
    *,
    type: object = str,  # noqa: A002 - the word that users know
    n: int | None = None,
    pick: Pick = 0,
    choices: Sequence[str] | None = None,
    by: Method | None = None,
    **options: Unpack[CallOptions],
) -> Gen | Select:
    """Generate here when the State is awaited; with `choices` it is a `select`.

    In place of the name there may be a term, whose captures are variables. The keywords are those
    of `State.gen`. Raises `OptionError` at once for options that cannot
    be used.
    """
    call = call_of(name, type, n, pick, choices, by, options)
    if isinstance(call, Gen):
        # Checked where it is written, not where it is awaited.
        request_from((), call.options, constraint=call.form and call.form.constraint)
    return call


def select(
    name: str | None = None,
    choices: Sequence[str] | None = None,
    **options: Unpack[SelectOptions],
) -> Select:
    """Choose one of `choices` here when the State is awaited; see `State.select`."""
    if choices is None:
        raise OptionError("choices", "write select('name', choices=['yes', 'no'])")
    given: dict[str, Any] = {key: value for key, value in options.items() if value is not None}
    if unknown := sorted(set(given) - set(SelectOptions.__annotations__)):
        raise unknown_option(unknown[0], SelectOptions.__annotations__, "select")
    check_range("temperature", given.get("temperature"), 0.0, 1e6, optional=True)
    check_range("timeout", given.get("timeout"), 0.0, 1e9, open_low=True, optional=True)
    check_flag("heal", given.get("heal", True))
    check_whole("seed", given.get("seed"), low=0, high=2**63 - 1, optional=True)
    if "by" in given:
        check_method(given["by"])
    if given.get("temperature") and given.get("by", "sum") != "sum":
        raise OptionError(
            "by", "it decides at temperature 0; a draw is made from the exact distribution"
        )
    return Select(name=checked_name(name), choices=checked_choices(choices), **given)


def system(content: Expression | str) -> Expression:
    """A turn of the system."""
    return _turn("system", content)


def user(content: Expression | str) -> Expression:
    """A turn of the user."""
    return _turn("user", content)


def assistant(content: Expression | str) -> Expression:
    """A turn of the assistant."""
    return _turn("assistant", content)


def system_begin() -> Expression:
    """A turn of the system begins; `system_end()` ends it."""
    return OpenRole("system")


def system_end() -> Expression:
    """The turn of the system ends."""
    return CloseRole("system")


def user_begin() -> Expression:
    """A turn of the user begins; `user_end()` ends it."""
    return OpenRole("user")


def user_end() -> Expression:
    """The turn of the user ends."""
    return CloseRole("user")


def assistant_begin() -> Expression:
    """A turn of the assistant begins; `assistant_end()` ends it."""
    return OpenRole("assistant")


def assistant_end() -> Expression:
    """The turn of the assistant ends."""
    return CloseRole("assistant")


def separate_reasoning(content: Expression | str, family: str) -> Expression:
    """The same with what every `gen` in it thinks aloud split off; see `CallOptions.reasoning`."""
    check_family(family)
    return Chain(tuple(_reasoned(each, family) for each in atoms(expression_of(content))))


def image(source: object) -> NoReturn:
    """No model sees images yet. Raises `UnsupportedError`."""
    raise UnsupportedError(
        f"image({source!r:.40}): no supported model sees images yet; describe the image as text"
    )


# ---------------------------------------------------------------- checks


def call_of(  # noqa: PLR0917 - the keywords of `gen`, which has them by name
    name: str | Term | None,
    type_: object,
    n: int | None,
    pick: Pick,
    choices: Sequence[str] | None,
    by: Method | None,
    options: Mapping[str, Any],
) -> Gen | Select:
    """The expression of a `gen`; what a request would refuse anyway is not looked at."""
    if isinstance(name, Term):
        if (other := constraining(options)) is not None:
            raise OptionError(other, "the term is a constraint already; drop one of the two")
        name, options = None, {**options, "constraint": name}
    if choices is not None:
        refused = {"n": n is not None, "type": type_ is not str}
        return _select_from(name, choices, by, {**options, **{k: k for k in refused if refused[k]}})
    if by is not None:
        raise OptionError("by", "it decides between choices; give choices=[...] as well")
    if unknown := sorted(set(options) - set(CallOptions.__annotations__)):
        raise unknown_option(unknown[0], [*CallOptions.__annotations__, *_OF_GEN])
    given = frozen(options)
    reasoning, timeout = given.pop("reasoning", None), given.pop("timeout", None)
    retries = 0 if given.get("retries") is None else given["retries"]
    given.pop("retries", None)
    check_whole("retries", retries, low=0, high=100)
    check_whole("n", n, low=1, optional=True)
    _check_pick(pick, n)
    check_range("timeout", timeout, 0.0, 1e9, open_low=True, optional=True)
    if reasoning is not None:
        check_family(reasoning)
    described: Any = type_  # whether it is a type is for `form_of` to say
    form: Form[Any] | None = None if type_ is str else form_of(described)
    constrained = constraining(given)
    if form is not None and form.constraint is not None and constrained is not None:
        raise OptionError(constrained, "type= has a form of its own; give one of the two")
    if reasoning is not None and (form is not None or constrained is not None):
        raise OptionError("reasoning", _UNBOUND)
    return Gen(
        name=checked_name(name),
        options=given,
        form=form,
        samples=n,
        pick=pick,
        reasoning=reasoning,
        timeout=timeout,
        retries=retries,
    )


def checked_name(name: object) -> str | None:
    """Check the name of a variable."""
    if name is not None and not isinstance(name, str):
        raise TypeError(f"the name of a variable is a str, got {name!r}")
    return name


def variable_name(name: object) -> str:
    """Check the name of a variable that must have one."""
    if not isinstance(name, str):
        raise TypeError(f"the name of a variable is a str, got {name!r}")
    return name


def how_to_append(value: object) -> str:
    """Why `value` cannot be appended to a State, and what to write instead."""
    if inspect.iscoroutine(value):
        value.close()  # it was not awaited on purpose: this error says so better than a warning
        return (
            f"cannot append the coroutine {value.__qualname__}: write `await s.gen(...)` on its "
            "own line, which appends by itself, or append the expression `gen(...)`"
        )
    if type(value).__name__ == "State":
        return "cannot append a State: append its text, s += other.text(), or fork it and join"
    return (
        f"cannot append {type(value).__name__} to a State, only str and expressions such as "
        "gen(...): write s += str(value) or s += f'{value}'"
    )


def _turn(role: Role, content: Expression | str) -> Expression:
    return Chain((OpenRole(role), expression_of(content), CloseRole(role)))


def _reasoned(each: Expression, family: str) -> Expression:
    if not isinstance(each, Gen):
        return each
    if each.form is not None or constraining(each.options) is not None:
        raise OptionError("reasoning", _UNBOUND)
    if each.reasoning not in {None, family}:
        raise OptionError("reasoning", f"{each!s} has {each.reasoning!r} already; give one of them")
    return msgspec.structs.replace(each, reasoning=family)


def _check_pick(pick: object, n: int | None) -> None:
    if callable(pick):
        if n is None:
            raise OptionError("pick", "it picks among n samples; give n= as well")
        return
    check_whole("pick", pick, low=0, high=(n or 1) - 1)


def _select_from(
    name: str | None, choices: Sequence[str], by: Method | None, options: Mapping[str, Any]
) -> Select:
    """A `gen` with choices is a select; what a select cannot heed is refused, not dropped."""
    given = {key: value for key, value in options.items() if value is not None}
    if by is not None:
        given["by"] = by
    if refused := sorted(set(given) - {"by", "temperature", "seed", "timeout"}):
        raise OptionError(
            refused[0], "gen(choices=...) selects by score and cannot heed this option"
        )
    return select(name, choices, **given)
