"""Tests a replica with the unmodified huggingface_hub.InferenceClient, which sends the requests of a TEI endpoint.

usage: hugging_face.py EMBEDDING_MODEL_URL CLASSIFIER_URL
"""

import math
import sys

import huggingface_hub
from huggingface_hub import InferenceClient

embeds, classifies = sys.argv[1:3]


def close(a, b):
    return len(a) == len(b) and all(math.isclose(x, y, abs_tol=1e-6) for x, y in zip(a, b))


# The client sends the request to the given URL unchanged: the root of an endpoint, or one of its paths.
root = InferenceClient(model=embeds).feature_extraction("w1 w2")
assert root.shape == (1, 64) and math.isclose(math.hypot(*root[0]), 1, abs_tol=1e-5)
path = InferenceClient(model=f"{embeds}/embed")
assert close(path.feature_extraction("w1 w2")[0], root[0])
assert close(InferenceClient(base_url=embeds).feature_extraction("w1 w2")[0], root[0])
prompted = path.feature_extraction("w1", prompt_name="query", normalize=True)
assert close(prompted[0], path.feature_extraction("w9 w9 w1")[0])
long = path.feature_extraction("w1 " * 500, truncate=True, truncation_direction="right")
assert close(long[0], path.feature_extraction("w1 " * 126)[0])
try:
    path.feature_extraction("w1 " * 500)
except huggingface_hub.errors.HfHubHTTPError as refused:
    assert refused.response.status_code == 413 and "502 tokens" in refused.response.text, refused.response.text
else:
    raise AssertionError("a text above the maximum length must be rejected, not truncated")
similar = InferenceClient(model=f"{embeds}/similarity").sentence_similarity("w1", other_sentences=["w1", "w2 w3"])
assert math.isclose(similar[0], 1, abs_tol=1e-5) and similar[1] < similar[0]
# The client uses only the first list of a batch, so the batch has one input.
labels = InferenceClient(model=f"{classifies}/predict").text_classification([["w1 w2"]])
assert {label.label for label in labels} == {"good", "bad", "neither"}
assert math.isclose(sum(label.score for label in labels), 1, abs_tol=1e-5)
print("huggingface_hub", huggingface_hub.__version__, "works")
