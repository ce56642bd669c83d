"""Builds the web application: the page's files, its routes, and one sentence for every error."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from harness.app.ui.bodies import BodyLimit
from harness.app.ui.guard import Guard, Hosts
from harness.app.ui.page import Page
from harness.app.ui.routes import router
from harness.app.ui.sessions import UnknownSessionError
from harness.core.errors import HarnessError
from harness.runtime.errors import ModelError

STATIC = Path(__file__).with_name("static")
INDEX = "index.html"


def make_app(page: Page, hosts: Hosts, token: str) -> FastAPI:
    """Makes the application.

    Args:
        page: Its state.
        hosts: Its names in URLs.
        token: The token that a browser must present.
    """
    app = FastAPI(title="sam3-tvm", openapi_url=None)
    app.state.page = page
    app.include_router(router)
    app.add_api_route("/", _index, include_in_schema=False)
    app.mount("/static", StaticFiles(directory=STATIC), name="static")
    app.add_middleware(BodyLimit)
    app.add_middleware(Guard, hosts=hosts, token=token)
    for kind, handler in _HANDLERS.items():
        app.add_exception_handler(kind, handler)
    return app


async def _index() -> FileResponse:
    return FileResponse(STATIC / INDEX, headers={"Cache-Control": "no-cache"})


def _error_response(message: str, status: int) -> JSONResponse:
    return JSONResponse({"error": message}, status)


async def _user_error(_request: Request, error: Exception) -> Response:
    return _error_response(str(error), 404 if isinstance(error, UnknownSessionError) else 422)


async def _no_such_route(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error_response(f"{error.detail}.", error.status_code)


async def _malformed(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first: Any = error.errors()[0]
    if first["type"] == "json_invalid":
        return _error_response("The request cannot be understood: it is not JSON.", 422)
    location = ".".join(str(part) for part in first["loc"][1:]) or "body"
    return _error_response(f"The request cannot be understood: {location}: {first['msg']}.", 422)


async def _disconnected(_request: Request, _error: Exception) -> Response:
    return _error_response("The request was given up.", 400)


async def _defect(_request: Request, error: Exception) -> Response:
    traceback.print_exception(error, file=sys.stderr)
    return _error_response(f"The server failed ({type(error).__name__}); its terminal says where.", 500)


_HANDLERS: dict[type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = {
    HarnessError: _user_error,
    ModelError: _user_error,
    HTTPException: _no_such_route,
    RequestValidationError: _malformed,
    ClientDisconnect: _disconnected,
    Exception: _defect,
}
"""The handler of each kind of error."""
