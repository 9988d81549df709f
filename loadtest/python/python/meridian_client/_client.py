"""The client, for threads and for asyncio."""

from __future__ import annotations

import json
import os
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

from ._errors import public_error
from ._jobs import JobMethods
from ._native import Failed, Native
from ._preference import RequestProcessingPreference, Terms
from ._results import (
    BatchPostResponse,
    ClassificationResponse,
    ClassificationResult,
    OpenAIEmbeddingsResponse,
    RerankResponse,
    RerankResult,
)
from ._run import Progress, native, wait, wait_async


class HttpClientWrapper:
    """HTTP version of a client. Connections are not shared between clients."""

    def __init__(self, http_version: int = 1, proxy: Optional[str] = None) -> None:
        if proxy is not None:
            raise ValueError("proxy is not supported: use the address of the proxy as the base URL")
        if http_version not in (1, 2):
            raise ValueError(f"http_version {http_version}: write 1 or 2")
        self.http_version = http_version


class Endpoint:
    """One of several interchangeable endpoints. Health is derived from the requests themselves; arguments for health
    checks are accepted and have no effect."""

    def __init__(
        self,
        base_url: str,
        api_key: Optional[str] = None,
        client_wrapper: Optional[HttpClientWrapper] = None,
        **health: object,
    ) -> None:
        self.base_url = base_url
        self.api_key = api_key


class EndpointPool:
    """Interchangeable endpoints. An endpoint with weight 0 is a standby."""

    def __init__(self, endpoints: Sequence[Endpoint], endpoint_weights: Optional[Sequence[float]] = None) -> None:
        self.endpoints = list(endpoints)
        self.endpoint_weights = [1.0] * len(self.endpoints) if endpoint_weights is None else list(endpoint_weights)
        if len(self.endpoint_weights) != len(self.endpoints):
            raise ValueError(f"{len(self.endpoint_weights)} weights for {len(self.endpoints)} endpoints")


