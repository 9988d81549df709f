#!/usr/bin/env python3
"""Generates small LLM rerankers (yes/no logits) and the reference outputs of sentence-transformers.

Writes, for each row of the table below, a folder in `families/`: the model as sentence-transformers' CrossEncoder saves it
(a transformer, LogitScore, a chat template), and the reference:

- golden.json and golden.f32: as make_families.py writes them, the scores of sequences of token ids. Some end in the
  padding id: the last token of a rendered template is read, whatever its id is;
- pairs.json: pairs of texts, and for each the token count it was truncated to, its ids, the raw score, the score
  returned by `predict`, and whether it lost only tokens of its document and the document kept at least half of the
  available length. (sentence-transformers truncates the rendered text at its end and overwrites that end with the end
  of the template. A template with the query last loses the query; with the query first, a long query leaves no tokens
  for the document. The replica does neither.)

make_families.py documents the random weights, the checks, and how to run the scripts.
    venv/bin/python make_yes_no.py [NAME...]
"""

import json
import shutil
import sys
import tempfile
from types import SimpleNamespace

import tokenizers
import torch
import transformers
from make_families import (
    DECODER,
    HEAD_LENGTHS,
    HERE,
    check_precise,
    check_sensitive,
    compute,
    make_cases,
    randomise,
    rope,
    write_golden,
)
from make_tokenizers import CORPUS, byte_fallback_llama, byte_level_qwen
from sentence_transformers import CrossEncoder
from sentence_transformers.base.modules import Transformer
from sentence_transformers.cross_encoder.modules import LogitScore
from tokenizers import AddedToken

MAX_TOKENS = 96
SIZES = dict(DECODER, max_position_embeddings=MAX_TOKENS)

# Content in parts, after a task. The test includes the line ends and indentation that the blocks leave, and the empty
# line at the end, of which Jinja keeps one line end.
STRUCTURED = """\
{# One pair, and the task that it is judged by. #}
{% set found = namespace(task="", query="", document="") %}
{% for message in messages %}
    {% if message.content is string %}
        {{ raise_exception("content comes in parts") }}
    {% elif message.role == "system" %}
        {% set found.task = message["content"][0]["text"].strip() %}
    {% elif message.role == "query" %}
        {% set found.query = message.content[0].text | trim %}
    {% elif message.role == "document" %}
        {% set found.document = message.content[0].text %}
        {% continue %}
    {% endif %}
{% endfor %}
<|im_start|>{{ found.task }}
{% if tools or documents or add_generation_prompt %}
never
{% endif %}
q: {{ found.query }}
d: {{ found.document }}<|im_end|>
<|im_start|>{{ {"be": [1, "<brief>"]} | tojson }}

"""

# Content as a string, the query last, and a special token from the tokenizer's configuration.
FLAT = """\
{{- bos_token -}}
text {{ messages | selectattr("role", "eq", "document") | map(attribute="content") | first }}
{%- for message in messages if message.role == "query" %}

for {{ message.content }}
{%- endfor %}
 is it?"""


def qwen_tokenizer():
    tokenizer, names, _ = byte_level_qwen()
    tokenizer.add_special_tokens(["<|im_start|>"])
    tokenizer.add_tokens([AddedToken("yes", single_word=True), AddedToken("no", single_word=True)])
    return tokenizer, names


def llama_tokenizer():
    tokenizer, names, _ = byte_fallback_llama()
    return tokenizer, names


# name: (class, its arguments, number format, tokenizer, template, words, prompts, default prompt, activation function)
YES_NO = {
    "qwen3_yes_no": (
        "Qwen3",
        dict(SIZES, vocab_size=330, head_dim=16, tie_word_embeddings=True, **rope(1000000.0)),
        "bfloat16",
        qwen_tokenizer,
        STRUCTURED,
        ("yes", "no"),
        {"task": " Does it answer? ", "other": "Is it alike?"},
        "task",
        None,
    ),
    "llama_yes_no": (
        "Llama",
        dict(SIZES, vocab_size=320, tie_word_embeddings=False, **rope(10000.0)),
        "float16",
        llama_tokenizer,
        FLAT,
        ("\u2581the", None),
        None,
        None,
        torch.nn.Identity(),
    ),
}

PAIRS = [
    ("wind", "By noon the wind had turned."),
    ("What is it?", ""),
    ("", "a text without a question"),
    ("  spaces around  ", "\n and around this one \n"),
    ("caf\u00e9", "I \u2764\ufe0f pizza \U0001f355"),
    ("0 1 2 3 4", "0 1 2 3 4"),
    ("quoted {{ braces }}", "and <|im_end|> inside, {% raw %}"),
    ("wind", CORPUS[1][:120]),
    ("wind", CORPUS[0]),
    ("What turns a text into numbers?", CORPUS[0] + " " + CORPUS[1]),
]


