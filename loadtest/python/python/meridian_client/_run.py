"""Start and end of an operation of the native module, for threads and for asyncio."""

from __future__ import annotations

import asyncio
from typing import Callable, Optional, TypeVar

from ._errors import MeridianError, public_error
from ._native import Failed, Job
from ._preference import CancellationToken, Terms

#: Called with the number of completed inputs and the total number.
Progress = Callable[[int, int], object]
_T = TypeVar("_T")

#: Interval at which progress is reported, and Ctrl-C and cancellation are checked.
_TICK_S = 0.1


def native(call: Callable[[], _T]) -> _T:
    """Calls `call` and converts the exceptions of the native module."""
    try:
        return call()
    except Failed as failed:
        raise public_error(failed) from None


def _poll(job: Job, token: Optional[CancellationToken], progress: Optional[Progress], reported: int) -> int:
    """Checks for cancellation and reports progress. Returns the number of inputs that were reported."""
    if token is not None and token.is_cancelled():
        job.cancel()
        raise MeridianError("the operation was cancelled by its token")
    _, _, done, inputs = job.progress()
    if progress is not None and done > reported:
        progress(done, inputs)
    return done


def wait(
    start: Callable[[], Job], terms: Terms, finish: Callable[..., _T], progress: Optional[Progress] = None
) -> _T:
    """Runs an operation; other threads run meanwhile."""
    job, reported = native(start), 0
    try:
        ended = False
        while not ended:
            ended = job.wait(_TICK_S)
            reported = _poll(job, terms.cancel_token, progress, reported)
    except BaseException:
        # Also on Ctrl-C: an abandoned operation must not continue.
        job.cancel()
        raise
    return finish(*native(job.result))


async def wait_async(
    start: Callable[[], Job], terms: Terms, finish: Callable[..., _T], progress: Optional[Progress] = None
) -> _T:
    """As `wait`, for asyncio."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    job, reported = native(start), 0

    def notify() -> None:
        try:
            loop.call_soon_threadsafe(ended.set)
        except RuntimeError:
            pass  # The event loop was closed, so no task waits.

    try:
        job.notify(notify)
        ticks = progress is not None or terms.cancel_token is not None
        while not ended.is_set():
            try:
                await asyncio.wait_for(ended.wait(), _TICK_S if ticks else None)
            except asyncio.TimeoutError:
                pass
            reported = _poll(job, terms.cancel_token, progress, reported)
    except BaseException:
        job.cancel()
        raise
    return finish(*native(job.result))
