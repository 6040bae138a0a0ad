"""What an engine refuses at the door: requests that it cannot serve, before any work on them.

Used   by `engine`, for every request.
"""

from __future__ import annotations

from collections.abc import Sequence

from structgen.core.schedule import Schedule
from structgen.engine.config import EngineConfig
from structgen.engine.constraints import check_kind
from structgen.engine.loading import Loaded
from structgen.errors import OptionError, OverloadedError, UnsupportedError
from structgen.options import check_bound
from structgen.request import Request

# Of all stop strings of a request. What finds them is built in 1 ms per 1,000 characters, in a
# thread from there on, and takes 400 bytes a character.
SLOW_STOP_CHARACTERS = 1_000
MOST_STOP_CHARACTERS = 100_000


def check(request: Request, loaded: Loaded, model: str) -> None:
    """Refuse what an engine cannot do that runs this model under this name."""
    if request.constraint is not None:
        check_kind(request.constraint)
        check_bound(request)
    if request.model not in {"", model, loaded.checkpoint.name}:
        raise UnsupportedError(f"this engine runs {model!r}, not {request.model!r}")
    if request.namespace.adapter or request.namespace.spliced:
        raise UnsupportedError("this engine has no adapters and no spliced prefixes")
    vocabulary, sampling = loaded.checkpoint.tokenizer.vocab_size, request.sampling
    _check_ids("stop_token_ids", sampling.stop_token_ids, vocabulary)
    _check_ids("logit_bias", [token for token, _ in sampling.logit_bias], vocabulary)
    if (length := sum(map(len, sampling.stop))) > MOST_STOP_CHARACTERS:
        raise OptionError(
            "stop", f"{length} characters in all, more than {MOST_STOP_CHARACTERS}; send fewer"
        )


def check_queue(schedule: Schedule, config: EngineConfig, tokens: int) -> None:
    """Refuse a request of so many prompt tokens where what waits is at its limit already.

    Raises `OverloadedError`. Requests that the next step will start do not wait.
    """
    waiting = len(schedule.running) + len(schedule.waiting) - config.max_running
    if config.max_waiting is not None and waiting >= config.max_waiting:
        raise OverloadedError(
            f"as many requests wait as max_waiting allows, {waiting}; send it again later"
        )
    if config.max_waiting_tokens is None or not schedule.waiting:
        return
    queued = schedule.waiting_tokens
    if queued + tokens > config.max_waiting_tokens:
        raise OverloadedError(
            f"{queued} prompt tokens wait already, and with {tokens} more they would be over the "
            f"{config.max_waiting_tokens} of max_waiting_tokens; send it again later"
        )


def _check_ids(option: str, ids: Sequence[int], vocabulary: int) -> None:
    for token in ids:
        if token >= vocabulary:
            raise OptionError(option, f"token {token} is not in the vocabulary of {vocabulary}")
