"""A checkpoint on disk, opened: config, tokenizer, template and tensors under one set of names.

Owns   the reading of a model directory and of a single GGUF file, and what wins where several
       files speak of the same thing.
Holds  end tokens are the union of all that any file names, and the template's own end of turn.
Used   by the engine, in a thread: opening reads files, but no tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from structgen.chat import Chat, Turn
from structgen.errors import CheckpointError, ModelNotFoundError, TemplateError
from structgen.models import tokenizer_json
from structgen.models.gguf.header import GgufFile
from structgen.models.gguf.source import GgufSource
from structgen.models.gguf.vocabulary import vocabulary_from
from structgen.models.safetensors_file import SafetensorsSource
from structgen.models.template import Template, TemplateChat
from structgen.models.tensors import BlockWeight, DenseWeight, TensorSource
from structgen.models.tokenizer import Tokenizer
from structgen.request import Control, Text
from structgen.sampling import ModelDefaults

__all__ = ["BlockWeight", "Checkpoint", "DenseWeight", "TensorSource", "open_checkpoint"]

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_TAG = re.compile(r"[<\[◁]/?(?!assistant|model|bot)\w+[>\]▷]")
_DTYPES = ("float32", "float16", "bfloat16")


class Checkpoint(msgspec.Struct, frozen=True):
    """One opened checkpoint.

    name       of the directory or file; `org/name` for one from the Hugging Face hub
    config     content of `config.json`, or GGUF metadata in its shape
    defaults   sampling defaults from the generation config, and all end tokens
    chat       None if there is no chat template
    dtype      "float32", "float16" or "bfloat16": what the weights were saved in
    """

    name: str
    path: Path
    config: dict[str, Any]
    defaults: ModelDefaults
    tokenizer: Tokenizer
    chat: Chat | None
    source: TensorSource
    dtype: str

    @property
    def markers(self) -> dict[str, int]:
        """Control tokens that may stand for their spelling in an output that asks for it.

        The template writes them, and not around turns: `<tool_call>`, `<think>`. None ends an
        output, or begins a turn.
        """
        if not isinstance(self.chat, TemplateChat):
            return {}
        tokenizer = self.tokenizer
        written = "\0".join(self.chat.template.literals)
        kept = _around_turns(tokenizer, self.chat) | set(self.defaults.end_ids)
        return {
            spelling: token
            for spelling, token in tokenizer.whole_controls.items()
            if spelling in written and token not in kept and token != tokenizer.start_id
        }


def open_checkpoint(path: Path, *, chat_template: Path | None = None) -> Checkpoint:
    """Open a directory in Hugging Face layout, or a GGUF file.

    `chat_template` is a Jinja file that replaces the checkpoint's own template.

    Raises `ModelNotFoundError` if there is nothing at `path`, `CheckpointError` for files that
    are missing, damaged or not supported, `TemplateError` for a template that does not compile.
    """
    if path.is_dir():
        return _open_directory(path, chat_template)
    if path.is_file():
        return _open_gguf(path, chat_template)
    raise ModelNotFoundError(f"{path}: no such file or directory")


def _open_gguf(path: Path, chat_template: Path | None) -> Checkpoint:
    file = GgufFile(path)
    source = GgufSource(file)
    vocabulary = vocabulary_from(file)
    given = (vocabulary.chat_template, f"{path} (tokenizer.chat_template)")
    template = _template(chat_template, given, vocabulary.special)
    tokenizer = Tokenizer(
        vocabulary.definition,
        source=str(path),
        control=_written_by(template, vocabulary.definition),
        size=source.config["vocab_size"],
        add_bos=vocabulary.add_bos,
        bos_token=vocabulary.special.get("bos_token"),
    )
    chat = _chat(template, tokenizer)
    return Checkpoint(
        name=path.stem,
        path=path,
        config=source.config,
        defaults=ModelDefaults(end_ids=_end_ids(tokenizer, chat, vocabulary.end_ids)),
        tokenizer=tokenizer,
        chat=chat,
        source=source,
        dtype=source.dtype,
    )


# ---------------------------------------------------------------- a directory


def _open_directory(path: Path, chat_template: Path | None) -> Checkpoint:
    if not (path / "config.json").is_file():
        raise ModelNotFoundError(f"{path}: the directory has no config.json")
    config = _json(path / "config.json")
    generation = _json(path / "generation_config.json", required=False)
    settings = _json(path / "tokenizer_config.json", required=False)
    special = _special(settings, _json(path / "special_tokens_map.json", required=False))
    definition = tokenizer_json.with_special(
        _definition(path), special, settings.get("added_tokens_decoder") or {}
    )
    template = _template(chat_template, _own_template(path, settings), special)
    tokenizer = Tokenizer(
        definition,
        source=str(path / "tokenizer.json"),
        control=_written_by(template, definition),
        size=_count(config.get("vocab_size")),
        add_bos=settings.get("add_bos_token"),
        bos_token=special.get("bos_token"),
    )
    chat = _chat(template, tokenizer)
    ends = [*_ids(config.get("eos_token_id")), *_ids(generation.get("eos_token_id"))]
    if (end := tokenizer.token_id(special.get("eos_token", ""))) is not None:
        ends.append(end)
    return Checkpoint(
        name=_directory_name(path),
        path=path,
        config=config,
        defaults=_defaults(path, generation, _end_ids(tokenizer, chat, ends)),
        tokenizer=tokenizer,
        chat=chat,
        source=SafetensorsSource(path),
        dtype=_dtype(path, config),
    )


def _json(path: Path, *, required: bool = True) -> dict[str, Any]:
    if not required and not path.is_file():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{path}: is damaged: {error}") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None


def _definition(path: Path) -> dict[str, Any]:
    """The content of `tokenizer.json`, made by `transformers` where only older files are there."""
    if (path / "tokenizer.json").is_file():
        return _json(path / "tokenizer.json")
    older = [name for name in ("tokenizer.model", "vocab.json") if (path / name).is_file()]
    if not older:
        raise CheckpointError(f"{path}: there is no tokenizer.json")
    from transformers import AutoTokenizer  # noqa: PLC0415 - seconds to import, rarely needed

    try:
        library = AutoTokenizer.from_pretrained(path, local_files_only=True).backend_tokenizer
        return msgspec.json.decode(library.to_str(), type=dict[str, Any])
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{path}: {older[0]} cannot be converted to a tokenizer.json: {reason}"
        ) from error


def _special(*settings: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and its kind to their spellings; each may be a string or a record."""
    found: dict[str, str] = {}
    for setting in settings:
        for name, value in setting.items():
            spelling = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(spelling, str):
                found.setdefault(name, spelling)
    return found


