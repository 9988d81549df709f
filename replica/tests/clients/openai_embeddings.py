"""Tests a replica with the unmodified openai client: all input forms, dimensions, both encodings, error types.

usage: openai_embeddings.py EMBEDDING_MODEL_URL
"""

import math
import sys

import openai

client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="unused", max_retries=0)


def vectors(**arguments):
    response = client.embeddings.create(model="small", **arguments)
    assert response.model == "small" and [row.index for row in response.data] == list(range(len(response.data)))
    assert response.usage.total_tokens == response.usage.prompt_tokens > 0
    return [row.embedding for row in response.data]


def close(a, b):
    return len(a) == len(b) and all(math.isclose(x, y, abs_tol=1e-6) for x, y in zip(a, b))


# Without a format the client requests base64 and decodes it.
one, two = vectors(input=["w1 w2", "w3"])
assert close(vectors(input="w1 w2")[0], one)
assert close(vectors(input="w1 w2", encoding_format="float")[0], one)
assert math.isclose(math.hypot(*one), 1, abs_tol=1e-5) and not close(one, two)
tokens = [198, 1, 2, 199]
assert close(vectors(input=tokens)[0], one) and close(vectors(input=[tokens, tokens])[1], one)
short = vectors(input="w1 w2", dimensions=16)[0]
scale = math.hypot(*one[:16])
assert close(short, [x / scale for x in one[:16]])
prompted = vectors(input="w1", extra_body={"prompt_name": "query"})[0]
assert close(prompted, vectors(input="w9 w9 w1")[0])
assert [model.id for model in client.models.list()] == ["small", "other"]
for wrong, error in [
    ({"input": ""}, openai.BadRequestError),
    ({"input": "w1", "dimensions": 65}, openai.BadRequestError),
    ({"input": "w1 " * 500}, openai.BadRequestError),
]:
    try:
        client.embeddings.create(model="small", **wrong)
    except error as refused:
        assert refused.body["message"] and refused.type == "invalid_request_error", refused.body
    else:
        raise AssertionError(f"{wrong} must be rejected")
try:
    client.embeddings.create(model="nothing", input="w1")
except openai.NotFoundError as refused:
    assert refused.code == "model_not_found", refused.body
else:
    raise AssertionError("an unknown model must be rejected")
print("openai", openai.__version__, "works")
