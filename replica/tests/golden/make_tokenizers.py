"""Small tokenizers of all relevant types, and reference encodings of transformers; called by make_families.py.

Each tokenizer is trained on the passages below, so that its vocabulary is small and its merges are realistic. The files
are in the folder of the fixture that uses the ids: tokenizer.json, tokenizer_config.json and the reference,
tokens.json. (Trainers number their pieces differently in each run; a reference belongs to the tokenizer in the same
folder.)

- `texts`: ids, types and character offsets of single texts, special tokens included;
- `pairs`: ids and types of pairs, and for a label head the logits of the pairs within the model's maximum length;
- `cut`: the same texts and pairs truncated to given token counts, at the `right` or `left` end, pairs `longest_first`.

Types are null if the tokenizer does not return them (the model has no token types, or all are 0).
"""

import json

import tokenizers
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

MAX_TOKENS = 48

CORPUS = [
    "An embedding model turns a text into a list of numbers, so that texts which mean similar things lie close to each "
    "other. A search engine computes the numbers of its documents once, keeps them, and for each question looks for the "
    "nearest ones. The model reads at most a few hundred words at a time; what is longer is cut into passages.",
    "In the spring of 1831 the ship lay in the harbour for repairs, and the captain, who disliked waiting, had the crew "
    "paint everything twice. By noon the wind had turned to the north-west, and at last they could leave.",
    "Mix 250 g of flour, 125 ml of milk, 2 eggs and a pinch of salt; let it rest for 30 minutes. Serves 4.",
    "Le vent se l\u00e8ve, il faut tenter de vivre. Der Wind erhebt sich, man mu\u00df versuchen zu leben.",
]

TEXTS = [
    "What is the capital of France?",
    "the wind had turned to the north-west",
    "",
    " ",
    "   two  spaces,\ttabs\n\nand lines  ",
    "UPPER, lower and MiXeD 12345 &c.",
    "caf\u00e9 and cafe\u0301, \u00dcbung, na\u00efve",
    "\u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd",
    "\u5929\u6c17\u304c\u826f\u3044",
    "I \u2764\ufe0f pizza \U0001f355",
    "a\u0000b zero\u200bwidth",
    "special [SEP] and </s> and <|endoftext|> inside",
    " ".join(CORPUS[:2]),
    "x" * 60,
]

PAIRS = [
    ("What turns a text into numbers?", "An embedding model turns a text into a list of numbers."),
    ("wind", "By noon the wind had turned to the north-west, and at last they could leave."),
    ("", "a text without a question"),
    ("a question without a text", ""),
    ("short", CORPUS[0]),
    (CORPUS[1], "short"),
    (CORPUS[0], CORPUS[1]),
    ("\u00bfpor qu\u00e9?", "\U0001f355\U0001f355\U0001f355"),
]

CUTS = [9, 16, MAX_TOKENS]


def word_piece():
    """BERT's WordPiece: lower case without accents, `[CLS] a [SEP] b [SEP]` with types 0 and 1."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=110, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    names = dict(unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]")
    return tokenizer, names, True


def byte_level_roberta():
    """RoBERTa's byte-level BPE: `<s> a </s></s> b </s>`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "<pad>", "</s>", "<unk>", AddedToken("<mask>", lstrip=True, special=True)]
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    names = dict(
        bos_token="<s>", eos_token="</s>", cls_token="<s>", sep_token="</s>", unk_token="<unk>", pad_token="<pad>"
    )
    return tokenizer, names, False


def unigram():
    """XLM-RoBERTa's unigram model: the most likely pieces, `▁` for spaces, `<s> a </s></s> b </s>`."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(replacement="\u2581", prepend_scheme="always")
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=110, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    names = dict(
        bos_token="<s>", eos_token="</s>", cls_token="<s>", sep_token="</s>", unk_token="<unk>", pad_token="<pad>"
    )
    return tokenizer, names, False


def byte_level_qwen():
    """Qwen3-Embedding's byte-level BPE: merges within words, no prefix token, end-of-text as suffix."""
    tokenizer = Tokenizer(models.BPE())
    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    end = ("<|endoftext|>", 0)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|endoftext|>", pair="$A $B <|endoftext|>", special_tokens=[end]
    )
    return tokenizer, dict(pad_token="<|endoftext|>", eos_token="<|im_end|>"), False


