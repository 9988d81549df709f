"""Bulk embedding, reranking and classification: many texts in, one float32 numpy array out, in order.

    client = PerformanceClient("http://127.0.0.1:8080", api_key="local")
    vectors = client.embed(texts, model="minilm").numpy()

The classes, their arguments and the fields of their results are those of Baseten's performance client. Additions of
Meridian: `progress`, `max_tokens_per_request`, settings as arguments of a call, several URLs, `roots_pem`, `attempts`,
and durable jobs (`submit`, `wait`, `iter_results`, `cancel`, `jobs`).
"""

from ._client import Endpoint, EndpointPool, HttpClientWrapper, PerformanceClient
from ._errors import (
    InvalidResponse,
    JobCancelled,
    JobError,
    JobExpired,
    JobFailed,
    JobFinished,
    JobNotFound,
    JobTimeout,
    MeridianError,
    RequestFailed,
    RequestTimeout,
)
from ._jobs import AsyncJobIterator, JobInfo, JobIterator, JobResult
from ._native import __version__
from ._preference import CancellationToken, RequestProcessingPreference, TraceContext
from ._results import (
    BatchPostResponse,
    ClassificationResponse,
    ClassificationResult,
    OpenAIEmbeddingData,
    OpenAIEmbeddingsResponse,
    OpenAIUsage,
    RerankResponse,
    RerankResult,
)

__all__ = [
    "AsyncJobIterator",
    "BatchPostResponse",
    "CancellationToken",
    "ClassificationResponse",
    "ClassificationResult",
    "Endpoint",
    "EndpointPool",
    "HttpClientWrapper",
    "JobCancelled",
    "JobError",
    "JobExpired",
    "JobFailed",
    "JobFinished",
    "JobInfo",
    "JobIterator",
    "JobNotFound",
    "JobResult",
    "JobTimeout",
    "MeridianError",
    "OpenAIEmbeddingData",
    "OpenAIEmbeddingsResponse",
    "OpenAIUsage",
    "PerformanceClient",
    "RequestFailed",
    "RequestProcessingPreference",
    "RequestTimeout",
    "RerankResponse",
    "RerankResult",
    "TraceContext",
    "InvalidResponse",
    "__version__",
]
