"""Tests a replica with the unmodified cohere client: rerank v1 and v2, by a cross-encoder and by similarity.

usage: cohere_rerank.py RERANKER_URL EMBEDDING_MODEL_URL
"""

import sys

import cohere

TEXTS = ["w10 w11", "w20 w21 w22", "w30", "w40"]


def check(response, count):
    scores = [result.relevance_score for result in response.results]
    assert len(scores) == count and scores == sorted(scores, reverse=True) and all(0 <= score <= 1 for score in scores)
    assert len({result.index for result in response.results}) == count
    assert response.id and response.meta.billed_units.search_units == 1
    return [result.index for result in response.results]


for url in sys.argv[1:3]:
    first = cohere.Client(api_key="unused", base_url=url)
    second = cohere.ClientV2(api_key="unused", base_url=url)
    all_of_them = check(first.rerank(model="small", query="w1 w2", documents=TEXTS), 4)
    best = second.rerank(model="small", query="w1 w2", documents=TEXTS, top_n=2)
    assert check(best, 2) == all_of_them[:2] and best.meta.api_version.version == "2"
    returned = first.rerank(model="small", query="w1 w2", documents=TEXTS, return_documents=True)
    assert all(result.document.text == TEXTS[result.index] for result in returned.results)
    objects = [{"text": text, "id": str(i)} for i, text in enumerate(TEXTS)]
    assert check(first.rerank(model="small", query="w1 w2", documents=objects), 4) == all_of_them
    titled = [{"title": text} for text in TEXTS]
    by_title = first.rerank(model="small", query="w1 w2", documents=titled, rank_fields=["title"])
    assert check(by_title, 4) == all_of_them
    for client in (first, second):
        try:
            client.rerank(model="small", query="w1", documents=[])
        except cohere.BadRequestError as refused:
            assert refused.body["error"]["code"] == "empty_input", refused.body
        else:
            raise AssertionError("a request without documents must be rejected")
print("cohere", cohere.__version__, "works")
