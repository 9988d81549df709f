from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

__version__: str

class Failed(Exception): ...

class Vectors:
    dimensions: int
    model: str
    prompt_tokens: int
    total_tokens: int
    __array_interface__: Dict[str, Any]

class OperationStats:
    total_time: float
    times: List[float]
    attempts: List[int]
    headers: List[Dict[str, str]]

class Job:
    def wait(self, seconds: float) -> bool: ...
    def notify(self, notify: Callable[[], object]) -> None: ...
    def progress(self) -> Tuple[int, int, int, int]: ...
    def cancel(self) -> None: ...
    def result(self) -> Tuple[Any, OperationStats]: ...

class Results:
    def add(self, ids: List[str]) -> int: ...
    def next(self, timeout: Optional[float]) -> Job: ...

class Native:
    def __init__(
        self,
        endpoints: Sequence[Tuple[str, Optional[str], float]],
        http_version: int,
        roots_pem: Optional[bytes],
    ) -> None: ...
    def embed(
        self,
        texts: Sequence[str],
        model: str,
        dimensions: Optional[int],
        user: Optional[str],
        as_floats: bool,
        preference: object,
    ) -> Job: ...
    def rerank(
        self,
        query: str,
        texts: Sequence[str],
        model: Optional[str],
        raw_scores: bool,
        return_text: bool,
        truncate: bool,
        truncation_direction: str,
        preference: object,
    ) -> Job: ...
    def classify(
        self,
        texts: Sequence[str],
        model: Optional[str],
        raw_scores: bool,
        truncate: bool,
        truncation_direction: str,
        preference: object,
    ) -> Job: ...
    def batch(self, method: str, path: str, bodies: Sequence[bytes], preference: object) -> Job: ...
    def submit(
        self,
        operation: str,
        body: bytes,
        idempotency_key: Optional[str],
        priority: Optional[str],
        deadline_s: Optional[float],
        max_time_in_queue_s: Optional[float],
        preference: object,
    ) -> Job: ...
    def durable_job(self, cancels: bool, id: str, preference: object) -> Job: ...
    def wait(self, id: str, timeout: Optional[float], preference: object) -> Job: ...
    def jobs(
        self,
        status: Optional[str],
        model: Optional[str],
        created_after: Optional[int],
        created_before: Optional[int],
        limit: Optional[int],
        after: Optional[str],
        preference: object,
    ) -> Job: ...
    def results(self, in_flight: int, preference: object) -> Results: ...
