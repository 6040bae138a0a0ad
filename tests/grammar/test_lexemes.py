"""Which lexemes have to do with each other: found without a look at each pair."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from structgen.errors import ConstraintError
from structgen.grammar.compiler import compile_constraint
from structgen.grammar.form.lexemes import Lexemes, Meeting, _Automaton, _met
from structgen.grammar.form.production import lark_of
from structgen.grammar.form.tree import (
    Chars,
    Form,
    Marker,
    Rule,
    Text,
    Until,
    Value,
    Without,
    either,
    join,
    repeat,
)
from structgen.grammar.matcher import Vocabulary, byte_vocabulary
from structgen.output.calls import HermesForm, JsonForm
from structgen.request import Choice, JsonSchema, Structure
from structgen.terms import Term

Calls = Callable[[Mapping[str, str]], Term]
LONG = "the quick brown fox " * 5_000
NOTHING = Meeting(together=False, beyond=0)
ALL = ((0, 0x10FFFF),)
SMALL = ((ord("a"), ord("c")),)

words = st.text("abc", min_size=1, max_size=4)
endings = st.sampled_from([("ab",), ("ab", "ca"), ("c",)])
leaves: st.SearchStrategy[Form] = st.one_of(
    words.map(Text),
    words.map(Text),
    st.sampled_from([Chars(SMALL), Chars(ALL), Value("{}", 1 << ord("a"), False), Marker("ab", 7)]),
    endings.flatmap(lambda ends: st.sampled_from([Until(ends, each, ALL) for each in ends])),
    endings.map(lambda ends: Without(ends, ALL)),
)
lexemes = st.one_of(
    leaves,
    st.lists(words.map(Text), min_size=2, max_size=3).map(either),
    words.map(lambda word: repeat(Text(word), 1, None)),
)
NAMES = ("", "x")
forms = st.recursive(
    st.one_of(leaves, st.sampled_from(NAMES).map(Rule)),
    lambda inner: st.one_of(
        st.lists(inner, min_size=2, max_size=4).map(join),
        st.lists(inner, min_size=2, max_size=4).map(either),
        inner.map(lambda part: repeat(part, 0, None)),
    ),
    max_leaves=12,
)


def lark(rules: Mapping[str, Form]) -> str:
    """What a grammar comes to, or why it is refused."""
    try:
        return lark_of(rules, "", "x")
    except ConstraintError as error:
        return str(error)


def functions(count: int) -> dict[str, str]:
    """As many tools, each with arguments of its own."""
    return {
        f"f{n}": json.dumps({"type": "object", "properties": {f"p{n}": {"type": "string"}}})
        for n in range(count)
    }


class TestLexemesThatAreNotNear:
    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(st.lists(lexemes, min_size=2, max_size=12, unique=True))
    def test_have_nothing_to_do_with_each_other(self, each: list[Form]) -> None:
        found = Lexemes()
        numbers = [found.number(form) for form in each]
        near = found.near()
        automata = [_Automaton(form) for form in each]

        for one, other in product(numbers, numbers):
            free = all(isinstance(each[n], Until | Without) for n in (one, other))
            if not near[one] >> other & 1 and not free:
                assert _met(automata[one], automata[other]) == NOTHING
            if not near[one] >> other & 1:
                assert found.meeting(one, other) == NOTHING
            assert near[one] >> one & 1

    @settings(max_examples=150, deadline=None, derandomize=True)
    @given(st.fixed_dictionaries(dict.fromkeys(NAMES, forms)))
    def test_change_no_grammar(self, rules: dict[str, Form]) -> None:
        with pytest.MonkeyPatch.context() as patch:
            # As if each had to be looked at beside each other.
            patch.setattr(Lexemes, "near", lambda self: [-1] * len(self._forms))
            every = lark(rules)

        assert lark(rules) == every


class TestManyTools:
    @pytest.mark.parametrize(
        "form",
        [JsonForm().calls_or_text, JsonForm().calls, HermesForm().calls_or_text],
        ids=["auto", "required", "in tags"],
    )
    def test_take_meetings_in_proportion_to_their_number(
        self, form: Calls, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        met: list[tuple[int, int]] = []
        meeting = Lexemes.meeting

        def counted(self: Lexemes, one: int, other: int) -> Meeting:
            met.append((one, other))
            return meeting(self, one, other)

        monkeypatch.setattr(Lexemes, "meeting", counted)
        counts = []
        for many in (16, 64):
            met.clear()
            compile_constraint(Structure(form(functions(many))), byte_vocabulary())
            counts.append(len(met))

        assert counts[1] < 6 * counts[0]

    def test_of_as_many_as_a_chat_may_have_are_served(self) -> None:
        rules: dict[str, Form] = {
            "": either(
                join(
                    [
                        Text(f'{{"name": "f{n}", "arguments": '),
                        Value(f'{{"a": {n}}}', 1 << 0x7B, False),
                        Text("}"),
                    ]
                )
                for n in range(512)
            )
        }

        assert lark(rules).count("%json") == 512


class TestALongTextThatIsCertain:
    @pytest.mark.parametrize("constraint", [Choice((LONG,)), JsonSchema({"const": LONG})])
    def test_holds_up_nobody(self, constraint: Choice | JsonSchema) -> None:
        encode = lambda text: list(text.encode())  # noqa: E731 - one token a byte
        tokens = [bytes([byte]) for byte in range(256)]
        matcher = compile_constraint(constraint, Vocabulary(tokens, (), 256, encode)).matcher()
        found: list[int] = []
        worst = 0.0
        for _ in range(8):
            began = time.thread_time()
            forced = matcher.forced(512)
            for token in forced:
                matcher.accept(token)
            worst = max(worst, time.thread_time() - began)
            found += forced

        assert bytes(found).decode().strip('"') == LONG[: len(found) - found.count(0x22)]
        assert len(found) > 4_000
        assert worst < 0.05
