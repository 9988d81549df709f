"""Exceptions."""

from __future__ import annotations

import sys
from typing import Optional

from ._native import Failed


class MeridianError(Exception):
    """An operation failed. One request that fails for good fails its operation."""


class RequestFailed(MeridianError):
    """A server rejected a request, or could not be reached. `args` are the status (0 if there is none) and the
    message."""

    @property
    def status_code(self) -> Optional[int]:
        """The status of the response, if there was one."""
        return self.args[0] or None

    def __str__(self) -> str:
        return str(self.args[1])


class RequestTimeout(MeridianError, TimeoutError):
    """The timeout of a request or of the operation expired."""


class InvalidResponse(MeridianError):
    """A response with a success status has an invalid body: missing rows, different lengths, non-finite numbers,
    truncation."""


def _also_requests(error: type, name: str) -> type:
    """Returns a subclass of `error` that is also the exception `name` of `requests`, if that module is imported."""
    requests = sys.modules.get("requests")
    other = getattr(getattr(requests, "exceptions", None), name, None)
    if other is None:
        return error
    return type(error.__name__, (error, other), {"__module__": error.__module__, "__doc__": error.__doc__})


def public_error(failed: Failed) -> Exception:
    """Converts an exception of the native module into a public one."""
    kind, status, message = failed.args
    if kind == "invalid":
        return ValueError(message)
    if kind == "timeout":
        return _also_requests(RequestTimeout, "Timeout")(message)
    if kind == "invalid_response":
        return InvalidResponse(message)
    name = "HTTPError" if kind == "status" else "ConnectionError"
    return _also_requests(RequestFailed, name)(status or 0, message)
