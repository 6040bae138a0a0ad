"""What travels between the rooms: prompt parts, requests, deltas, completions.

Everything here is frozen, plain and serialisable by msgspec: a request can cross a thread, a
process or a socket unchanged. Nothing here knows a tokenizer, an engine or a program.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal, overload

import msgspec

from structgen.errors import ConstraintError, PromptError
from structgen.sampling import INT32_MAX, Sampling, Want, check_range, check_text, check_whole
from structgen.schemas import SchemaLike, schema_text
from structgen.terms import Term

# ---------------------------------------------------------------- prompt parts


class Text(msgspec.Struct, frozen=True, tag="text", gc=False):
    """Text of a user or a program. It is encoded as ordinary text, whatever it spells."""

    text: str


class Control(msgspec.Struct, frozen=True, tag="control", gc=False):
    """Markup of the chat template: the only part in which control tokens are recognised."""

    text: str


class Tokens(msgspec.Struct, frozen=True, tag="tokens"):
    """Token ids as the model wrote or the caller gave them; never encoded again.

    `tokenizer` is the fingerprint of the tokenizer that they belong to; "" means: trust me.
    """

    ids: tuple[int, ...]
    text: str
    tokenizer: str = ""


class Image(msgspec.Struct, frozen=True, tag="image"):
    """An image; `sha256` names its bytes in cache keys. No model here sees images yet."""

    data: bytes
    sha256: str
    media_type: str = "image/png"


Part = Text | Control | Tokens | Image
Prompt = tuple[Part, ...]


def prompt_text(parts: Sequence[Part]) -> str:
    """The text of a prompt as a person would read it, markup included, images left out."""
    return "".join(part.text for part in parts if not isinstance(part, Image))


# ---------------------------------------------------------------- constraints, as specified


class Regex(msgspec.Struct, frozen=True, tag="regex"):
    """The whole output matches this regular expression."""

    pattern: str


class JsonSchema(msgspec.Struct, frozen=True, tag="json_schema"):
    """The output is one JSON value that is valid under this schema.

    schema       JSON text once it is here; it may be given as a dict, as a type that msgspec or
                 pydantic can describe, or as True for any JSON value
    separators   fix the layout: what stands between items and after keys, such as `(", ", ": ")`
                 as `json.dumps` has it or `(",", ":")`. None leaves it to the model, with at most
                 two white-space characters between tokens.

    Raises `ConstraintError` for a schema that cannot be written as JSON.
    """

    schema: str
    separators: tuple[str, str] | None = None

    if TYPE_CHECKING:

        def __init__(
            self, schema: SchemaLike, separators: tuple[str, str] | None = None
        ) -> None: ...

    def __post_init__(self) -> None:
        if not isinstance(self.schema, str):
            msgspec.structs.force_setattr(self, "schema", schema_text(self.schema))
        if isinstance(self.separators, list):
            msgspec.structs.force_setattr(self, "separators", tuple(self.separators))


class Ebnf(msgspec.Struct, frozen=True, tag="ebnf"):
    """The output is derived by this EBNF grammar, starting at its rule `root`."""

    grammar: str


class Choice(msgspec.Struct, frozen=True, tag="choice"):
    """The output is one of these strings.

    Raises `ConstraintError` for what is no sequence of strings; one string is none.
    """

    options: tuple[str, ...]

    if TYPE_CHECKING:

        def __init__(self, options: Sequence[str]) -> None: ...

    def __post_init__(self) -> None:
        given: object = self.options
        if (
            isinstance(given, str)
            or not isinstance(given, Sequence)
            or any(not isinstance(each, str) for each in given)
        ):
            raise ConstraintError(
                f"choices: expected a sequence of strings, got {given!r:.80}; write "
                'Choice(["yes", "no"])'
            )
        if not isinstance(given, tuple):
            msgspec.structs.force_setattr(self, "options", tuple(given))


class Structure(msgspec.Struct, frozen=True, tag="structure"):
    """The output has the form of this term; see `structgen.terms`."""

    term: Term


Constraint = Regex | JsonSchema | Ebnf | Choice | Structure


# ---------------------------------------------------------------- requests and replies


class Namespace(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """Whose keys and values may be shared: two requests share a prefix only inside one.

    Raises `OptionError` for a field of another type: it would be a key that finds nothing.
    """

    epoch: int = 0
    adapter: str = ""
    tenant: str = ""
    spliced: bool = False

    def __post_init__(self) -> None:
        check_whole("epoch", self.epoch, low=0)
        check_text("adapter", self.adapter)
        check_text("tenant", self.tenant)


class Lineage(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """Where in which program a request was made.

    run      the program run
    scope    id of the innermost open fork scope of the backend, 0 for none
    branch   index path of forks, from the root state
    parent   name or position of the call that led here, for people
    """

    run: str = ""
    scope: int = 0
    branch: tuple[int, ...] = ()
    parent: str = ""

    def __post_init__(self) -> None:
        check_whole("scope", self.scope, low=0)


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One generation, complete in itself.

    priority   higher ones are computed first
    deadline   seconds from submission

    Raises `OptionError` and `PromptError` for values that no backend could serve.
    """

    prompt: Prompt
    sampling: Sampling = Sampling()
    constraint: Constraint | None = None
    want: Want = Want()
    lineage: Lineage = Lineage()
    namespace: Namespace = Namespace()
    priority: int = 0
    deadline: float | None = None
    model: str = ""

    def __post_init__(self) -> None:
        for part in self.prompt:
            if not isinstance(part, Text | Control | Tokens | Image):
                raise PromptError(
                    f"a prompt is made of parts (Text, Control, Tokens, Image), got {part!r:.80}"
                )
            if not isinstance(part, Image) and not isinstance(part.text, str):
                raise PromptError(f"the text of a prompt part is a str, got {part.text!r:.80}")
        check_whole("priority", self.priority, low=-INT32_MAX, high=INT32_MAX)
        check_range("deadline", self.deadline, 0.0, math.inf, open_low=True, optional=True)


