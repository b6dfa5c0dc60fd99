"""A small JSON client over HTTP, of the standard library only: servers are asked directly, no proxy is used."""

from __future__ import annotations

import dataclasses
import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

# Answers of a server that is overloaded or still loading its model; everything else is final.
_BUSY = frozenset({429, 502, 503, 504})


class AnswerError(ValueError):
    """A server answered with an error.

    Attributes:
        status: HTTP status.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclasses.dataclass(frozen=True, slots=True)
class JsonClient:
    """Asks one server.

    Attributes:
        url: Base address, ``http://host:port``, without a slash at the end.
        timeout: Seconds to wait for one answer.
        retries: Further attempts where the server cannot be reached or is busy.
        pause: Seconds before the first of them; doubled each time.
    """

    url: str
    timeout: float = 600.0
    retries: int = 5
    pause: float = 1.0

    def __post_init__(self) -> None:
        """Validate the address."""
        parts = urllib.parse.urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path or parts.query:
            raise ValueError(f"--server must look like http://host:port (no /v1 behind it), got {self.url!r}")
        if not self.timeout > 0:
            raise ValueError(f"--server-timeout must be above 0 seconds, got {self.timeout}")

    def get(self, path: str) -> Any:
        """Return the parsed answer of a GET request; errors as `post`."""
        return self._parsed(path, self._ask(path, None))

    def get_text(self, path: str) -> str:
        """Return the text a GET request answers; errors as `post`."""
        return self._ask(path, None).decode("utf-8", errors="replace")

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Send an object and return the parsed answer.

        Args:
            path: Beginning with a slash.
            body: What to send.

        Raises:
            ConnectionError: The server cannot be reached, or stays busy, after every attempt.
            TimeoutError: No answer in time; not tried again, since the server may still be working on it.
            AnswerError: The server refused or failed; the message quotes it.
            ValueError: The answer is no JSON.
        """
        return self._parsed(path, self._ask(path, json.dumps(body).encode()))

    def _parsed(self, path: str, data: bytes) -> Any:
        try:
            return json.loads(data)
        except ValueError as error:
            raise ValueError(f"{self.url}{path} did not answer with JSON; is this the right server?") from error

    def _ask(self, path: str, body: bytes | None) -> bytes:
        problem = ""
        for attempt in range(self.retries + 1):
            if attempt:
                time.sleep(self.pause * 2 ** (attempt - 1))
            try:
                return self._ask_once(path, body)
            except AnswerError as error:
                if error.status not in _BUSY:
                    raise
                problem = str(error)
            except TimeoutError as error:
                raise TimeoutError(self._too_slow(path)) from error
            except urllib.error.URLError as error:
                if isinstance(error.reason, TimeoutError):
                    raise TimeoutError(self._too_slow(path)) from error
                problem = str(error.reason)
            except (OSError, http.client.HTTPException) as error:  # the connection broke while the answer was read
                problem = str(error) or type(error).__name__
        message = f"cannot reach the server at {self.url} ({problem}) after {self.retries + 1} attempts"
        raise ConnectionError(f"{message}; is it running? Then run again with --resume")

    def _ask_once(self, path: str, body: bytes | None) -> bytes:
        headers = {"Content-Type": "application/json"} if body is not None else {}
        request = urllib.request.Request(f"{self.url}{path}", data=body, headers=headers)  # noqa: S310 - checked above
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=self.timeout) as answer:
                data: bytes = answer.read()
        except urllib.error.HTTPError as error:
            with error:
                raise AnswerError(f"{self.url}{path} answered {error.code}: {_told(error)}", error.code) from error
        return data

    def _too_slow(self, path: str) -> str:
        return (
            f"{self.url}{path} gave no answer in {self.timeout:g} s; raise --server-timeout, or lower --batch-size "
            "or --max-new-tokens"
        )


def _told(error: urllib.error.HTTPError) -> str:
    """What a server says about its error, in one line."""
    try:
        text = error.read().decode("utf-8", errors="replace")
    except (OSError, http.client.HTTPException):
        return str(error.reason)
    try:
        answer = json.loads(text)
    except ValueError:
        return " ".join(text.split())[:300] or str(error.reason)
    inner = answer.get("error", answer) if isinstance(answer, dict) else answer
    message = inner.get("message", inner.get("detail", inner)) if isinstance(inner, dict) else inner
    return " ".join(str(message).split())[:300]
