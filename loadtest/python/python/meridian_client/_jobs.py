"""Durable jobs: requests that are computed later (docs/jobs.md)."""

from __future__ import annotations

import base64
import json
import time
from itertools import islice
from typing import Any, AsyncIterator, Callable, Dict, Iterable, Iterator, List, Optional, Tuple, Union

import numpy

from ._errors import JobError, public_error
from ._native import Failed, Job, Native, Results
from ._preference import RequestProcessingPreference, Terms
from ._run import native, wait, wait_async

#: Identifiers that are taken from the iterable of the caller at a time.
_CHUNK = 1024


class JobInfo:
    """State of a job, without its result. Times are seconds since 1970."""

    id: str
    status: str
    operation: str
    model: str
    priority: str
    inputs: int
    attempts: int
    created_at: int
    expires_at: Optional[int]
    finished_at: Optional[int]
    position: Optional[int]
    estimated_start_seconds: Optional[float]

    def __init__(self, fields: Dict[str, Any]) -> None:
        error = fields.pop("error", None)
        vars(self).update(fields)
        #: Reason of the failure, or of the last failed attempt.
        self.reason: Optional[str] = error and error["message"]

    def __repr__(self) -> str:
        return f"JobInfo(id={self.id!r}, status={self.status!r}, model={self.model!r})"


class JobResult:
    """Result of a job that has succeeded. `body` is the body that the ordinary request would have returned, in bytes."""

    def __init__(self, job: JobInfo, body: bytes) -> None:
        self.job = job
        self.body = body

    def json(self) -> Any:
        """The body, parsed."""
        return json.loads(self.body)

    def numpy(self) -> numpy.ndarray:
        """The vectors of an embeddings job as float32, one row per input. A body with `"encoding_format": "base64"` is
        decoded faster, and is a third of the size."""
        if self.job.operation != "embeddings":
            raise ValueError(f"a job of {self.job.operation} has no vectors: use json()")
        rows = sorted(self.json()["data"], key=lambda row: row["index"])
        vectors = [row["embedding"] for row in rows]
        if vectors and isinstance(vectors[0], str):
            block = b"".join(base64.b64decode(vector) for vector in vectors)
            return numpy.frombuffer(block, dtype="<f4").astype(numpy.float32).reshape(len(vectors), -1)
        return numpy.asarray(vectors, dtype=numpy.float32)

    def __repr__(self) -> str:
        return f"JobResult(job={self.job!r}, {len(self.body)} bytes)"


def _info(text: bytes) -> JobInfo:
    return JobInfo(json.loads(text))


def _result(job: bytes, body: bytes) -> JobResult:
    return JobResult(_info(job), body)


#: Result of a job, or the reason why there is none.
Outcome = Union[JobResult, JobError]


class _Iteration:
    """Iteration over results: takes identifiers as they are needed, and converts what the native module returns."""

    def __init__(self, results: Results, ids: Iterable[str], timeout: Optional[float], terms: Terms) -> None:
        self.terms = terms
        self._results = results
        self._ids = iter(ids)
        self._until = None if timeout is None else time.monotonic() + timeout

    def start(self) -> Job:
        """Starts waiting for the next job."""
        if self._results.add([]) == 0:
            self._results.add(list(islice(self._ids, _CHUNK)))
        return self._results.next(None if self._until is None else max(self._until - time.monotonic(), 0.0))

    def finish(self, finished: Optional[Tuple[str, Any]]) -> Optional[Tuple[str, Outcome]]:
        """Converts a finished job; `None` at the end."""
        if finished is None:
            return None
        job_id, result = finished
        if not isinstance(result, Failed):
            return job_id, _result(*result)
        error = public_error(result)
        if isinstance(error, JobError):
            return job_id, error
        raise error


#: Page of jobs, whether there are more, and the regions whose queue could not be read for it.
_Page = Tuple[List[JobInfo], bool, List[str]]
#: Reading of the page after a job: how to start it, its settings, and the conversion of what the native module returns.
_PageRead = Tuple[Callable[[], Job], Terms, Callable[[bytes], _Page]]


class _JobList:
    """List of jobs whose pages are read as needed."""

    #: Regions whose queue could not be read for one of the pages so far. The list lacks jobs of them.
    unavailable_regions: List[str]

    def __init__(self, read: Callable[[Optional[str]], _PageRead]) -> None:
        self.unavailable_regions = []
        self._read = read

    def _received(self, page: _Page) -> Tuple[List[JobInfo], Optional[str]]:
        """Records a page. Returns its jobs, and the last one if there is another page after it."""
        jobs, more, unavailable = page
        new = [region for region in unavailable if region not in self.unavailable_regions]
        self.unavailable_regions += new
        return jobs, jobs[-1].id if more and jobs else None


