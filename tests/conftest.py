"""Fixtures of all tests: the event loops they run on, and the default model."""

from __future__ import annotations

import compileall
import shutil
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

import structgen
from structgen.engine.constraints import vocabulary_of
from structgen.errors import ModelError
from structgen.models.checkpoint import open_checkpoint
from structgen.models.resolve import resolve
from structgen.models.weights import load_weights

LOOPS = [
    pytest.param(("asyncio", {"use_uvloop": False}), id="asyncio"),
    pytest.param(("asyncio", {"use_uvloop": True}), id="uvloop"),
]


# What has to hold on every loop, whatever is built on it.
ON_ALL_LOOPS = {
    *("test_conformance", "test_conformance_scripted", "test_loop", "test_programs"),
    *("test_responsive", "test_stream", "test_watch", "test_branches"),
}
ON_THEIR_OWN = {"cases", "soak"}  # rooms that say for themselves what they run on


@pytest.fixture
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """The loop that an asynchronous test runs on."""
    backend: tuple[str, dict[str, Any]] = request.param
    return backend


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run asynchronous tests on all loops, or on one of them: which, their name decides."""
    path = Path(metafunc.module.__file__)
    if "anyio_backend" not in metafunc.fixturenames or path.parent.name in ON_THEIR_OWN:
        return
    chosen = crc32(metafunc.function.__qualname__.encode()) % len(LOOPS)
    loops = LOOPS if path.stem in ON_ALL_LOOPS else LOOPS[chosen : chosen + 1]
    metafunc.parametrize("anyio_backend", loops, indirect=True)


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH with the package as pip installs it: with its bytecode.

    What a process of its own is timed with, whether or not Python may leave bytecode here.
    """
    folder = tmp_path_factory.mktemp("installed")
    source = Path(structgen.__file__).parent
    package = folder / source.name
    shutil.copytree(source, package, ignore=shutil.ignore_patterns("__pycache__"))
    assert compileall.compile_dir(package, quiet=1)
    return folder


@pytest.fixture(scope="session")
def default_model() -> Iterator[Path]:
    """The default model's GGUF file, fetched if need be.

    All engines of a test run share what never changes of it: checkpoint, vocabulary, weights. To
    read them anew takes longer than most tests do.
    """
    try:
        path = resolve("default")
    except ModelError as error:
        pytest.skip(f"the default model cannot be had: {error}")

    def opening(source: Path, *, chat_template: Path | None) -> Hashable:
        return "open" if source == path and chat_template is None else None

    def indexing(checkpoint: Any, size: int) -> Hashable:
        return size if checkpoint.path == path else None

    def reading(_: Any, source: Any, *, dtype: Any, device: Any) -> Hashable:
        return (dtype, device) if source is opened(path, chat_template=None).source else None

    opened = _Once(open_checkpoint, opening)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("structgen.engine.loading.open_checkpoint", opened)
        patch.setattr("structgen.engine.loading.vocabulary_of", _Once(vocabulary_of, indexing))
        patch.setattr("structgen.models.registry.load_weights", _Once(load_weights, reading))
        yield path


class _Once:
    """A function that is called once for each key of its arguments, if they have one."""

    def __init__(self, made: Callable[..., Any], key: Callable[..., Hashable]) -> None:
        self._made, self._key = made, key
        self._kept: dict[Hashable, Any] = {}

    def __call__(self, *args: Any, **options: Any) -> Any:
        key = self._key(*args, **options)
        if key is None:
            return self._made(*args, **options)
        if key not in self._kept:
            self._kept[key] = self._made(*args, **options)
        return self._kept[key]
