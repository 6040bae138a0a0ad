r"""Python types as forms: what to ask a model for, and how to read what it wrote.

Owns   the way from a type to a constraint, and from text back to a value of the type.
Holds  plain forms (int to Enum below) read exactly the texts that their constraint admits; of
       JSON the type itself is the judge, since a schema cannot say everything that a type can.
Used   by `program`, for `gen(type=...)`.

Plain values are written as Python's `str()` writes them, without quotes:

    str                      any text: no constraint, nothing to read
    int                      [-+]?[0-9]{1,20}
    float                    [-+]?([0-9]{1,20}(\.[0-9]{1,20})?|\.[0-9]{1,20})
    bool                     (True|False)
    Literal                  one of its strings, whole numbers, booleans, None, Enum members
    Enum                     one of its members, by value: strings, whole numbers or booleans
    one of these or None     the text `None` as well; `str | None` is JSON, to tell null from "None"

Numbers have a bound of 20 digits, so that a model that likes digits comes to an end. There is no
exponent, as in SGLang's `dtype=float`, whose patterns these are (Zheng et al., 2024) but for the
bounds and its blanks at the end.

Everything else that msgspec can describe is one JSON value under msgspec's schema for the type:
Struct, dataclass, TypedDict, NamedTuple, list, dict, tuple, set, date, datetime, UUID, unions,
`Annotated[int, Meta(ge=0)]`, Any. A type with something of pydantic in it - a model, a bound
`Annotated[int, Field(ge=0)]` - is described and read by pydantic. Objects with named fields are
closed: the schema admits no other keys, since reading would throw their values away.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from enum import Enum
from functools import lru_cache
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Generic,
    Literal,
    NewType,
    TypeVar,
    Union,
    get_args,
    get_origin,
)

import msgspec

from structgen.errors import InvalidOutputError, OptionError
from structgen.request import Choice, Constraint, JsonSchema, Regex
from structgen.schemas import bounds, described

if TYPE_CHECKING:
    from typing_extensions import TypeForm

T = TypeVar("T")

INT = r"[-+]?[0-9]{1,20}"
FLOAT = r"[-+]?([0-9]{1,20}(\.[0-9]{1,20})?|\.[0-9]{1,20})"
BOOL = "(True|False)"

_NUMBERS: tuple[tuple[type, str, Callable[[str], Any]], ...] = (
    (int, INT, int),
    (float, FLOAT, float),
    (bool, BOOL, "True".__eq__),
)
_SUPPORTED = (
    "supported are str, int, float, bool, Literal, Enum, each of these or None, and what msgspec "
    "reads as JSON: Struct, dataclass, TypedDict, NamedTuple, list, dict, tuple, set, date, "
    "datetime, UUID, Decimal, Any, or pydantic: its models"
)


class Form(msgspec.Struct, Generic[T], frozen=True):
    """What to ask for to get a value of one type, and how to read it.

    name         of the type, as one would write it
    constraint   what the whole output must be; None for any text
    convert      makes the value of a text; raises `ValueError` for what is none
    """

    name: str
    constraint: Constraint | None
    convert: Callable[[str], T]

    def read(self, text: str) -> T:
        """Read the value. Raises `InvalidOutputError` where the text is no value of the type.

        Whether that is so because the text was cut off is for the caller to know.
        """
        try:
            return self.convert(text)
        except (ValueError, RecursionError) as error:
            raise InvalidOutputError(
                f"the output is no {self.name}: {error}; it begins {text!r:.80}", text
            ) from None


def form_of(type_: TypeForm[T]) -> Form[T]:
    """The form of a type; the same object each time, where the type can be hashed.

    Raises `OptionError` for a type that cannot be asked for.
    """
    try:
        hash(type_)
    except TypeError:  # an annotation holds a list or a dict
        return _made(type_)
    # Neither side of the cache knows of T: a key is any type, and its form comes back.
    key: Any = type_
    form: Form[T] = _cached(key)
    return form


# ---------------------------------------------------------------- one form for each kind of type


@lru_cache(maxsize=512)
def _cached(type_: object) -> Form[Any]:
    return _made(type_)


def _made(type_: object) -> Form[Any]:
    name, bare = _name(type_), _bare(type_)
    if bare is str:
        return Form(name, None, str)
    alone, or_none = _without_none(bare)
    for number, pattern, convert in _NUMBERS:
        if alone is number:
            return _number(name, pattern, convert, or_none=or_none)
    values = _values(bare)
    return _json(name, type_) if values is None else _choice(name, values)


def _number(name: str, pattern: str, convert: Callable[[str], Any], *, or_none: bool) -> Form[Any]:
    if or_none:
        pattern = f"(None|{pattern})"
    whole = re.compile(pattern)

    def read(text: str) -> object:
        if whole.fullmatch(text) is None:
            raise ValueError(f"expected {pattern}")
        return None if text == "None" else convert(text)

    return Form(name, Regex(pattern), read)


def _choice(name: str, values: Iterable[object]) -> Form[Any]:
    by_text: dict[str, object] = {}
    for value in values:
        text = _written(name, value)
        if text in by_text:
            raise OptionError(
                "type",
                f"{name} has two values that are written {text!r}, "
                f"{by_text[text]!r} and {value!r}; leave one out, or give it another value",
            )
        by_text[text] = value
    if not by_text:
        raise OptionError("type", f"{name} has no values; give it members, or ask for str")
    # Sorted, since types that differ only in the order of their values are equal, and may share
    # this form as they may share a compiled grammar.
    options = tuple(sorted(by_text))

    def read(text: str) -> object:
        if text not in by_text:
            raise ValueError(f"expected one of {', '.join(map(repr, options)):.200}")
        return by_text[text]

    return Form(name, Choice(options), read)


def _json(name: str, type_: object) -> Form[Any]:
    try:
        schema, read = described(type_)
    except TypeError as error:
        raise OptionError("type", f"{name} cannot be asked for: {error}; {_SUPPORTED}") from None
    return Form(name, JsonSchema(schema), read)


# ---------------------------------------------------------------- looking at types


def _bare(type_: object) -> object:
    """The type under what adds nothing to it: an alias, NewType, Annotated without a bound."""
    while True:
        if isinstance(type_, NewType):
            type_ = type_.__supertype__
        elif get_origin(type_) is Annotated:
            inner, *notes = get_args(type_)
            if any(bounds(note) for note in notes):
                return type_
            type_ = inner
        elif type(type_).__name__ == "TypeAliasType":  # the `type` statement; not in Python 3.11
            type_ = type_.__value__  # type: ignore[attr-defined] # by the line above
        else:
            return type_


def _without_none(type_: object) -> tuple[object, bool]:
    """A of `A | None`, and whether None was there."""
    if get_origin(type_) not in {Union, UnionType}:
        return type_, False
    others = [_bare(each) for each in get_args(type_) if each is not NoneType]
    return (others[0], True) if len(others) == 1 else (type_, False)


def _values(type_: object) -> tuple[object, ...] | None:
    """All values of a type that lists them, None for any other type."""
    type_ = _bare(type_)
    if get_origin(type_) is Literal:
        return get_args(type_)
    if type_ is bool:
        return (True, False)
    if type_ is None or type_ is NoneType:
        return (None,)
    if isinstance(type_, type) and issubclass(type_, Enum):
        return tuple(type_)
    if get_origin(type_) in {Union, UnionType}:
        parts = [_values(each) for each in get_args(type_)]
        return None if None in parts else tuple(value for part in parts for value in part or ())
    return None


def _written(name: str, value: object) -> str:
    """How a value of a Literal or Enum is written, or `OptionError`."""
    plain = value.value if isinstance(value, Enum) else value
    if not isinstance(plain, str | int | NoneType) or (plain is None and value is not None):
        raise OptionError(
            "type",
            f"{name}: {value!r} cannot be written as one word; "
            "values of a Literal or Enum are strings, whole numbers or booleans",
        )
    text = str(plain)
    if not text:
        raise OptionError("type", f"{name}: {value!r} has no text to write; write None for nothing")
    return text


def _name(type_: object) -> str:
    if isinstance(type_, type) and get_origin(type_) is None:
        return type_.__qualname__.rpartition("<locals>.")[2]
    return str(type_).replace("typing.", "")
