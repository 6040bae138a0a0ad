"""`GET /v1/models` and `GET /v1/models/NAME`: what is served here, by each of its names.

Used by `app`.
"""

from __future__ import annotations

from aiohttp import web

from structgen.server.call import Call
from structgen.server.openai.replies import Model, Models
from structgen.server.openai.requests import model_of


async def list_models(call: Call) -> web.StreamResponse:
    """All names of the model."""
    return call.answer(Models([_model(call, name) for name in call.service.names]))


async def describe_model(call: Call) -> web.StreamResponse:
    """The model by one of its names, which may have slashes in it."""
    return call.answer(_model(call, model_of(call, call.request.match_info["id"])))


def _model(call: Call, name: str) -> Model:
    service = call.service
    loaded = service.engine.loaded
    return Model(name, service.created, loaded.max_context, root=loaded.checkpoint.name)
