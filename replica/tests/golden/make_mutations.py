#!/usr/bin/env python3
"""Generates references for mutated checkpoints: the results of the libraries when one key of the files is changed.

For each row of FIXTURES below, a small model of `families/` gets a complete set of files (tokenizer, prompts, modules), and
then every key of its JSON files is changed, one at a time: present keys, absent keys that the library supports, and
keys that no library supports. The libraries load each changed checkpoint and compute the same inputs. A test compares
the responses of a replica with these references: a key that the replica silently ignores gives a different result.

Writes two files per row in `mutations/`:

- NAME.json: the files that replace those of the fixture's folder (`files`), the inputs, and the cases, one per line. A
  case names a `file`, a `key` ("/" between its parts; an index of a list is a number, the index behind the last
  appends), and the new `value` or `remove`. Its `outcome` is
    - `same`: the outputs are those of the unchanged checkpoint (maximum difference 1e-6);
    - `different`: `rows` (number of rows and their width) and `offset` locate the outputs in NAME.f32; for a
      classifier, `labels` has the label names if they differ from those of `base`;
    - `random`: tensors are missing and the library initialises them at random: two loads with two seeds give two results
      (if the library fills a missing tensor with a constant, the outputs determine the outcome);
    - `not_finite`: outputs contain NaN or infinity;
    - `fails`: the library raises `error`; `at` is the loading of the checkpoint or an `input`;
- NAME.f32: little-endian floats. Cases with equal outputs share them.

The references, all float32, eager attention, on the CPU, one text at a time, without remote code:

- `embed`: SentenceTransformer(folder).encode(text, prompt_name=...). First all inputs without a prompt name, then all
  inputs with the prompt `query`;
- `rerank`: CrossEncoder(folder).predict(pair), with the checkpoint's default activation function;
- `classify`: AutoModelForSequenceClassification and the text-classification pipeline, the probability of each label in
  the order of the labels. As in sentence-transformers, an input is truncated to `max_position_embeddings` tokens if the
  tokenizer allows more. If config.json names an activation function for CrossEncoder, it is a sentence-transformers
  model: CrossEncoder(folder).predict(text).

The two libraries select the activation function of a head by different keys: the pipeline by `problem_type`,
CrossEncoder by its own keys. If the scores of the pipeline and of CrossEncoder differ for the same logits, a case also
has `pipeline`: the rows and the offset of the pipeline's scores. (llama_rerank is used without its `problem_type`, for
the same reason.)

With a tokenizer.json in the folder, version 5 of transformers ignores `add_bos_token` and `add_eos_token` of
tokenizer_config.json: the post-processor of tokenizer.json takes precedence. (Version 4 applied them in its class for
Llama.) In the unchanged checkpoints both agree.

These rows differ from a folder of `families/` loaded with the library's own classes:

- jina_bert: jina_bert.py replaces the authors' code. It supports ALiBi and gated feed-forward blocks; for other values
  of `position_embedding_type` and `feed_forward_type` the authors' code would read tensors that the checkpoint lacks,
  so these cases fail here. (`hidden_act` is not read: the gate is GELU.) transformers reads the configuration as that
  of a BERT.
- nomic_bert: config.json has the library's names. nomic_bert_published: it has the names that the authors' code reads, and
  the script translates them for the library. Values that the library's NomicBERT cannot express fail here ("no reference
  for" the key). The library's names that correspond to one of the authors' names also fail.
- bert_rerank_saved: bert_rerank with the files that CrossEncoder of sentence-transformers 6 writes.
- camembert: RoBERTa's weights with the model type of CamemBERT, which is the same architecture.

Usage (the committed files: Python 3.11, torch 2.15.0, transformers 5.23.0, sentence-transformers 6.2.0)
    python3 -m venv venv && venv/bin/pip install torch transformers sentence-transformers
    venv/bin/python make_mutations.py [NAME...]
Each row runs in a separate process, with limits on memory and time.
"""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

HERE = Path(__file__).parent
FAMILIES = HERE / "families"
OUT = HERE / "mutations"
# Bytes of address space (libraries use 3.7e9 of them), seconds per row, seconds per case.
MEMORY_LIMIT = 6 << 30
TIME_LIMIT = 1500
CASE_TIME_LIMIT = 60
NOT_MODEL_FILES = ("golden.json", "golden.f32", "tokens.json", "pairs.json")

# Three different length limits, so that none hides another: the tokenizer's limit has a different effect in a row with
# `max_seq_length` than in a row without it.
MAX_SEQ_LENGTH, MODEL_MAX_LENGTH = 36, 40

CORPUS = [
    "An embedding model turns a text into a list of numbers, so that texts which mean similar things lie close to each "
    "other. A search engine computes the numbers of its documents once, keeps them, and for each question looks for the "
    "nearest ones. The model reads at most a few hundred words at a time; what is longer is cut into passages.",
    "In the spring of 1831 the ship lay in the harbour for repairs, and the captain, who disliked waiting, had the crew "
    "paint everything twice. By noon the wind had turned to the north-west, and at last they could leave.",
]
# An ordinary text; capitals, accents and characters without spaces between them; a text that is too long for the model;
# a text with the names of special tokens.
TEXTS = [
    "  What is the wind?",
    "\u00dcBUNG, na\u00efve CAF\u00c9 \u5929\u6c17",
    CORPUS[1],
    "a [SEP] b </s> c <|endoftext|> d<eos>",
]
PAIRS = [
    ["What is the wind?", "By noon it had turned."],
    ["CAF\u00c9 na\u00efve", " \u00dcBUNG \u5929\u6c17"],
    ["In the spring of 1831", CORPUS[1]],
    ["a [SEP] b </s>", "c <|endoftext|> d<eos>"],
]
# With an LLM reranker's template, sentence-transformers and the replica truncate differently (see make_yes_no.py).
SHORT_PAIRS = [PAIRS[0], PAIRS[1], ["In the spring of 1831", "the ship lay in the harbour"], PAIRS[3]]


# --- Tokenizers. The trainers of `tokenizers` number pieces differently in each run, so these are built by this script.


def learn(words, vocabulary, size):
    """Returns the vocabulary and merges of byte-pair encoding, most frequent pair first; ties break alphabetically."""
    counts = Counter(words)
    words = {word: list(word) for word in sorted(counts)}
    merges = []
    while len(vocabulary) < size:
        pairs = Counter()
        for word, parts in words.items():
            for pair in zip(parts, parts[1:]):
                pairs[pair] += counts[word]
        pair = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(pair)
        vocabulary.append("".join(pair))
        for word, parts in words.items():
            joined, index = [], 0
            while index < len(parts):
                step = 2 if tuple(parts[index : index + 2]) == pair else 1
                joined.append("".join(parts[index : index + step]))
                index += step
            words[word] = joined
    return {token: id for id, token in enumerate(vocabulary)}, merges


