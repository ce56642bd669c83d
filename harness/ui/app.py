"""The web application: the page's files, its routes, and one sentence for every mistake."""

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

from harness.core.errors import HarnessError
from harness.runtime.errors import Sam3Error
from harness.ui.bodies import Bounded
from harness.ui.guard import Guard, Hosts
from harness.ui.page import Page
from harness.ui.routes import router
from harness.ui.sessions import UnknownSessionError

STATIC = Path(__file__).with_name("static")
INDEX = "index.html"


def make_app(page: Page, hosts: Hosts, token: str) -> FastAPI:
    """Makes the application.

    Args:
        page: Its state.
        hosts: What it may be called in a URL.
        token: What a browser must know to use it.
    """
    app = FastAPI(title="sam3-tvm", openapi_url=None)
    app.state.page = page
    app.include_router(router)
    app.add_api_route("/", _index, include_in_schema=False)
    app.mount("/static", StaticFiles(directory=STATIC), name="static")
    app.add_middleware(Bounded)
    app.add_middleware(Guard, hosts=hosts, token=token)
    for kind, answer in _ANSWERS.items():
        app.add_exception_handler(kind, answer)
    return app


async def _index() -> FileResponse:
    return FileResponse(STATIC / INDEX, headers={"Cache-Control": "no-cache"})


def _sentence(sentence: str, status: int) -> JSONResponse:
    return JSONResponse({"error": sentence}, status)


async def _mistake(_request: Request, error: Exception) -> Response:
    return _sentence(str(error), 404 if isinstance(error, UnknownSessionError) else 422)


async def _no_such_route(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _sentence(f"{error.detail}.", error.status_code)


async def _malformed(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first: Any = error.errors()[0]
    if first["type"] == "json_invalid":
        return _sentence("The request cannot be understood: it is not JSON.", 422)
    where = ".".join(str(part) for part in first["loc"][1:]) or "body"
    return _sentence(f"The request cannot be understood: {where}: {first['msg']}.", 422)


async def _given_up(_request: Request, _error: Exception) -> Response:
    return _sentence("The request was given up.", 400)


async def _defect(_request: Request, error: Exception) -> Response:
    traceback.print_exception(error, file=sys.stderr)
    return _sentence(f"The server failed ({type(error).__name__}); its terminal says where.", 500)


_ANSWERS: dict[type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = {
    HarnessError: _mistake,
    Sam3Error: _mistake,
    HTTPException: _no_such_route,
    RequestValidationError: _malformed,
    ClientDisconnect: _given_up,
    Exception: _defect,
}
"""Who answers each kind of error."""
