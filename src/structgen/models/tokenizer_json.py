"""The content of a `tokenizer.json`: what its parts mean, and variants of it.

Owns   the list of models and decoders that are supported; others are refused by name.
Used   by `tokenizer`, which gives what results to the `tokenizers` library.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec

from structgen.errors import CheckpointError

BYTE_LEVEL, SENTENCE_PIECE = "byte level", "SentencePiece"
_PLAIN_TOKEN = {
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
    "special": False,
}
_STEP_LISTS = ("normalizers", "pretokenizers", "decoders")


class AddedToken(msgspec.Struct, frozen=True):
    """One entry of `added_tokens` in a `tokenizer.json`."""

    id: int
    content: str
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False


def vocabulary(model: Mapping[str, Any], source: str) -> dict[str, int]:
    """Piece to id; raises `CheckpointError` naming `source` for an unknown type of model."""
    match model:
        case {"type": "Unigram", "vocab": list(pieces)}:
            return {piece: index for index, (piece, _score) in enumerate(pieces)}
        case {"type": "BPE", "vocab": dict(pieces)}:
            return pieces
        case {"vocab": dict(pieces), "merges": _} if "type" not in model:
            return pieces
        case {"type": str(kind)}:
            raise CheckpointError(
                f"{source}: tokenizers of the type {kind!r} are not supported; BPE and Unigram are"
            )
        case _:
            raise CheckpointError(f"{source}: 'model' has no vocabulary")


def unknown_ids(model: Mapping[str, Any], pieces: Mapping[str, int]) -> frozenset[int]:
    """The unknown token, which ordinary text may become where there are no byte tokens."""
    index = model.get("unk_id") if model.get("type") == "Unigram" else None
    if index is None:
        index = pieces.get(model.get("unk_token") or "")
    return frozenset(() if index is None else (index,))


def _steps(part: object) -> list[Mapping[str, Any]]:
    """A normalizer, pre-tokenizer or decoder as the list of its steps."""
    if not isinstance(part, Mapping):
        return []
    for name in _STEP_LISTS:
        if isinstance(steps := part.get(name), list):
            return [step for inner in steps for step in _steps(inner)]
    return [part]


def family(decoder: object, source: str) -> str:
    """`BYTE_LEVEL` or `SENTENCE_PIECE`; raises `CheckpointError` for another decoder."""
    kinds = {step.get("type") for step in _steps(decoder)}
    if "ByteLevel" in kinds:
        return BYTE_LEVEL
    if kinds & {"Metaspace", "ByteFallback", "Replace"}:
        return SENTENCE_PIECE
    names = ", ".join(sorted(map(str, kinds))) or "none"
    raise CheckpointError(
        f"{source}: the decoder ({names}) is not supported; byte-level and SentencePiece ones are"
    )


def strips_first_space(decoder: object) -> bool:
    """Whether decoding drops a space at the very beginning."""
    return any(
        (step.get("type") == "Strip" and step.get("content") == " " and step.get("start", 0) > 0)
        or (step.get("type") == "Metaspace" and _scheme(step) != "never")
        for step in _steps(decoder)
    )


def _scheme(metaspace: Mapping[str, Any]) -> str:
    if metaspace.get("add_prefix_space") is False:
        return "never"
    return str(metaspace.get("prepend_scheme", "always"))


# ---------------------------------------------------------------- definitions, changed


def with_special(
    definition: Mapping[str, Any], special: Mapping[str, str], decoder: Mapping[str, Any]
) -> dict[str, Any]:
    """The definition with what `tokenizer_config.json` says of added tokens.

    special    spellings that are special tokens, if they are in the vocabulary at all
    decoder    id to record of further added tokens (`added_tokens_decoder`)
    """
    added: dict[str, dict[str, Any]] = {
        token["content"]: token for token in definition.get("added_tokens") or []
    }
    for index, record in sorted(decoder.items(), key=lambda item: int(item[0])):
        added.setdefault(record["content"], {**_PLAIN_TOKEN, **record, "id": int(index)})
    pieces = (definition.get("model") or {}).get("vocab")
    for spelling in special.values():
        if spelling in added:
            added[spelling] = {**added[spelling], "special": True}
        elif isinstance(pieces, dict) and spelling in pieces:
            token = {**_PLAIN_TOKEN, "content": spelling, "id": pieces[spelling]}
            added[spelling] = {**token, "special": True}
    return {**definition, "added_tokens": list(added.values())}


def with_control(definition: Mapping[str, Any], control: Collection[int]) -> dict[str, Any]:
    """The definition with exactly the control tokens flagged special, and no length limits."""
    added = [
        {**token, "special": token["id"] in control}
        for token in definition.get("added_tokens") or []
    ]
    return {**definition, "added_tokens": added, "truncation": None, "padding": None}


def without_prefix(definition: Mapping[str, Any]) -> tuple[dict[str, Any] | None, bool]:
    """The definition without a space before the text, None if it has none as it is.

    The flag tells whether that space comes before every stretch of text or only the first.
    """
    throughout = False

    def change(step: Mapping[str, Any]) -> Mapping[str, Any] | None:
        nonlocal throughout
        match step.get("type"):
            case "Prepend":
                throughout = True
                return None
            case "Metaspace" if (scheme := _scheme(step)) != "never":
                throughout = throughout or scheme == "always"
                bare = {key: step[key] for key in step if key != "add_prefix_space"}
                return {**bare, "prepend_scheme": "never"}
            case "ByteLevel" if step.get("add_prefix_space"):
                throughout = True
                return {**step, "add_prefix_space": False}
            case _:
                return step

    parts = {name: definition.get(name) for name in ("normalizer", "pre_tokenizer")}
    changed = {name: _changed(part, change) for name, part in parts.items()}
    return ({**definition, **changed} if changed != parts else None), throughout


def _changed(
    part: object, change: Callable[[Mapping[str, Any]], Mapping[str, Any] | None]
) -> Mapping[str, Any] | None:
    """A normalizer or pre-tokenizer with each step changed, or left out for None."""
    if not isinstance(part, Mapping):
        return None
    for name in _STEP_LISTS:
        if isinstance(steps := part.get(name), list):
            kept = (_changed(step, change) for step in steps)
            return {**part, name: [step for step in kept if step is not None]}
    return change(part)
