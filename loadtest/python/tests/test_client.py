"""Tests of the package against a scripted server: `python -m unittest discover loadtest/python/tests`."""

import asyncio
import base64
import http.server
import inspect
import json
import struct
import threading
import time
import unittest

import numpy

import meridian_client
from meridian_client import CancellationToken, PerformanceClient, RequestProcessingPreference


def number(text):
    return float(text.split()[-1])


def response_to(path, body):
    """Valid response: the vector of `text 7` is (7, 1, -0.5)."""
    if path.endswith("/v1/embeddings"):
        rows = [(number(text), 1.0, -0.5) for text in body["input"]]
        if body.get("encoding_format") == "base64":
            rows = [base64.b64encode(struct.pack("<3f", *row)).decode() for row in rows]
        data = [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(rows)]
        usage = {"prompt_tokens": len(rows), "total_tokens": 2 * len(rows)}
        return {"object": "list", "data": data, "model": body["model"], "usage": usage}
    if path == "/rerank":
        ranks = [{"index": index, "score": number(text) / 10} for index, text in enumerate(body["texts"])]
        return sorted(ranks, key=lambda rank: -rank["score"])
    if path == "/predict":
        return [[{"label": texts[0], "score": 0.75}] for texts in body["inputs"]]
    return {"path": path, "body": body}


class Server:
    """Calls `script` for each request: None for a valid response, or status and body. Records the requests."""

    def __init__(self, script=lambda path, body: None):
        self.requests = requests = []

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1

            def do_POST(self):
                raw = self.rfile.read(int(self.headers["content-length"]))
                body = json.loads(raw) if raw else None
                requests.append((self.command, self.path, dict(self.headers.items()), body))
                status, response = script(self.path, body) or (200, response_to(self.path, body))
                response = response if isinstance(response, bytes) else json.dumps(response).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(response)))
                self.end_headers()
                self.wfile.write(response)

            do_GET = do_POST

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


TEXTS = [f"text {place}" for place in range(250)]


class EmbedTest(unittest.TestCase):
    def test_vectors_are_one_float32_block_in_the_order_of_the_texts(self):
        with Server() as server:
            client = PerformanceClient(server.url, api_key="key")
            response = client.embed(TEXTS, model="m", batch_size=7)
            array = response.numpy()
            self.assertEqual((array.dtype, array.shape), (numpy.float32, (250, 3)))
            self.assertTrue(array.flags.c_contiguous and array.flags.writeable)
            self.assertIs(array, response.numpy())
            self.assertEqual(array[:, 0].tolist(), list(range(250)))
            self.assertEqual(array[249].tolist(), [249.0, 1.0, -0.5])
            self.assertEqual((response.object, response.model), ("list", "m"))
            self.assertEqual((response.usage.prompt_tokens, response.usage.total_tokens), (250, 500))
            self.assertEqual(len(server.requests), 36)
            self.assertEqual(server.requests[0][2]["authorization"], "Bearer key")
            self.assertEqual(len(response.individual_request_times), 36)
            self.assertGreater(response.total_time, max(response.individual_request_times) * 0.99)
            self.assertEqual(len(response.response_headers), 36)
            self.assertIn("content-length", response.response_headers[0])
            self.assertEqual(response.data[3].embedding, [3.0, 1.0, -0.5])
            self.assertEqual([row.index for row in response.data], list(range(250)))
            del response, client
            self.assertEqual(array[100, 0], 100, "the array keeps the block alive")

    def test_rows_are_available_in_base64(self):
        with Server() as server:
            response = PerformanceClient(server.url, "k").embed(["text 2"], "m", encoding_format="base64")
            self.assertEqual(base64.b64decode(response.data[0].embedding), struct.pack("<3f", 2, 1, -0.5))

    def test_any_text_is_transmitted_unchanged(self):
        received = []

        def script(path, body):
            received.extend(body["input"])
            return 200, response_to(path, {"model": "m", "input": ["text 1"] * len(body["input"])})

        texts = ["", 'quote " and \\ slash', "new\nline \x00 and \x1f", "Ωμέγα 海 🌊", "plain"]
        with Server(script) as server:
            PerformanceClient(server.url, "k").embed(texts, "m")
        self.assertEqual(received, texts)

    def test_asyncio_has_the_same_results_and_does_not_block(self):
        async def both(client):
            reported, beats = [], 0

            async def beat():
                nonlocal beats
                while True:
                    beats += 1
                    await asyncio.sleep(0)

            beating = asyncio.ensure_future(beat())
            progress = lambda done, inputs: reported.append((done, inputs))  # noqa: E731
            one, other = await asyncio.gather(
                client.async_embed(TEXTS, "m", progress=progress), client.async_embed(TEXTS[:5], "m")
            )
            beating.cancel()
            return one, other, reported, beats

        with Server() as server:
            one, other, reported, beats = asyncio.run(both(PerformanceClient(server.url, "k")))
        self.assertEqual((one.numpy().shape, other.numpy().shape), ((250, 3), (5, 3)))
        self.assertEqual(reported[-1], (250, 250))
        self.assertGreater(beats, 1)

    def test_progress_fits_tqdm(self):
        reported = []
        with Server() as server:
            PerformanceClient(server.url, "k").embed(TEXTS, "m", progress=lambda *at: reported.append(at))
        self.assertEqual(reported[-1], (250, 250))
        self.assertEqual(reported, sorted(reported))

    def test_waiting_releases_the_interpreter_lock(self):
        gate = threading.Event()

        def script(path, body):
            gate.wait(30)

        with Server(script) as server:
            client = PerformanceClient(server.url, "k")
            waiting = threading.Thread(target=lambda: client.embed(TEXTS, "m"))
            waiting.start()
            while not server.requests:
                time.sleep(0)
            gate.set()
            waiting.join()


