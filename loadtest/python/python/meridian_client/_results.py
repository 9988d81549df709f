"""What comes back. Objects for single rows are made when somebody asks for them, and not before."""

from __future__ import annotations

import base64
from typing import Any, Dict, List, Optional, Union

import numpy

from ._native import Run, Vectors


class _Response:
    """What every result says of how it came about."""

    def __init__(
        self,
        total_time: Optional[float] = None,
        individual_request_times: Optional[List[float]] = None,
        response_headers: Optional[List[Dict[str, str]]] = None,
        run: Optional[Run] = None,
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
        """The headers of each answer, in the order of the inputs."""
        if self._headers is None:
            self._headers = [] if self._run is None else self._run.headers
        return self._headers

    @property
    def attempts(self) -> List[int]:
        """How many attempts each request took, hedges included."""
        return [] if self._run is None else self._run.attempts


class OpenAIUsage:
    """Tokens, as the server counted them."""

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
        """A list of numbers; base64 of them where that was asked for."""
        if self._as_base64:
            return base64.b64encode(self._row.astype("<f4").tobytes()).decode()
        return self._row.tolist()


class OpenAIEmbeddingsResponse(_Response):
    """Vectors, in the order of the texts."""

    object = "list"

    def __init__(self, vectors: Vectors, run: Run, as_base64: bool) -> None:
        super().__init__(run=run)
        self.model = vectors.model
        self.usage = OpenAIUsage(vectors.prompt_tokens, vectors.total_tokens)
        self._array = numpy.asarray(vectors)
        self._as_base64 = as_base64
        self._data: Optional[List[OpenAIEmbeddingData]] = None

    @property
    def data(self) -> List[OpenAIEmbeddingData]:
        """An object for each vector. For many of them `numpy()` is the better question."""
        if self._data is None:
            rows = enumerate(self._array)
            self._data = [OpenAIEmbeddingData(index, row, self._as_base64) for index, row in rows]
        return self._data

    def numpy(self) -> numpy.ndarray:
        """All vectors, float32, one row for each text, in one contiguous block: the same array each time, and no copy."""
        return self._array


class RerankResult:
    """How well a text matches."""

    def __init__(self, index: int, score: float, text: Optional[str] = None) -> None:
        self.index = index
        self.score = score
        self.text = text

    def __repr__(self) -> str:
        return f"RerankResult(index={self.index}, score={self.score})"


class RerankResponse(_Response):
    """Texts and their scores, each request's in the order in which the server ranks them."""

    object = "list"

    def __init__(
        self,
        data: List[RerankResult],
        total_time: Optional[float] = None,
        individual_request_times: Optional[List[float]] = None,
        response_headers: Optional[List[Dict[str, str]]] = None,
        run: Optional[Run] = None,
    ) -> None:
        super().__init__(total_time, individual_request_times, response_headers, run)
        self.data = data


class ClassificationResult:
    """A label and how well it fits."""

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
        run: Optional[Run] = None,
    ) -> None:
        super().__init__(total_time, individual_request_times, response_headers, run)
        self.data = data


class BatchPostResponse(_Response):
    """The answer to each payload, parsed."""

    def __init__(self, data: List[Any], run: Run) -> None:
        super().__init__(run=run)
        self.data = data
