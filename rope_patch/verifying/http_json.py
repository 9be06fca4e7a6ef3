"""JSON over HTTP, with the standard library: no client is a dependency of every transformers 5."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from rope_patch.utils.errors import describe_error, one_line
from rope_patch.verifying.engine import CannotVerify

_LARGEST = 2**30  # bytes of an answer


class CannotReach(CannotVerify):
    """No server answers at an address."""


class HttpError(CannotVerify):
    """A server answered with an error.

    Attributes:
        status: HTTP's number.
        detail: The server's message.
    """

    def __init__(self, url: str, status: int, detail: str) -> None:
        self.status, self.detail = status, detail
        message = f"{url} answered {status}: {detail}"
        if status in (401, 403):
            message += ": expected to be let in; put the server's key into OPENAI_API_KEY"
        super().__init__(message)


class JsonClient:
    """A client of one server.

    Args:
        url: Address of the server; paths of the API are added to it.
        seconds: Longest wait for an answer.
        api_key: Sent as a bearer token; the variable OPENAI_API_KEY unless given.

    Raises:
        CannotVerify: Not an http(s) address.
    """

    def __init__(self, url: str, seconds: float = 120.0, api_key: str | None = None) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise CannotVerify(
                "expected the address of a server such as http://localhost:8000, or a folder or "
                f"GGUF file that exists, got {url!r}"
            )
        self.url = url.rstrip("/").removesuffix("/v1")
        self.seconds = seconds
        self._api_key = api_key or os.environ.get("OPENAI_API_KEY")

    def get(self, path: str) -> Any:
        """Return a path's JSON.

        Raises:
            CannotVerify: The server is not reachable, or answers with an error or no JSON.
        """
        return self._ask(path, None)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Return the answer to a JSON body.

        Raises:
            CannotVerify: See `get`.
        """
        return self._ask(path, json.dumps(body).encode())

    def _ask(self, path: str, body: bytes | None) -> Any:
        url = f"{self.url}{path}"
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"
        request = urllib.request.Request(url, data=body, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=self.seconds) as answer:
                text = answer.read(_LARGEST)
        except urllib.error.HTTPError as error:
            raise HttpError(url, error.code, _detail(error.read(_LARGEST))) from error
        except OSError as error:
            if isinstance(getattr(error, "reason", error), TimeoutError):
                raise CannotReach(
                    f"{url} did not answer within {self.seconds:g} s: wait until the server is "
                    "idle, or allow more time by --seconds"
                ) from error
            raise CannotReach(
                f"no server answers at {url} ({describe_error(error)}): expected one that runs; "
                "start it, and give its address as http://HOST:PORT"
            ) from error
        try:
            return json.loads(text)
        except ValueError as error:
            raise CannotVerify(
                f"{url} answered no JSON ({one_line(text[:80].decode(errors='replace'))!r}): "
                "expected an engine's API; give the address of the server itself"
            ) from error


def _detail(body: bytes) -> str:
    """Return the message in an error's body."""
    text = body.decode(errors="replace")
    try:
        answer = json.loads(text)
    except ValueError:
        return one_line(text)
    for name in ("error", "message", "detail"):
        if isinstance(answer, dict) and name in answer:
            answer = answer[name]
    return one_line(answer)
