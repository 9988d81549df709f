"""Tests a Meridian gateway with the unmodified OpenAI client: only base_url and api_key are changed.

    python openai_client.py http://127.0.0.1:8080

Embeds 500 texts in one call and the same texts in 50 concurrent calls, and checks that each text has the same vector
both times: the order within a call is preserved, and no call gets the rows of another call.
"""

import asyncio
import math
import sys

from openai import AsyncOpenAI, NotFoundError, OpenAI

base_url = sys.argv[1] + "/v1"
texts = [f"Text number {number} speaks of {number * number} ships on the sea." for number in range(500)]

client = OpenAI(base_url=base_url, api_key="local")
response = client.embeddings.create(model="minilm", input=texts)
assert [row.index for row in response.data] == list(range(500))
at_once = [row.embedding for row in response.data]
assert all(len(vector) == 384 for vector in at_once)
assert all(abs(math.fsum(x * x for x in vector) - 1) < 1e-4 for vector in at_once)
assert len({tuple(vector) for vector in at_once}) == 500, "different texts must have different vectors"
assert response.usage.total_tokens > 500 * 8


async def concurrently():
    async with AsyncOpenAI(base_url=base_url, api_key="local") as client:
        calls = [client.embeddings.create(model="minilm", input=texts[at : at + 10]) for at in range(0, 500, 10)]
        return [row.embedding for response in await asyncio.gather(*calls) for row in response.data]


for number, (one, other) in enumerate(zip(at_once, asyncio.run(concurrently()), strict=True)):
    assert max(abs(a - b) for a, b in zip(one, other)) < 1e-6, f"text {number} has different vectors in the two calls"

floats = client.embeddings.create(model="minilm", input=texts[0], encoding_format="float").data[0].embedding
assert max(abs(a - b) for a, b in zip(floats, at_once[0])) < 1e-6, "base64 and float must encode the same numbers"

try:
    client.embeddings.create(model="no-such-model", input="x")
except NotFoundError as error:
    assert error.code == "model_not_found", error.code
else:
    raise AssertionError("an unknown model must be rejected with NotFoundError")

assert "minilm" in [model.id for model in client.models.list()]
print("500 texts in one call, 50 calls at once: in order")