def byte_symbols():
    """Returns the characters that represent bytes in byte-level tokenizers."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in kept]
    return {byte: chr(byte) for byte in kept} | {byte: chr(256 + index) for index, byte in enumerate(others)}


def byte_level(special, size):
    symbols = byte_symbols()
    text = " ".join([CORPUS[1], TEXTS[0], "a b c d naïve CAFÉ ÜBUNG q: query: text: [/|<>_]"])
    words = ["".join(symbols[byte] for byte in word.encode()) for word in re.findall(r" ?\w+| ?[^\s\w]+|\s+", text)]
    alphabet = sorted(set("".join(words)))
    return learn(words, [*special, *alphabet], size)


def pieces(special, size):
    """Returns single-character pieces, with `▁` for spaces, which cover all characters of the inputs."""
    text = " ".join([CORPUS[1], *TEXTS, "query: text:", *(text for pair in PAIRS for text in pair)])
    words = re.findall("\u2581*[^\u2581]+", "\u2581" + text.replace(" ", "\u2581"))
    alphabet = sorted(set("".join(words)))
    return learn(words, [*special, *alphabet], size)


def added(tokenizer, special):
    from tokenizers import AddedToken

    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return json.loads(tokenizer.to_str())


def committed(name):
    return lambda: json.loads((FAMILIES / name / "tokenizer.json").read_text())


def word_piece_mpnet():
    """BERT's WordPiece vocabulary with MPNet's special tokens."""
    tokenizer = committed("bert")()
    names = {"[PAD]": ("<pad>", 1), "[UNK]": ("[UNK]", 3), "[CLS]": ("<s>", 0), "[SEP]": ("</s>", 2), "[MASK]": ("<mask>", 4)}
    vocabulary = tokenizer["model"]["vocab"]
    kept = {token: id for token, id in vocabulary.items() if token not in names}
    tokenizer["model"]["vocab"] = {token: id for token, id in names.values()} | kept
    for token in tokenizer["added_tokens"]:
        token["content"], token["id"] = names[token["content"]]
    tokenizer["added_tokens"].sort(key=lambda token: token["id"])
    tokenizer["post_processor"] = {
        "type": "RobertaProcessing",
        "sep": ["</s>", 2],
        "cls": ["<s>", 0],
        "trim_offsets": True,
        "add_prefix_space": False,
    }
    return tokenizer


def unigram():
    """XLM-RoBERTa's unigram model; as published, text is split at spaces first."""
    tokenizer = committed("xlm_roberta_rerank")()
    tokenizer["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [{"type": "WhitespaceSplit"}, tokenizer["pre_tokenizer"]],
    }
    return tokenizer


def byte_level_roberta():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    vocabulary, merges = byte_level(special, 110)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    return added(tokenizer, special)


def byte_level_modernbert():
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    special = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]", "<|endoftext|>"]
    vocabulary, merges = byte_level(special, 110)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return added(tokenizer, special)


QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level_qwen():
    """gte-Qwen2's byte-level BPE: no prefix token, end-of-text as suffix."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocabulary, merges = byte_level(special, 110)
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, continuing_subword_prefix="", end_of_word_suffix="")
    )
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    end = "<|endoftext|>"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A:0 {end}:0", pair=f"$A:0 {end}:0 $B:1 {end}:1", special_tokens=[(end, 0)]
    )
    return added(tokenizer, special)


def pieces_llama(end):
    """Llama's and Mistral's BPE: beginning-of-text as prefix, and optionally end-of-text as suffix (e5-mistral)."""

    def make():
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

        special = ["<unk>", "<s>", "</s>"]
        vocabulary, merges = pieces(special, 110)
        tokenizer = Tokenizer(
            models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
        )
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme="first", split=False)
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        single = "<s>:0 $A:0" + (" </s>:0" if end else "")
        pair = f"{single} <s>:1 $B:1" + (" </s>:1" if end else "")
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single, pair=pair, special_tokens=[("<s>", 1), ("</s>", 2)]
        )
        return added(tokenizer, special)

    return make


def pieces_gemma(end):
    def make():
        from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

        special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
        vocabulary, merges = pieces(special, 110)
        tokenizer = Tokenizer(
            models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
        )
        tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
        single = "<bos>:0 $A:0" + (" <eos>:0" if end else "")
        pair = f"{single} <bos>:1 $B:1" + (" <eos>:1" if end else "")
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single, pair=pair, special_tokens=[("<bos>", 2), ("<eos>", 1)]
        )
        return added(tokenizer, special)

    return make


# --- Files of the unchanged checkpoints.

BERT_TOKENIZER = {
    "clean_up_tokenization_spaces": True,
    "cls_token": "[CLS]",
    "do_basic_tokenize": True,
    "do_lower_case": True,
    "mask_token": "[MASK]",
    "model_max_length": MODEL_MAX_LENGTH,
    "never_split": None,
    "pad_token": "[PAD]",
    "sep_token": "[SEP]",
    "strip_accents": None,
    "tokenize_chinese_chars": True,
    "tokenizer_class": "BertTokenizer",
    "unk_token": "[UNK]",
}
DISTILBERT_TOKENIZER = BERT_TOKENIZER | {"tokenizer_class": "DistilBertTokenizer"}
ELECTRA_TOKENIZER = BERT_TOKENIZER | {"tokenizer_class": "ElectraTokenizer"}
ROBERTA_TOKENIZER = {
    "add_prefix_space": False,
    "bos_token": "<s>",
    "cls_token": "<s>",
    "eos_token": "</s>",
    "errors": "replace",
    "mask_token": "<mask>",
    "model_max_length": MODEL_MAX_LENGTH,
    "pad_token": "<pad>",
    "sep_token": "</s>",
    "tokenizer_class": "RobertaTokenizer",
    "trim_offsets": True,
    "unk_token": "<unk>",
}
XLM_ROBERTA_TOKENIZER = {
    "bos_token": "<s>",
    "clean_up_tokenization_spaces": True,
    "cls_token": "<s>",
    "eos_token": "</s>",
    "mask_token": "<mask>",
    "model_max_length": MODEL_MAX_LENGTH,
    "pad_token": "<pad>",
    "sep_token": "</s>",
    "tokenizer_class": "XLMRobertaTokenizer",
    "unk_token": "<unk>",
}
CAMEMBERT_TOKENIZER = XLM_ROBERTA_TOKENIZER | {"tokenizer_class": "CamembertTokenizer"}
MPNET_TOKENIZER = {
    "bos_token": "<s>",
    "cls_token": "<s>",
    "do_lower_case": True,
    "eos_token": "</s>",
    "mask_token": "<mask>",
    "model_max_length": MODEL_MAX_LENGTH,
    "pad_token": "<pad>",
    "sep_token": "</s>",
    "strip_accents": None,
    "tokenize_chinese_chars": True,
    "tokenizer_class": "MPNetTokenizer",
    "unk_token": "[UNK]",
}
MODERNBERT_TOKENIZER = {
    "clean_up_tokenization_spaces": True,
    "cls_token": "[CLS]",
    "mask_token": "[MASK]",
    "model_input_names": ["input_ids", "attention_mask"],
    "model_max_length": MODEL_MAX_LENGTH,
    "pad_token": "[PAD]",
    "sep_token": "[SEP]",
    "tokenizer_class": "PreTrainedTokenizerFast",
    "unk_token": "[UNK]",
}
LLAMA_TOKENIZER = {
    "add_bos_token": True,
    "add_eos_token": False,
    "bos_token": "<s>",
    "clean_up_tokenization_spaces": False,
    "eos_token": "</s>",
    "legacy": False,
    "model_max_length": MODEL_MAX_LENGTH,
    "pad_token": "<unk>",
    "padding_side": "right",
    "sp_model_kwargs": {},
    "spaces_between_special_tokens": False,
    "tokenizer_class": "LlamaTokenizer",
    "unk_token": "<unk>",
    "use_default_system_prompt": False,
}
E5_MISTRAL_TOKENIZER = LLAMA_TOKENIZER | {"add_eos_token": True, "additional_special_tokens": []}
# As transformers saves a tokenizer that no class rebuilds: tokenizer.json takes precedence.
BACKEND_TOKENIZER = {
    "backend": "tokenizers",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "model_input_names": ["input_ids", "attention_mask"],
    "model_max_length": MODEL_MAX_LENGTH,
    "pad_token": "<unk>",
    "tokenizer_class": "TokenizersBackend",
    "unk_token": "<unk>",
}
QWEN_TOKENIZER = {
    "add_prefix_space": False,
    "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
    "bos_token": None,
    "clean_up_tokenization_spaces": False,
    "eos_token": "<|endoftext|>",
    "errors": "replace",
    "model_max_length": MODEL_MAX_LENGTH,
    "pad_token": "<|endoftext|>",
    "split_special_tokens": False,
    "tokenizer_class": "Qwen2Tokenizer",
    "unk_token": None,
}
GTE_QWEN_TOKENIZER = QWEN_TOKENIZER | {
    "add_eos_token": True,
    "added_tokens_decoder": {
        str(id): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for id, token in enumerate(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    },
}
QWEN3_TOKENIZER = QWEN_TOKENIZER | {"additional_special_tokens": [], "eos_token": "<|im_end|>"}
GEMMA_TOKENIZER = {
    "add_bos_token": True,
    "add_eos_token": False,
    "bos_token": "<bos>",
    "clean_up_tokenization_spaces": False,
    "eos_token": "<eos>",
    "mask_token": "<mask>",
    "model_max_length": MODEL_MAX_LENGTH,
    "pad_token": "<pad>",
    "tokenizer_class": "GemmaTokenizer",
    "unk_token": "<unk>",
}
EMBEDDING_GEMMA_TOKENIZER = GEMMA_TOKENIZER | {"add_eos_token": True}

OLD_SENTENCE = {"do_lower_case": False, "max_seq_length": MAX_SEQ_LENGTH}
NEW_SENTENCE = {
    "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
    "module_output_name": "token_embeddings",
    "transformer_task": "feature-extraction",
}
OLD_PROMPTS = {
    "__version__": {"pytorch": "2.1.2", "sentence_transformers": "2.7.0", "transformers": "4.37.2"},
    "default_prompt_name": None,
    "prompts": {"document": "text: ", "query": "query: "},
}
NEW_PROMPTS = OLD_PROMPTS | {
    "__version__": {"pytorch": "2.15.0", "sentence_transformers": "6.2.0", "transformers": "5.23.0"},
    "model_type": "SentenceTransformer",
    "similarity_fn_name": "cosine",
}


def bare_stages(hidden, mode):
    """Returns modules.json and its files for a fixture without them."""
    modes = ["cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken"]
    types = ["Transformer", "Pooling", "Normalize"]
    return {
        "modules.json": [
            {
                "idx": index,
                "name": str(index),
                "path": "" if index == 0 else f"{index}_{stage}",
                "type": f"sentence_transformers.models.{stage}",
            }
            for index, stage in enumerate(types)
        ],
        "1_Pooling/config.json": {
            "include_prompt": True,
            "word_embedding_dimension": hidden,
        }
        | {f"pooling_mode_{other}": other == mode for other in modes},
    }


# Defaults of the authors' code for keys missing in config.json (it extends the configuration of GPT-2).
NOMIC_DEFAULTS = {
    "activation_function": "gelu_new",
    "causal": False,
    "layer_norm_epsilon": 1e-5,
    "mlp_fc1_bias": True,
    "mlp_fc2_bias": True,
    "n_embd": 768,
    "n_head": 12,
    "n_inner": None,
    "n_layer": 12,
    "n_positions": 1024,
    "parallel_block": False,
    "prenorm": False,
    "qkv_proj_bias": True,
    "rotary_emb_base": 10000,
    "rotary_emb_fraction": 0.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "use_rms_norm": False,
}
# The only values for which the library's NomicBERT is the same model.
NOMIC_ONLY = {
    "activation_function": "swiglu",
    "causal": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "parallel_block": False,
    "prenorm": False,
    "qkv_proj_bias": False,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "use_rms_norm": False,
}
NOMIC_NAMES = {
    "layer_norm_epsilon": "layer_norm_eps",
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
}
# Keys of the library that the authors' code does not read.
NOMIC_UNREAD = [
    "head_dim",
    "hidden_act",
    "intermediate_size",
    "layer_norm_eps",
    "partial_rotary_factor",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
]


def library_nomic(published):
    """Returns the configuration of NomicBERT with the library's names; raises for values that it cannot express."""
    config = {key: value for key, value in (NOMIC_DEFAULTS | published).items() if key not in NOMIC_UNREAD}
    for key, value in NOMIC_ONLY.items():
        if not same_json(config.pop(key), value):
            raise ValueError(f"no reference for {key}")
    for key in [*NOMIC_NAMES, "rotary_emb_base"]:
        if not isinstance(config[key], (int, float)):
            raise ValueError(f"no reference for {key}")
    for key in NOMIC_NAMES.values():
        if key in config:
            raise ValueError(f"no reference for {key}")
    config |= {to: config.pop(key) for key, to in NOMIC_NAMES.items()}
    rope = {"rope_theta": float(config.pop("rotary_emb_base")), "rope_type": "default"}
    return config | {"hidden_act": "silu", "rope_parameters": rope}