class ScoreTest(unittest.TestCase):
    def test_texts_are_ranked_and_classified(self):
        with Server() as server:
            client = PerformanceClient(server.url, "k")
            response = client.rerank("q", TEXTS[:25], return_text=True, batch_size=10)
            self.assertEqual([result.index for result in response.data[:10]], list(range(9, -1, -1)))
            self.assertTrue(all(result.score == result.index / 10 for result in response.data))
            self.assertEqual((server.requests[0][3]["return_text"], server.requests[0][3]["query"]), (True, "q"))
            response = client.classify(TEXTS[:25], model="m", batch_size=10)
            self.assertEqual([group[0].label for group in response.data], TEXTS[:25])
            self.assertEqual(response.data[0][0].score, 0.75)

            async def both():
                return await client.async_rerank("q", TEXTS[:3]), await client.async_classify(TEXTS[:3])

            ranks, classes = asyncio.run(both())
            self.assertEqual((len(ranks.data), len(classes.data)), (3, 3))

    def test_batch_post_sends_any_payload(self):
        with Server() as server:
            client = PerformanceClient(server.url, "k")
            payloads = [{"n": place} for place in range(20)]
            response = client.batch_post("/x?y=z", payloads, custom_headers={"x-priority": "bulk"})
            self.assertEqual([one["body"]["n"] for one in response.data], list(range(20)))
            self.assertEqual(server.requests[0][2]["x-priority"], "bulk")
            self.assertEqual(len(response.response_headers), 20)
            response = asyncio.run(client.async_batch_post("x", [None], method="GET"))
            self.assertEqual((server.requests[-1][0], response.data[0]["path"]), ("GET", "/x"))


class FailureTest(unittest.TestCase):
    def test_errors_contain_status_and_inputs(self):
        with Server(lambda path, body: (400, {"error": "no"})) as server:
            client = PerformanceClient(server.url, "k")
            with self.assertRaises(meridian_client.RequestFailed) as raised:
                client.embed(TEXTS, "m", batch_size=100, max_concurrent_requests=1)
            self.assertEqual((raised.exception.args[0], raised.exception.status_code), (400, 400))
            self.assertIn("inputs 0..100", str(raised.exception))
            self.assertEqual(len(server.requests), 1)

    def test_invalid_responses_are_errors(self):
        good = response_to("/v1/embeddings", {"model": "m", "input": ["text 1", "text 2"]})
        for spoil in [
            lambda rows: rows.pop(),
            lambda rows: rows[0].update(embedding=[1.0]),
            lambda rows: rows[0].update(embedding=[1.0, float("nan"), 2.0]),
            lambda rows: rows[0].update(index=1),
        ]:
            bad = json.loads(json.dumps(good))
            spoil(bad["data"])
            with Server(lambda path, body: (200, bad)) as server:
                with self.assertRaises(meridian_client.InvalidResponse):
                    PerformanceClient(server.url, "k").embed(["text 1", "text 2"], "m")
        with Server(lambda path, body: (200, json.dumps(good).encode()[:-9])) as server:
            with self.assertRaises(meridian_client.InvalidResponse):
                PerformanceClient(server.url, "k").embed(["text 1", "text 2"], "m")

    def test_transient_failures_are_retried_at_another_endpoint(self):
        with Server(lambda path, body: (503, {})) as bad, Server() as good:
            client = PerformanceClient([bad.url, good.url], "k")
            response = client.embed(TEXTS, "m", batch_size=50, max_concurrent_requests=2, initial_backoff_ms=1)
            self.assertEqual(response.numpy()[:, 0].tolist(), list(range(250)))
            self.assertGreaterEqual(max(response.attempts), 2)

    def test_timeouts_and_cancellation(self):
        gate = threading.Event()
        with Server(lambda path, body: gate.wait(30) and None) as server:
            try:
                client = PerformanceClient(server.url, "k")
                with self.assertRaises(TimeoutError):
                    client.embed(TEXTS, "m", total_timeout_s=0.05)
                token = CancellationToken()
                threading.Timer(0.05, token.cancel).start()
                with self.assertRaises(meridian_client.MeridianError):
                    client.embed(TEXTS, "m", cancel_token=token)

                async def timed_out():
                    await asyncio.wait_for(client.async_embed(TEXTS, "m"), 0.05)

                with self.assertRaises(asyncio.TimeoutError):
                    asyncio.run(timed_out())
            finally:
                gate.set()

    def test_invalid_arguments_are_rejected_before_anything_is_sent(self):
        with Server() as server:
            client = PerformanceClient(server.url, "k")
            for call in [
                lambda: client.embed([], "m"),
                lambda: client.embed(TEXTS, "m", batch_size=0),
                lambda: client.embed(TEXTS, "m", encoding_format="hex"),
                lambda: client.embed(TEXTS, "m", timeout_s=0.0),
                lambda: client.batch_post("/x", []),
                lambda: client.batch_post("/x y", [1]),
                lambda: PerformanceClient("127.0.0.1:80", "k"),
                lambda: PerformanceClient(server.url, "k", proxy="http://p"),
            ]:
                self.assertRaises(ValueError, call)
            for call in [
                lambda: client.embed("text", "m"),
                lambda: client.embed([1], "m"),
                lambda: client.embed(TEXTS, "m", batch_sise=1),
            ]:
                self.assertRaises(TypeError, call)
            self.assertEqual(server.requests, [])


