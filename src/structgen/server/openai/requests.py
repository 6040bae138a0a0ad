"""From the fields of a body to the engine's requests.

Owns   what each field means to the engine, and what is refused with its reason.
Used   by both generating routes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import anyio.to_thread
import msgspec

from structgen.engine.engine import Engine
from structgen.errors import OptionError
from structgen.options import request_from
from structgen.request import Constraint, Prompt, Request, Tokens
from structgen.sampling import check_whole
from structgen.server.call import Call
from structgen.server.errors import unknown_model
from structgen.server.openai.wire import Generating, refuse, top_k_of

T = TypeVar("T")
SLOW_BODY = 20_000  # bytes, whose tools or schema take some 5 ms: more are looked at in a thread
_PLAIN = (
    *("temperature", "top_p", "top_k", "min_p", "min_tokens", "stop", "stop_regex"),
    *("stop_token_ids", "ignore_eos", "logit_bias", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "priority"),
)
_SEEDS = 2**63  # seeds of the engine are below it; a client's may be negative
_STRIDE = 0x9E3779B97F4A7C15  # between the seeds of two choices: 2**64 over the golden ratio


def model_of(call: Call, name: str | None) -> str:
    """The name under which the client knows the model. Raises `ApiError` for another model."""
    names = call.service.names
    if name is None:
        return names[0]
    if name not in names:
        raise unknown_model(name, names)
    return name


def check_common(call: Call, body: Generating, prompts: int) -> int:
    """Refuse what no value of a field can mean here; returns `n`."""
    n = 1 if body.n is None else body.n
    check_whole("n", n, low=1)
    most, engine = call.service.config.max_choices, call.service.engine.config
    if engine.max_waiting is not None:
        # More would be told to come again later, for ever.
        most = min(most, engine.max_running + engine.max_waiting)
    if n * prompts > most:
        raise OptionError(
            "n" if prompts <= most else "prompt",
            f"{n} choices of each of {prompts} prompts are more than {most} in all; send fewer",
        )
    if body.skip_special_tokens is False:
        raise OptionError("skip_special_tokens", "special tokens have no text here; leave it out")
    if body.stop_regex is not None:
        call.names["constraint"] = "stop_regex"  # unless there is a constraint to blame, too
    if body.stream_options is not None and not body.stream:
        raise OptionError("stream_options", "only a stream has them; set stream to true")
    if body.stream_options is not None:
        stats = body.stream_options.continuous_usage_stats
        refuse("stream_options.continuous_usage_stats", stats, "usage comes at the end only")
    return n


async def beside(call: Call, function: Callable[..., T], *given: object) -> T:
    """What a function makes of a body; in a thread, where that may take long."""
    if call.size <= SLOW_BODY:
        return function(*given)
    return await anyio.to_thread.run_sync(function, *given)


async def requests_of(count: int, request: Callable[[int], Request]) -> list[Request]:
    """Several requests, by their number."""
    found = [request(0)]
    for number in range(1, count):
        await asyncio.sleep(0)  # hundreds take long together
        found.append(request(number))
    return found


def request_of(
    call: Call,
    body: Generating,
    prompt: Prompt,
    *,
    choice: int,
    max_tokens: int,
    constraint: Constraint | None,
    **want: Any,
) -> Request:
    """The request of one choice; `want` are fields of `Want`.

    Raises `OptionError` for a value that is out of range.
    """
    options = {name: getattr(body, name) for name in _PLAIN} | {"top_k": top_k_of(body.top_k)}
    seed = call.service.config.seed if body.seed is None else body.seed
    if seed is not None:
        options["seed"] = (seed + _STRIDE * choice) % _SEEDS
    return request_from(
        prompt,
        {
            **options,
            **want,
            "max_tokens": max_tokens,
            "deadline": call.service.config.request_timeout,
        },
        constraint=constraint,
        namespace=call.namespace(body.cache_salt),
    )


async def encoded(engine: Engine, prompt: Prompt) -> Prompt:
    """The prompt as token ids, for several requests that have it."""
    return (Tokens(await engine.encode(prompt), ""),)


def room(engine: Engine, prompt: Prompt) -> int:
    """Tokens that an output behind an encoded prompt may have at most; at least one."""
    most = min(engine.loaded.max_context, engine.loaded.slots)
    return max(1, most - sum(len(part.ids) for part in prompt if isinstance(part, Tokens)))


def with_seed(request: Request, attempt: int) -> Request:
    """The same request, drawn anew; the first attempt is the request itself."""
    sampling = request.sampling
    if sampling.seed is None or not attempt:
        return request
    seed = (sampling.seed + _STRIDE * 7 * attempt) % _SEEDS
    return msgspec.structs.replace(request, sampling=msgspec.structs.replace(sampling, seed=seed))