def family_config(name):
    return json.loads((FAMILIES / name / "config.json").read_text())


def nomic_files():
    return {"config.json": library_nomic(family_config("nomic_bert"))}


def camembert_files():
    return {"config.json": family_config("roberta") | {"architectures": ["CamembertModel"], "model_type": "camembert"}}


def llama_rerank_files():
    config = family_config("llama_rerank")
    del config["problem_type"]
    return {"config.json": config}


# As CrossEncoder(...).save_pretrained(...) of sentence-transformers 6 writes it.
SAVED_RERANKER = {
    "modules.json": [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"}
    ],
    "sentence_bert_config.json": {
        "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}},
        "module_output_name": "scores",
        "transformer_task": "sequence-classification",
    },
    "config_sentence_transformers.json": {
        "__version__": {"pytorch": "2.15.0", "sentence_transformers": "6.2.0", "transformers": "5.23.0"},
        "activation_fn": "torch.nn.modules.activation.Sigmoid",
        "default_prompt_name": None,
        "model_type": "CrossEncoder",
        "prompts": {},
    },
}


def qwen3_files():
    return bare_stages(32, "lasttoken")


NOMIC_KEYS = {
    "dense_seq_output": [False],
    "fused_bias_fc": [True],
    "fused_dropout_add_ln": [True],
    "max_trained_positions": [16],
    "parallel_block_tied_norm": [True],
    "rotary_emb_scale_base": [512.0],
    "use_flash_attn": [True],
    "use_xentropy": [True],
}
EMBED = dict(task="embed", inputs=TEXTS, prompt_names=[None, "query"])
RERANK = dict(task="rerank", inputs=PAIRS)
CLASSIFY = dict(task="classify", inputs=TEXTS)
OLD = {"sentence_bert_config.json": OLD_SENTENCE, "config_sentence_transformers.json": OLD_PROMPTS}
NEW = {"sentence_bert_config.json": NEW_SENTENCE, "config_sentence_transformers.json": NEW_PROMPTS}
BERT = dict(tokenizer=committed("bert"), config=BERT_TOKENIZER)
ROBERTA = dict(tokenizer=byte_level_roberta, config=ROBERTA_TOKENIZER)
MODERNBERT = dict(tokenizer=byte_level_modernbert, config=MODERNBERT_TOKENIZER)
LLAMA = dict(tokenizer=pieces_llama(False), config=LLAMA_TOKENIZER)
QWEN = dict(tokenizer=byte_level_qwen, config=GTE_QWEN_TOKENIZER)