class Judge(torch.nn.Module):
    """Last two modules applied to token ids, with the interface of a sequence classification model."""

    def __init__(self, encoder):
        super().__init__()
        self.model, self.score = encoder[0].model, encoder[1]
        self.config = self.model.config

    def forward(self, **inputs):
        logits = self.model(**inputs).logits
        return SimpleNamespace(logits=self.score({"causal_logits": logits})["scores"])


def load(folder, dtype):
    options = dict(dtype=dtype, attn_implementation="eager")
    return CrossEncoder(str(folder), device="cpu", model_kwargs=options).eval()


class Auto:
    """Loader of a `Judge`, with the interface of the auto classes of transformers."""

    @staticmethod
    def from_pretrained(folder, dtype, attn_implementation):
        return Judge(load(folder, dtype))


def save(name, family, arguments, kind, made, template, words, prompts, default, function):
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    tokenizer, names = made()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=MAX_TOKENS,
        model_input_names=["input_ids", "attention_mask"],
        chat_template=template,
        **names,
    )
    assert len(tokenizer) <= arguments["vocab_size"], f"{name}: {len(tokenizer)} tokens"
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**arguments)).eval()
    randomise(model, name)
    with tempfile.TemporaryDirectory() as bare:
        model.to(getattr(torch, kind)).save_pretrained(bare)
        tokenizer.save_pretrained(bare)
        options = dict(dtype=getattr(torch, kind))
        transformer = Transformer(bare, transformer_task="text-generation", model_kwargs=options)
        ids = [None if word is None else tokenizer.convert_tokens_to_ids(word) for word in words]
        assert ids[0] is not None and tokenizer.unk_token_id not in ids
        encoder = CrossEncoder(
            modules=[transformer, LogitScore(*ids)],
            prompts=prompts,
            default_prompt_name=default,
            activation_fn=function,
            device="cpu",
        )
        encoder.save_pretrained(str(folder), create_model_card=False)
    for extra in ["generation_config.json", "README.md"]:
        (folder / extra).unlink(missing_ok=True)
    return folder


def read(encoder, query, document, most):
    encoder.max_seq_length = most
    prompt = encoder._resolve_prompt(None, None)
    return encoder.preprocess([(query, document)], prompt=prompt)["input_ids"][0].tolist()


def read_pairs(encoder, most, document_last):
    rows = []
    for query, document in PAIRS:
        whole, template = [len(read(encoder, *pair, 10_000)) for pair in [(query, ""), ("", "")]]
        of_query, room = whole - template, most - template
        uncut = len(read(encoder, query, document, 10_000)) <= most
        ids = read(encoder, query, document, most)
        raw = encoder.predict([(query, document)], activation_fn=torch.nn.Identity())[0]
        score = encoder.predict([(query, document)])[0]
        row = {"query": query, "document": document, "most": most, "ids": ids, "raw": float(raw), "score": float(score)}
        rows.append(row | {"whole": uncut or (document_last and 2 * of_query <= room)})
    return rows


def make(name):
    folder = save(name, *YES_NO[name])
    encoder = load(folder, torch.float32)
    judge = Judge(encoder)
    cases = make_cases(judge.config, HEAD_LENGTHS)
    padding = judge.config.pad_token_id
    cases.append({"ids": [7, 8, padding, 9, padding, padding], "types": [0] * 6})
    scores = [compute(judge, case) for case in cases]
    precise = check_precise(name, Auto, folder, cases, scores)
    sensitive = check_sensitive(name, judge, cases, scores, without_effect=())
    write_golden(folder, cases, {"logits": scores})
    document_last = YES_NO[name][4] is STRUCTURED
    rows = [row for most in [MAX_TOKENS, 72, 64] for row in read_pairs(encoder, most, document_last)]
    cut = sum(len(row["ids"]) == row["most"] for row in rows)
    assert cut >= 5, f"{name}: {cut} pairs were cut"
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    made_with = {"transformers": transformers.__version__, "tokenizers": tokenizers.__version__}
    (folder / "pairs.json").write_text(f'{{"made_with": {json.dumps(made_with)},\n"pairs": [\n{lines}\n]}}\n')
    print(f"{name:22} float32 {precise:.1e}   least parameter {sensitive:.1e}   {cut} of {len(rows)} pairs cut")


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    for name in sys.argv[1:] or YES_NO:
        make(name)
