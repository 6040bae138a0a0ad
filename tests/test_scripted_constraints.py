"""The scripted backend reads constraints as the engine does: by its front end and its grammars."""

from __future__ import annotations

import re
from typing import Any

import pytest

from structgen.errors import ConstraintError, InvalidOutputError, OptionError
from structgen.grammar.compiler import KINDS, compile_constraint
from structgen.grammar.matcher import Vocabulary
from structgen.options import in_words
from structgen.request import (
    Choice,
    Completion,
    Constraint,
    Ebnf,
    JsonSchema,
    Regex,
    Request,
    Structure,
)
from structgen.sampling import Sampling
from structgen.terms import Capture, Fixed, Free, Json, Pattern, Repeat, Rules, Sequence, Term
from structgen.testing import END_ID, ScriptedBackend
from tests.conformance import PROMPT, completion_of

UNIQUE = JsonSchema('{"type":"array","uniqueItems":true}')
LIST = Repeat(Sequence((Fixed("- "), Capture("item", Free(("\n",))), Fixed("\n"))))
DIGITS = Rules('root ::= "0" | [1-9] [0-9]*')


def asking(constraint: Constraint, **options: Any) -> Request:
    sampling = Sampling(**{"max_tokens": 100, **options})
    return Request(prompt=PROMPT, constraint=constraint, sampling=sampling)


async def said(reply: str, constraint: Constraint, size: int = 1, **options: Any) -> Completion:
    backend = ScriptedBackend(reply, token_size=size)
    return await completion_of(backend, asking(constraint, **options))


class TestOptionsThatContradictAConstraint:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"ignore_eos": True}, "ignore_eos: with a constraint the end tokens end the output"),
            ({"max_tokens": 0}, "max_tokens: it is 0, and an output that meets a constraint"),
        ],
        ids=["ignore_eos", "max_tokens"],
    )
    async def test_are_refused_as_the_engine_refuses_them(
        self, options: dict[str, Any], message: str
    ) -> None:
        backend = ScriptedBackend("aaa")

        with pytest.raises(OptionError, match=message):
            await completion_of(backend, asking(Regex("a+"), **options))

        assert backend.requests == []


class TestAConstraintThatTheEngineRefuses:
    @pytest.mark.parametrize(
        "constraint",
        [
            Regex("(abc"),
            Regex(""),
            Regex(r"(?=a)ab"),
            Regex(r"(a)\1"),
            Choice(()),
            Choice(("",)),
            JsonSchema("{"),
            JsonSchema('{"type":"nonsense"}'),
            Ebnf("root ::= nowhere"),
            Structure(Fixed("")),
            Structure(Sequence((Free(("\n",)), Fixed("x")))),
            Structure(Sequence((Fixed("x"), Pattern(r"(?!a)b")))),
            Structure(Rules("root ::= nowhere")),
        ],
        ids=lambda each: repr(each)[:60],
    )
    async def test_is_refused_in_the_same_words_before_the_script_is_asked(
        self, constraint: Constraint
    ) -> None:
        asked: list[Request] = []

        def reply(request: Request) -> str:
            asked.append(request)
            return "ab"

        backend = ScriptedBackend(reply)

        with pytest.raises(ConstraintError) as refused:
            await completion_of(backend, asking(constraint))

        assert (asked, backend.requests, backend.running) == ([], [], 0)
        # The tokens of another vocabulary are whole characters, as those of models are.
        tokens = [chr(code).encode() for code in range(0x250)]
        tokens += [bytes([byte]) for byte in range(128, 256)]
        with pytest.raises(ConstraintError, match=f"^{re.escape(str(refused.value))}$"):
            compile_constraint(constraint, Vocabulary(tokens, (), len(tokens)))

    async def test_may_be_none_at_all(self) -> None:
        patterns: Any = ["a"]

        with pytest.raises(ConstraintError, match=r"Regex.* is not made of strings"):
            await said("a", Regex(patterns))

    async def test_may_be_nested_too_deeply(self) -> None:
        term: Term = Fixed("x")
        for _ in range(100_000):
            term = Capture("x", term)

        with pytest.raises(ConstraintError, match="nest less"):
            await said("x", Structure(term))


