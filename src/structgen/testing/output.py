"""What a scripted reply becomes under the options of a request.

Owns   one output: the tokens kept, the tail, the end.
Used   by the scripted backend.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from structgen.errors import InvalidOutputError
from structgen.grammar.automaton import Search, automaton_of
from structgen.request import Delta, Finish, Request, TokenLogprob, Usage
from structgen.sampling import ModelDefaults
from structgen.testing.tokenizer import END_ID, ScriptedTokenizer
from structgen.testing.verdict import Course


class Output:
    """What a reply becomes under the options of a request: kept tokens, a tail, an end."""

    def __init__(
        self,
        tokenizer: ScriptedTokenizer,
        request: Request,
        reply: str,
        course: Course | None,
        room: int | None,
    ) -> None:
        """`course` is what the reply has to follow, and `room` the tokens that there is room for.

        Raises `AssertionError` for a reply that could not come of this request.
        """
        self._tokenizer, self._request, self._course = tokenizer, request, course
        self._sampling = sampling = ModelDefaults().fill(request.sampling)
        limit = sampling.max_tokens
        assert limit is not None, "defaults are filled in"
        self._limit = limit if room is None else min(limit, room)
        patterns = sampling.stop_regex
        self._search = Search(automaton_of(patterns)) if patterns else None
        self.tokens: list[int] = []
        self.tail = ""
        self.sampled = 0
        self.finish = Finish(reason="length", complete=False)
        self._error: InvalidOutputError | None = None
        if self._limit:
            self._sample(reply)

    def deltas(self, number: int, usage: Usage, chunk: int) -> Iterator[Delta]:
        """The output in deltas of `chunk` tokens; the last carries the end."""
        finish = msgspec.structs.replace(self.finish, usage=usage)
        last = max(0, (len(self.tokens) - 1) // chunk * chunk)
        for start in range(0, last, chunk):
            yield self._delta(number, self.tokens[start : start + chunk])
        delta = self._delta(number, self.tokens[last:])
        text = delta.text + self.tail
        if self._error is not None:
            yield msgspec.structs.replace(delta, text=text, tail=self.tail)
            raise self._error
        yield msgspec.structs.replace(delta, text=text, tail=self.tail, finish=finish)

    def _delta(self, number: int, tokens: Sequence[int]) -> Delta:
        entries = [self._entry(token) for token in tokens]
        return Delta(
            request=number,
            tokens=tuple(tokens),
            text=self._tokenizer.decode(tokens),
            logprobs=tuple(entry for entry in entries if entry is not None),
        )

    def _entry(self, token: int) -> TokenLogprob | None:
        """The log-probability of a token, where those of the output are wanted."""
        want = self._request.want
        if not (want.logprobs or want.top_logprobs):
            return None
        return TokenLogprob(token, 0.0, ((token, 0.0),) if want.top_logprobs else ())

    def _sample(self, reply: str) -> None:
        sampling, course, text = self._sampling, self._course, ""
        for token in self._script(reply):
            self.sampled += 1
            enough = self._finished or self.sampled >= sampling.min_tokens
            if enough and (token == END_ID or self._stops_at(token, text)):
                self.finish = Finish(reason="stop", matched=token, ended=self._entry(token))
                break
            self.tokens.append(token)
            before, text = text, text + self._tokenizer.decode([token])
            if course is not None:
                course.follow(text[len(before) :])
            found = self._first_stop(text, len(before), count=enough)
            if found is not None and self._may_end(found[0]):
                self._cut(*found)
                break
            if self.sampled == self._limit:
                break
        if self.finish.reason == "length" and self._finished:
            self.finish = Finish(reason="stop")
        self._conclude()

    def _stops_at(self, token: int, text: str) -> bool:
        return token in self._sampling.stop_token_ids and self._may_end(len(text))

    def _may_end(self, length: int) -> bool:
        """Whether a stop after so many characters ends the output; in a constraint it is text."""
        return self._course is None or self._course.may_end(length)

    @property
    def _finished(self) -> bool:
        """Whether the constraint lets nothing follow."""
        return self._course is not None and self._course.finished

    def _conclude(self) -> None:
        """Look at the whole text: is it what the constraint asks for?"""
        course, text = self._course, self._tokenizer.decode(self.tokens) + self.tail
        if course is None:
            complete = self.finish.reason != "length"
            self.finish = msgspec.structs.replace(self.finish, complete=complete)
            return
        course.check(text, ended=self.finish.matched == END_ID)
        complete = course.may_end(len(text))
        fault = course.fault(text) if complete else None
        if fault is not None and self.finish.reason == "length":
            complete = False  # it could have gone on, and become what would do
        elif fault is not None:
            message = f"the output does not keep its constraint: {fault}"
            self._error = InvalidOutputError(message, text)
        captures = course.captures(text) if complete and fault is None else ()
        self.finish = msgspec.structs.replace(
            self.finish, complete=complete, captures=captures, enforced=course.path
        )

    def _script(self, reply: str) -> Iterator[int]:
        """The tokens that a model that follows the script samples, without end if it must."""
        tokens = self._tokenizer.encode(reply)
        yield from tokens
        while self._sampling.ignore_eos or self.sampled < self._sampling.min_tokens - 1:
            for token in tokens or self._tokenizer.encode(" "):
                if self._finished:
                    break
                yield token
            if self._finished:
                break
        yield END_ID

    def _first_stop(self, text: str, start: int, *, count: bool) -> tuple[int, str] | None:
        """The first stop that ends behind `start`, if stops count; and where it begins."""
        found = _first_stop(text, start, self._sampling.stop) if count else None
        if self._search is not None:
            read, length = self._search.scan(text[start:], allow=count)
            first = (start + read - length, text[start + read - length : start + read])
            if length and (found is None or _rank(first) < _rank(found)):
                return first
        return found

    def _cut(self, at: int, stop: str) -> None:
        """Keep the tokens that end before the stop at `at`; what is left before it is the tail."""
        self.finish = Finish(reason="stop", matched=stop)
        size = self._tokenizer.size
        text = self._tokenizer.decode(self.tokens)
        while self.tokens and len(self._tokenizer.decode(self.tokens)) > at:
            self.tokens.pop()
        self.tail = text[len(self._tokenizer.decode(self.tokens)) : at]
        assert len(self.tail) < size, "the tail is shorter than a token"


def _first_stop(text: str, start: int, stops: Sequence[str]) -> tuple[int, str] | None:
    """The first stop that ends behind `start`, and where it begins; the longest of several."""
    for end in range(start + 1, len(text) + 1):
        found = [stop for stop in stops if text.endswith(stop, 0, end)]
        if found:
            stop = max(found, key=len)
            return end - len(stop), stop
    return None


def _rank(found: tuple[int, str]) -> tuple[int, int]:
    """The order of stops: what ends first, then what begins first."""
    at, stop = found
    return at + len(stop), at
