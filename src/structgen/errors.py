"""Every error that structgen raises on purpose, and when.

    StructgenError
    ├── OptionError (ValueError)          an option has a value that cannot be used
    ├── PromptError (ValueError)          the prompt is empty, or not of this model
    │   └── ContextLengthError            prompt and output together are too long
    ├── ConstraintError (ValueError)      a regex, schema or grammar that cannot be enforced
    ├── UnsupportedError                  the backend or model cannot do what was asked
    ├── ModelError                        the model cannot be found, read or understood
    │   ├── ModelNotFoundError            no such path, hub id or known name
    │   └── CheckpointError               the files are there, but damaged or not understood
    ├── TemplateError                     the chat template is missing, broken or refuses
    ├── GenerationError                   one request failed; the engine lives on
    │   ├── StepFailedError               the forward pass that carried it raised
    │   ├── NumericalError                its logits were NaN or infinite
    │   ├── DeadlineError (TimeoutError)  it was not finished in time
    │   └── OutputError                   its output is not what was asked for; `.text` has it
    │       ├── IncompleteOutputError     cut off before it was a whole value
    │       └── InvalidOutputError        whole, but no value of the type
    ├── BudgetError                       a program run has used up its tokens or its time
    ├── BatchError                        items of a batch failed; `.outcomes` has all of them
    ├── EngineError
    │   ├── OverloadedError               too much waits, or compiles, already; nothing was begun
    │   ├── EngineClosedError             the engine is not open (any more)
    │   └── EngineDiedError               the engine loop ended by an error; the cause is attached
    └── StateError                        a program used its State in a way that has no meaning
        ├── UnknownVariableError (KeyError)
        ├── PendingError                  appended, but not generated yet
        ├── ConcurrentUseError            two operations on one State at the same time
        ├── StateClosedError              the program that owns the State has ended
        ├── RoleError                     roles nested or closed in the wrong order
        └── JoinError                     branches that cannot be joined in this mode

A message says what happened, to what, and what to write instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class StructgenError(Exception):
    """Base of all errors raised by structgen on purpose."""


class OptionError(StructgenError, ValueError):
    """An option has a value that cannot be used.

    `option` is the name of the option, as the caller wrote it.
    """

    def __init__(self, option: str, message: str) -> None:
        super().__init__(f"{option}: {message}")
        self.option = option


class PromptError(StructgenError, ValueError):
    """The prompt is empty, too long for the model or the pool, or not of its tokenizer."""


class ContextLengthError(PromptError):
    """Prompt and output together are longer than the context, or than the pool of slots."""


class ConstraintError(StructgenError, ValueError):
    """A constraint is malformed or cannot be enforced; the message quotes it."""


class UnsupportedError(StructgenError):
    """The backend or model cannot do what was asked; the message says what would work."""


class ModelError(StructgenError):
    """A model cannot be found, read or understood."""


class ModelNotFoundError(ModelError):
    """There is no model at that path, under that hub id or of that name."""


class CheckpointError(ModelError):
    """The model's files exist but are damaged, incomplete or of an unknown kind."""


class TemplateError(StructgenError):
    """The chat template is missing, does not compile, or refused the messages."""


class GenerationError(StructgenError):
    """One request failed after it was accepted; other requests and the engine go on."""


class StepFailedError(GenerationError):
    """The forward pass that carried this request raised; the cause is attached."""


class NumericalError(GenerationError):
    """The model produced NaN or infinite logits for this request."""


class DeadlineError(GenerationError, TimeoutError):
    """The request was not finished within its deadline; it has been aborted."""


class OutputError(GenerationError):
    """The output is not what was asked for. `text` is what the model wrote."""

    def __init__(self, message: str, text: str) -> None:
        super().__init__(message)
        self.text = text


class IncompleteOutputError(OutputError):
    """The output was cut off, by max_tokens or by a stop, before it was a whole value."""


class InvalidOutputError(OutputError):
    """The output ended by itself, but is no value of the type that was asked for."""


class BudgetError(StructgenError):
    """A program run has used up what `Program.budget` allows it; what it had live was aborted.

    budget   "tokens" or "seconds"
    """

    def __init__(self, message: str, budget: str) -> None:
        super().__init__(message)
        self.budget = budget


class BatchError(StructgenError):
    """Some items of a batch failed, after all of them were run.

    outcomes   of every item in order: its `Result`, or the exception that ended it
    """

    def __init__(self, message: str, outcomes: list[Any]) -> None:
        super().__init__(message)
        self.outcomes = outcomes


class EngineError(StructgenError):
    """The engine as a whole cannot serve."""


class OverloadedError(EngineError):
    """As much waits as the engine's options allow, or too much compiles: send it again later."""


class EngineClosedError(EngineError):
    """The engine is not open: use it inside `async with Engine(...) as engine:`."""


class EngineDiedError(EngineError):
    """The engine loop ended by an error in the engine itself; the cause is attached."""


class StateError(StructgenError):
    """A program used its State in a way that has no meaning."""


class UnknownVariableError(StateError, KeyError):
    """No variable of that name was set; the message lists those that were."""

    def __str__(self) -> str:
        # KeyError shows the repr of its argument, which would quote and escape the sentence.
        return str(self.args[0])


class PendingError(StateError):
    """The value has been appended but not generated yet."""


class ConcurrentUseError(StateError):
    """Two operations ran on one State at the same time; fork it instead."""


class StateClosedError(StateError):
    """The program that owns this State has ended."""


class RoleError(StateError):
    """Roles do not nest and close in the order in which they opened."""


class JoinError(StateError):
    """The branches cannot be joined in the mode that was asked for."""


def leaves(error: BaseException) -> Iterator[BaseException]:
    """The errors in a group, whatever its nesting; or the error itself."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves(inner)
    else:
        yield error