def byte_fallback_llama():
    """Llama's and Mistral's BPE: `▁` for spaces, byte fallback for unknown characters, beginning-of-text as prefix."""
    special = ["<unk>", "<s>", "</s>"]
    trained = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    trained.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    trainer = trainers.BpeTrainer(vocab_size=61, special_tokens=special, show_progress=False)
    trained.train_from_iterator(CORPUS[:3], trainer)
    learnt = json.loads(trained.to_str())["model"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    order = sorted(learnt["vocab"], key=learnt["vocab"].get)
    vocabulary = {token: id for id, token in enumerate(order[:3] + bytes_ + order[3:])}
    merges = [tuple(merge) for merge in learnt["merges"]]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.add_special_tokens(special)
    tokenizer.normalizer = trained.normalizer
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)]
    )
    return tokenizer, dict(unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<unk>"), False


# Tokenizer of each fixture.
TOKENIZERS = {
    "bert": word_piece,
    "bert_rerank": word_piece,
    "roberta_rerank": byte_level_roberta,
    "xlm_roberta_rerank": unigram,
    "qwen3": byte_level_qwen,
    "llama": byte_fallback_llama,
}


def encode(tokenizer, *texts, offsets=False, **cut):
    encoded = tokenizer(*texts, return_offsets_mapping=offsets, **cut)
    types = encoded.get("token_type_ids")
    found = {"ids": encoded["input_ids"], "types": types}
    if offsets:
        found["offsets"] = encoded["offset_mapping"]
    return found


def write(folder, logits_of=None):
    """Writes the fixture's tokenizer and reference; `logits_of` maps ids and types to the label head's logits."""
    made, names, types = TOKENIZERS[folder.name]()
    inputs = ["input_ids", "token_type_ids", "attention_mask"] if types else ["input_ids", "attention_mask"]
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, model_max_length=MAX_TOKENS, model_input_names=inputs, **names
    ).save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = [{"text": text, **encode(tokenizer, text, offsets=True)} for text in TEXTS]
    pairs = []
    for first, second in PAIRS:
        pair = {"first": first, "second": second, **encode(tokenizer, first, second)}
        if logits_of is not None and len(pair["ids"]) <= MAX_TOKENS:
            types = pair["types"] or [0] * len(pair["ids"])
            pair["logits"] = logits_of({"ids": pair["ids"], "types": types}).tolist()
        pairs.append(pair)
    cut = []
    for side in ["right", "left"]:
        tokenizer.truncation_side = side
        for length in CUTS:
            options = dict(truncation="longest_first", max_length=length)
            cut.append(
                {
                    "side": side,
                    "max_tokens": length,
                    "texts": [encode(tokenizer, text, **options) for text in TEXTS],
                    "pairs": [encode(tokenizer, first, second, **options) for first, second in PAIRS],
                }
            )
    made_with = {"transformers": transformers.__version__, "tokenizers": tokenizers.__version__}
    lines = ["{" + f'"made_with": {json.dumps(made_with)}']
    for key, entries in [("texts", texts), ("pairs", pairs), ("cut", cut)]:
        lines.append(f'"{key}": [\n' + ",\n".join(json.dumps(entry, separators=(",", ":")) for entry in entries) + "\n]")
    (folder / "tokens.json").write_text(",\n".join(lines) + "}\n")
    largest = max(id for entry in texts + pairs for id in entry["ids"])
    print(f"{folder.name:22} {len(tokenizer)} entries, the largest id in use {largest}")
    return len(tokenizer)
