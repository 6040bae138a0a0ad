"""The tokenizer of a GGUF file, as the content of a `tokenizer.json`.

Owns   what llama.cpp's names of vocabularies and pre-tokenizers mean.
Holds  a vocabulary or pre-tokenizer that is not known is refused by name: a near miss would
       split words differently from what the model was trained on, and nobody would notice.
Used   by `checkpoint`.

The split patterns are those of the models' own `tokenizer.json` files (llama.cpp rewrites some
for its own regex engine), applied in the order in which llama.cpp applies them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from structgen.errors import CheckpointError
from structgen.models.gguf.header import GgufFile

_Entry = TypeVar("_Entry", str, int, float)
_LOG = logging.getLogger(__name__)

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _WORDS + r"\p{N}{1,3}" + _REST
_QWEN2 = _WORDS + r"\p{N}" + _REST
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_OLD = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")


class _Split(msgspec.Struct, frozen=True):
    """How text is cut before merging.

    patterns        applied one after another, each to the pieces that the one before left
    nfc             text is composed first (Unicode NFC)
    ignore_merges   a piece that is in the vocabulary is taken whole
    add_bos         a token is put in front where the file does not say otherwise
    """

    patterns: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


_SMOLLM_SPLIT = _Split((r"\p{N}", _GPT2))
_LLAMA3_SPLIT = _Split((_LLAMA3,), ignore_merges=True, add_bos=True)
_QWEN2_SPLIT = _Split((_QWEN2,), nfc=True)
_SPLITS = {
    "default": _Split(_OLD),
    "gpt-2": _Split((_GPT2,)),
    "smollm": _SMOLLM_SPLIT,
    "starcoder": _SMOLLM_SPLIT,
    "refact": _SMOLLM_SPLIT,
    "llama-bpe": _LLAMA3_SPLIT,
    "llama3": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
    "smaug-bpe": _Split((_LLAMA3,)),
    "qwen2": _QWEN2_SPLIT,
    "deepseek-r1-qwen": _QWEN2_SPLIT,
    "tekken": _Split((_TEKKEN,), ignore_merges=True, add_bos=True),
}


class GgufVocabulary(msgspec.Struct, frozen=True):
    """What a GGUF file says of its tokenizer.

    definition      content of a `tokenizer.json`
    add_bos         whether the BOS token is put before every text
    special         name of each special token ("bos_token", ...) to its spelling
    end_ids         tokens that end a text, a turn or a message
    chat_template   Jinja source, None if the file has none
    """

    definition: dict[str, Any]
    add_bos: bool
    special: dict[str, str]
    end_ids: tuple[int, ...]
    chat_template: str | None


def vocabulary_from(file: GgufFile) -> GgufVocabulary:
    """Read the tokenizer; raises `CheckpointError` naming what is missing or not supported."""
    keys = _Keys(file.path, file.metadata)
    tokens = keys.listing("tokens", str)
    kinds = keys.listing("token_type", int, [_NORMAL] * len(tokens))
    if len(kinds) != len(tokens):
        raise keys.fail("token_type", f"has {len(kinds)} entries for {len(tokens)} tokens")
    model = keys.value("model")
    match model:
        case "gpt2":
            definition, adds_bos = _byte_level(keys, tokens, file.text("tokenizer.ggml.pre"))
        case "llama":
            definition, adds_bos = _sentence_piece(keys, tokens, kinds), True
        case _:
            raise keys.fail(
                "model", f"(= {model!r}) is not supported; 'gpt2' (byte-level BPE) and 'llama' are"
            )
    definition["added_tokens"] = _added(tokens, kinds)
    return GgufVocabulary(
        definition=definition,
        add_bos=bool(keys.value("add_bos_token", adds_bos)),
        special=_special(keys, tokens),
        end_ids=tuple(dict.fromkeys(_ends(keys, len(tokens)))),
        chat_template=file.text("tokenizer.chat_template"),
    )


class _Keys:
    """The metadata below `tokenizer.ggml.`."""

    def __init__(self, path: Path, metadata: Mapping[str, Any]) -> None:
        self.path, self._metadata = path, metadata

    def fail(self, key: str, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: metadata 'tokenizer.ggml.{key}' {what}")

    def value(self, key: str, default: object = None) -> Any:  # noqa: ANN401 - of any type
        return self._metadata.get(f"tokenizer.ggml.{key}", default)

    def listing(self, key: str, kind: type[_Entry], default: object = None) -> list[_Entry]:
        value = self.value(key, default)
        if value is None:
            raise self.fail(key, "is missing")
        try:
            return msgspec.convert(value, list[kind])  # type: ignore[valid-type]  # at run time
        except msgspec.ValidationError as error:
            raise self.fail(key, f"is not what it should be: {error}") from None


def _special(keys: _Keys, tokens: Sequence[str]) -> dict[str, str]:
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    ids = {name: keys.value(f"{key}_token_id") for key, name in names.items()}
    return {
        f"{name}_token": tokens[token]
        for name, token in ids.items()
        if isinstance(token, int) and 0 <= token < len(tokens)
    }


def _ends(keys: _Keys, count: int) -> Iterable[int]:
    for name in ("eos", "eot", "eom"):
        token = keys.value(f"{name}_token_id")
        if isinstance(token, int) and 0 <= token < count:
            yield token


def _added(tokens: Sequence[str], kinds: Sequence[int]) -> list[dict[str, Any]]:
    return [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != _USER_DEFINED,
        }
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in {_UNKNOWN, _CONTROL, _USER_DEFINED}
    ]


# ---------------------------------------------------------------- byte-level BPE


def _byte_level(keys: _Keys, tokens: Sequence[str], pre: str | None) -> tuple[dict[str, Any], bool]:
    if pre is None:
        _LOG.warning(
            "%s names no pre-tokenizer (tokenizer.ggml.pre); 'default' is used, which may split "
            "text differently from what the model was trained on",
            keys.path,
        )
    split = _SPLITS.get(pre or "default")
    if split is None:
        raise keys.fail("pre", f"(= {pre!r}) is not supported; known are {', '.join(_SPLITS)}")
    cuts = [
        {
            "type": "Split",
            "pattern": {"Regex": pattern},
            "behavior": "Isolated",
            "invert": False,
        }
        for pattern in split.patterns
    ]
    whole = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    model = {
        "type": "BPE",
        "vocab": _indexed(keys, tokens),
        "merges": keys.listing("merges", str),
        "ignore_merges": split.ignore_merges,
    }
    definition = _definition(
        model,
        normalizer={"type": "NFC"} if split.nfc else None,
        pre_tokenizer={
            "type": "Sequence",
            "pretokenizers": [*cuts, {**whole, "use_regex": False}],
        },
        decoder={**whole, "use_regex": True},
    )
    return definition, split.add_bos


def _definition(model: dict[str, Any], **parts: dict[str, Any] | None) -> dict[str, Any]:
    bpe = {
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
    }
    return {"version": "1.0", "post_processor": None, **parts, "model": {**bpe, **model}}


def _indexed(keys: _Keys, tokens: Sequence[str]) -> dict[str, int]:
    indexed = {token: index for index, token in enumerate(tokens)}
    if len(indexed) != len(tokens):
        twice = next(token for index, token in enumerate(tokens) if indexed[token] != index)
        raise keys.fail("tokens", f"has {twice!r} twice")
    return indexed


# ---------------------------------------------------------------- SentencePiece BPE


def _sentence_piece(keys: _Keys, tokens: list[str], kinds: Sequence[int]) -> dict[str, Any]:
    """BPE whose merges are implied: of all pairs that make a token, the best-scored goes first.

    The scores of a SentencePiece BPE vocabulary are its merge order (Kudo and Richardson, 2018).
    """
    scores = keys.listing("scores", float)
    if len(scores) != len(tokens):
        raise keys.fail("scores", f"has {len(scores)} entries for {len(tokens)} tokens")
    ordinary = {
        token: index
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind == _NORMAL
    }
    unknown = next((t for t, kind in zip(tokens, kinds, strict=True) if kind == _UNKNOWN), None)
    mark = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    space = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    normalizers = [mark]
    decoders = [space, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if keys.value("add_space_prefix", default=True):
        normalizers.insert(0, {"type": "Prepend", "prepend": "▁"})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    model = {
        "type": "BPE",
        "vocab": _indexed(keys, tokens),
        "merges": _merges(ordinary, scores),
        "unk_token": unknown,
        "fuse_unk": True,
        "byte_fallback": True,
    }
    return _definition(
        model,
        normalizer={"type": "Sequence", "normalizers": normalizers},
        pre_tokenizer=None,
        decoder={"type": "Sequence", "decoders": decoders},
    )


def _merges(ordinary: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    ranked = sorted(ordinary, key=lambda token: (-scores[ordinary[token]], ordinary[token]))
    return [
        (token[:cut], token[cut:])
        for token in ranked
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in ordinary and token[cut:] in ordinary
    ]
