"""Runs a backfill with the unmodified OpenAI client: upload, create, poll, download.

    python openai_batch.py http://127.0.0.1:8080 KEY MODEL LINES

Ten lines are broken. Checks that these are in the error file, and that the output file has all others once and in order, each with
the vector of its own text.
"""

import json
import sys
import tempfile
import time

from openai import ConflictError, NotFoundError, OpenAI

url, key, model, lines = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
client = OpenAI(base_url=url + "/v1", api_key=key)
broken = {lines * part // 10 + 3 for part in range(10)}


def text(number):
    return f"Text number {number} speaks of {number * number} ships on the sea."


with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as requests:
    for number in range(lines):
        body = {"model": model, "input": text(number)}
        line = json.dumps({"custom_id": f"line-{number}", "method": "POST", "url": "/v1/embeddings", "body": body})
        requests.write((line[:40] if number in broken else line) + "\n")
    requests.flush()
    begun = time.monotonic()
    with open(requests.name, "rb") as opened:
        file = client.files.create(file=opened, purpose="batch")
print(f"uploaded {file.bytes} bytes in {time.monotonic() - begun:.1f} s")
assert client.files.retrieve(file.id).filename == file.filename

begun = time.monotonic()
batch = client.batches.create(
    input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h", metadata={"name": "backfill"}
)
progress = []
while batch.status in ("validating", "in_progress", "finalizing"):
    time.sleep(0.5)
    batch = client.batches.retrieve(batch.id)
    progress.append(batch.request_counts.completed)
took = time.monotonic() - begun
assert batch.status == "completed", batch
assert progress == sorted(progress)
counts = batch.request_counts
assert (counts.total, counts.completed, counts.failed) == (lines, lines - 10, 10), counts
print(f"computed {counts.completed} lines in {took:.1f} s")

errors = [json.loads(line) for line in client.files.content(batch.error_file_id).iter_lines()]
assert [error["error"]["line"] for error in errors] == sorted(number + 1 for number in broken), errors
begun = time.monotonic()
expected = (number for number in range(lines) if number not in broken)
sampled = {}
for line in client.files.content(batch.output_file_id).iter_lines():
    row, number = json.loads(line), next(expected)
    assert row["custom_id"] == f"line-{number}", (row["custom_id"], number)
    assert row["error"] is None and row["response"]["status_code"] == 200, row
    if number % (lines // 7) == 0:
        sampled[number] = row["response"]["body"]["data"][0]["embedding"]
assert next(expected, None) is None, "the output has all lines"
print(f"downloaded the output in {time.monotonic() - begun:.1f} s")
if model == "minilm":
    for number, vector in sampled.items():
        alone = client.embeddings.create(model=model, input=text(number), encoding_format="float")
        alone = alone.data[0].embedding
        assert max(abs(a - b) for a, b in zip(vector, alone, strict=True)) < 1e-4, number

assert batch.id in [one.id for one in client.batches.list(limit=5)]
try:
    client.batches.cancel(batch.id)
except ConflictError as error:
    assert error.code == "batch_finished", error.code
else:
    raise AssertionError("a batch that has ended cannot be cancelled")
for id in (file.id, batch.output_file_id, batch.error_file_id):
    assert client.files.delete(id).deleted
try:
    client.files.content(batch.output_file_id)
except NotFoundError as error:
    assert error.code == "file_not_found", error.code
else:
    raise AssertionError("a deleted file has no content")
print(f"{lines} lines, 10 broken: in order")