class CompatibilityTest(unittest.TestCase):
    """Same names as Baseten's performance client 0.1.16, which this one replaces."""

    CALLS = {
        "embed": "input model encoding_format dimensions user preference",
        "rerank": "query texts raw_scores model return_text truncate truncation_direction preference",
        "classify": "inputs model raw_scores truncate truncation_direction preference",
        "batch_post": "url_path payloads custom_headers preference method",
    }
    PREFERENCE = (
        "max_concurrent_requests batch_size max_chars_per_request pin_initial_endpoint_once timeout_s hedge_delay "
        "total_timeout_s hedge_budget_pct retry_budget_pct max_retries initial_backoff_ms cancel_token "
        "primary_api_key_override extra_headers non_retryable_status_codes trace_context"
    )

    def test_calls_have_the_same_arguments_in_the_same_order(self):
        for name, expected in self.CALLS.items():
            for call in (name, f"async_{name}"):
                arguments = list(inspect.signature(getattr(PerformanceClient, call)).parameters)
                self.assertEqual(arguments[1:], expected.split() + ["progress", "settings"], call)
        arguments = list(inspect.signature(PerformanceClient).parameters)
        expected = ["base_url", "api_key", "http_version", "client_wrapper", "proxy", "endpoint_pool"]
        self.assertEqual(arguments[: len(expected)], expected)

    def test_preferences_have_the_same_fields_and_take_effect(self):
        preference = RequestProcessingPreference.default()
        for field in self.PREFERENCE.split():
            self.assertTrue(hasattr(preference, field), field)
        preference.batch_size = 100
        preference.extra_headers = {"x-a": "b"}
        preference.primary_api_key_override = "other"
        preference.trace_context = meridian_client.TraceContext("00-1-2-01", "s")
        with Server() as server:
            PerformanceClient(server.url, "k").embed(TEXTS, "m", preference=preference)
            headers = server.requests[0][2]
            sent = [headers[name] for name in ("x-a", "authorization", "traceparent", "tracestate")]
            self.assertEqual((len(server.requests), sent), (3, ["b", "Bearer other", "00-1-2-01", "s"]))
        self.assertNotIn("other", repr(preference))

    def test_endpoints_of_a_pool_share_the_requests(self):
        from meridian_client import Endpoint, EndpointPool, HttpClientWrapper

        with Server() as one, Server() as other:
            wrapper = HttpClientWrapper(http_version=1)
            endpoints = [Endpoint(server.url, "k", wrapper, deployment_health_path="/h") for server in (one, other)]
            pool = EndpointPool(endpoints, endpoint_weights=[0.5, 0.5])
            client = PerformanceClient(one.url, "k", endpoint_pool=pool)
            client.embed(TEXTS, "m", batch_size=10)
            self.assertEqual(len(one.requests) + len(other.requests), 25)
            self.assertGreater(min(len(one.requests), len(other.requests)), 5)


if __name__ == "__main__":
    unittest.main()
