"""What goes wrong, as Python says it."""

from __future__ import annotations

import sys
from typing import Optional

from ._native import Failed


class MeridianError(Exception):
    """An operation gave no result. One request that fails for good fails its operation."""


class RequestFailed(MeridianError):
    """A server refused a request, or could not be reached. `args` are the status (0 without one) and what happened."""

    @property
    def status_code(self) -> Optional[int]:
        """The status of the answer, where there was one."""
        return self.args[0] or None

    def __str__(self) -> str:
        return str(self.args[1])


class RequestTimeout(MeridianError, TimeoutError):
    """The time was up, for one request or for all of them."""


class WrongAnswer(MeridianError):
    """A server said yes with something that is not an answer: rows missing, of another length, not finite, cut short."""


def _also(error: type, name: str) -> type:
    """`error`, which whoever has imported `requests` can catch as the error of that name there."""
    requests = sys.modules.get("requests")
    other = getattr(getattr(requests, "exceptions", None), name, None)
    if other is None:
        return error
    return type(error.__name__, (error, other), {"__module__": error.__module__, "__doc__": error.__doc__})


def raised(failed: Failed) -> Exception:
    """The exception for what the native side said."""
    kind, status, message = failed.args
    if kind == "invalid":
        return ValueError(message)
    if kind == "timeout":
        return _also(RequestTimeout, "Timeout")(message)
    if kind == "wrong":
        return WrongAnswer(message)
    name = "HTTPError" if kind == "status" else "ConnectionError"
    return _also(RequestFailed, name)(status or 0, message)
