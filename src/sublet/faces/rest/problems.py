"""Errors as problems (RFC 9457).

One rule: each carries the stable `code`, and the `field` and the `hint` where there are any.
"""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from sublet.domain.errors import Broken, Refused, SubletError, Unavailable

MEDIA_TYPE = "application/problem+json"
NOT_FOUND = {"job_unknown", "node_unknown", "attempt_unknown", "instance_unknown", "route_unknown"}
CONFLICT = {"job_ended", "job_not_waiting", "job_ambiguous", "idempotency_key_reused", "quota_in_use", "node_lost"}


def install(app: FastAPI) -> None:
    """Every error of this app leaves as a problem."""
    app.add_exception_handler(SubletError, _of_ours)
    app.add_exception_handler(RequestValidationError, _of_a_parameter)
    app.add_exception_handler(HTTPException, _of_the_framework)
    app.add_exception_handler(Exception, _unforeseen)


def response(error: SubletError) -> JSONResponse:
    status = status_of(error)
    problem: dict[str, Any] = {
        "type": f"urn:sublet:problem:{error.code}",
        "title": error.what,
        "status": status,
        "detail": str(error),
        "code": error.code,
    }
    more = {key: getattr(error, key) for key in ("why", "hint", "field", "where") if getattr(error, key)}
    headers = {"Retry-After": "1"} if status == 503 else None
    return JSONResponse(problem | more, status_code=status, media_type=MEDIA_TYPE, headers=headers)


def status_of(error: SubletError) -> int:
    if isinstance(error, Unavailable):
        return 503
    if not isinstance(error, Refused):
        return 500
    special = {"media_type": 415, "foreign_origin": 403, "method": 405, "too_long": 413}
    usual = 404 if error.code in NOT_FOUND else 409 if error.code in CONFLICT else 422
    return special.get(error.code, usual)


def _of_ours(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, SubletError)
    return response(error)


def _of_a_parameter(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = str(first["loc"][-1])
    what = f"{name} is {first.get('input')!r:.60}."
    return response(Refused(what=what, why=f"{first['msg']}.", code="malformed", field=name))


def _of_the_framework(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        return response(Refused(what=f"{request.method} is not done here.", hint="See openapi.json.", code="method"))
    hint = "See /api/v1/openapi.json."
    return response(Refused(what=f"There is nothing at {request.url.path}.", hint=hint, code="route_unknown"))


def _unforeseen(_: Request, error: Exception) -> JSONResponse:
    what = f"{type(error).__name__}: {error}".rstrip(".") + "."
    return response(Broken(what=what, why="This is a fault of Sublet.", hint="Please report it.", code="broken"))
