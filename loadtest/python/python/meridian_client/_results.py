"""Results. Objects for single rows are created on first access."""

from __future__ import annotations

import base64
from typing import Any, Dict, List, Optional, Union

import numpy

from ._native import OperationStats, Vectors


class _Response:
    """Statistics common to all results."""

    def __init__(
        self,
        total_time: Optional[float] = None,
        individual_request_times: Optional[List[float]] = None,
        response_headers: Optional[List[Dict[str, str]]] = None,
        run: Optional[OperationStats] = None,
    ) -> None:
        self.total_time = total_time if run is None else run.total_time
        self._times = individual_request_times
        self._headers = response_headers
        self._run = run

    @property
    def individual_request_times(self) -> Optional[List[float]]:
        """Seconds of each request, in the order of the inputs."""
        if self._times is None and self._run is not None:
            self._times = self._run.times
        return self._times

    @property
    def response_headers(self) -> List[Dict[str, str]]:
        """The headers of each response, in the order of the inputs."""
        if self._headers is None:
            self._headers = [] if self._run is None else self._run.headers
        return self._headers

    @property
    def attempts(self) -> List[int]:
        """The number of attempts of each request, including hedges."""
        return [] if self._run is None else self._run.attempts


class OpenAIUsage:
    """Token counts of the server."""

    def __init__(self, prompt_tokens: int, total_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.total_tokens = total_tokens

    def __repr__(self) -> str:
        return f"OpenAIUsage(prompt_tokens={self.prompt_tokens}, total_tokens={self.total_tokens})"


class OpenAIEmbeddingData:
    """One vector."""

    object = "embedding"

    def __init__(self, index: int, row: numpy.ndarray, as_base64: bool) -> None:
        self.index = index
        self._row = row
        self._as_base64 = as_base64

    @property
    def embedding(self) -> Union[List[float], str]:
        """A list of numbers, or their base64 encoding if requested."""
        if self._as_base64:
            return base64.b64encode(self._row.astype("<f4").tobytes()).decode()
        return self._row.tolist()


class OpenAIEmbeddingsResponse(_Response):
    """Vectors, in the order of the texts."""

    object = "list"

    def __init__(self, vectors: Vectors, run: OperationStats, as_base64: bool) -> None:
        super().__init__(run=run)
        self.model = vectors.model
        self.usage = OpenAIUsage(vectors.prompt_tokens, vectors.total_tokens)
        self._array = numpy.asarray(vectors)
        self._as_base64 = as_base64
        self._data: Optional[List[OpenAIEmbeddingData]] = None

    @property
    def data(self) -> List[OpenAIEmbeddingData]:
        """An object for each vector. For many vectors use `numpy()`."""
        if self._data is None:
            rows = enumerate(self._array)
            self._data = [OpenAIEmbeddingData(index, row, self._as_base64) for index, row in rows]
        return self._data

    def numpy(self) -> numpy.ndarray:
        """All vectors as float32, one row per text, in one contiguous block; returns the same array each time, without
        a copy."""
        return self._array


class RerankResult:
    """Score of a text."""

    def __init__(self, index: int, score: float, text: Optional[str] = None) -> None:
        self.index = index
        self.score = score
        self.text = text

    def __repr__(self) -> str:
        return f"RerankResult(index={self.index}, score={self.score})"


class RerankResponse(_Response):
    """Texts with their scores; those of each request are in the order of the server's ranking."""

    object = "list"

    def __init__(
        self,
        data: List[RerankResult],
        total_time: Optional[float] = None,
        individual_request_times: Optional[List[float]] = None,
        response_headers: Optional[List[Dict[str, str]]] = None,
        run: Optional[OperationStats] = None,
    ) -> None:
        super().__init__(total_time, individual_request_times, response_headers, run)
        self.data = data


class ClassificationResult:
    """Label with its score."""

    def __init__(self, label: str, score: float) -> None:
        self.label = label
        self.score = score

    def __repr__(self) -> str:
        return f"ClassificationResult(label={self.label!r}, score={self.score})"


class ClassificationResponse(_Response):
    """The labels of each text."""

    object = "list"

    def __init__(
        self,
        data: List[List[ClassificationResult]],
        total_time: Optional[float] = None,
        individual_request_times: Optional[List[float]] = None,
        response_headers: Optional[List[Dict[str, str]]] = None,
        run: Optional[OperationStats] = None,
    ) -> None:
        super().__init__(total_time, individual_request_times, response_headers, run)
        self.data = data


class BatchPostResponse(_Response):
    """Parsed response for each payload."""

    def __init__(self, data: List[Any], run: OperationStats) -> None:
        super().__init__(run=run)
        self.data = data
