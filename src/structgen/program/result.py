"""What a program run leaves behind.

Owns   a transcript and variables that nobody changes any more; nothing of the backend, so a
       result can be kept after the engine is gone. Used by `Program.run`, which returns it.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from structgen.chat import Chat, Message
from structgen.program.variables import Meta, Value, Variables
from structgen.request import Usage, prompt_text
from structgen.transcript.chain import Transcript
from structgen.transcript.layout import lay_out, messages_in

R = TypeVar("R")


class Result(Generic[R]):
    """The value that a program returned, and the last state of its first State.

    value   what the program returned
    usage   token counts, summed over all requests of the run, those of branches included; of a
            request that was aborted only the tokens that were read
    """

    __slots__ = ("_chat", "_transcript", "_variables", "usage", "value")

    def __init__(
        self,
        value: R,
        usage: Usage,
        transcript: Transcript,
        variables: Variables,
        chat: Chat | None,
    ) -> None:
        self.value = value
        self.usage = usage
        self._transcript, self._variables, self._chat = transcript, variables, chat

    def __getitem__(self, name: str) -> Value:
        """The value of a variable; raises `UnknownVariableError`."""
        return self._variables.read(name)

    def __contains__(self, name: object) -> bool:
        return name in self._variables

    @property
    def variables(self) -> dict[str, Value]:
        """All values by name, in the order in which they were set first."""
        return {name: self._variables.read(name) for name in self._variables.names()}

    def meta(self, name: str) -> Meta:
        """How a variable was generated; raises `UnknownVariableError`."""
        return self._variables.meta(name)

    def text(self) -> str:
        """All that was said, as the model reads it, the markup of roles included."""
        return prompt_text(lay_out(self._transcript.said(), self._chat).parts)

    def messages(self) -> list[Message]:
        """What was said in roles, as messages."""
        return messages_in(self._transcript.said())

    def __repr__(self) -> str:
        names = ", ".join(self._variables.names())
        return f"<Result value={self.value!r} variables=[{names}]>"
