"""The first, the most frequent, the best of what branches return."""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import pytest

from structgen.errors import OptionError, StructgenError
from structgen.program.combine import Vote, Winner, best_of, race, vote
from structgen.program.state import State
from structgen.testing import ScriptedBackend
from tests.program.bodies import run
from tests.program.turns import Clean, cancel_everywhere, turns

pytestmark = pytest.mark.timeout(20)

Function = Callable[[Any, int], Awaitable[Any]]


def after(*moments: int | Exception | None) -> Function:
    """A branch returns its name after so many turns of the loop, or never, or raises."""

    async def function(state: str, index: int) -> str:
        moment = moments[index]
        if isinstance(moment, Exception):
            await asyncio.sleep(0)
            raise moment
        await (turns(moment) if moment is not None else asyncio.Event().wait())
        return state

    return function


def saying(*answers: Any, order: Sequence[int] | None = None) -> Function:
    """Branches answer in the given order; who was not asked any more waits for ever."""
    places = list(order if order is not None else range(len(answers)))

    async def function(_state: object, index: int) -> Any:
        await turns(3 * places.index(index))
        return answers[index]

    return function


@pytest.fixture
async def reported() -> AsyncIterator[list[Any]]:
    """What asyncio reports as an error that nobody has looked at."""
    found: list[Any] = []
    loop = asyncio.get_running_loop()
    before = loop.get_exception_handler()
    loop.set_exception_handler(lambda _, context: found.append(context))
    yield found
    loop.set_exception_handler(before)


class TestARace:
    async def test_is_won_by_the_first_that_returns(self) -> None:
        assert await race("abc", after(9, 2, 5)) == Winner(1, "b")

    async def test_cancels_the_losers_and_waits_for_them(self) -> None:
        clean, ended = Clean(), []

        async def function(state: str, index: int) -> str:
            try:
                await (asyncio.Event().wait() if index else asyncio.sleep(0))
            finally:
                await turns(2)
                ended.append(state)
            return state

        await race("abc", function)

        assert (sorted(ended), clean.left()) == (["a", "b", "c"], set())

    async def test_forgets_who_fails_as_long_as_one_returns(self) -> None:
        assert await race("abc", after(ValueError("no"), 5, ValueError("no"))) == Winner(1, "b")

    async def test_that_all_lose_raises_all_errors_in_order(self) -> None:
        errors = [ValueError("one"), KeyError("two")]

        with pytest.raises(ExceptionGroup, match="all 2 branches of the race failed") as caught:
            await race("ab", after(*errors))

        assert list(caught.value.exceptions) == errors
        assert [error.__notes__ for error in errors] == [["in branch 0"], ["in branch 1"]]

    async def test_that_is_lost_by_a_cancellation_from_within_says_so(self) -> None:
        async def function(_state: str, _index: int) -> None:
            raise asyncio.CancelledError

        with pytest.raises(ExceptionGroup) as caught:
            await race("a", function)

        assert "branch 0 was cancelled from within" in str(caught.value.exceptions[0])

    async def test_keeps_the_winner_when_a_loser_fails_while_it_is_cancelled(
        self, reported: list[Any]
    ) -> None:
        async def function(state: str, index: int) -> str:
            if index == 0:
                return state
            try:
                await asyncio.Event().wait()
                return state
            finally:
                raise ZeroDivisionError

        assert await race("ab", function) == Winner(0, "a")
        gc.collect()
        assert reported == []

    async def test_keeps_the_winner_when_a_loser_will_not_be_cancelled(self) -> None:
        async def function(state: str, index: int) -> str:
            try:
                await turns(index)
            except asyncio.CancelledError:
                await turns(3)
            return state

        assert await race("ab", function) == Winner(0, "a")

    async def test_starts_nobody_after_an_eager_winner(self) -> None:
        started: list[int] = []

        async def function(state: str, index: int) -> str:
            started.append(index)
            return state

        loop = asyncio.get_running_loop()
        loop.set_task_factory(_eager)
        try:
            winner = await race("abc", function)
        finally:
            loop.set_task_factory(None)

        assert (winner, started) == (Winner(0, "a"), [0])

    async def test_of_nobody_is_refused(self) -> None:
        with pytest.raises(OptionError, match=r"race\(\) needs at least one branch"):
            await race("", after())

    async def test_may_be_cancelled_at_any_moment(self) -> None:
        live = 0

        async def function(state: str, index: int) -> str:
            nonlocal live
            live += 1
            try:
                await turns(4 + index)
                return state
            finally:
                live -= 1

        def check() -> None:
            assert live == 0

        assert await cancel_everywhere(lambda: race("abc", function), check) > 6

    async def test_that_is_cancelled_lets_losers_clean_up(self) -> None:
        cleaning, cleaned = asyncio.Event(), asyncio.Event()

        async def function(state: str, index: int) -> str:
            try:
                await (asyncio.Event().wait() if index else turns(3))
                return state
            finally:
                if index:
                    cleaning.set()
                    await turns(9)
                    cleaned.set()

        task = asyncio.create_task(race("ab", function))
        await cleaning.wait()
        task.cancel()
        await asyncio.wait([task])

        assert task.cancelled()
        assert cleaned.is_set()


