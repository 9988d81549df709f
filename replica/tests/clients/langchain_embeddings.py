"""Tests a replica with the unmodified embeddings of langchain-openai.

`check_embedding_ctx_length=False` is langchain's recommendation for servers other than OpenAI's. With True, langchain
downloads OpenAI's vocabulary, tokenises with it, and sends token ids that are invalid for other models.

usage: langchain_embeddings.py EMBEDDING_MODEL_URL
"""

import math
import sys

from langchain_openai import OpenAIEmbeddings

embeddings = OpenAIEmbeddings(
    model="small", base_url=f"{sys.argv[1]}/v1", api_key="unused", check_embedding_ctx_length=False, chunk_size=100
)
texts = [f"w{i % 90 + 1} w{i % 7 + 1}" for i in range(250)]
documents = embeddings.embed_documents(texts)
assert len(documents) == 250 and all(len(vector) == 64 for vector in documents)
for i in (0, 99, 100, 249):
    query = embeddings.embed_query(texts[i])
    assert all(math.isclose(a, b, abs_tol=1e-5) for a, b in zip(query, documents[i])), i
print("langchain-openai works")
