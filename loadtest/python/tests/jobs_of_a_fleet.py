"""Durable jobs of a running fleet: `python jobs_of_a_fleet.py URL [KEY] [COUNT]`. The snippet is that of docs/client.md."""

import asyncio
import pathlib
import re
import sys

import numpy

from meridian_client import JobCancelled, JobFinished, JobResult, PerformanceClient


def snippet():
    """Returns the Python code of docs/client.md that submits jobs."""
    page = (pathlib.Path(__file__).parents[3] / "docs/client.md").read_text()
    found = [code for code in re.findall(r"```python\n(.*?)```", page, re.S) if "client.submit(" in code]
    assert len(found) == 1, "docs/client.md has one snippet with jobs"
    return found[0]


def main(url, key="local", count="100"):
    client = PerformanceClient(url, api_key=key)
    texts = [f"text {number}" for number in range(int(count))]
    expected = client.embed(texts, model="minilm").numpy()

    scope = {"client": client, "texts": texts}
    exec(snippet(), scope)
    vectors = scope["vectors"]
    assert len(vectors) == len(texts) and len(scope["ids"]) == len(set(scope["ids"].values())) == len(texts)
    for number, text in enumerate(texts):
        numpy.testing.assert_allclose(vectors[text], expected[number], atol=1e-5)

    body = {"model": "minilm", "input": ["again"]}
    keyed = [client.submit("embeddings", body, idempotency_key="one key", priority="bulk") for _ in range(2)]
    assert keyed[0] == keyed[1], "one job for a key"
    result = asyncio.run(client.async_wait(keyed[0], timeout=60))
    assert isinstance(result, JobResult) and result.numpy().shape == (1, expected.shape[1])
    try:
        client.cancel(keyed[0])
        raise AssertionError("a finished job cannot be cancelled")
    except JobFinished:
        pass
    last = client.submit("embeddings", {"model": "minilm", "input": ["cancelled"]})
    try:
        assert client.cancel(last).status == "cancelled"
        client.wait(last, timeout=60)
        raise AssertionError("a cancelled job has no result")
    except (JobCancelled, JobFinished):
        pass  # It may have been computed before the cancellation.
    listed = {job.id for job in client.jobs(model="minilm")}
    assert listed >= set(scope["ids"].values()) | {keyed[0], last}, "all pages of the list"
    assert not list(client.jobs(model="another"))
    print(f"{len(texts)} jobs have the vectors of the ordinary requests")


main(*sys.argv[1:])
