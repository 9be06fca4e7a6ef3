"""JSON over HTTP, with the standard library: no client is a dependency of every transformers 5."""

from __future__ import annotations

import http.client
import json
import os
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from email.message import Message
from typing import IO, Any

from rope_patch.utils.errors import describe_error, one_line, parse_json
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


class _OwnOriginOnly(urllib.request.HTTPRedirectHandler):
    """Follow redirects within one server: others would get the key, or be taken for it."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: Message[str, str],
        newurl: str,
    ) -> urllib.request.Request | None:
        """Return the next request.

        Raises:
            CannotVerify: It goes to another scheme, host or port.
        """
        if _origin(newurl) != _origin(req.full_url):
            raise CannotVerify(
                f"{one_line(req.full_url)} redirects to {one_line(newurl)}, another server: "
                "expected its own answer; give the address of the engine itself"
            )
        return super().redirect_request(req, fp, code, msg, headers, newurl)  # type: ignore[arg-type]


class JsonClient:
    """A client of one server.

    Args:
        url: Address of the server; paths of the API are added to it.
        seconds: Longest wait for all answers together.
        api_key: Sent as a bearer token; the variable OPENAI_API_KEY unless given.

    Raises:
        CannotVerify: Not an http(s) address, or a key that no header can hold.
    """

    def __init__(self, url: str, seconds: float = 120.0, api_key: str | None = None) -> None:
        try:
            origin = _origin(url)
        except ValueError:
            origin = None
        if origin is None or origin[0] not in ("http", "https") or not origin[1]:
            raise CannotVerify(
                "expected the address of a server such as http://localhost:8000, or a folder or "
                f"GGUF file that exists, got {url!r}"
            )
        self.url = url.rstrip("/").removesuffix("/v1")
        self.seconds = seconds
        self._waited = 0.0
        key = os.environ.get("OPENAI_API_KEY", "") if api_key is None else api_key
        self._api_key = key.strip()
        if not self._api_key.isascii() or not self._api_key.isprintable():
            raise CannotVerify(
                "OPENAI_API_KEY has characters that no HTTP header can hold, expected printable "
                "ASCII: set it again"
            )
        self._opener = urllib.request.build_opener(_OwnOriginOnly)

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
            text = self._read(request)
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
        except http.client.HTTPException as error:
            raise CannotReach(
                f"what answers at {url} does not speak HTTP ({describe_error(error)}): expected an "
                "engine's server; give its address as http://HOST:PORT"
            ) from error
        try:
            return parse_json(text)
        except ValueError as error:
            raise CannotVerify(
                f"{url} answered no JSON ({one_line(text[:80].decode(errors='replace'))!r}): "
                "expected an engine's API; give the address of the server itself"
            ) from error

    def _read(self, request: urllib.request.Request) -> bytes:
        """Return an answer's body, and end at the deadline whatever the server does.

        A socket's timeout bounds a single read, so a server that sends a byte a second would never
        meet it. The request runs in a thread of its own, which is left behind at the deadline.

        Raises:
            TimeoutError: At the deadline.
            HttpError: The server answered with an error.
        """
        left = self.seconds - self._waited
        outcome: list[bytes | BaseException] = []
        is_late = threading.Event()

        def read_answer() -> None:
            try:
                with self._opener.open(request, timeout=max(left, 1e-3)) as answer:
                    outcome.append(_read_until(answer, is_late))
            except urllib.error.HTTPError as error:
                try:
                    detail = _detail(_read_until(error, is_late))
                    outcome.append(HttpError(request.full_url, error.code, detail))
                except Exception as second:
                    outcome.append(second)
            except BaseException as error:
                outcome.append(error)

        started = time.monotonic()
        thread = threading.Thread(target=read_answer, daemon=True)
        thread.start()
        thread.join(max(left, 0.0))
        self._waited += time.monotonic() - started
        is_late.set()
        if not outcome:
            raise TimeoutError
        if isinstance(outcome[0], BaseException):
            raise outcome[0]
        return outcome[0]


def _origin(url: str) -> tuple[str, str | None, int | None]:
    """Return scheme, host and port of an address.

    Raises:
        ValueError: It is none.
    """
    parts = urllib.parse.urlsplit(url)
    standard = {"http": 80, "https": 443}.get(parts.scheme)
    return parts.scheme, parts.hostname, standard if parts.port is None else parts.port


def _read_until(answer: Any, is_late: threading.Event) -> bytes:
    """Return a body, up to `_LARGEST` bytes of it."""
    parts: list[bytes] = []
    size = 0
    while not is_late.is_set() and size < _LARGEST and (part := answer.read1(1 << 20)):
        parts.append(part)
        size += len(part)
    return b"".join(parts)


def _detail(body: bytes) -> str:
    """Return the message in an error's body."""
    text = body.decode(errors="replace")
    try:
        answer = parse_json(text)
    except ValueError:
        return one_line(text)
    for name in ("error", "message", "detail"):
        if isinstance(answer, dict) and name in answer:
            answer = answer[name]
    return one_line(answer)
