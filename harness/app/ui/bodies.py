"""Rejects requests that are larger than any question, before they are read, parsed and checked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException

from harness.app.ui.photographs import LARGEST_UPLOAD

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

LARGEST_QUESTION = 2**20
"""Maximum size of a JSON body in bytes."""
TOO_LARGE = 413


class BodyLimit:
    """Limits the body of a request to the size of a question, or, by PUT, of a photograph."""

    def __init__(self, app: ASGIApp) -> None:
        """Limits the bodies that an application reads."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles a request."""
        limit = LARGEST_UPLOAD if scope.get("method") == "PUT" else LARGEST_QUESTION
        length = 0

        async def receive_bounded() -> Message:
            nonlocal length
            message = await receive()
            length += len(message.get("body", b""))
            if length > limit:
                raise HTTPException(TOO_LARGE, f"The request has more than {limit // 2**20} MB; send less")
            return message

        await self._app(scope, receive_bounded, send)
