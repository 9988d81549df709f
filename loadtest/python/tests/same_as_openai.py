"""Compares the vectors with those of the OpenAI client: same order, same values, one block.

    python same_as_openai.py http://127.0.0.1:8080 [TEXTS]

requires a Meridian gateway, `meridian-client` and `openai`. docs/client.md has the commands for a clean environment.
"""

import sys
import time

import numpy
from openai import OpenAI

from meridian_client import PerformanceClient

url, count = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1000
texts = [f"Text number {number} speaks of {number * number} ships on the sea." for number in range(count)]

reported = []
begin = time.perf_counter()
client = PerformanceClient(url, api_key="local")
result = client.embed(texts, model="minilm", max_concurrent_requests=32, progress=lambda *at: reported.append(at))
ours = result.numpy()
ours_s = time.perf_counter() - begin
assert ours.dtype == numpy.float32 and ours.shape == (count, 384), (ours.dtype, ours.shape)
assert ours.flags.c_contiguous and reported[-1] == (count, count), reported[-1:]
assert result.usage.total_tokens > 8 * count

begin = time.perf_counter()
stock = OpenAI(base_url=url + "/v1", api_key="local")
responses = [stock.embeddings.create(model="minilm", input=texts[at : at + 500]) for at in range(0, count, 500)]
theirs = numpy.array([row.embedding for response in responses for row in response.data], dtype=numpy.float32)
theirs_s = time.perf_counter() - begin

apart = numpy.abs(ours - theirs).max()
assert apart < 1e-6, f"vectors differ by {apart}"
assert len(numpy.unique(ours, axis=0)) == count, "different texts have different vectors"
print(f"{count} texts: the same vectors in order, at most {apart:.1e} apart ({ours_s:.1f} s and {theirs_s:.1f} s)")
