"""Ends requests that are larger than any question, before they are read, parsed and checked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException

from harness.ui.photographs import LARGEST_UPLOAD

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

LARGEST_QUESTION = 2**20
"""Bytes of JSON."""
TOO_LARGE = 413


class Bounded:
    """Lets no more of a body through than a question may have, or, by PUT, a photograph."""

    def __init__(self, app: ASGIApp) -> None:
        """Bound what an application reads."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles a request."""
        most = LARGEST_UPLOAD if scope.get("method") == "PUT" else LARGEST_QUESTION
        length = 0

        async def receive_bounded() -> Message:
            nonlocal length
            message = await receive()
            length += len(message.get("body", b""))
            if length > most:
                raise HTTPException(TOO_LARGE, f"The request has more than {most // 2**20} MB; send less")
            return message

        await self._app(scope, receive_bounded, send)
