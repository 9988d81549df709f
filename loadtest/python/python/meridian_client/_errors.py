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


class JobError(MeridianError):
    """There is no result of a durable job. `job_id` is the job, `reason` that of the server, if it states one."""

    def __init__(self, message: str, job_id: str, reason: str = "") -> None:
        super().__init__(message)
        self.job_id = job_id
        self.reason = reason


class JobFailed(JobError):
    """The model rejected the request of the job, or all attempts failed."""


class JobCancelled(JobError):
    """The job was cancelled."""


class JobExpired(JobError):
    """The deadline of the job, or its maximum time in the queue, has passed."""


class JobFinished(JobError):
    """The job is finished, so it cannot be cancelled."""


class JobNotFound(JobError):
    """There is no such job, or its retention time has passed."""


class JobTimeout(JobError, TimeoutError):
    """The job is not finished within the timeout of the call. It continues."""


_JOB_ERRORS = {
    "job_failed": JobFailed,
    "job_cancelled": JobCancelled,
    "job_expired": JobExpired,
    "job_finished": JobFinished,
    "job_not_found": JobNotFound,
    "job_timeout": JobTimeout,
}


def _also_requests(error: type, name: str) -> type:
    """Returns a subclass of `error` that is also the exception `name` of `requests`, if that module is imported."""
    requests = sys.modules.get("requests")
    other = getattr(getattr(requests, "exceptions", None), name, None)
    if other is None:
        return error
    return type(error.__name__, (error, other), {"__module__": error.__module__, "__doc__": error.__doc__})


def public_error(failed: Failed) -> Exception:
    """Converts an exception of the native module into a public one."""
    kind, status, message = failed.args[:3]
    if kind in _JOB_ERRORS:
        return _JOB_ERRORS[kind](message, *failed.args[3:])
    if kind == "invalid":
        return ValueError(message)
    if kind == "timeout":
        return _also_requests(RequestTimeout, "Timeout")(message)
    if kind == "invalid_response":
        return InvalidResponse(message)
    name = "HTTPError" if kind == "status" else "ConnectionError"
    return _also_requests(RequestFailed, name)(status or 0, message)
