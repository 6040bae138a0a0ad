"""Opening an engine from the command line."""

from __future__ import annotations

import gc

import pytest

from structgen.cli.engine import without_collections


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
