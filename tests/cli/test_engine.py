"""Opening an engine from the command line."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from structgen.cli.engine import open_engine, without_collections
from structgen.engine.engine import Engine


class TestImportingWithoutCollections:
    def test_ends_with_the_block_however_that_ends(self) -> None:
        inside: list[bool] = []

        def fail() -> None:
            with without_collections():
                inside.append(gc.isenabled())
                raise ImportError

        with pytest.raises(ImportError):
            fail()

        assert inside == [False]
        assert gc.isenabled()

    def test_leaves_a_collector_off_that_was_off(self) -> None:
        gc.disable()
        try:
            with without_collections():
                pass

            assert not gc.isenabled()
        finally:
            gc.enable()


class TestAnEngine:
    def test_is_called_what_it_was_asked_for_and_not_where_it_lies(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        file = tmp_path / "model.gguf"
        monkeypatch.setattr("structgen.cli.fetching.locate", lambda _: file)

        engine = open_engine("smollm2-135m")

        assert isinstance(engine, Engine)
        assert engine.model == "smollm2-135m"