class JobIterator(_JobList, Iterator[JobInfo]):
    """Iterator over the tenant's jobs, the newest first. Pages are read as needed. Jobs of `unavailable_regions` are
    missing; that list is complete at the end of the iteration."""

    def __init__(self, read: Callable[[Optional[str]], _PageRead]) -> None:
        super().__init__(read)
        self._jobs = self._all()

    def _all(self) -> Iterator[JobInfo]:
        after, is_first = None, True
        while is_first or after is not None:
            jobs, after = self._received(wait(*self._read(after)))
            is_first = False
            yield from jobs

    def __next__(self) -> JobInfo:
        return next(self._jobs)


class AsyncJobIterator(_JobList, AsyncIterator[JobInfo]):
    """As `JobIterator`, for asyncio."""

    def __init__(self, read: Callable[[Optional[str]], _PageRead]) -> None:
        super().__init__(read)
        self._jobs = self._all()

    async def _all(self) -> AsyncIterator[JobInfo]:
        after, is_first = None, True
        while is_first or after is not None:
            jobs, after = self._received(await wait_async(*self._read(after)))
            is_first = False
            for job in jobs:
                yield job

    async def __anext__(self) -> JobInfo:
        return await self._jobs.__anext__()


class JobMethods:
    """Methods of a client for durable jobs."""

    _native: Native

    def _submit(
        self,
        operation: str,
        body: Dict[str, Any],
        idempotency_key: Optional[str],
        priority: Optional[str],
        deadline_s: Optional[float],
        max_time_in_queue_s: Optional[float],
        preference: Optional[RequestProcessingPreference],
        settings: Dict[str, Any],
    ) -> Tuple[Callable[[], Job], Terms, Callable[[bytes], str]]:
        terms = Terms(preference, settings)
        encoded = json.dumps(body, separators=(",", ":")).encode()
        fields = (idempotency_key, priority, deadline_s, max_time_in_queue_s)
        return lambda: self._native.submit(operation, encoded, *fields, terms), terms, lambda job: _info(job).id

    def _pages(
        self,
        status: Optional[str],
        model: Optional[str],
        created_after: Optional[float],
        created_before: Optional[float],
        terms: Terms,
    ) -> Callable[[Optional[str]], _PageRead]:
        times = [None if bound is None else int(bound) for bound in (created_after, created_before)]

        def finish(text: bytes) -> _Page:
            page = json.loads(text)
            return [JobInfo(fields) for fields in page["data"]], page["has_more"], page["unavailable_regions"]

        def read(after: Optional[str]) -> _PageRead:
            return lambda: self._native.jobs(status, model, times[0], times[1], 100, after, terms), terms, finish

        return read

    def submit(
        self,
        operation: str,
        body: Dict[str, Any],
        *,
        idempotency_key: Optional[str] = None,
        priority: Optional[str] = None,
        deadline_s: Optional[float] = None,
        max_time_in_queue_s: Optional[float] = None,
        preference: Optional[RequestProcessingPreference] = None,
        **settings: Any,
    ) -> str:
        """Submits the body of an ordinary request as a job, and returns its id when it is durable. `operation` is
        `embeddings`, `rerank`, `predict` or `classify`. Without an `idempotency_key` the retries of this call have a new
        one, so they are one job; give one to repeat a submission after this process has ended."""
        fields = (idempotency_key, priority, deadline_s, max_time_in_queue_s)
        return wait(*self._submit(operation, body, *fields, preference, settings))

    async def async_submit(
        self,
        operation: str,
        body: Dict[str, Any],
        *,
        idempotency_key: Optional[str] = None,
        priority: Optional[str] = None,
        deadline_s: Optional[float] = None,
        max_time_in_queue_s: Optional[float] = None,
        preference: Optional[RequestProcessingPreference] = None,
        **settings: Any,
    ) -> str:
        """As `submit`, for asyncio."""
        fields = (idempotency_key, priority, deadline_s, max_time_in_queue_s)
        return await wait_async(*self._submit(operation, body, *fields, preference, settings))

    def wait(
        self,
        job_id: str,
        timeout: Optional[float] = None,
        *,
        preference: Optional[RequestProcessingPreference] = None,
        **settings: Any,
    ) -> JobResult:
        """Waits for the result of a job, at most `timeout` seconds. Raises `JobFailed`, `JobCancelled`, `JobExpired`,
        `JobNotFound` or `JobTimeout`. Restarts of gateways are survived."""
        terms = Terms(preference, settings)
        return wait(lambda: self._native.wait(job_id, timeout, terms), terms, _result)

    async def async_wait(
        self,
        job_id: str,
        timeout: Optional[float] = None,
        *,
        preference: Optional[RequestProcessingPreference] = None,
        **settings: Any,
    ) -> JobResult:
        """As `wait`, for asyncio."""
        terms = Terms(preference, settings)
        return await wait_async(lambda: self._native.wait(job_id, timeout, terms), terms, _result)

    def iter_results(
        self,
        ids: Iterable[str],
        timeout: Optional[float] = None,
        *,
        max_concurrent: int = 16,
        preference: Optional[RequestProcessingPreference] = None,
        **settings: Any,
    ) -> Iterator[Tuple[str, Outcome]]:
        """Yields `(id, result)` as the jobs finish, or `(id, error)` with a `JobError` if there is no result. At most
        `max_concurrent` results are in memory, and `ids` is consumed as needed, so it may be a generator. Another
        failure than that of a job is raised after ten minutes of retries, and `JobTimeout` after `timeout` seconds."""
        iteration = self._iteration(ids, timeout, max_concurrent, preference, settings)
        while True:
            finished = wait(iteration.start, iteration.terms, iteration.finish)
            if finished is None:
                return
            yield finished

    async def async_iter_results(
        self,
        ids: Iterable[str],
        timeout: Optional[float] = None,
        *,
        max_concurrent: int = 16,
        preference: Optional[RequestProcessingPreference] = None,
        **settings: Any,
    ) -> AsyncIterator[Tuple[str, Outcome]]:
        """As `iter_results`, for asyncio."""
        iteration = self._iteration(ids, timeout, max_concurrent, preference, settings)
        while True:
            finished = await wait_async(iteration.start, iteration.terms, iteration.finish)
            if finished is None:
                return
            yield finished

    def _iteration(
        self,
        ids: Iterable[str],
        timeout: Optional[float],
        max_concurrent: int,
        preference: Optional[RequestProcessingPreference],
        settings: Dict[str, Any],
    ) -> _Iteration:
        if isinstance(ids, str):
            raise TypeError("ids is a str; give a list of ids, or use wait() for one job")
        terms = Terms(preference, settings)
        results = native(lambda: self._native.results(max_concurrent, terms))
        return _Iteration(results, ids, timeout, terms)

    def cancel(
        self, job_id: str, *, preference: Optional[RequestProcessingPreference] = None, **settings: Any
    ) -> JobInfo:
        """Cancels a job. Raises `JobFinished` if it is finished, and `JobNotFound`."""
        terms = Terms(preference, settings)
        return wait(lambda: self._native.durable_job(True, job_id, terms), terms, _info)

    async def async_cancel(
        self, job_id: str, *, preference: Optional[RequestProcessingPreference] = None, **settings: Any
    ) -> JobInfo:
        """As `cancel`, for asyncio."""
        terms = Terms(preference, settings)
        return await wait_async(lambda: self._native.durable_job(True, job_id, terms), terms, _info)

    def job(
        self, job_id: str, *, preference: Optional[RequestProcessingPreference] = None, **settings: Any
    ) -> JobInfo:
        """Returns the state of a job. Raises `JobNotFound`."""
        terms = Terms(preference, settings)
        return wait(lambda: self._native.durable_job(False, job_id, terms), terms, _info)

    async def async_job(
        self, job_id: str, *, preference: Optional[RequestProcessingPreference] = None, **settings: Any
    ) -> JobInfo:
        """As `job`, for asyncio."""
        terms = Terms(preference, settings)
        return await wait_async(lambda: self._native.durable_job(False, job_id, terms), terms, _info)

    def jobs(
        self,
        *,
        status: Optional[str] = None,
        model: Optional[str] = None,
        created_after: Optional[float] = None,
        created_before: Optional[float] = None,
        preference: Optional[RequestProcessingPreference] = None,
        **settings: Any,
    ) -> JobIterator:
        """Iterates over the tenant's jobs, the newest first, without results. Pages are read as needed."""
        terms = Terms(preference, settings)
        return JobIterator(self._pages(status, model, created_after, created_before, terms))

    def async_jobs(
        self,
        *,
        status: Optional[str] = None,
        model: Optional[str] = None,
        created_after: Optional[float] = None,
        created_before: Optional[float] = None,
        preference: Optional[RequestProcessingPreference] = None,
        **settings: Any,
    ) -> AsyncJobIterator:
        """As `jobs`, for asyncio."""
        terms = Terms(preference, settings)
        return AsyncJobIterator(self._pages(status, model, created_after, created_before, terms))
