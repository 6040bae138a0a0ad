"""A tokenizer whose ids can be read.

Owns   nothing. Used by the scripted backend, whose programs' tests look at ids.
"""

from __future__ import annotations

from collections.abc import Sequence

from structgen.errors import PromptError, UnsupportedError
from structgen.request import Control, Image, Part, Text, Tokens

_BASE = 0x110000  # one more than the largest code point
END_ID = _BASE
FINGERPRINT = "structgen-scripted"


class ScriptedTokenizer:
    """A tokenizer whose ids can be read: a token is up to `size` characters.

    A token of one character is its code point; a longer one is 1 and its code points as digits
    in base 0x110000. Control text is one token with a negative id, so that no text can ever
    spell it. Every part is cut from its own beginning: like real tokens, those of two parts
    differ from those of the parts joined.
    """

    def __init__(self, size: int = 1) -> None:
        self.size = size
        self.fingerprint = f"{FINGERPRINT}-{size}"

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of ordinary text."""
        return tuple(_number(text[i : i + self.size]) for i in range(0, len(text), self.size))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; control tokens and the end token have none."""
        return "".join(_characters(token) for token in ids if token >= 0 and token != END_ID)

    def encode_parts(self, parts: Sequence[Part]) -> tuple[int, ...]:
        """Ids of a prompt. Raises `PromptError` for tokens that are not what they claim to be."""
        return tuple(token for part in parts for token in self._encode_part(part))

    def _encode_part(self, part: Part) -> tuple[int, ...]:
        match part:
            case Text(text):
                return self.encode(text)
            case Control(text):
                return (-1 - _number(text),)
            case Tokens(ids, text, fingerprint):
                if fingerprint not in {"", self.fingerprint}:
                    raise PromptError(
                        f"tokens of {fingerprint!r} in a prompt for {self.fingerprint}"
                    )
                if self.decode(ids) != text:
                    raise PromptError(
                        f"tokens that spell {self.decode(ids)!r} claim to be {text!r}"
                    )
                return ids
            case Image():
                raise UnsupportedError("the scripted backend sees no images; describe them as text")


def _number(characters: str) -> int:
    """One token's id; see `ScriptedTokenizer`."""
    if len(characters) == 1:
        return ord(characters)
    number = 1
    for character in characters:
        number = number * _BASE + ord(character)
    return number


def _characters(token: int) -> str:
    if token < _BASE:
        return chr(token)
    found: list[str] = []
    while token > 1:
        token, digit = divmod(token, _BASE)
        found.append(chr(digit))
    return "".join(reversed(found))
