"""Serving an engine and programs over HTTP, on aiohttp.

    app = structgen.server.make_app(engine, programs=[judge])
    structgen.server.add_routes(app, engine, programs=[judge])    # into an application of yours

`structgen serve MODEL` does the same from the command line. What each route takes and answers is
in `docs/serving.md`, and in the OpenAPI document that the server gives at `/openapi.json`.
"""

from structgen.server.app import add_routes, make_app
from structgen.server.config import ServerConfig

__all__ = ("ServerConfig", "add_routes", "make_app")