class PerformanceClient(JobMethods):
    """Client for bulk embedding, reranking and classification, and for durable jobs.

    `base_url` is the URL for an OpenAI client, with or without `/v1`; several URLs share the load and replace each
    other on failure. Without `api_key`, the environment variables `MERIDIAN_API_KEY` and `BASETEN_API_KEY` are used.
    `http_version` 2 is HTTP/2. `roots_pem` are CA certificates that are trusted in addition to the system's.

    Every method accepts a `preference`, or its fields as keyword arguments, and `progress`, which is called with the
    number of completed inputs and the total number. Methods with the prefix `async_` are for asyncio; the others
    release the interpreter lock while they wait. Create a client after forking, not before.
    """

    def __init__(
        self,
        base_url: Union[str, Sequence[str]],
        api_key: Optional[str] = None,
        http_version: int = 1,
        client_wrapper: Optional[HttpClientWrapper] = None,
        proxy: Optional[str] = None,
        endpoint_pool: Optional[EndpointPool] = None,
        roots_pem: Optional[bytes] = None,
    ) -> None:
        self._wrapper = HttpClientWrapper(http_version, proxy) if client_wrapper is None else client_wrapper
        environment = os.environ.get("MERIDIAN_API_KEY") or os.environ.get("BASETEN_API_KEY")
        self._api_key = api_key or environment or None
        endpoints: List[Tuple[str, Optional[str], float]]
        if endpoint_pool is None:
            urls = [base_url] if isinstance(base_url, str) else list(base_url)
            endpoints = [(url, self._api_key, 1.0) for url in urls]
        else:
            pairs = zip(endpoint_pool.endpoints, endpoint_pool.endpoint_weights)
            endpoints = [(one.base_url, one.api_key or self._api_key, float(weight)) for one, weight in pairs]
        self._native = native(lambda: Native(endpoints, self._wrapper.http_version, roots_pem))

    @property
    def api_key(self) -> Optional[str]:
        """The API key."""
        return self._api_key

    def get_client_wrapper(self) -> HttpClientWrapper:
        """The HTTP settings of this client, for the creation of another one."""
        return self._wrapper

    # Each operation is started by one function, and awaited in a blocking or an asyncio variant.

    def _embed(self, input, model, encoding_format, dimensions, user, preference, settings):
        if encoding_format not in (None, "float", "base64"):
            raise ValueError(f"encoding_format {encoding_format!r}: write 'float' or 'base64'")
        as_base64 = encoding_format == "base64"
        terms = Terms(preference, settings)
        # Base64 is always requested: the same numbers in half the bytes.
        start = lambda: self._native.embed(input, model, dimensions, user, False, terms)  # noqa: E731
        return start, terms, lambda vectors, run: OpenAIEmbeddingsResponse(vectors, run, as_base64)

    def _rerank(self, query, texts, raw_scores, model, return_text, truncate, truncation_direction, preference, settings):
        terms = Terms(preference, settings)
        fields = (model, raw_scores, return_text, truncate, truncation_direction)
        finish = lambda ranks, run: RerankResponse([RerankResult(*rank) for rank in ranks], run=run)  # noqa: E731
        return lambda: self._native.rerank(query, texts, *fields, terms), terms, finish

    def _classify(self, inputs, model, raw_scores, truncate, truncation_direction, preference, settings):
        terms = Terms(preference, settings)

        def finish(rows, run):
            labels = [[ClassificationResult(*result) for result in row] for row in rows]
            return ClassificationResponse(labels, run=run)

        fields = (model, raw_scores, truncate, truncation_direction)
        return lambda: self._native.classify(inputs, *fields, terms), terms, finish

    def _batch(self, url_path, payloads, custom_headers, preference, method, settings):
        method = (method or "POST").upper()
        path = url_path if url_path.startswith("/") else f"/{url_path}"
        terms = Terms(preference, settings, custom_headers)
        if method in ("GET", "HEAD", "OPTIONS"):
            bodies = [b""] * len(payloads)
        else:
            bodies = [json.dumps(payload, separators=(",", ":")).encode() for payload in payloads]

        def finish(responses, run):
            try:
                return BatchPostResponse([json.loads(body) if body.strip() else None for body in responses], run)
            except ValueError as error:
                raise public_error(Failed("invalid_response", None, f"a response of {path} is not JSON: {error}")) from None

        return lambda: self._native.batch(method, path, bodies, terms), terms, finish

    def embed(
        self,
        input: List[str],
        model: str,
        encoding_format: Optional[str] = None,
        dimensions: Optional[int] = None,
        user: Optional[str] = None,
        preference: Optional[RequestProcessingPreference] = None,
        *,
        progress: Optional[Progress] = None,
        **settings: Any,
    ) -> OpenAIEmbeddingsResponse:
        """Embeds texts by `POST /v1/embeddings`."""
        return wait(*self._embed(input, model, encoding_format, dimensions, user, preference, settings), progress)

    async def async_embed(
        self,
        input: List[str],
        model: str,
        encoding_format: Optional[str] = None,
        dimensions: Optional[int] = None,
        user: Optional[str] = None,
        preference: Optional[RequestProcessingPreference] = None,
        *,
        progress: Optional[Progress] = None,
        **settings: Any,
    ) -> OpenAIEmbeddingsResponse:
        """As `embed`, for asyncio."""
        started = self._embed(input, model, encoding_format, dimensions, user, preference, settings)
        return await wait_async(*started, progress)

    def rerank(
        self,
        query: str,
        texts: List[str],
        raw_scores: bool = False,
        model: Optional[str] = None,
        return_text: bool = False,
        truncate: bool = False,
        truncation_direction: str = "Right",
        preference: Optional[RequestProcessingPreference] = None,
        *,
        progress: Optional[Progress] = None,
        **settings: Any,
    ) -> RerankResponse:
        """Scores texts for `query` by `POST /rerank`. `index` is the index of a text in `texts`."""
        fields = (query, texts, raw_scores, model, return_text, truncate, truncation_direction)
        return wait(*self._rerank(*fields, preference, settings), progress)

    async def async_rerank(
        self,
        query: str,
        texts: List[str],
        raw_scores: bool = False,
        model: Optional[str] = None,
        return_text: bool = False,
        truncate: bool = False,
        truncation_direction: str = "Right",
        preference: Optional[RequestProcessingPreference] = None,
        *,
        progress: Optional[Progress] = None,
        **settings: Any,
    ) -> RerankResponse:
        """As `rerank`, for asyncio."""
        fields = (query, texts, raw_scores, model, return_text, truncate, truncation_direction)
        return await wait_async(*self._rerank(*fields, preference, settings), progress)

    def classify(
        self,
        inputs: List[str],
        model: Optional[str] = None,
        raw_scores: bool = False,
        truncate: bool = False,
        truncation_direction: str = "Right",
        preference: Optional[RequestProcessingPreference] = None,
        *,
        progress: Optional[Progress] = None,
        **settings: Any,
    ) -> ClassificationResponse:
        """Classifies texts by `POST /predict`."""
        fields = (inputs, model, raw_scores, truncate, truncation_direction)
        return wait(*self._classify(*fields, preference, settings), progress)

    async def async_classify(
        self,
        inputs: List[str],
        model: Optional[str] = None,
        raw_scores: bool = False,
        truncate: bool = False,
        truncation_direction: str = "Right",
        preference: Optional[RequestProcessingPreference] = None,
        *,
        progress: Optional[Progress] = None,
        **settings: Any,
    ) -> ClassificationResponse:
        """As `classify`, for asyncio."""
        fields = (inputs, model, raw_scores, truncate, truncation_direction)
        return await wait_async(*self._classify(*fields, preference, settings), progress)

    def batch_post(
        self,
        url_path: str,
        payloads: List[Any],
        custom_headers: Optional[Dict[str, str]] = None,
        preference: Optional[RequestProcessingPreference] = None,
        method: Optional[str] = None,
        *,
        progress: Optional[Progress] = None,
        **settings: Any,
    ) -> BatchPostResponse:
        """Sends each payload as JSON, and parses the responses. Failed requests are retried: pass `max_retries=0` for
        requests that are not idempotent."""
        return wait(*self._batch(url_path, payloads, custom_headers, preference, method, settings), progress)

    async def async_batch_post(
        self,
        url_path: str,
        payloads: List[Any],
        custom_headers: Optional[Dict[str, str]] = None,
        preference: Optional[RequestProcessingPreference] = None,
        method: Optional[str] = None,
        *,
        progress: Optional[Progress] = None,
        **settings: Any,
    ) -> BatchPostResponse:
        """As `batch_post`, for asyncio."""
        return await wait_async(*self._batch(url_path, payloads, custom_headers, preference, method, settings), progress)
