"""Shared parts of the demo's OpenAI-compatible servers: the API key check and OpenAI's error
format.
"""

from __future__ import annotations

from hmac import compare_digest

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from scorekit.errors import UserError

LOOPBACK = "127.0.0.1"


class Refused(Exception):
    """Raised for a request that the server rejects; holds the status and the message of the
    response.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def new_app() -> FastAPI:
    """Return an app that answers `Refused` and invalid bodies with errors in OpenAI's format."""
    app = FastAPI()

    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> JSONResponse:
        return _error(error.status, str(error))

    @app.exception_handler(RequestValidationError)
    async def wrong(_: Request, error: RequestValidationError) -> JSONResponse:
        messages = [
            f"{error_detail['loc'][-1]}: {error_detail['msg']}" for error_detail in error.errors()
        ]
        return _error(400, "; ".join(messages))

    return app


def check_key(request: Request, api_key: str | None) -> None:
    """Check that the request has the key. None allows every request. Raises Refused."""
    authorization = request.headers.get("authorization", "")
    if api_key is not None and not compare_digest(
        authorization.encode(), f"Bearer {api_key}".encode()
    ):
        raise Refused(401, "Unauthorized")


def check_host(host: str, api_key: str | None, variable: str) -> None:
    """Check that other machines cannot reach the server without a key. Raises UserError.

    variable: the environment variable that holds the key.
    """
    if host != LOOPBACK and not api_key:
        raise UserError(f"--host {host} can be reached by others: set {variable}")


def _error(status: int, message: str) -> JSONResponse:
    error = {"message": message, "type": "Error", "param": None, "code": status}
    return JSONResponse({"error": error}, status)