# Ordered by urgency: embedders with known defects, embedders, heads.
FIXTURES = {
    "bert": EMBED | BERT | dict(files=OLD),
    "mistral": EMBED | dict(tokenizer=pieces_llama(True), config=E5_MISTRAL_TOKENIZER, files=NEW),
    "qwen2": EMBED | QWEN | dict(files=OLD),
    "llama": EMBED | dict(tokenizer=None, config=BACKEND_TOKENIZER, files=OLD),
    "qwen3": EMBED | dict(tokenizer=None, config=QWEN3_TOKENIZER, files=NEW, more=qwen3_files),
    "roberta": EMBED | ROBERTA | dict(files=NEW),
    "modernbert": EMBED | MODERNBERT | dict(files=OLD),
    "bert_f16": EMBED | BERT | dict(files=OLD),
    "jina_bert": EMBED | BERT | dict(files=OLD),
    "xlm_roberta": EMBED | dict(tokenizer=unigram, config=XLM_ROBERTA_TOKENIZER, files=NEW),
    "camembert": EMBED
    | dict(
        fixture="roberta",
        tokenizer=unigram,
        config=CAMEMBERT_TOKENIZER,
        files=OLD,
        more=camembert_files,
    ),
    "distilbert": EMBED | BERT | dict(config=DISTILBERT_TOKENIZER, files=NEW),
    "electra": EMBED | BERT | dict(config=ELECTRA_TOKENIZER, files=NEW),
    "mpnet": EMBED | dict(tokenizer=word_piece_mpnet, config=MPNET_TOKENIZER, files=OLD),
    "nomic_bert": EMBED | BERT | dict(files=NEW, more=nomic_files),
    "nomic_bert_published": EMBED | BERT | dict(fixture="nomic_bert", files=OLD, keys=NOMIC_KEYS),
    "gemma2": EMBED | dict(tokenizer=pieces_gemma(False), config=GEMMA_TOKENIZER, files=OLD),
    "gemma3": EMBED | dict(tokenizer=pieces_gemma(True), config=EMBEDDING_GEMMA_TOKENIZER, files=NEW),
    "bert_rerank": RERANK | dict(tokenizer=None, config=BERT_TOKENIZER),
    "bert_rerank_saved": RERANK
    | dict(fixture="bert_rerank", tokenizer=None, config=BERT_TOKENIZER, files=SAVED_RERANKER),
    "bert_classify": CLASSIFY | BERT,
    "qwen3_yes_no": RERANK | dict(tokenizer=None, inputs=SHORT_PAIRS),
    "llama_yes_no": RERANK | dict(tokenizer=None, inputs=SHORT_PAIRS),
    "qwen3_rerank": RERANK | QWEN,
    "llama_rerank": RERANK | LLAMA | dict(more=llama_rerank_files),
    "mistral_rerank": RERANK | LLAMA,
    "roberta_rerank": RERANK | dict(tokenizer=None, config=ROBERTA_TOKENIZER),
    "modernbert_rerank": RERANK | MODERNBERT,
    "modernbert_classify": CLASSIFY | MODERNBERT,
    "distilbert_classify": CLASSIFY | BERT | dict(config=DISTILBERT_TOKENIZER),
    "mpnet_labels": CLASSIFY | dict(tokenizer=word_piece_mpnet, config=MPNET_TOKENIZER),
    "nomic_bert_rerank": RERANK | BERT,
    "gemma2_rerank": RERANK | dict(tokenizer=pieces_gemma(False), config=GEMMA_TOKENIZER),
    "gemma3_classify": CLASSIFY | dict(tokenizer=pieces_gemma(True), config=EMBEDDING_GEMMA_TOKENIZER),
}


def base_files(name):
    row = FIXTURES[name]
    files = {}
    if row.get("tokenizer") is not None:
        files["tokenizer.json"] = row["tokenizer"]()
    if row.get("config") is not None:
        files["tokenizer_config.json"] = row["config"]
    files |= row.get("files", {})
    if "more" in row:
        files |= row["more"]()
    return json.loads(json.dumps(files))


# --- Changes.

REMOVE = object()
ACTIVATIONS = ["gelu", "relu", "silu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "unheard_of"]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 10000.0,
}
BOTH, ON, OFF = [True, False], [True], [False]

