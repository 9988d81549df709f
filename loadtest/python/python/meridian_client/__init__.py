"""Bulk embedding, reranking and classification: many texts in, one float32 numpy array out, in order.

    client = PerformanceClient("http://127.0.0.1:8080", api_key="local")
    vectors = client.embed(texts, model="minilm").numpy()

The classes, their arguments and the fields of their results are those of Baseten's performance client. Additions of
Meridian: `progress`, `max_tokens_per_request`, settings as arguments of a call, several URLs, `roots_pem`, `attempts`.
"""

from ._client import Endpoint, EndpointPool, HttpClientWrapper, PerformanceClient
from ._errors import MeridianError, RequestFailed, RequestTimeout, InvalidResponse
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
    "BatchPostResponse",
    "CancellationToken",
    "ClassificationResponse",
    "ClassificationResult",
    "Endpoint",
    "EndpointPool",
    "HttpClientWrapper",
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
