"""Settings of an operation."""

from __future__ import annotations

import threading
from typing import Dict, List, Optional, Set, Tuple


class CancellationToken:
    """Cancels operations from any thread."""

    def __init__(self) -> None:
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """Cancels all current and future operations with this token."""
        self._cancelled.set()

    def is_cancelled(self) -> bool:
        """Returns whether the token was cancelled."""
        return self._cancelled.is_set()


class TraceContext:
    """W3C trace context of the requests."""

    def __init__(self, traceparent: str, tracestate: Optional[str] = None) -> None:
        self.traceparent = traceparent
        self.tracestate = tracestate


class RequestProcessingPreference:
    """Settings of an operation; omitted ones have their defaults.

    `batch_size`, `max_chars_per_request` and `max_tokens_per_request` (estimated) limit the size of a request,
    `max_concurrent_requests` the number of requests in flight. `timeout_s` is the timeout of an attempt,
    `total_timeout_s` that of the operation. Each success pays for `retry_budget_pct` of a retry and for
    `hedge_budget_pct` of a hedged request, which is sent after `hedge_delay` seconds, or never.
    """

    max_concurrent_requests: int
    batch_size: int
    max_chars_per_request: int
    max_tokens_per_request: Optional[int]
    pin_initial_endpoint_once: bool
    timeout_s: float
    hedge_delay: Optional[float]
    total_timeout_s: Optional[float]
    hedge_budget_pct: float
    retry_budget_pct: float
    max_retries: int
    initial_backoff_ms: int
    cancel_token: Optional[CancellationToken]
    primary_api_key_override: Optional[str]
    extra_headers: Optional[Dict[str, str]]
    non_retryable_status_codes: Set[int]
    trace_context: Optional[TraceContext]

    def __init__(
        self,
        max_concurrent_requests: Optional[int] = None,
        batch_size: Optional[int] = None,
        max_chars_per_request: Optional[int] = None,
        pin_initial_endpoint_once: Optional[bool] = None,
        timeout_s: Optional[float] = None,
        hedge_delay: Optional[float] = None,
        total_timeout_s: Optional[float] = None,
        hedge_budget_pct: Optional[float] = None,
        retry_budget_pct: Optional[float] = None,
        max_retries: Optional[int] = None,
        initial_backoff_ms: Optional[int] = None,
        cancel_token: Optional[CancellationToken] = None,
        primary_api_key_override: Optional[str] = None,
        extra_headers: Optional[Dict[str, str]] = None,
        non_retryable_status_codes: Optional[Set[int]] = None,
        trace_context: Optional[TraceContext] = None,
        max_tokens_per_request: Optional[int] = None,
    ) -> None:
        def or_default(value, default):
            return default if value is None else value

        self.max_concurrent_requests = or_default(max_concurrent_requests, 256)
        self.batch_size = or_default(batch_size, 64)
        self.max_chars_per_request = or_default(max_chars_per_request, 256_000)
        self.max_tokens_per_request = max_tokens_per_request
        self.pin_initial_endpoint_once = or_default(pin_initial_endpoint_once, False)
        self.timeout_s = or_default(timeout_s, 3600.0)
        self.hedge_delay = hedge_delay
        self.total_timeout_s = total_timeout_s
        self.hedge_budget_pct = or_default(hedge_budget_pct, 0.02)
        self.retry_budget_pct = or_default(retry_budget_pct, 0.10)
        self.max_retries = or_default(max_retries, 5)
        self.initial_backoff_ms = or_default(initial_backoff_ms, 125)
        self.cancel_token = cancel_token
        self.primary_api_key_override = primary_api_key_override
        self.extra_headers = extra_headers
        self.non_retryable_status_codes = set(or_default(non_retryable_status_codes, ()))
        self.trace_context = trace_context

    @classmethod
    def default(cls) -> "RequestProcessingPreference":
        """All defaults."""
        return cls()

    def __repr__(self) -> str:
        hidden = ("primary_api_key_override", "extra_headers", "cancel_token", "trace_context")
        fields = ", ".join(f"{name}={value!r}" for name, value in vars(self).items() if name not in hidden)
        return f"RequestProcessingPreference({fields})"


#: Settings that are also accepted as keyword arguments of a call.
SETTINGS = tuple(vars(RequestProcessingPreference()))


class Terms:
    """Preference merged with the keyword arguments of the call, in the form of the native module."""

    def __init__(
        self,
        preference: Optional[RequestProcessingPreference],
        settings: Dict[str, object],
        custom_headers: Optional[Dict[str, str]] = None,
    ) -> None:
        vars(self).update(vars(RequestProcessingPreference() if preference is None else preference))
        for name, value in settings.items():
            if name not in SETTINGS:
                raise TypeError(f"unexpected keyword argument {name!r}; settings are {', '.join(SETTINGS)}")
            if value is not None:
                setattr(self, name, value)
        if self.pin_initial_endpoint_once:
            raise ValueError("pin_initial_endpoint_once is not supported: requests are balanced by the number in flight")
        self.non_retryable_status_codes = sorted(self.non_retryable_status_codes)
        headers: List[Tuple[str, str]] = []
        if self.trace_context is not None:
            headers.append(("traceparent", self.trace_context.traceparent))
            if self.trace_context.tracestate:
                headers.append(("tracestate", self.trace_context.tracestate))
        if self.primary_api_key_override is not None:
            headers.append(("authorization", f"Bearer {self.primary_api_key_override}"))
        headers.extend((self.extra_headers or {}).items())
        headers.extend((custom_headers or {}).items())
        self.headers = headers
