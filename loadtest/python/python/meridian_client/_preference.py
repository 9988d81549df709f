"""How an operation is carried out."""

from __future__ import annotations

import threading
from typing import Dict, List, Optional, Set, Tuple


class CancellationToken:
    """Takes operations back, from any thread."""

    def __init__(self) -> None:
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """Takes back every operation that was given this token, and every one that will be."""
        self._cancelled.set()

    def is_cancelled(self) -> bool:
        """Whether it was used."""
        return self._cancelled.is_set()


class TraceContext:
    """A W3C trace that requests belong to."""

    def __init__(self, traceparent: str, tracestate: Optional[str] = None) -> None:
        self.traceparent = traceparent
        self.tracestate = tracestate


class RequestProcessingPreference:
    """How an operation is carried out. Whatever is left out has the default that stands here.

    `batch_size`, `max_chars_per_request` and `max_tokens_per_request` (estimated) say what one request carries,
    `max_concurrent_requests` how many are open at once. `timeout_s` is the time of one attempt, `total_timeout_s` that of
    everything. A retry is paid for by successes (`retry_budget_pct` of one each), and so is a hedge (`hedge_budget_pct`), which is
    made after `hedge_delay` seconds, or never.
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
        def said(value, default):
            return default if value is None else value

        self.max_concurrent_requests = said(max_concurrent_requests, 256)
        self.batch_size = said(batch_size, 64)
        self.max_chars_per_request = said(max_chars_per_request, 256_000)
        self.max_tokens_per_request = max_tokens_per_request
        self.pin_initial_endpoint_once = said(pin_initial_endpoint_once, False)
        self.timeout_s = said(timeout_s, 3600.0)
        self.hedge_delay = hedge_delay
        self.total_timeout_s = total_timeout_s
        self.hedge_budget_pct = said(hedge_budget_pct, 0.02)
        self.retry_budget_pct = said(retry_budget_pct, 0.10)
        self.max_retries = said(max_retries, 5)
        self.initial_backoff_ms = said(initial_backoff_ms, 125)
        self.cancel_token = cancel_token
        self.primary_api_key_override = primary_api_key_override
        self.extra_headers = extra_headers
        self.non_retryable_status_codes = set(said(non_retryable_status_codes, ()))
        self.trace_context = trace_context

    @classmethod
    def default(cls) -> "RequestProcessingPreference":
        """All defaults."""
        return cls()

    def __repr__(self) -> str:
        hidden = ("primary_api_key_override", "extra_headers", "cancel_token", "trace_context")
        fields = ", ".join(f"{name}={value!r}" for name, value in vars(self).items() if name not in hidden)
        return f"RequestProcessingPreference({fields})"


#: What may also be said in the call itself.
SETTINGS = tuple(vars(RequestProcessingPreference()))


class Terms:
    """A preference with what was said in the call itself, as the native side reads it."""

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
            raise ValueError("pin_initial_endpoint_once is not supported: requests go where the fewest are in flight")
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