def _eager(loop: asyncio.AbstractEventLoop, coroutine: Any, **_: Any) -> asyncio.Future[Any]:
    """Like `asyncio.eager_task_factory` of Python 3.12, for what ends at its first step."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        done = loop.create_future()
        done.set_result(end.value)
        return done
    raise AssertionError("this coroutine did not end at its first step")


class TestAVote:
    async def test_is_won_by_the_majority(self) -> None:
        outcome = await vote(range(4), saying("x", "y", "y", "z"))

        assert outcome == Vote("y", 2, {"y": 2, "x": 1, "z": 1}, (1, 2))

    @pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
    async def test_that_is_a_tie_goes_to_the_lowest_branch(self, order: Sequence[int]) -> None:
        outcome = await vote(range(4), saying("b", "a", "a", "b", order=order))

        assert (outcome.value, outcome.indexes) == ("b", (0, 3))

    async def test_ends_when_nothing_else_can_win(self) -> None:
        clean, asked = Clean(), []

        async def function(_state: int, index: int) -> str:
            if index > 2:
                asked.append(index)
                await asyncio.Event().wait()
            await turns(index)
            return "y"

        outcome = await vote(range(5), function)

        assert (outcome, asked) == (Vote("y", 3, {"y": 3}, (0, 1, 2)), [3, 4])
        assert clean.left() == set()

    async def test_waits_for_a_lower_branch_that_could_make_it_a_tie(self) -> None:
        # Branch 0 may still name "n", and a tie would go to it.
        outcome = await vote(range(3), saying("n", "y", "n", order=[1, 2, 0]))

        assert outcome.value == "n"

    async def test_counts_by_key_and_returns_the_value_of_the_lowest(self) -> None:
        outcome = await vote(range(3), saying("B", "a", "b"), key=str.lower)

        assert outcome == Vote("B", 2, {"b": 2, "a": 1}, (0, 2))

    async def test_of_one_is_its_answer(self) -> None:
        assert await vote(["s"], saying(None)) == Vote(None, 1, {None: 1}, (0,))

    async def test_fails_with_a_branch(self) -> None:
        clean = Clean()

        with pytest.raises(ExceptionGroup) as caught:
            await vote("abc", after(None, ValueError("no"), None))

        assert [(str(e), e.__notes__) for e in caught.value.exceptions] == [("no", ["in branch 1"])]
        assert clean.left() == set()

    async def test_fails_with_a_branch_that_was_cancelled_from_within(self) -> None:
        async def function(_state: int, index: int) -> int:
            if index == 1:
                raise asyncio.CancelledError
            return index

        with pytest.raises(ExceptionGroup, match="branches of the vote failed") as caught:
            await vote(range(3), function)

        assert "branch 1 was cancelled from within" in str(caught.value.exceptions[0])

    async def test_stands_when_a_branch_fails_after_it_was_decided(self) -> None:
        async def function(_state: int, index: int) -> str:
            if index < 2:
                return "y"
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                return "n"  # too late
            raise AssertionError

        assert await vote(range(3), function) == Vote("y", 2, {"y": 2}, (0, 1))

    async def test_of_what_cannot_be_counted_says_what_to_write(self) -> None:
        with pytest.raises(ExceptionGroup) as caught:
            await vote(range(1), saying(["a list"]))

        assert "list cannot be counted: it is not hashable" in str(caught.value.exceptions[0])
        assert "such as key=str" in str(caught.value.exceptions[0])

    async def test_of_nobody_is_refused(self) -> None:
        with pytest.raises(OptionError, match=r"vote\(\) needs at least one branch"):
            await vote([], saying())

    async def test_may_be_cancelled_at_any_moment(self) -> None:
        votes = saying(*"xyyzx", order=[4, 2, 0, 1, 3])

        assert await cancel_everywhere(lambda: vote(range(5), votes), lambda: None) > 10

    @pytest.mark.parametrize("seed", range(40))
    async def test_is_what_counting_all_votes_gives(self, seed: int) -> None:
        choose = random.Random(seed)
        answers = choose.choices("abc", k=choose.randrange(1, 9))
        order = choose.sample(range(len(answers)), len(answers))
        counts = Counter(answers)

        outcome = await vote(answers, saying(*answers, order=order))

        assert outcome.value == max(counts, key=lambda each: (counts[each], -answers.index(each)))
        assert set(outcome.indexes) <= {i for i, a in enumerate(answers) if a == outcome.value}

    @pytest.mark.parametrize("seed", range(40))
    async def test_is_decided_as_early_as_possible(self, seed: int) -> None:
        choose = random.Random(seed)
        answers = choose.choices("ab", k=choose.randrange(2, 6))
        order = choose.sample(range(len(answers)), len(answers))

        outcome = await vote(answers, saying(*answers, order=order))

        assert sum(outcome.counts.values()) == earliest(answers, order)


def earliest(answers: Sequence[str], order: Sequence[int]) -> int:
    """After how many votes every way to go on has the same winner, by trying them all."""

    def winner(votes: Sequence[str]) -> str:
        counts = Counter(votes)
        return max(counts, key=lambda each: (counts[each], -votes.index(each)))

    for seen in range(1, len(answers) + 1):
        missing = order[seen:]
        winners = set()
        for others in itertools.product("abc", repeat=len(missing)):
            votes = list(answers)
            for index, other in zip(missing, others, strict=True):
                votes[index] = other
            winners.add(winner(votes))
        if len(winners) == 1:
            return seen
    raise AssertionError("all votes decide")


class TestTheBestOf:
    async def test_has_the_highest_score(self) -> None:
        best = await best_of("abc", after(3, 2, 1), lambda _, value: "bca".index(value))

        assert best == Winner(0, "a", 2.0)

    async def test_may_be_scored_by_a_coroutine_that_sees_the_state(self) -> None:
        async def score(state: str, value: str) -> float:
            await turns(1)
            return float(state == "b" and value == "b")

        assert await best_of("abc", after(3, 2, 1), score) == Winner(1, "b", 1.0)

    async def test_is_the_lowest_of_equals(self) -> None:
        assert await best_of("abc", after(3, 2, 1), lambda _s, _v: 1) == Winner(0, "a", 1.0)

    async def test_scores_a_branch_while_others_run(self) -> None:
        first_scored = asyncio.Event()

        async def function(state: str, index: int) -> str:
            if index:
                await first_scored.wait()
            return state

        def score(_state: str, _value: str) -> float:
            first_scored.set()
            return 1.0

        assert (await best_of("ab", function, score)).index == 0

    async def test_fails_with_a_branch_and_cancels_the_others(self) -> None:
        clean = Clean()

        with pytest.raises(ExceptionGroup) as caught:
            await best_of("abc", after(None, ValueError("no"), None), lambda _s, _v: 1)

        assert [(str(e), e.__notes__) for e in caught.value.exceptions] == [("no", ["in branch 1"])]
        assert clean.left() == set()

    async def test_fails_with_a_branch_that_was_cancelled_from_within(self) -> None:
        async def function(_state: str, _index: int) -> str:
            raise asyncio.CancelledError

        with pytest.raises(ExceptionGroup) as caught:
            await best_of("a", function, lambda _s, _v: 1)

        assert isinstance(caught.value.exceptions[0], StructgenError)

    @pytest.mark.parametrize(
        ("score", "message"),
        [("7", r"is a number, got str; write float"), (float("nan"), "NaN is neither higher")],
    )
    async def test_refuses_what_has_no_order(self, score: Any, message: str) -> None:
        with pytest.raises(ExceptionGroup) as caught:
            await best_of("a", after(0), lambda _s, _v: score)

        assert caught.group_contains(Exception, match=message)

    async def test_of_nobody_is_refused(self) -> None:
        with pytest.raises(OptionError, match=r"best_of\(\) needs at least one branch"):
            await best_of("", after(), lambda _s, _v: 1)

    async def test_may_be_cancelled_at_any_moment(self) -> None:
        async def score(_state: str, _value: str) -> float:
            await turns(2)
            return 1.0

        work = lambda: best_of("abc", after(3, 2, 1), score)  # noqa: E731 - run again and again

        assert await cancel_everywhere(work, lambda: None) > 4


class TestOnBranches:
    async def test_the_requests_of_those_who_lose_are_aborted(self) -> None:
        backend = ScriptedBackend(
            lambda request: "x" * (4 if request.lineage.branch == (1,) else 90)
        )

        async def body(s: State) -> Any:
            s += "say "
            branches = s.fork(3)
            found = await race(list(branches), lambda branch, _: branch.gen("v"))
            return found.index, [("v" in branch, branch.text()) for branch in branches]

        result = await run(body, backend)

        assert result.value == (1, [(False, "say "), (True, "say xxxx"), (False, "say ")])
        assert (backend.running, backend.finished, backend.aborted) == (0, 1, 2)
