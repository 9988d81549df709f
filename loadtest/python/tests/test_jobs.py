"""Tests of durable jobs against a scripted queue: `python -m unittest discover loadtest/python/tests`."""

import asyncio
import http.server
import json
import threading
import unittest
from itertools import islice

import numpy

from meridian_client import (
    JobCancelled,
    JobExpired,
    JobFailed,
    JobFinished,
    JobNotFound,
    JobResult,
    JobTimeout,
    PerformanceClient,
    RequestFailed,
)

REGION = "aws.us-east-1"


class Queue:
    """Scripted gateway: a job is finished at its second poll, unless its name says something else."""

    def __init__(self):
        self.keys, self.polls, self.headers, self.rejections = {}, {}, [], []
        self.lock = threading.Lock()
        queue = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1

            def serve(self):
                raw = self.rfile.read(int(self.headers.get("content-length") or 0))
                with queue.lock:
                    status, response = queue.respond(self.command, self.path, self.headers, raw)
                response = json.dumps(response).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(response)))
                self.end_headers()
                self.wfile.write(response)

            do_GET = do_POST = do_DELETE = serve

            def log_message(self, *_):
                pass

        class Quiet(http.server.ThreadingHTTPServer):
            request_queue_size = 128

            def handle_error(self, *_):
                pass

        self.server = Quiet(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()

    def shown(self, job_id, status, **more):
        return {
            "id": job_id,
            "object": "job",
            "status": status,
            "operation": "embeddings",
            "model": "m",
            "priority": "bulk",
            "inputs": 1,
            "attempts": 1,
            "created_at": 1,
            "expires_at": 9,
            **more,
        }

    def respond(self, method, path, headers, raw):
        error = {"error": {"message": "scripted"}}
        if method == "POST":
            key = headers["idempotency-key"]
            job_id = self.keys.setdefault(key, f"job_{len(self.keys)}.{REGION}")
            self.headers.append(dict(headers.items()))
            if self.rejections:
                return self.rejections.pop(), error
            return 202, self.shown(job_id, "queued")
        if path.startswith("/v1/async?") or path == "/v1/async":
            first = "after=" not in path.replace("created_after=", "")
            return 200, {
                "object": "list",
                "data": [self.shown(f"job_{'b' if first else 'a'}.{REGION}", "queued")],
                "has_more": first,
                # The response leaves the field out if every region could be read.
                **({"unavailable_regions": ["gcp/europe-west4"]} if first else {}),
            }
        job_id = path.rpartition("/")[2]
        name = job_id.partition(".")[0]
        if name == "job_unknown":
            return 404, error
        if method == "DELETE":
            return (409, error) if name == "job_done" else (200, self.shown(job_id, "cancelled"))
        if self.rejections:
            return self.rejections.pop(), error
        polls = self.polls[job_id] = self.polls.get(job_id, 0) + 1
        if name in ("job_failed", "job_expired"):
            return 200, self.shown(job_id, name[4:], error={"message": "the reason"})
        if name == "job_cancelled":
            return 200, self.shown(job_id, "cancelled")
        if name == "job_never":
            return 200, self.shown(job_id, "running")
        if polls == 1:
            return 200, self.shown(job_id, "queued", position=0, estimated_start_seconds=0.01)
        data = [{"index": 1, "embedding": [3, 4]}, {"index": 0, "embedding": [1, 2.5]}]
        return 200, self.shown(job_id, "succeeded", finished_at=5, result={"data": data})


def job(name):
    return f"job_{name}.{REGION}"


class JobsTest(unittest.TestCase):
    def setUp(self):
        self.queue = Queue()
        self.queue.__enter__()
        self.addCleanup(self.queue.__exit__)
        self.client = PerformanceClient(self.queue.url, "k")

    def test_a_repeated_submission_is_one_job_and_has_the_options(self):
        self.queue.rejections = [503, 500]
        body = {"model": "m", "input": ["text"]}
        options = {"priority": "bulk", "deadline_s": 60, "max_time_in_queue_s": 1.5}
        self.assertEqual(self.client.submit("embeddings", body, **options, initial_backoff_ms=1), job("0"))
        self.assertEqual((len(self.queue.keys), len(self.queue.headers)), (1, 3))
        sent = self.queue.headers[-1]
        self.assertEqual(sent["x-meridian-deadline-ms"], "60000")
        self.assertEqual((sent["x-meridian-max-time-in-queue-ms"], sent["x-meridian-priority"]), ("1500", "bulk"))
        self.assertEqual(asyncio.run(self.client.async_submit("embeddings", body, idempotency_key="own")), job("1"))
        self.assertIn("own", self.queue.keys)
        for wrong in ({"operation": "other"}, {"priority": "high"}, {"deadline_s": 0.0}, {"idempotency_key": ""}):
            with self.assertRaises(ValueError, msg=str(wrong)):
                self.client.submit(**{"operation": "embeddings", "body": body, **wrong})

    def test_wait_returns_the_result_or_raises_the_reason(self):
        self.queue.rejections = [503]
        result = self.client.wait(job("1"), timeout=20)
        self.assertEqual((result.job.id, result.job.status, result.job.finished_at), (job("1"), "succeeded", 5))
        numpy.testing.assert_array_equal(result.numpy(), numpy.array([[1, 2.5], [3, 4]], numpy.float32))
        for name, error, reason in (
            ("failed", JobFailed, "the reason"),
            ("expired", JobExpired, "the reason"),
            ("cancelled", JobCancelled, ""),
            ("unknown", JobNotFound, ""),
        ):
            with self.assertRaises(error) as raised:
                asyncio.run(self.client.async_wait(job(name)))
            self.assertEqual((raised.exception.job_id, raised.exception.reason), (job(name), reason))
        with self.assertRaises(JobTimeout) as raised:
            self.client.wait(job("never"), timeout=0.05)
        self.assertIsInstance(raised.exception, TimeoutError)
        self.queue.rejections = [401]
        with self.assertRaises(RequestFailed) as raised:
            self.client.wait(job("1"))
        self.assertEqual(raised.exception.status_code, 401)

    def test_results_are_yielded_as_the_jobs_finish_and_ids_may_be_a_generator(self):
        taken = []

        def ids():
            for number in range(3000):
                taken.append(number)
                yield job(number)

        iteration = self.client.iter_results(ids(), max_concurrent=8)
        outcomes = dict([next(iteration)])
        self.assertLess(len(taken), 3000, "ids are consumed as needed")
        outcomes.update(islice(iteration, 200))
        self.assertEqual(len(outcomes), 201)
        self.assertTrue(all(isinstance(result, JobResult) for result in outcomes.values()))

    def test_every_job_is_yielded_once_and_a_failed_one_does_not_end_the_iteration(self):
        ids = [job(name) for name in ("failed", 1, "unknown", "cancelled", 2, "expired")]
        outcomes = list(self.client.iter_results(ids))
        self.assertEqual(sorted(job_id for job_id, _ in outcomes), sorted(ids))
        kinds = {job_id: type(result) for job_id, result in outcomes}
        self.assertEqual(
            [kinds[job_id] for job_id in ids],
            [JobFailed, JobResult, JobNotFound, JobCancelled, JobResult, JobExpired],
        )

        async def all_of(ids):
            return [job_id async for job_id, _ in self.client.async_iter_results(ids)]

        self.assertEqual(sorted(asyncio.run(all_of(ids))), sorted(ids))
        with self.assertRaises(JobTimeout):
            list(self.client.iter_results([job("never")], timeout=0.1))
        with self.assertRaises(TypeError):
            next(self.client.iter_results(job("1")))

    def test_jobs_are_cancelled_read_and_listed(self):
        self.assertEqual(self.client.cancel(job("1")).status, "cancelled")
        self.assertEqual(asyncio.run(self.client.async_cancel(job("1"))).status, "cancelled")
        with self.assertRaises(JobFinished):
            self.client.cancel(job("done"))
        with self.assertRaises(JobNotFound):
            self.client.job(job("unknown"))
        self.assertEqual(self.client.job(job("failed")).reason, "the reason")
        jobs = self.client.jobs(status="queued", created_after=1.5)
        self.assertEqual(jobs.unavailable_regions, [], "nothing is read yet")
        listed = [found.id for found in jobs]
        self.assertEqual(listed, [job("b"), job("a")], "all pages")
        self.assertEqual(jobs.unavailable_regions, ["gcp/europe-west4"], "of one page")
        with self.assertRaises(StopIteration):
            next(jobs)

        async def all_jobs():
            jobs = self.client.async_jobs()
            return [found.id async for found in jobs], jobs.unavailable_regions

        self.assertEqual(asyncio.run(all_jobs()), (listed, ["gcp/europe-west4"]))
        with self.assertRaises(ValueError):
            list(self.client.jobs(status="done"))


if __name__ == "__main__":
    unittest.main()