def _own_template(path: Path, settings: Mapping[str, Any]) -> tuple[str | None, str]:
    """The checkpoint's template, and where it stands."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return _text(file), str(file)
    named = settings.get("chat_template")
    where = f"{path / 'tokenizer_config.json'} (chat_template)"
    if isinstance(named, list):
        templates = {entry.get("name"): entry.get("template") for entry in named}
        named = templates.get("default", next(iter(templates.values()), None))
    return (named if isinstance(named, str) else None), where


def _directory_name(path: Path) -> str:
    # The hub's cache keeps a repository as models--org--name/snapshots/<revision>.
    if path.parent.name == "snapshots":
        return path.parent.parent.name.removeprefix("models--").replace("--", "/")
    return path.resolve().name


def _dtype(path: Path, config: Mapping[str, Any]) -> str:
    named = config.get("dtype") or config.get("torch_dtype") or "float32"
    dtype = str(named).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise CheckpointError(
            f"{path / 'config.json'}: dtype {dtype!r} is not supported; {', '.join(_DTYPES)} are"
        )
    return dtype


def _defaults(path: Path, generation: Mapping[str, Any], ends: tuple[int, ...]) -> ModelDefaults:
    given = {name: generation[name] for name in _SAMPLING if generation.get(name) is not None}
    try:
        return msgspec.convert({**given, "end_ids": ends}, ModelDefaults)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{path / 'generation_config.json'}: {error}") from None


# ---------------------------------------------------------------- template and end tokens


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TemplateError(f"{path}: the chat template cannot be read: {error}") from None


def _template(
    chosen: Path | None, own: tuple[str | None, str], special: Mapping[str, str]
) -> Template | None:
    source, name = own if chosen is None else (_text(chosen), str(chosen))
    return None if source is None else Template(source, name=name, variables=special)


def _written_by(template: Template | None, definition: Mapping[str, Any]) -> frozenset[str]:
    """The added tokens that stand in the template's text: they are markup, too."""
    if template is None:
        return frozenset()
    literals = "\0".join(template.literals)
    added = (token["content"] for token in definition["added_tokens"])
    return frozenset(content for content in added if content in literals)


def _chat(template: Template | None, tokenizer: Tokenizer) -> TemplateChat | None:
    return None if template is None else TemplateChat(template, tokenizer.control_spellings)


def _end_ids(tokenizer: Tokenizer, chat: Chat | None, named: Iterable[int]) -> tuple[int, ...]:
    ids = {token for token in named if 0 <= token < tokenizer.vocab_size}
    return tuple(sorted(ids | set(_ends_of_turn(tokenizer, chat))))


def _ends_of_turn(tokenizer: Tokenizer, chat: Chat | None) -> Iterable[int]:
    """The token that closes an assistant's turn, if the template closes it with a single one."""
    if chat is None:
        return
    turns = [Turn("user", (Text("a"),)), Turn("assistant", (Text("b"),))]
    try:
        closing = chat.closing(turns).lstrip()
    except TemplateError:
        return
    sections = tokenizer.sections(closing)
    controls = [section for section in sections if isinstance(section, int)]
    if len(controls) == 1 and sections[0] == controls[0]:
        yield controls[0]


def _around_turns(tokenizer: Tokenizer, chat: Chat) -> set[int]:
    """The control tokens that stand around what somebody says."""
    user, opened = Turn("user", (Text("a"),)), Turn("assistant", (), open=True)
    found: set[int] = set()
    for turns in ([user], [Turn("system", (Text("b"),)), user], [user, opened]):
        try:
            parts = chat.render(turns).parts
        except TemplateError:
            continue
        markup = "".join(part.text for part in parts if isinstance(part, Control))
        ids = {section for section in tokenizer.sections(markup) if isinstance(section, int)}
        if opened in turns:  # with it, a reasoning may be opened, too
            ids -= {
                token for text, token in tokenizer.whole_controls.items() if _TAG.fullmatch(text)
            }
        found |= ids
    return found


def _ids(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [token for token in values if isinstance(token, int)]


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0
