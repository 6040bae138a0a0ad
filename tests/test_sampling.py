"""Checks of numbers: what is refused, and in which words."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from structgen.errors import OptionError
from structgen.sampling import LEAST_REPETITION, Sampling, Want, check_range

LONG = 10**5000  # more digits than Python writes out


class TestARefusal:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"temperature": -1}, "temperature: must be at least 0, got -1"),
            ({"temperature": -1.0}, "temperature: must be at least 0, got -1"),
            ({"temperature": "warm"}, "temperature: expected a number, got 'warm'"),
            ({"temperature": True}, "temperature: expected a number, got True"),
            ({"temperature": math.nan}, "temperature: expected a number, got nan"),
            ({"temperature": math.inf}, "temperature: must be a finite number that float32 can"),
            ({"temperature": LONG}, "float32 can hold, got a number of more than 300 digits"),
            ({"top_p": 0}, "top_p: must be above 0 and at most 1, got 0"),
            ({"top_p": 1.0000000000000002}, "at most 1, got 1.0000000000000002"),
            ({"top_p": -LONG}, "at most 1, got a number of more than 300 digits"),
            ({"min_p": 1.5}, "min_p: must be between 0 and 1, got 1.5"),
            ({"presence_penalty": -2.5}, "presence_penalty: must be between -2 and 2, got -2.5"),
            ({"logit_bias": ((5, 101),)}, "logit_bias: must be between -100 and 100, got 101"),
            ({"max_tokens": -1}, "max_tokens: must be at least 0, got -1"),
            ({"max_tokens": 0, "min_tokens": 1}, "min_tokens: 1 is more than max_tokens"),
            ({"seed": LONG}, "between 0 and 9223372036854775807, got a number of more than 300"),
            ({"repetition_penalty": 1e-300}, "repetition_penalty: must be at least 0.01, got 1e-3"),
            ({"repetition_penalty": 0}, "repetition_penalty: must be at least 0.01, got 0"),
        ],
        ids=lambda value: f"{value!s:.40}" if isinstance(value, str) else None,
    )
    def test_says_in_words_what_would_do(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(OptionError) as caught:
            Sampling(**options)

        assert message in str(caught.value)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"stop": "END"}, r"stop: expected a sequence of strings, got 'END'; write ("),
            ({"stop": 5}, "stop: expected a sequence of strings, got 5"),
            ({"stop_regex": "[0-9]+"}, "sequence of regular expressions, got '[0-9]+'; write (\""),
            ({"stop_token_ids": 5}, "stop_token_ids: expected a sequence of token ids, got 5"),
            ({"stop_token_ids": {5}}, "stop_token_ids: expected a sequence of token ids, got {5}"),
            ({"logit_bias": {5: 1.0}}, "got {5: 1.0}; write ((50, -1.5),), or tuple(bias.items())"),
            ({"logit_bias": (5, 1.0)}, "logit_bias: expected a sequence of (token id, bias) pairs"),
            ({"logit_bias": ((5,),)}, "logit_bias: expected (token id, bias) pairs, got (5,)"),
        ],
        ids=str,
    )
    def test_says_how_several_values_are_written(
        self, options: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(OptionError) as caught:
            Sampling(**options)

        assert message in str(caught.value)
        assert caught.value.option in options

    def test_is_none_of_lists_which_are_kept_as_tuples(self) -> None:
        lists: Any = {
            "stop": ["a"],
            "stop_regex": ["b+"],
            "stop_token_ids": [5],
            "logit_bias": [[5, 1.0]],
        }

        assert Sampling(**lists) == Sampling(
            stop=("a",), stop_regex=("b+",), stop_token_ids=(5,), logit_bias=((5, 1.0),)
        )

    def test_names_both_ends_of_a_whole_number(self) -> None:
        with pytest.raises(OptionError, match=r"^top_logprobs: must be between 0 and 20, got 21$"):
            Want(top_logprobs=21)

    def test_of_an_open_end_says_above(self) -> None:
        with pytest.raises(OptionError, match=r"^deadline: must be above 0, got 0$"):
            check_range("deadline", 0.0, 0.0, math.inf, open_low=True)


class TestTheLeastRepetitionPenalty:
    def test_leaves_logits_in_which_other_penalties_count(self) -> None:
        """A logit of 100 is larger than models give; float32 must still tell thousandths apart."""
        largest = np.float32(100) / np.float32(LEAST_REPETITION)

        assert np.spacing(largest) < 1e-3

    def test_is_accepted(self) -> None:
        assert Sampling(repetition_penalty=LEAST_REPETITION).repetition_penalty == 0.01