class TestAReply:
    @pytest.mark.parametrize("size", [1, 3])
    @pytest.mark.parametrize(
        ("constraint", "reply"),
        [
            (Regex("a+"), "aa"),
            (Regex(r"\{.*?\}"), "{a}"),
            (Regex("[ä-ö]+\N{GRINNING FACE}"), "äö\N{GRINNING FACE}"),
            (Choice(("a", "ab")), "ab"),
            (JsonSchema("{}"), '{"a": 1}'),
            (JsonSchema('{"type":"object"}', (",", ":")), '{"a":1}'),
            (
                JsonSchema('{"type":"string","format":"uuid"}'),
                '"a0b1c2d3-0000-4000-8000-000000000000"',
            ),
            (Ebnf('root ::= "a" root | "b"'), "aab"),
            (Structure(Sequence((Fixed("n = "), DIGITS))), "n = 120"),
            (Structure(LIST), "- a\n- b\n"),
        ],
        ids=repr,
    )
    async def test_that_masks_let_through_is_complete(
        self, constraint: Constraint, reply: str, size: int
    ) -> None:
        completion = await said(reply, constraint, size)

        assert (completion.text, completion.finish.complete) == (reply, True)
        assert (completion.finish.reason, completion.finish.matched) == ("stop", END_ID)

    @pytest.mark.parametrize("size", [1, 3])
    @pytest.mark.parametrize(
        ("constraint", "reply", "reason"),
        [
            (Regex("a+"), "ab", "no mask lets 'b' follow 'a'"),
            (Regex("a+"), "", "it ends before it is complete"),
            (Regex("ab+"), "a", "it ends before it is complete"),
            (Regex(r"\{.*?\}"), "{a}}", "no mask lets '}' follow '{a}'"),
            (Regex("(.|\n)*"), "a\ud83d", r"no mask lets '\ud83d' follow 'a'"),
            (Choice(("a", "b")), "c", "no mask lets 'c' follow ''"),
            (JsonSchema("{}"), "{a", "no mask lets 'a' follow '{'"),
            (JsonSchema('{"type":"integer"}'), " 1 ", "no mask lets ' ' follow ''"),
            (
                JsonSchema('{"type":"object"}', (",", ":")),
                '{ "a" :  1}',
                "no mask lets ' ' follow '{'",
            ),
            (JsonSchema('{"type":"string","format":"uuid"}'), '"x"', "lets 'x' follow '\"'"),
            (JsonSchema('{"type":"string","maxLength":1}'), '"ab"', "lets 'b' follow '\"a'"),
            (Ebnf('root ::= "a" root | "b"'), "aa", "it ends before it is complete"),
            (Structure(Sequence((Fixed("n = "), DIGITS))), "n = 01", "lets '1' follow 'n = 0'"),
            (Structure(LIST), "- a\nb", "no mask lets 'b' follow '- a\\n'"),
        ],
        ids=repr,
    )
    async def test_that_masks_do_not_let_through_is_a_mistake_of_the_test(
        self, constraint: Constraint, reply: str, reason: str, size: int
    ) -> None:
        with pytest.raises(AssertionError) as info:
            await said(reply, constraint, size)

        message = str(info.value)
        assert message.startswith(f"reply {reply!r} has not the form of {in_words(constraint)}: ")
        assert message.endswith(reason)

    async def test_that_is_cut_off_is_incomplete(self) -> None:
        completion = await said('{"a": 1}', JsonSchema("{}"), max_tokens=4)

        assert (completion.text, completion.finish.reason) == ('{"a"', "length")
        assert not completion.finish.complete

    async def test_that_is_cut_off_must_have_begun_well(self) -> None:
        with pytest.raises(AssertionError, match=r"reply 'ax' has not the form of regex 'a[+]b'"):
            await said("axb", Regex("a+b"), max_tokens=2)

    async def test_that_is_cut_off_where_it_is_complete_is_complete(self) -> None:
        longer = await said("123", Regex("[0-9]+"), max_tokens=2)
        whole = await said("12", Regex("[0-9]{2}"), max_tokens=2)

        assert (longer.finish.reason, longer.finish.complete) == ("length", True)
        assert (whole.finish.reason, whole.finish.complete) == ("stop", True)

    async def test_that_is_cut_off_and_would_not_do_is_incomplete(self) -> None:
        schema = JsonSchema('{"type": "integer", "multipleOf": 99991}')
        completion = await said("99991", schema, max_tokens=3)

        assert (completion.text, completion.finish.reason) == ("999", "length")
        assert not completion.finish.complete

    async def test_is_judged_as_far_as_a_stop_lets_it_go(self) -> None:
        completion = await said("12 or so", Regex("[0-9]+"), stop=(" ",))

        assert (completion.text, completion.finish.matched) == ("12", " ")
        assert completion.finish.complete

    async def test_is_repeated_only_for_as_long_as_something_may_follow(self) -> None:
        completion = await said("12", Regex("[0-9]{1,3}"), min_tokens=10)

        assert (completion.text, completion.finish.complete) == ("121", True)

    async def test_that_the_final_check_refuses_is_invalid(self) -> None:
        assert (await said("[1,2]", UNIQUE)).finish.complete
        with pytest.raises(InvalidOutputError, match=r"keep its constraint: .*uniqueItems"):
            await said("[1,1]", UNIQUE)
        with pytest.raises(InvalidOutputError, match="uniqueItems"):
            await said("x=[1,1]", Structure(Sequence((Fixed("x="), Json(UNIQUE.schema)))))


class TestTheEnd:
    async def test_says_what_was_captured(self) -> None:
        completion = await said("- a\n- bc\n", Structure(LIST))

        assert completion.finish.captures == (("item", "a"), ("item", "bc"))
        assert (await said("- a\n- bc\n", Structure(LIST), max_tokens=6)).finish.captures == ()

    async def test_says_what_the_engine_would_enforce_it_by(self) -> None:
        assert (await said("a", Regex("a"))).finish.enforced == "llguidance"
        assert (await said("[]", UNIQUE)).finish.enforced == "llguidance, final check"

    def test_is_under_all_kinds_of_constraint(self) -> None:
        assert ScriptedBackend().capabilities.constraints == KINDS
