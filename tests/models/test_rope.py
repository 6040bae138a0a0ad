"""Reading of rope fields: no base is ever assumed in silence, nothing unknown is ignored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from structgen.errors import CheckpointError, OptionError
from structgen.models.rope import Rope, read_rope
from tests.models.families import (
    CASES,
    Tiny,
    config_in,
    loaded,
    oracle,
    relative_error,
    saved,
    tokens,
)
from tests.models.harness import logits_of

THETA = 100000.0
TINY = Tiny("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": THETA}})


def read(**config: Any) -> Rope:
    return read_rope(config, default_theta=10000.0, positions=128)


class TestTheta:
    @pytest.mark.parametrize(
        "spelling",
        [
            {"rope_parameters": {"rope_type": "default", "rope_theta": THETA}},
            {"rope_theta": THETA},
            {"rope_theta": THETA, "rope_scaling": None},
            {"rope_theta": 1.0, "rope_parameters": {"rope_theta": THETA}},
        ],
        ids=["dictionary", "top level", "no scaling", "both: the dictionary wins"],
    )
    def test_is_read_from_either_spelling(self, spelling: dict[str, Any], tmp_path: Path) -> None:
        model = saved(TINY, tmp_path)
        config = config_in(tmp_path)
        del config["rope_parameters"], config["head_dim"]

        decoder = loaded(tmp_path, config | spelling)

        assert decoder.config.rope.theta == THETA
        assert relative_error(logits_of(decoder, tokens()), oracle(model, tokens())) < 2e-5

    def test_that_is_missing_is_assumed_with_a_warning_that_names_it(self) -> None:
        with pytest.warns(UserWarning, match=r"no rope_theta; using 10000\.0"):
            rope = read()

        assert rope.theta == 10000.0


class TestScaling:
    def test_under_the_older_key_type_is_read(self) -> None:
        rope = read(rope_theta=THETA, rope_scaling={"type": "linear", "factor": 2.0})

        assert (rope.kind, rope.factor) == ("linear", 2.0)

    def test_of_yarn_derives_a_missing_factor_from_the_context(self) -> None:
        scaling = {"rope_type": "yarn", "original_max_position_embeddings": 32}

        assert read(rope_theta=THETA, rope_scaling=scaling).factor == 4.0

    @pytest.mark.parametrize(
        ("scaling", "message"),
        [
            ({"rope_type": "longrope", "factor": 2.0}, "rope type 'longrope' is not supported"),
            ({"type": "su"}, "rope type 'su' is not supported"),
            ({"rope_type": "linear"}, "rope type 'linear' needs 'factor'"),
            ({"rope_type": "llama3", "factor": 2.0}, "needs 'low_freq_factor'"),
            ({"rope_type": "default", "mrope_section": [1, 2]}, "'mrope_section'"),
            ({"rope_type": "linear", "factor": 2.0, "beta_fast": 3}, "'beta_fast'"),
            ({"full_attention": {"rope_type": "default"}}, "'full_attention'"),
            ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ],
    )
    def test_that_is_not_understood_is_refused_by_name(
        self, scaling: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(CheckpointError, match=message):
            read(rope_theta=THETA, rope_scaling=scaling)

    def test_of_part_of_a_head_is_refused_at_top_level_too(self) -> None:
        with pytest.raises(CheckpointError, match=r"partial_rotary_factor 0\.25"):
            read(rope_theta=THETA, partial_rotary_factor=0.25)


class TestContext:
    @pytest.mark.parametrize(
        ("case", "default", "longest"),
        [
            ("llama", 128, 128),
            ("linear", 512, 512),
            ("dynamic, extended", 16, 64),
            ("llama3", 128, 128),
            ("yarn", 128, 128),
        ],
    )
    def test_is_what_the_frequencies_are_made_for(
        self, case: str, default: int, longest: int, tmp_path: Path
    ) -> None:
        saved(CASES[case], tmp_path)

        assert loaded(tmp_path).max_context == default
        assert loaded(tmp_path, max_context=longest).max_context == longest
        with pytest.raises(OptionError, match=rf"max_context: {longest + 1} is not between"):
            loaded(tmp_path, max_context=longest + 1)

    def test_of_dynamic_scaling_does_not_depend_on_the_length_of_a_request(
        self, tmp_path: Path
    ) -> None:
        saved(CASES["dynamic, extended"], tmp_path)
        decoder = loaded(tmp_path, max_context=48)

        alone = logits_of(decoder, tokens(10))

        assert relative_error(alone, logits_of(decoder, tokens(48))[:10]) < 2e-5
