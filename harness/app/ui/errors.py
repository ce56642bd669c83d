"""Answers a failed request with one sentence, as JSON."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from harness.core.errors import HarnessError
from harness.runtime.errors import ModelError


class UnknownSessionError(HarnessError):
    """A session that this server does not know."""


def add_error_handlers(app: FastAPI) -> None:
    """Makes an application answer each kind of error with a sentence."""
    for kind, handler in _HANDLERS.items():
        app.add_exception_handler(kind, handler)


def error_response(message: str, status: int) -> JSONResponse:
    """Returns a response with a sentence, `{"error": …}`."""
    return JSONResponse({"error": message}, status)


async def _user_error(_request: Request, error: Exception) -> Response:
    return error_response(str(error), 404 if isinstance(error, UnknownSessionError) else 422)


async def _no_such_route(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return error_response(f"{error.detail}.", error.status_code)


async def _malformed(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first: Any = error.errors()[0]
    if first["type"] == "json_invalid":
        return error_response("The request cannot be understood: it is not JSON.", 422)
    location = ".".join(str(part) for part in first["loc"][1:]) or "body"
    return error_response(f"The request cannot be understood: {location}: {first['msg']}.", 422)


async def _disconnected(_request: Request, _error: Exception) -> Response:
    return error_response("The request was given up.", 400)


async def _defect(_request: Request, error: Exception) -> Response:
    traceback.print_exception(error, file=sys.stderr)
    return error_response(f"The server failed ({type(error).__name__}); its terminal says where.", 500)


_HANDLERS: dict[type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = {
    HarnessError: _user_error,
    ModelError: _user_error,
    HTTPException: _no_such_route,
    RequestValidationError: _malformed,
    ClientDisconnect: _disconnected,
    Exception: _defect,
}
"""The handler of each kind of error."""
