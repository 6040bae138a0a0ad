"""From what a user calls a model to a path.

Owns   the order in which a name is understood: a path, a known name, a hub id.
Holds  whatever looks like a path, and any name that is not `org/name`, is answered without the
       network. Functions here block: the engine calls them in a thread.
Used   by the engine and the command line (`structgen pull`).
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from structgen.errors import CheckpointError, ModelError, ModelNotFoundError
from structgen.models.pull import KNOWN, Progress, cached, fetch, known_model

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# Weights in other formats (pickles, ONNX, other frameworks) are not fetched: they are not read.
_HUB_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "*.safetensors",
    "*.safetensors.index.json",
)
# An engine that starts should say at once that there is no network; `pull` may wait.
_HASTY_SECONDS, _PATIENT_SECONDS = 1.5, 10.0


def resolve(model: str | Path, *, progress: Progress | None = None) -> Path:
    """Find a model; returns a directory in Hugging Face layout, or a GGUF file.

    model      a path, a known name ("smollm2-135m", "smollm2", "default") or a hub id "org/name"
    progress   called as `progress(stage, done, total)` while a known model is fetched

    Raises `ModelNotFoundError` naming what is missing, or `ModelError` if fetching fails.
    """
    return _resolved(model, progress, _HASTY_SECONDS)


def pull(model: str | Path, progress: Progress | None = None) -> Path:
    """Fetch a model ahead of use, waiting longer for the network; otherwise as `resolve`."""
    return _resolved(model, progress, _PATIENT_SECONDS)


def _resolved(model: str | Path, progress: Progress | None, patience: float) -> Path:
    name = os.fspath(model)
    if not name.strip():
        raise ModelNotFoundError(
            "the model's name is empty; give a path, a hub id (org/name) or 'smollm2-135m'"
        )
    if isinstance(model, Path) or _is_path(name):
        return _local(Path(name).expanduser())
    if known := known_model(name):
        return cached(known) or fetch(known, progress)
    if _HUB_ID.fullmatch(name):
        return _snapshot(name, patience)
    names = ", ".join(known.names[0] for known in KNOWN)
    raise ModelNotFoundError(
        f"{name}: no such path, and no known model ({names}); a hub id is written org/name"
    )


def _is_path(name: str) -> bool:
    return (
        name.startswith((".", "~", "/", "\\"))
        or name.lower().endswith((".gguf", ".safetensors"))
        or name.count("/") > 1
        or os.path.isabs(name)
        or os.path.exists(name)
    )


def _local(path: Path) -> Path:
    if path.is_file():
        if path.suffix.lower() == ".safetensors":
            raise CheckpointError(f"{path}: give the directory that has it and its config.json")
        return path
    if not path.is_dir():
        raise ModelNotFoundError(f"{path}: no such file or directory")
    if (path / "config.json").is_file():
        return path
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if files:
        names = ", ".join(file.name for file in files)
        raise ModelNotFoundError(f"{path}: has several models, give the path of one: {names}")
    raise ModelNotFoundError(f"{path}: the directory has no config.json and no .gguf file")


def _snapshot(name: str, patience: float) -> Path:
    # Imported here: a fifth of a second that local models need not pay.
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - see above
    from huggingface_hub.errors import (  # noqa: PLC0415 - see above
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(name, allow_patterns=list(_HUB_FILES), etag_timeout=patience))
    except LocalEntryNotFoundError:
        raise ModelNotFoundError(
            f"{name}: the hub cannot be reached and the model is not in its cache; give a local "
            f"path, run `structgen pull {name}` while online, or set HF_HOME to a filled cache"
        ) from None
    except RepositoryNotFoundError:
        raise ModelNotFoundError(
            f"{name}: the hub has no such model, or it is private or gated (`hf auth login`)"
        ) from None
    except (HFValidationError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"{name}: cannot be fetched from the hub: {reason}") from error