class TokenLogprob(msgspec.Struct, frozen=True):
    """A token, its log-probability, and the likeliest alternatives (best first).

    `logprob` is None for prompt token 0 only.
    """

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


class Usage(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Token counts of one request or, summed, of a run.

    prompt_tokens       tokens of the prompt
    cached_tokens       those of them whose keys and values another request had computed
    completion_tokens   tokens of the output: drawn or forced, what a stop cut off included, and the
                        end token
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
            completion_tokens=self.completion_tokens + other.completion_tokens,
        )


FinishReason = Literal["stop", "length", "abort"]


class Finish(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request ended, and what it took.

    matched   the stop string, the text that a stop pattern matched, or the token id that ended it
    ended     the log-probability of that token, where those of the output were wanted; the token is
              not among the output's
    dropped   tokens of the end that were drawn and are not among the output's: those of a stop, or
              the token that ended it
    complete  whether the output is whole: under its constraint if it has one, whatever the reason,
              so that "12" of "123" is a whole number (one that a final check refuses is not whole);
              without one, whether it ended by itself or by a stop
    forced    tokens of the output that its constraint left no choice about, and that were taken
              without being drawn (jump-forward)
    captures  (name, text) of each capture of the constraint's term, in the order of the text; none
              of an output that is not complete
    enforced  what held the output to its constraint: "xgrammar" or "llguidance", which make the
              masks, with ", final check" where the whole text was looked at, too; "" without one
    waited    seconds between its submission and the step that first computed something of it
    """

    reason: FinishReason
    matched: str | int | None = None
    ended: TokenLogprob | None = None
    dropped: tuple[int, ...] = ()
    complete: bool = True
    forced: int = 0
    captures: tuple[tuple[str, str], ...] = ()
    enforced: str = ""
    usage: Usage = Usage()
    waited: float = 0.0


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """What one step added to a request.

    `tokens` and `text` describe the output that is kept: what a stop string cut off appears in
    neither. Tokens may arrive one delta earlier than their text (a character may need several),
    and after the last delta the joined text may be longer than the decoded tokens by a `tail`:
    the part of a token that stands before a stop string that begins inside it.

    `partial`: the text so far and the tokens so far do not end at the same place, because one of
    them waits for the rest of a character or of a stop string. Who stops reading here can keep the
    tokens up to the last delta that is not partial, and the text after it as text.
    """

    request: int
    tokens: tuple[int, ...] = ()
    text: str = ""
    tail: str = ""
    partial: bool = False
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish: Finish | None = None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """All deltas of a request, joined. `prompt` joined with `parts` continues the text exactly."""

    text: str
    tokens: tuple[int, ...]
    tail: str
    finish: Finish
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    tokenizer: str = ""

    @property
    def usage(self) -> Usage:
        """Token counts of the request."""
        return self.finish.usage

    @property
    def parts(self) -> Prompt:
        """The output as prompt parts: exact ids, then the tail (if any) as text."""
        whole = self.text[: len(self.text) - len(self.tail)]
        tokens: Prompt = (Tokens(self.tokens, whole, self.tokenizer),) if self.tokens else ()
        return (*tokens, Text(self.tail)) if self.tail else tokens


def join_deltas(deltas: Sequence[Delta], tokenizer: str = "") -> Completion:
    """Join the deltas of one finished request."""
    finish = deltas[-1].finish if deltas else None
    assert finish is not None, "the request has not finished"
    return Completion(
        text="".join(delta.text for delta in deltas),
        tokens=tuple(token for delta in deltas for token in delta.tokens),
        tail=deltas[-1].tail,
        finish=finish,
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
        prompt_logprobs=tuple(entry for delta in deltas for entry in delta.prompt_logprobs),
        tokenizer=tokenizer,
    )


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities of one continuation of a prompt, token by token."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]

    @property
    def total(self) -> float:
        """Sum of the log-probabilities: log P(continuation | prompt)."""
        return math.fsum(self.logprobs)


class Scores(msgspec.Struct, frozen=True):
    """The scores of some continuations, in the order in which they were given: a sequence.

    usage   of the call; the continuations' own tokens are not prompt tokens and count nowhere
    """

    each: tuple[Score, ...]
    usage: Usage = Usage()

    def __len__(self) -> int:
        return len(self.each)

    def __iter__(self) -> Iterator[Score]:
        return iter(self.each)

    @overload
    def __getitem__(self, index: int) -> Score: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Score, ...]: ...
    def __getitem__(self, index: int | slice) -> Score | tuple[Score, ...]:
        return self.each[index]