# Values to test for present and absent keys.
CONFIG_VALUES = {
    "_attn_implementation": ["sdpa"],
    "_name_or_path": ["unheard_of"],
    "activation": ACTIVATIONS,
    "activation_function": ["swiglu", "geglu", "gelu", "relu", "unheard_of"],
    "adapters": [{}],
    "add_cross_attention": BOTH,
    "add_pooling_layer": ON,
    "attention_bias": BOTH,
    "attention_dropout": [0.5],
    "attention_scaling": [2.0],
    "attn_implementation": ["sdpa", "flash_attention_2"],
    "attn_logit_softcapping": [1.0, None],
    "auto_map": [
        {"AutoModel": "modeling_unheard_of.UnheardOfModel"},
        {"AutoConfig": "configuration_unheard_of.UnheardOfConfig", "AutoModel": "unheard/of--modeling.UnheardOfModel"},
        {},
    ],
    "chunk_size_feed_forward": [1, 4],
    "classifier_activation": ACTIVATIONS,
    "classifier_bias": BOTH,
    "classifier_dropout": [0.5],
    "classifier_pooling": ["cls", "mean", "unheard_of"],
    "causal": BOTH,
    "cross_attention_hidden_size": [16],
    "decoder_bias": ON,
    "decoder_start_token_id": [1],
    "dtype": ["float16", "bfloat16", "float32", "float64", "unheard_of"],
    "embedding_size": [16],
    "feed_forward_type": ["original", "geglu", "reglu", "unheard_of"],
    "final_logit_softcapping": [1.0, None],
    "finetuning_task": ["sst-2"],
    "fused_qkv": ON,
    "global_attn_every_n_layers": [1, 2, 3],
    "global_rope_theta": [500.0],
    "head_dim": [4, 8, 16, None],
    "hidden_act": ACTIVATIONS,
    "hidden_activation": ACTIVATIONS,
    "is_causal": BOTH,
    "is_decoder": BOTH,
    "is_encoder_decoder": BOTH,
    "layer_norm_epsilon": [0.01],
    "layer_norm_eps": [0.01],
    "local_attention": [4, 9, 16],
    "local_rope_theta": [500.0],
    "max_window_layers": [0, 1, 2],
    "mlp_bias": BOTH,
    "no_bias": ON,
    "norm_bias": BOTH,
    "norm_eps": [0.01],
    "n_head": [2, 5, 8],
    "n_heads": [1, 6, 10],
    "num_attention_heads": [2, 5, 8],
    "num_key_value_heads": [1, 2, 4, None],
    "num_labels": [1, 2, 3, 4],
    "output_attentions": ON,
    "output_hidden_states": ON,
    "pad_token_id": [0, 1, 5, -1, None],
    "partial_rotary_factor": [0.5],
    "position_biased_input": OFF,
    "position_embedding_type": [
        "absolute",
        "relative_key",
        "relative_key_query",
        "alibi",
        "rotary",
        "rope",
        "unheard_of",
    ],
    "pretraining_tp": [2],
    "problem_type": ["regression", "single_label_classification", "multi_label_classification", "unheard_of"],
    "projection_dim": [16],
    "pruned_heads": [{"0": [0]}],
    "qk_norm": ON,
    "quantization_config": [
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "unheard_of"},
        {},
    ],
    "query_pre_attn_scalar": [1, 21, 64],
    "relative_attention_num_buckets": [8],
    "return_dict": OFF,
    "rms_norm_eps": [0.01],
    "rope_local_base_freq": [500.0],
    "rope_parameters": [
        {},
        {"rope_type": "default", "rope_theta": 500.0},
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
        {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
        YARN,
        LLAMA3,
        {"rope_type": "longrope", "short_factor": [2.0, 2.0], "long_factor": [3.0, 3.0], "rope_theta": 10000.0},
        {"rope_type": "unheard_of", "rope_theta": 10000.0},
        {
            "full_attention": {"rope_type": "default", "rope_theta": 500.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 700.0},
        },
    ],
    "rope_scaling": [
        {},
        {"type": "linear", "factor": 2.0},
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {key: value for key, value in YARN.items() if key != "rope_theta"},
        {key: value for key, value in LLAMA3.items() if key != "rope_theta"},
        {"rope_type": "unheard_of"},
        None,
    ],
    "rope_theta": [500.0],
    "rotary_emb_base": [500.0],
    "rotary_emb_fraction": [0.5, 0.0],
    "rotary_scaling_factor": [2.0],
    "scale_attn_weights": OFF,
    "sinusoidal_pos_embds": ON,
    "sliding_window": [4, 9, 4096, None],
    "sliding_window_pattern": [1, 2, 3],
    "sparse_prediction": ON,
    "summary_type": ["mean"],
    "task_specific_params": [{"text-classification": {"function_to_apply": "none"}}],
    "tie_word_embeddings": BOTH,
    "tokenizer_class": ["BertTokenizer", "LlamaTokenizer", "UnheardOfTokenizer"],
    "torch_dtype": ["float16", "bfloat16", "float32", "float64", "unheard_of"],
    "torchscript": ON,
    "type_vocab_size": [1, 2, 3],
    "use_bidirectional_attention": [True, False, "all"],
    "use_cache": BOTH,
    "use_qk_norm": ON,
    "use_sliding_window": BOTH,
    "_sliding_window_pattern": [1, 2, 3],
    "unheard_of_key": [1],
    "unheard_of_flag": [True],
    "unheard_of_part": [{"unheard_of": "value"}],
}
# Keys to test for a head although its configuration class does not define them; embedders are tested with all keys.
HEAD_KEYS = [
    "attention_bias",
    "auto_map",
    "causal",
    "classifier_activation",
    "classifier_bias",
    "classifier_pooling",
    "dtype",
    "head_dim",
    "is_causal",
    "is_decoder",
    "layer_types",
    "mlp_bias",
    "partial_rotary_factor",
    "position_embedding_type",
    "projection_dim",
    "pruned_heads",
    "quantization_config",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "summary_type",
    "task_specific_params",
    "tokenizer_class",
    "torch_dtype",
    "unheard_of_key",
    "use_bidirectional_attention",
]
HEAD_TOKENIZER_KEYS = [
    "add_bos_token",
    "add_eos_token",
    "add_prefix_space",
    "added_tokens_decoder",
    "additional_special_tokens",
    "auto_map",
    "bos_token",
    "chat_template",
    "cls_token",
    "do_lower_case",
    "eos_token",
    "extra_special_tokens",
    "mask_token",
    "max_length",
    "model_input_names",
    "pad_token_type_id",
    "padding_side",
    "processor_class",
    "sep_token",
    "split_special_tokens",
    "strip_accents",
    "tokenize_chinese_chars",
    "tokenizer_class",
    "truncation_side",
    "unheard_of_key",
    "unk_token",
]
# Reduced values of these keys for heads; an embedder of the same family is tested with all values.
HEAD_SHORT = {
    "auto_map": CONFIG_VALUES["auto_map"][:1],
    "dtype": ["float16"],
    "quantization_config": CONFIG_VALUES["quantization_config"][:1],
    "rope_parameters": CONFIG_VALUES["rope_parameters"][:4],
    "rope_scaling": CONFIG_VALUES["rope_scaling"][:3],
    "torch_dtype": ["float16"],
} | {key: ["relu", "silu", "unheard_of"] for key in ["activation", "classifier_activation", "hidden_act", "hidden_activation"]}
# Keys of heads, not applicable to embedders.
HEAD_VALUES = {
    "function_to_apply": ["none", "sigmoid", "softmax"],
    "sbert_ce_default_activation_function": [
        "torch.nn.modules.linear.Identity",
        "torch.nn.modules.activation.Sigmoid",
        "unheard.of.Function",
    ],
    "sentence_transformers": [
        {"activation_fn": "torch.nn.modules.linear.Identity", "version": "4.1.0"},
        {"activation_fn": "torch.nn.modules.activation.Sigmoid", "version": "4.1.0"},
        {"activation_fn": "torch.nn.modules.activation.Tanh", "version": "4.1.0"},
        {"activation_fn": "unheard.of.Function", "version": "4.1.0"},
        {"version": "4.1.0"},
    ],
}
# Keys within rope_parameters and rope_scaling.
ROPE_VALUES = {
    "attention_factor": [0.5],
    "beta_fast": [16.0],
    "beta_slow": [2.0],
    "factor": [2.0],
    "mscale": [0.5],
    "original_max_position_embeddings": [8],
    "partial_rotary_factor": [0.5],
    "rope_theta": [500.0],
    "rope_type": ["default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional", "unheard_of"],
    "type": ["linear"],
    "unheard_of_key": [1],
}
TOKENIZER_CLASSES = [
    "BertTokenizer",
    "BertJapaneseTokenizer",
    "RobertaTokenizer",
    "XLMRobertaTokenizer",
    "CamembertTokenizer",
    "MPNetTokenizer",
    "LlamaTokenizer",
    "Qwen2Tokenizer",
    "GemmaTokenizer",
    "GPT2Tokenizer",
    "T5Tokenizer",
    "PreTrainedTokenizerFast",
    "TokenizersBackend",
    "UnheardOfTokenizer",
]
TOKENIZER_VALUES = {
    "add_bos_token": BOTH,
    "add_eos_token": BOTH,
    "add_prefix_space": BOTH,
    "add_special_tokens": BOTH,
    "added_tokens_decoder": [
        {},
        {"5": {"content": "wind", "special": True}},
        {
            "200": {
                "content": "turned",
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
        },
    ],
    "additional_special_tokens": [["wind"], []],
    "auto_map": [
        {"AutoTokenizer": ["tokenization_unheard_of.UnheardOfTokenizer", None]},
        {"AutoTokenizer": ["tokenization_qwen.Qwen2Tokenizer", "tokenization_qwen.Qwen2TokenizerFast"]},
        {},
    ],
    "backend": ["tokenizers", "sentencepiece", "unheard_of"],
    "chat_template": ["{{ messages[0].content }}"],
    "clean_up_tokenization_spaces": BOTH,
    "do_basic_tokenize": BOTH,
    "do_lower_case": BOTH,
    "do_lowercase": ON,
    "errors": ["strict"],
    "extra_special_tokens": [["wind"], {"image_token": "wind"}],
    "fix_mistral_regex": ON,
    "from_slow": ON,
    "is_fast": OFF,
    "keep_accents": ON,
    "legacy": BOTH,
    "lowercase": ON,
    "max_length": [10],
    "max_len": [10],
    "model_input_names": [
        ["input_ids", "token_type_ids", "attention_mask"],
        ["input_ids", "attention_mask"],
        ["input_ids"],
        ["unheard_of"],
    ],
    "model_max_length": [10, 1000000000000000019884624838656, 0, None],
    "model_specific_special_tokens": [{"image_token": "wind"}],
    "name_or_path": ["unheard_of"],
    "never_split": [["wind"]],
    "normalize": ON,
    "pad_to_multiple_of": [8],
    "pad_token_type_id": [1],
    "padding": ["max_length"],
    "padding_side": ["left", "right", "unheard_of"],
    "processor_class": ["UnheardOfProcessor"],
    "remove_space": ON,
    "return_token_type_ids": OFF,
    "sp_model_kwargs": [{"enable_sampling": True}],
    "spaces_between_special_tokens": OFF,
    "special_tokens_map_file": ["unheard_of.json"],
    "split_special_tokens": BOTH,
    "stride": [2],
    "strip_accents": BOTH,
    "subword_prefix": ["@@"],
    "tokenize_chinese_chars": BOTH,
    "tokenizer_class": TOKENIZER_CLASSES,
    "tokenizer_file": ["unheard_of.json"],
    "tokenizer_type": ["bert"],
    "trim_offsets": BOTH,
    "truncation": [False],
    "truncation_side": ["left", "right", "unheard_of"],
    "truncation_strategy": ["only_first"],
    "use_default_system_prompt": ON,
    "use_fast": OFF,
    "vocab_file": ["unheard_of.txt"],
    "wordpieces_prefix": ["@@"],
    "unheard_of_key": [1],
    "unheard_of_flag": [True],
}
for token in ["bos", "eos", "cls", "sep", "pad", "unk", "mask"]:
    TOKENIZER_VALUES[f"{token}_token"] = ["e", "unheard_of"]
ADDED = {"__type": "AddedToken", "content": "e", "lstrip": True, "rstrip": False, "single_word": False, "special": True}
for token in ["cls", "eos"]:
    TOKENIZER_VALUES[f"{token}_token"].append(ADDED)
SENTENCE_VALUES = {
    "config_args": [{"num_hidden_layers": 1}, {"output_attentions": True}],
    "config_kwargs": [{"num_hidden_layers": 1}],
    "do_lower_case": BOTH,
    "document_length": [10],
    "max_seq_length": [10, 64, 0, None, "unheard_of"],
    "modality_config": [
        {},
        {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
        {"text": {"method": "forward", "method_output_name": "pooler_output"}},
        {"text": {"method": "forward", "method_output_name": ["hidden_states", 1]}},
        {"text": {"method": "get_text_features", "method_output_name": "pooler_output"}},
        {"image": {"method": "forward", "method_output_name": "last_hidden_state"}},
    ],
    "model_args": [{"attn_implementation": "sdpa"}, {"dtype": "float16"}, {"add_pooling_layer": False}],
    "model_kwargs": [{"add_pooling_layer": False}],
    "module_output_name": ["sentence_embedding", "token_embeddings", "unheard_of"],
    "processing_kwargs": [
        {"text": {"max_length": 10}},
        {"text": {"truncation": False}},
        {"text": {"add_special_tokens": False}},
        {"common": {"return_tensors": "np"}},
        {"unheard_of": {}},
    ],
    "processor_kwargs": [{"model_max_length": 10}, {"truncation_side": "left"}],
    "query_expansion": [{"strategy": "fixed", "length": 32}],
    "query_length": [10],
    "tokenizer_args": [{"model_max_length": 10}, {"do_lower_case": False}, {"add_eos_token": False}],
    "tokenizer_name_or_path": ["unheard_of"],
    "transformer_task": ["feature-extraction", "fill-mask", "text-generation", "sequence-classification", "unheard_of"],
    "unpad_inputs": BOTH,
    "unheard_of_key": [1],
    "unheard_of_flag": [True],
}
MODALITY_VALUES = {
    "format": ["flat", "structured", "unheard_of"],
    "method": ["get_text_features", "unheard_of"],
    "method_output_name": [
        "logits",
        "pooler_output",
        "last_hidden_state",
        "unheard_of",
        ["hidden_states", 0],
        ["hidden_states", 1],
        ["last_hidden_state"],
    ],
}
PROMPT_FILE_VALUES = {
    "activation_fn": ["torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Tanh", "unheard.of.Function"],
    "default_prompt_name": ["query", "document", "unheard_of", ""],
    "model_type": ["SentenceTransformer", "SparseEncoder", "CrossEncoder", "UnheardOf"],
    "prompts": [{}, {"query": "find: "}, {"unheard_of": "u: "}],
    "requirements": [["torch>=99"], {"torch": ">=99"}],
    "similarity_fn_name": ["cosine", "dot", "unheard_of"],
    "truncate_dim": [8, 1, 1000, 0, -1, "8"],
    "keep_in_fp32_modules": [["unheard_of"], []],
    "unheard_of_key": [1],
    "unheard_of_flag": [True],
}
PROMPT_VALUES = {"unheard_of": ["u: "], "passage": ["passage: "], "": ["x: "]}
POOLING_NAMES = ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
POOLING_VALUES = {
    "embedding_dimension": [16, 33],
    "include_prompt": BOTH,
    "pooling_mode": [*POOLING_NAMES, "unheard_of", ["mean"], ["mean", "cls"], []],
    "word_embedding_dimension": [16, 33],
    "unheard_of_key": [1],
    "unheard_of_flag": [True],
} | {
    f"pooling_mode_{mode}": BOTH
    for mode in ["cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken"]
}
DENSE_VALUES = {
    "activation_function": [
        "torch.nn.modules.linear.Identity",
        "torch.nn.modules.activation.Tanh",
        "torch.nn.modules.activation.ReLU",
        "torch.nn.modules.activation.GELU",
        "torch.nn.modules.activation.Sigmoid",
        "torch.nn.modules.activation.SiLU",
        "unheard.of.Function",
    ],
    "bias": BOTH,
    "module_input_name": ["sentence_embedding", "token_embeddings", "unheard_of"],
    "module_output_name": ["sentence_embedding", "token_embeddings", "unheard_of"],
    "use_residual": BOTH,
    "unheard_of_key": [1],
    "unheard_of_flag": [True],
}
NORMALIZE_VALUES = {
    "module_input_name": ["sentence_embedding", "token_embeddings", "unheard_of"],
    "module_output_name": ["sentence_embedding", "token_embeddings", "unheard_of"],
    "unheard_of_key": [1],
    "unheard_of_flag": [True],
}
SCORE_VALUES = {
    "true_token_id": [3, 5, 100000, None],
    "false_token_id": [3, 5, 100000, None],
    "module_input_name": ["unheard_of"],
    "module_output_name": ["scores", "unheard_of"],
    "unheard_of_key": [1],
}
MODULE_TYPES = [
    "sentence_transformers.models.Transformer",
    "sentence_transformers.models.Pooling",
    "sentence_transformers.models.Normalize",
    "sentence_transformers.models.Dense",
    "sentence_transformers.models.Dropout",
    "sentence_transformers.sentence_transformer.modules.pooling.Pooling",
    "sentence_transformers.base.modules.normalize.Normalize",
    "sentence_transformers.models.UnheardOf",
]
MODULE_VALUES = {
    "kwargs": [["task"], ["unheard_of"]],
    "idx": [7],
    "name": ["0"],
    "path": ["", "1_Pooling", "../1_Pooling"],
    "type": MODULE_TYPES,
    "unheard_of_key": [1],
}
ARCHITECTURE_ENDINGS = [
    "Model",
    "ForMaskedLM",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForCausalLM",
]
MODEL_TYPES = [
    "bert",
    "roberta",
    "xlm-roberta",
    "distilbert",
    "modernbert",
    "nomic_bert",
    "mistral",
    "llama",
    "qwen2",
    "gemma3_text",
    "unheard_of",
]


def generic(key, value, present):
    """Returns informative changes of a value, by its type."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        if key.endswith("token_id"):
            return [value + 1]
        return [value + 1, value // 2] if present else [value + 1]
    if isinstance(value, float):
        return [0.5 if value == 0 else value * 2]
    if isinstance(value, str):
        return ["unheard_of"]
    if isinstance(value, list):
        return [value[::-1], value[:-1], [*value, "unheard_of"]]
    if isinstance(value, dict):
        return [{}]
    return []


def same_json(one, other):
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def changes_of(holder, prefix, hand, known=None, nested=None, nulls=True):
    """Yields (key, value or REMOVE) for the keys of an object, of `hand`, and of `known` (library defaults)."""
    known = known or {}
    for key in sorted({*holder, *hand, *known}):
        present = key in holder
        current = holder[key] if present else known.get(key)
        values = list(hand.get(key) or generic(key, current, present))
        if not present and not values:
            values = [1]
        tried = []
        if present:
            yield prefix + key, REMOVE
            tried.append(current)
            if nulls or not isinstance(current, (int, float)):
                values.append(None)
        for value in values:
            if not any(same_json(value, other) for other in tried):
                tried.append(value)
                yield prefix + key, value
        if present and isinstance(current, dict):
            parts = (nested or {}).get(key, nested.get("") if nested else None) or {}
            yield from changes_of(current, f"{prefix}{key}/", parts, nested=nested, nulls=nulls)


def config_changes(config, row):
    import transformers

    family = config["architectures"][0]
    stem = re.sub(r"(Model|For[A-Z].*)$", "", family)
    library = transformers.AutoConfig.for_model(config["model_type"])
    known = library.to_dict()
    # Alternative names of keys, tested with the key's own value.
    known |= {other: config.get(key, known.get(key)) for other, key in library.attribute_map.items()}
    del known["transformers_version"]
    hand = CONFIG_VALUES | row.get("keys", {})
    if row["task"] != "embed":
        hand = {key: values for key, values in hand.items() if key in {*HEAD_KEYS, *known, *config}}
        hand |= HEAD_VALUES | {key: values for key, values in HEAD_SHORT.items() if key in hand}
        labels = ["a", "b", "c", "d", "e", "f"]
        hand["id2label"] = [{}] + [{str(id): label for id, label in enumerate(labels[:count])} for count in [1, 2, 3, 5]]
        hand["label2id"] = [{label: id for id, label in enumerate(labels[:count])} for count in [1, 3]]
    hand["architectures"] = [[stem + ending] for ending in ARCHITECTURE_ENDINGS]
    hand["architectures"] += [["JinaForRanking"], ["UnheardOfModel"], [], [family, "UnheardOfModel"]]
    hand["model_type"] = MODEL_TYPES
    layers = next((config[key] for key in ["num_hidden_layers", "n_layers", "n_layer"] if key in config), 2)
    full, sliding = "full_attention", "sliding_attention"
    hand["layer_types"] = [
        [full] * layers,
        [sliding] * layers,
        [[sliding, full][index % 2] for index in range(layers)],
        [[full, sliding][index % 2] for index in range(layers)],
        ["unheard_of"] + [full] * (layers - 1),
        [full] * (layers - 1),
    ]
    rope = {"full_attention": ROPE_VALUES, "sliding_attention": ROPE_VALUES}
    flat = "full_attention" not in (config.get("rope_parameters") or {})
    nested = rope | {"rope_parameters": ROPE_VALUES if flat else {}, "rope_scaling": ROPE_VALUES}
    # The library's configuration classes reject null for required numbers and flags.
    yield from changes_of(config, "", hand, known, nested, nulls=False)


def all_changes(folder, row):
    """Yields (file, key, value or REMOVE) in a fixed order."""

    def read(file):
        return json.loads((folder / file).read_text())

    def changes(file, iterator):
        return [(file, key, value) for key, value in iterator]

    found = changes("config.json", config_changes(read("config.json"), row))
    tokenizer = read("tokenizer_config.json")
    special = [value for key, value in sorted(tokenizer.items()) if key.endswith("_token") and isinstance(value, str)]
    hand = {
        key: [*values, *special] if key.endswith("_token") and values[0] == "e" else values
        for key, values in TOKENIZER_VALUES.items()
        if row["task"] == "embed" or key in {*HEAD_TOKENIZER_KEYS, *tokenizer}
    }
    decoder = {"added_tokens_decoder": {}}
    found += changes("tokenizer_config.json", changes_of(tokenizer, "", hand, nested=decoder))
    if (folder / "sentence_bert_config.json").exists():
        nested = {"modality_config": {}, "text": MODALITY_VALUES, "message": MODALITY_VALUES}
        values = changes_of(read("sentence_bert_config.json"), "", SENTENCE_VALUES, nested=nested)
        found += changes("sentence_bert_config.json", values)
    if (folder / "config_sentence_transformers.json").exists():
        config = read("config_sentence_transformers.json")
        hand = dict(PROMPT_FILE_VALUES)
        if row["task"] == "rerank":
            hand["default_prompt_name"] = [*(config.get("prompts") or {}), "unheard_of"]
        values = changes_of(config, "", hand, nested={"prompts": PROMPT_VALUES})
        found += changes("config_sentence_transformers.json", values)
    if not (folder / "modules.json").exists():
        return found
    modules = read("modules.json")
    for index, module in enumerate(modules):
        file = f"{module['path']}/config.json"
        values = None
        if module["type"].endswith("Pooling"):
            values = POOLING_VALUES
        elif module["type"].endswith("Dense"):
            values = DENSE_VALUES
        elif module["type"].endswith("Normalize") and (folder / file).exists():
            values = NORMALIZE_VALUES
        elif module["type"].endswith("LogitScore"):
            values = SCORE_VALUES
        if values is not None:
            found += changes(file, changes_of(read(file), "", values))
    for index, module in enumerate(modules):
        found.append(("modules.json", str(index), REMOVE))
        found += changes("modules.json", changes_of(module, f"{index}/", MODULE_VALUES))
    end = len(modules)
    for stage in ["Normalize", "Dense", "UnheardOf"]:
        added = {"idx": end, "name": str(end), "path": f"{end}_{stage}", "type": f"sentence_transformers.models.{stage}"}
        found.append(("modules.json", str(end), added))
    return found


def change(document, key, value):
    document = deepcopy(document)
    *path, last = key.split("/")
    holder = document
    for part in path:
        holder = holder[int(part)] if isinstance(holder, list) else holder[part]
    if isinstance(holder, list):
        last = int(last)
        if value is REMOVE:
            del holder[last]
        elif last == len(holder):
            holder.append(value)
        else:
            holder[last] = value
    elif value is REMOVE:
        del holder[last]
    else:
        holder[last] = value
    return document


# --- References.


class CaseTimeout(Exception):
    pass


def load_options():
    import torch

    return dict(dtype=torch.float32, attn_implementation="eager")


class Embedder:
    labels = pipeline = None

    def __init__(self, folder, row):
        from sentence_transformers import SentenceTransformer

        self.row = row
        self.model = SentenceTransformer(
            str(folder), device="cpu", local_files_only=True, model_kwargs=load_options()
        )

    def compute(self):
        import numpy

        rows = [
            self.model.encode(text, prompt_name=prompt, show_progress_bar=False)
            for prompt in self.row["prompt_names"]
            for text in self.row["inputs"]
        ]
        return numpy.stack([numpy.asarray(row, dtype="<f4") for row in rows])

    def ids(self, text):
        return self.model.preprocess([text])["input_ids"][0].tolist()


class Reranker:
    labels = pipeline = None

    def __init__(self, folder, row):
        from sentence_transformers import CrossEncoder

        self.row = row
        self.model = CrossEncoder(str(folder), device="cpu", local_files_only=True, model_kwargs=load_options())

    def compute(self):
        import numpy

        inputs = [tuple(text) if isinstance(text, list) else text for text in self.row["inputs"]]
        rows = [self.model.predict(text, show_progress_bar=False) for text in inputs]
        if len(self.model) == 1:
            self.pipeline = numpy.stack([self.by_pipeline(text) for text in inputs])
        return numpy.stack([numpy.atleast_1d(numpy.asarray(row, dtype="<f4")) for row in rows])

    def by_pipeline(self, text):
        """Returns the scores of the text-classification pipeline for the same logits."""
        import numpy
        import torch
        from transformers import TextClassificationPipeline

        with torch.no_grad():
            logits = self.model(self.model.preprocess([text]))["scores"]
        holder = SimpleNamespace(model=self.model[0].model)
        scores = TextClassificationPipeline.postprocess(holder, {"logits": logits}, top_k=None, _legacy=True)
        return numpy.array([score["score"] for score in scores], dtype="<f4")

    def ids(self, pair):
        return self.model.preprocess([tuple(pair)])["input_ids"][0].tolist()


class Classifier:
    labels = pipeline = None

    def __init__(self, folder, row):
        import transformers

        self.row, self.crosses = row, None
        auto = transformers.AutoModelForSequenceClassification
        model = auto.from_pretrained(folder, local_files_only=True, **load_options()).eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        longest = getattr(model.config, "max_position_embeddings", -1)
        if longest != -1:
            tokenizer.model_max_length = min(tokenizer.model_max_length, longest)
        self.made = transformers.pipeline("text-classification", model=model, tokenizer=tokenizer, device="cpu")
        written = getattr(model.config, "sentence_transformers", None) or {}
        if "activation_fn" in written or getattr(model.config, "sbert_ce_default_activation_function", None) is not None:
            self.crosses = Reranker(folder, row)

    def compute(self):
        import numpy
        import torch

        rows = []
        for text in self.row["inputs"]:
            with torch.no_grad():
                outputs = self.made.forward(self.made.preprocess(text, truncation=True))
            # With `_legacy` the labels keep their order.
            scores = self.made.postprocess(outputs, top_k=None, _legacy=True)
            self.labels = [score["label"] for score in scores]
            rows.append(numpy.array([score["score"] for score in scores], dtype="<f4"))
        self.pipeline = numpy.stack(rows)
        return self.pipeline if self.crosses is None else self.crosses.compute()

    def ids(self, text):
        return self.made.preprocess(text, truncation=True)["input_ids"][0].tolist()


REFERENCES = {"embed": Embedder, "rerank": Reranker, "classify": Classifier}


def patch_jina():
    """Makes sentence-transformers load JinaBERT with the class of jina_bert.py."""
    import torch
    from jina_bert import JinaBert
    from sentence_transformers.base.modules import Transformer
    from transformers import BertConfig

    class Wrapped(torch.nn.Module):
        def __init__(self, inner, config):
            super().__init__()
            self.inner, self.config, self.dtype = inner, config, torch.float32

        def forward(self, input_ids, attention_mask=None, token_type_ids=None, return_dict=True):
            if attention_mask is None:
                attention_mask = torch.ones_like(input_ids)
            if token_type_ids is None:
                token_type_ids = torch.zeros_like(input_ids)
            return self.inner(input_ids, token_type_ids, attention_mask)

    def load(self, folder, task, config, backend, is_peft, **options):
        if type(config) is not BertConfig:
            raise ValueError("no reference: the model type is not that of a JinaBERT")
        if task != "feature-extraction":
            raise ValueError(f"no reference: the task {task} is not that of an embedder")
        for key, value in {"position_embedding_type": "alibi", "feed_forward_type": "geglu"}.items():
            if getattr(config, key, None) != value:
                raise ValueError(f"no reference: {key} is not {value}")
        if config.hidden_size % config.num_attention_heads:
            raise ValueError("the hidden size is not a multiple of the number of heads")
        from safetensors.torch import load_file

        model = JinaBert(config)
        model.load_state_dict(load_file(Path(folder) / "model.safetensors"))
        return Wrapped(model.float(), config).eval()

    Transformer._load_model = load


class Runner:
    def __init__(self, name, work):
        self.name, self.row, self.work = name, FIXTURES[name], work
        self.count = 0
        self.base = work / "base"
        source = FAMILIES / self.row.get("fixture", name)
        shutil.copytree(source, self.base, ignore=lambda _, names: [name for name in names if name in NOT_MODEL_FILES])
        self.files = base_files(name)
        for file, document in self.files.items():
            path = self.base / file
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(document, indent=2) + "\n")

    def place(self, folder, changed):
        """Creates a folder with links to the unchanged files, and the changed files."""
        if self.name == "nomic_bert_published":
            config = changed.get("config.json") or json.loads((self.base / "config.json").read_text())
            changed = changed | {"config.json": library_nomic(config)}
        for path in self.base.rglob("*"):
            to = folder / path.relative_to(self.base)
            if path.is_dir():
                to.mkdir(parents=True, exist_ok=True)
            else:
                to.parent.mkdir(parents=True, exist_ok=True)
                to.symlink_to(path)
        for file, document in changed.items():
            (folder / file).unlink()
            (folder / file).write_text(json.dumps(document, indent=2) + "\n")

    def attempt(self, changed, seed):
        """Returns ('rows', outputs, labels, the pipeline's outputs) or ('fails', where, error)."""
        import torch

        folder = self.work / f"case{self.count}" / "model"
        self.count += 1
        signal.alarm(CASE_TIME_LIMIT)
        at = "load"
        try:
            self.place(folder, changed)
            torch.manual_seed(seed)
            reference = REFERENCES[self.row["task"]](folder, self.row)
            at = "input"
            rows = reference.compute()
            if rows.ndim != 2:
                raise ValueError(f"no row per input: {list(rows.shape[1:])}")
            return "rows", rows, reference.labels, reference.pipeline
        except CaseTimeout:
            raise
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            lines = [line for line in str(error).splitlines() if line.strip()] or [""]
            text = f"{type(error).__name__}: {lines[0].strip()}".replace(str(folder), "FOLDER")
            return "fails", at, re.sub(r"0x[0-9a-f]{6,}", "0x", text)[:60]
        finally:
            signal.alarm(0)
            shutil.rmtree(folder.parent, ignore_errors=True)

    def check_base(self):
        """Checks that the unchanged tokenizer.json alone gives the same tokens as the library with all files."""
        import tokenizers

        if (self.base / "chat_template.jinja").exists():
            return
        folder = self.work / "checked" / "model"
        self.place(folder, {})
        reference = REFERENCES[self.row["task"]](folder, self.row)
        alone = tokenizers.Tokenizer.from_file(str(self.base / "tokenizer.json"))
        alone.no_padding()
        lengths = []
        for text in self.row["inputs"]:
            ids = reference.ids(text)
            lengths.append(len(ids))
            alone.enable_truncation(len(ids))
            own = alone.encode(*text) if isinstance(text, list) else alone.encode(text)
            assert own.ids == ids, f"{self.name}: {text!r} is {own.tokens}, {own.ids} and not {ids}"
        assert max(lengths) in (MAX_SEQ_LENGTH, MODEL_MAX_LENGTH) and len(set(lengths)) > 2, lengths

    def run(self):
        import numpy

        self.check_base()
        kind, *base = self.attempt({}, 0)
        assert kind == "rows", f"{self.name}: {base}"
        base, labels, pipeline = base
        assert numpy.isfinite(base).all() and (pipeline is None or self.alike(base, pipeline))
        values, places, cases = [], {}, []

        def keep(rows):
            data = rows.astype("<f4").tobytes()
            if (rows.shape, data) not in places:
                places[rows.shape, data] = sum(map(len, values)) // 4
                values.append(data)
            return {"rows": list(rows.shape), "offset": places[rows.shape, data]}

        kept_base = keep(base) | ({} if labels is None else {"labels": labels})
        documents = {}
        for file, key, value in all_changes(self.base, self.row):
            if file not in documents:
                documents[file] = json.loads((self.base / file).read_text())
            case = {"file": file, "key": key} | ({"remove": True} if value is REMOVE else {"value": value})
            changed = {file: change(documents[file], key, value)}
            kind, *found = self.attempt(changed, 0)
            if kind == "fails":
                case |= {"outcome": "fails", "at": found[0], "error": found[1]}
            elif not numpy.isfinite(found[0]).all():
                case |= {"outcome": "not_finite"}
            elif self.alike(found[0], base) and found[1] == labels:
                case |= {"outcome": "same"}
            else:
                kind, *again = self.attempt(changed, 1)
                assert kind == "rows", f"{self.name}: {case}: {again}"
                if self.alike(found[0], again[0]):
                    case |= {"outcome": "different"} | keep(found[0])
                    if found[1] != labels:
                        case["labels"] = found[1]
                else:
                    case |= {"outcome": "random"}
            if case["outcome"] in ("same", "different") and found[2] is not None and not self.alike(found[0], found[2]):
                case["pipeline"] = keep(found[2])
            cases.append(case)
        kind, *again = self.attempt({}, 0)
        assert kind == "rows" and again[0].tobytes() == base.tobytes(), f"{self.name}: the cases changed the library"
        self.write(kept_base, cases, b"".join(values))

    @staticmethod
    def alike(one, other):
        return one.shape == other.shape and bool((abs(one - other) <= 1e-6).all())

    def write(self, base, cases, data):
        import sentence_transformers
        import torch
        import transformers

        made_with = {
            "torch": torch.__version__.split("+")[0],
            "transformers": transformers.__version__,
            "sentence_transformers": sentence_transformers.__version__,
        }
        head = {"made_with": made_with, "fixture": self.row.get("fixture", self.name)}
        lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
        files = ",\n".join(f"  {json.dumps(file)}: {json.dumps(document)}" for file, document in self.files.items())
        lines.append(f'"files": {{\n{files}\n}}')
        for key in ["task", "inputs", "prompt_names"]:
            if key in self.row:
                lines.append(f"{json.dumps(key)}: {json.dumps(self.row[key])}")
        lines.append(f'"base": {json.dumps(base)}')
        lines.append('"cases": [\n' + ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases) + "\n]")
        OUT.mkdir(exist_ok=True)
        (OUT / f"{self.name}.f32").write_bytes(data)
        (OUT / f"{self.name}.json").write_text("{" + ",\n".join(lines) + "}\n")
        outcomes = Counter(case["outcome"] for case in cases)
        print(f"{self.name:22} {len(cases)} cases {dict(sorted(outcomes.items()))} {len(data)} bytes")


def run(name):
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))

    def expire(*_):
        raise CaseTimeout(f"a case took longer than {CASE_TIME_LIMIT} s")

    signal.signal(signal.SIGALRM, expire)
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    import logging
    import warnings

    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    if name == "jina_bert":
        patch_jina()
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None) as work:
        Runner(name, Path(work)).run()


def main():
    if sys.argv[1:2] == ["--row"]:
        run(sys.argv[2])
        return
    wanted = sys.argv[1:] or list(FIXTURES)
    unknown = [name for name in wanted if name not in FIXTURES]
    assert not unknown, f"no rows {unknown}; there are {list(FIXTURES)}"
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONHASHSEED": "0", "TOKENIZERS_PARALLELISM": "false"}
    failed = []
    for name in wanted:
        try:
            subprocess.run([sys.executable, __file__, "--row", name], env=environment, check=True, timeout=TIME_LIMIT)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            print(f"{name}: {error}")
            failed.append(name)
    assert not failed, f"failed: {failed}"


if __name__ == "__main__":
    main()
