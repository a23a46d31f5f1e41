"""The HTTP application: health, version, and the routes of /api/v1.

One rule: a face decides nothing. It reads the request, calls the service, and shapes the answer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp

from sublet.faces.rest import problems, routes, webhooks
from sublet.faces.rest.guard import guarded
from sublet.notify.sender import Sender
from sublet.service.desk import Desk


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """`checks`: each by name; empty text = it is well, else what is wrong."""

    version: str
    checks: dict[str, Callable[[], str]]
    metrics: Callable[[], bytes] | None = None  # the text for Prometheus


def create_app(desk: Desk, health: Health, sender: Sender | None = None) -> ASGIApp:
    app = FastAPI(
        title="Sublet",
        version=health.version,
        openapi_url="/api/v1/openapi.json",
        docs_url=None,  # the usual pages load their scripts from elsewhere
        redoc_url=None,
        generate_unique_id_function=lambda route: route.name,
    )
    app.state.desk, app.state.sender = desk, sender
    problems.install(app)
    app.include_router(routes.router, prefix="/api/v1")
    app.include_router(webhooks.router, prefix="/api/v1")
    _add_health(app, health)
    return guarded(app)


def _add_health(app: FastAPI, health: Health) -> None:
    @app.get("/livez", include_in_schema=False)
    def livez() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/readyz", include_in_schema=False)
    def readyz(request: Request) -> JSONResponse:
        found = {name: check() for name, check in health.checks.items()}
        is_ready = not any(found.values())
        body: dict[str, Any] = {"status": "ok" if is_ready else "not ready"}
        if "verbose" in request.query_params or not is_ready:
            body["checks"] = {name: said or "ok" for name, said in found.items()}
        return JSONResponse(body, status_code=200 if is_ready else 503)

    if (scrape := health.metrics) is not None:

        @app.get("/metrics", include_in_schema=False)
        def metrics() -> Response:
            return Response(scrape(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/version", include_in_schema=False)
    def version() -> dict[str, str]:
        return {"version": health.version}
