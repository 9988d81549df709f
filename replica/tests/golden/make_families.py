#!/usr/bin/env python3
"""Generates a small model with random weights for each family, and the reference outputs of transformers.

Writes, for each row of the tables below, a folder in `families/`: the model as transformers saves it (config.json,
model.safetensors or shards of it), the files of sentence-transformers if it is an embedder, and the reference:

- golden.json: token ids and types of some sequences, the names and widths of the outputs, and the library versions;
- golden.f32: the outputs as little-endian floats, one output after another, each with the sequences in order. `tokens`
  has a row per token (the last hidden states), the others have a row per sequence: each pooling mode of
  sentence-transformers by its name, `pooled` (the pooling of the model's configuration and its dense layers, not
  normalised), or `logits` and `scores` of a label head.

make_tokenizers.py adds a tokenizer to some fixtures; make_yes_no.py generates the LLM rerankers.

Every sequence is computed alone, in float32, with eager attention, by the model as loaded from the folder. The
reference therefore includes the rounding of a 16-bit checkpoint.

Weights, biases and normalisations are random and large. `check_sensitive` verifies that every parameter matters:
it replaces one parameter at a time, and the outputs must change. `check_precise` verifies against float64 that float32
is precise enough to distinguish right from wrong.

Usage (the committed files: Python 3.11.7, torch 2.15.0, transformers 5.23.0, sentence-transformers 6.2.0)
    python3 -m venv venv && venv/bin/pip install torch transformers sentence-transformers
    venv/bin/python make_families.py [NAME...]
"""

import json
import random
import shutil
import sys
import zlib
from pathlib import Path

import sentence_transformers
import torch
import transformers
from jina_bert import JinaBert
from make_tokenizers import TOKENIZERS, write as write_tokenizer
from sentence_transformers.sentence_transformer.modules import Dense, Pooling

HERE = Path(__file__).parent / "families"
POOLINGS = ["mean", "cls", "lasttoken", "weightedmean", "max", "mean_sqrt_len_tokens"]
# One token, lengths around vector and block sizes, several attention windows, and the maximum length.
LENGTHS = [1, 2, 3, 5, 8, 9, 17, 33, 48]
HEAD_LENGTHS = [1, 2, 5, 9, 17, 48]
LABELS = ["joy", "anger", "fear", "trust", "surprise"]

ENCODER = dict(
    vocab_size=110,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    max_position_embeddings=48,
    pad_token_id=0,
)
# The first two positions are reserved for padding.
ROBERTA = dict(ENCODER, max_position_embeddings=50, pad_token_id=1, type_vocab_size=1, layer_norm_eps=1e-5)
MPNET = dict(ENCODER, max_position_embeddings=50, pad_token_id=1)
DISTILBERT = dict(
    vocab_size=110, dim=40, n_layers=2, n_heads=5, hidden_dim=72, max_position_embeddings=48, pad_token_id=0
)
MODERNBERT = dict(
    ENCODER,
    num_hidden_layers=4,
    intermediate_size=48,
    layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    local_attention=8,
    rope_parameters={
        "full_attention": {"rope_type": "default", "rope_theta": 160000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
    bos_token_id=1,
    eos_token_id=2,
    cls_token_id=1,
    sep_token_id=2,
)
DECODER = dict(ENCODER, num_key_value_heads=2, intermediate_size=56, bos_token_id=1, eos_token_id=2)
GEMMA = dict(DECODER, head_dim=12, hidden_activation="gelu_pytorch_tanh", eos_token_id=1, bos_token_id=2)
ALTERNATING = ["sliding_attention", "full_attention"]


def rope(theta, **scaling):
    return dict(rope_parameters=dict({"rope_type": "default"}, **scaling, rope_theta=theta))


LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)

# name: (configuration class, its arguments, then options that differ from the default)
#   base: the saved class, which determines the tensor names; kind: number format; shards: bytes per shard;
#   pooling and normalize: of the model; dense: sizes of the dense layers after pooling; legacy: files as written by
#   version 4 of transformers and version 5 of sentence-transformers; stages: False for a model without modules.json;
#   published: config.json is rewritten at the end in the authors' form; auto: class that loads the model, if it is not
#   one of transformers
EMBEDDERS = {
    "bert": (
        "Bert",
        dict(ENCODER, type_vocab_size=2),
        dict(pooling="cls", normalize=True, legacy=True, prompts={"query": "query: ", "document": "text: "}),
    ),
    "bert_f16": (
        "Bert",
        dict(ENCODER, type_vocab_size=2, hidden_size=36, num_attention_heads=3, hidden_act="gelu_new"),
        dict(kind="float16", shards="24KB", dense=[(36, 20, True, torch.nn.Tanh())], legacy=True),
    ),
    "jina_bert": (
        "Bert",
        dict(
            ENCODER,
            type_vocab_size=2,
            hidden_size=36,
            num_attention_heads=3,
            position_embedding_type="alibi",
            feed_forward_type="geglu",
        ),
        dict(kind="float16", auto=JinaBert),
    ),
    "roberta": ("Roberta", ROBERTA, dict()),
    "xlm_roberta": (
        "XLMRoberta",
        ROBERTA,
        dict(base="XLMRobertaForMaskedLM", kind="bfloat16", pooling="cls", normalize=True),
    ),
    "distilbert": ("DistilBert", DISTILBERT, dict(kind="float16", pooling="mean_sqrt_len_tokens")),
    "mpnet": ("MPNet", MPNET, dict(kind="float16", normalize=True)),
    "electra": ("Electra", dict(ENCODER, embedding_size=32, type_vocab_size=2), dict(kind="float16")),
    "modernbert": ("ModernBert", MODERNBERT, dict(kind="float16", pooling="cls", legacy=True)),
    "nomic_bert": (
        "NomicBert",
        dict(ENCODER, type_vocab_size=2, **rope(1000.0)),
        dict(kind="float16", pooling="mean", normalize=True, published=True),
    ),
    "mistral": (
        "Mistral",
        dict(DECODER, head_dim=16, sliding_window=8, **rope(10000.0)),
        dict(kind="bfloat16", shards="24KB", pooling="lasttoken", normalize=True),
    ),
    "llama": (
        "Llama",
        dict(DECODER, vocab_size=320, **rope(500000.0, **LLAMA3)),
        dict(kind="bfloat16", pooling="weightedmean", legacy=True),
    ),
    "qwen2": (
        "Qwen2",
        dict(DECODER, use_sliding_window=True, max_window_layers=1, sliding_window=8, **rope(1000000.0)),
        dict(kind="bfloat16", pooling="lasttoken", legacy=True),
    ),
    "qwen3": (
        "Qwen3",
        dict(DECODER, vocab_size=320, head_dim=16, tie_word_embeddings=True, **rope(1000000.0)),
        dict(kind="bfloat16", base="Qwen3ForCausalLM", stages=False, pooling="lasttoken"),
    ),
    "gemma2": (
        "Gemma2",
        dict(
            GEMMA,
            query_pre_attn_scalar=20,
            attn_logit_softcapping=3.0,
            final_logit_softcapping=5.0,
            sliding_window=8,
            layer_types=ALTERNATING,
            **rope(10000.0),
        ),
        dict(kind="bfloat16", pooling="mean"),
    ),
    "gemma3": (
        "Gemma3Text",
        dict(
            GEMMA,
            num_hidden_layers=3,
            query_pre_attn_scalar=20,
            sliding_window=8,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
            use_bidirectional_attention=True,
            rope_parameters={
                "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        ),
        dict(
            kind="bfloat16",
            pooling="mean",
            normalize=True,
            dense=[(32, 64, False, torch.nn.Identity()), (64, 32, False, torch.nn.Identity())],
        ),
    ),
}

# name: (configuration class, its arguments, labels, problem type, then options that differ from the default)
HEADS = {
    "bert_rerank": ("Bert", dict(ENCODER, type_vocab_size=2), 1, None, dict(kind="float16")),
    "bert_classify": ("Bert", dict(ENCODER, type_vocab_size=2), 3, None, dict(kind="float16")),
    "bert_labels": (
        "Bert",
        dict(ENCODER, type_vocab_size=2),
        5,
        "multi_label_classification",
        dict(kind="bfloat16"),
    ),
    "roberta_rerank": ("Roberta", dict(ROBERTA, vocab_size=320), 1, None, dict(kind="float16")),
    "roberta_labels": ("Roberta", ROBERTA, 5, "multi_label_classification", dict(kind="bfloat16")),
    "xlm_roberta_rerank": ("XLMRoberta", ROBERTA, 1, None, dict(kind="bfloat16")),
    "xlm_roberta_classify": ("XLMRoberta", ROBERTA, 5, "single_label_classification", dict(kind="float16")),
    "distilbert_rerank": ("DistilBert", DISTILBERT, 1, None, dict(kind="float16")),
    "distilbert_classify": ("DistilBert", DISTILBERT, 2, "single_label_classification", dict(kind="bfloat16")),
    "mpnet_rerank": (
        "MPNet",
        MPNET,
        1,
        None,
        dict(kind="float16"),
    ),
    "mpnet_labels": (
        "MPNet",
        MPNET,
        5,
        "multi_label_classification",
        dict(kind="bfloat16"),
    ),
    "electra_rerank": ("Electra", dict(ENCODER, embedding_size=32, type_vocab_size=2), 1, None, dict(kind="float16")),
    "modernbert_rerank": ("ModernBert", dict(MODERNBERT, classifier_pooling="mean"), 1, None, dict(kind="float16")),
    "modernbert_classify": (
        "ModernBert",
        dict(
            MODERNBERT,
            classifier_pooling="cls",
            classifier_bias=True,
            norm_bias=True,
            mlp_bias=True,
            attention_bias=True,
        ),
        5,
        "single_label_classification",
        dict(kind="bfloat16"),
    ),
    "nomic_bert_rerank": (
        "NomicBert",
        dict(ENCODER, type_vocab_size=2, **rope(1000.0)),
        1,
        None,
        dict(kind="float16"),
    ),
    "mistral_rerank": ("Mistral", dict(DECODER, sliding_window=8, **rope(10000.0)), 1, None, dict(kind="float16")),
    "mistral_labels": (
        "Mistral",
        dict(DECODER, sliding_window=None, **rope(10000.0)),
        5,
        "multi_label_classification",
        dict(kind="bfloat16"),
    ),
    "llama_rerank": (
        "Llama",
        dict(DECODER, num_key_value_heads=4, attention_bias=True, mlp_bias=True, **rope(10000.0)),
        1,
        "regression",
        dict(kind="float16"),
    ),
    "llama_classify": (
        "Llama",
        dict(DECODER, num_key_value_heads=1, **rope(10000.0, rope_type="linear", factor=2.0)),
        5,
        "single_label_classification",
        dict(kind="bfloat16", legacy=True),
    ),
    "qwen2_rerank": ("Qwen2", dict(DECODER, **rope(10000.0, **YARN)), 1, None, dict(kind="float16")),
    "qwen2_labels": ("Qwen2", dict(DECODER, **rope(10000.0)), 5, "multi_label_classification", dict(kind="bfloat16")),
    "qwen3_rerank": ("Qwen3", dict(DECODER, head_dim=16, **rope(10000.0)), 1, None, dict(kind="float16")),
    "qwen3_classify": (
        "Qwen3",
        dict(DECODER, head_dim=16, attention_bias=True, **rope(10000.0)),
        5,
        "single_label_classification",
        dict(kind="bfloat16"),
    ),
    "gemma2_rerank": (
        "Gemma2",
        dict(GEMMA, query_pre_attn_scalar=12, attn_logit_softcapping=None, sliding_window=8, **rope(10000.0)),
        1,
        None,
        dict(kind="float16", legacy=True),
    ),
    "gemma3_classify": (
        "Gemma3Text",
        dict(GEMMA, num_hidden_layers=3, query_pre_attn_scalar=12, sliding_window=8, sliding_window_pattern=2),
        5,
        "single_label_classification",
        dict(kind="bfloat16", legacy=True),
    ),
}


def randomise(model, name):
    """Randomises weights, scaled by fan-in: products keep their input's magnitude, normalisations stay near one."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    gemma = "gemma" in model.config.model_type
    with torch.no_grad():
        for parameter_name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            norm = parameter.dim() == 1 and "norm" in parameter_name.lower()
            if norm and parameter_name.endswith("weight"):
                noise = 0.3 * noise + (0.0 if gemma else 1.0)
            elif parameter.dim() == 1:
                noise = 0.3 * noise
            elif "embed" in parameter_name or "relative_attention_bias" in parameter_name:
                noise = 0.7 * noise
            else:
                noise = 1.4 * noise / parameter.shape[1] ** 0.5
            parameter.copy_(noise)
    model.tie_weights()


def write_legacy_config(folder):
    """Writes config.json in the form of version 4 of transformers, as in most published models."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["torch_dtype"] = config.pop("dtype")
    config["transformers_version"] = "4.51.3"
    parameters = config.pop("rope_parameters", None)
    config.pop("layer_types", None)
    if config["model_type"] == "modernbert":
        config["global_attn_every_n_layers"] = 3
        config["global_rope_theta"] = parameters["full_attention"]["rope_theta"]
        config["local_rope_theta"] = parameters["sliding_attention"]["rope_theta"]
    elif config["model_type"] == "gemma3_text":
        config["sliding_window_pattern"] = config.pop("_sliding_window_pattern")
        config["rope_theta"] = parameters["full_attention"]["rope_theta"]
        config["rope_local_base_freq"] = parameters["sliding_attention"]["rope_theta"]
    elif parameters is not None:
        config["rope_theta"] = parameters.pop("rope_theta")
        config["rope_scaling"] = None if parameters == {"rope_type": "default"} else parameters
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def write_published_config(folder):
    """Writes config.json of a NomicBERT as its authors publish it, with the key names of their code."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    published = {
        "activation_function": "swiglu",
        "architectures": config["architectures"],
        "causal": False,
        "layer_norm_epsilon": config["layer_norm_eps"],
        "mlp_fc1_bias": False,
        "mlp_fc2_bias": False,
        "model_type": "nomic_bert",
        "n_embd": config["hidden_size"],
        "n_head": config["num_attention_heads"],
        "n_inner": config["intermediate_size"],
        "n_layer": config["num_hidden_layers"],
        "n_positions": config["max_position_embeddings"],
        "pad_vocab_size_multiple": 64,
        "parallel_block": False,
        "prenorm": False,
        "qkv_proj_bias": False,
        "rotary_emb_base": config["rope_parameters"]["rope_theta"],
        "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": False,
        "rotary_scaling_factor": None,
        "torch_dtype": "float16",
        "type_vocab_size": config["type_vocab_size"],
        "use_rms_norm": False,
        "vocab_size": config["vocab_size"],
    }
    path.write_text(json.dumps(published, indent=2, sort_keys=True) + "\n")


def write_stages(folder, hidden, pooling, normalize, dense, legacy):
    """Writes the files of sentence-transformers 5 or 6."""
    classes = ["Transformer", "Pooling"] + ["Dense"] * len(dense) + (["Normalize"] if normalize else [])
    modern = {
        "Transformer": "sentence_transformers.base.modules.transformer.Transformer",
        "Pooling": "sentence_transformers.sentence_transformer.modules.pooling.Pooling",
        "Dense": "sentence_transformers.base.modules.dense.Dense",
        "Normalize": "sentence_transformers.base.modules.normalize.Normalize",
    }
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": "" if index == 0 else f"{index}_{stage}",
            "type": f"sentence_transformers.models.{stage}" if legacy else modern[stage],
        }
        for index, stage in enumerate(classes)
    ]
    (folder / "modules.json").write_text(json.dumps(modules, indent=2) + "\n")
    (folder / "1_Pooling").mkdir()
    if legacy:
        keys = {"cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens", "weightedmean": "weightedmean_tokens"}
        config = {"word_embedding_dimension": hidden, "include_prompt": True}
        config |= {f"pooling_mode_{keys.get(mode, mode)}": mode == pooling for mode in POOLINGS}
        (folder / "1_Pooling/config.json").write_text(json.dumps(config, indent=2) + "\n")
        (folder / "sentence_bert_config.json").write_text('{\n  "max_seq_length": 48,\n  "do_lower_case": false\n}\n')
    else:
        Pooling(hidden, pooling).save(str(folder / "1_Pooling"))
    if normalize and not legacy:
        place = folder / modules[-1]["path"]
        place.mkdir()
        sentence_transformers.base.modules.Normalize().save(str(place))
    for index, layer in enumerate(dense, 2):
        place = folder / f"{index}_Dense"
        place.mkdir()
        layer.save(str(place))


def make_dense(sizes, name):
    layers = []
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} dense".encode()))
    for inputs, outputs, bias, activation in sizes:
        layer = Dense(inputs, outputs, bias=bias, activation_function=activation)
        with torch.no_grad():
            layer.linear.weight.copy_(torch.randn((outputs, inputs), generator=generator) / inputs**0.5)
            if bias:
                layer.linear.bias.copy_(0.3 * torch.randn((outputs,), generator=generator))
        layers.append(layer)
    return layers


# In these families, a padding token within a sequence gets the padding position and does not advance the positions.
PADDING_HAS_NO_POSITION = ("roberta", "xlm-roberta", "mpnet")


def make_cases(config, lengths):
    """Returns random sequences; they contain the padding id only for families that treat it specially."""
    rng = random.Random(7)
    types = getattr(config, "type_vocab_size", 1) or 1
    words = [word for word in range(config.vocab_size) if word != config.pad_token_id]
    if config.model_type in PADDING_HAS_NO_POSITION:
        words += [config.pad_token_id] * 8
    cases = []
    for length in lengths:
        boundary = rng.randrange(length + 1) if types > 1 else length
        ids = [rng.choice(words) for _ in range(length)]
        cases.append({"ids": ids, "types": [0] * boundary + [1] * (length - boundary)})
    return cases


def load(auto, folder, dtype):
    model = auto.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    return model.eval()


def compute(model, case):
    """Returns the outputs of a single sequence: hidden states or logits."""
    inputs = {"input_ids": torch.tensor([case["ids"]])}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    if (getattr(model.config, "type_vocab_size", 1) or 1) > 1:
        inputs["token_type_ids"] = torch.tensor([case["types"]])
    with torch.no_grad():
        out = model(**inputs)
    return out.logits[0] if hasattr(out, "logits") else out.last_hidden_state[0]


def difference(found, reference):
    """Returns the maximum difference over all sequences, relative to the largest absolute value of the sequence.

    For a label head it is relative to the largest value of all sequences: a head has few outputs, and one of them may
    be close to zero as a difference of large numbers.
    """
    largest = [wanted.double().abs().max() for wanted in reference]
    if reference[0].dim() == 1:
        largest = [max(largest)] * len(reference)
    each = zip(found, reference, largest)
    return max(((found.double() - wanted.double()).abs().max() / size).item() for found, wanted, size in each)


def check_precise(name, auto, folder, cases, reference):
    """Checks that the float32 error is far below the tests' tolerance, which also covers another summation order."""
    exact = load(auto, folder, torch.float64)
    worst = difference([compute(exact, case) for case in cases], reference)
    assert worst < 4e-6, f"{name}: float32 is off by {worst}"
    return worst


# A key bias adds the same value to all scores of a row, unless rotary embeddings are applied after it.
WITHOUT_EFFECT = ("attention.self.key.bias", "attention.k_lin.bias", "attention.attn.k.bias", "pooler.", "lm_head.")


def check_sensitive(name, model, cases, reference, without_effect=WITHOUT_EFFECT):
    """Checks that replacing any parameter changes the outputs by far more than the tolerance."""
    least = 1e9
    head = hasattr(model, "score") or hasattr(model, "classifier")
    for parameter_name, parameter in model.named_parameters():
        if any(part in parameter_name for part in without_effect) and not (head and "pooler." in parameter_name):
            continue
        kept = parameter.detach().clone()
        with torch.no_grad():
            parameter.copy_(kept.flip(0) if kept.numel() > 1 else -kept)
        moved = difference([compute(model, case) for case in cases], reference)
        with torch.no_grad():
            parameter.copy_(kept)
        # With one token type, the embedding table has one row.
        if torch.equal(kept, kept.flip(0)) and kept.numel() > 1:
            continue
        assert moved > 1e-3, f"{name}: {parameter_name} moves the outputs by {moved} only"
        least = min(least, moved)
    return least


def write_golden(folder, cases, outputs):
    made_with = {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "sentence-transformers": sentence_transformers.__version__,
    }
    names = [{"name": name, "width": rows[0].shape[-1]} for name, rows in outputs.items()]
    lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
    (folder / "golden.json").write_text(
        f'{{"made_with": {json.dumps(made_with)},\n"outputs": {json.dumps(names)},\n"cases": [\n{lines}\n]}}\n'
    )
    numbers = torch.cat([row.reshape(-1) for rows in outputs.values() for row in rows])
    assert numbers.dtype == torch.float32 and numbers.isfinite().all()
    (folder / "golden.f32").write_bytes(numbers.numpy().astype("<f4").tobytes())


def save(name, family, arguments, made_by, kind, shards):
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    config = getattr(transformers, f"{family}Config")(**arguments)
    model = made_by(config).eval()
    randomise(model, name)
    model.to(getattr(torch, kind)).save_pretrained(folder, max_shard_size=shards)
    (folder / "generation_config.json").unlink(missing_ok=True)
    return folder


def make_embedder(
    name,
    family,
    arguments,
    base=None,
    kind="float32",
    shards="1GB",
    pooling="mean",
    normalize=False,
    dense=(),
    legacy=False,
    stages=True,
    published=False,
    prompts=None,
    auto=transformers.AutoModel,
):
    made_by = auto if auto is JinaBert else getattr(transformers, base or f"{family}Model")
    folder = save(name, family, arguments, made_by, kind, shards)
    if legacy:
        write_legacy_config(folder)
    model = load(auto, folder, torch.float32)
    hidden = model.config.hidden_size
    layers = make_dense(dense, name)
    if stages:
        write_stages(folder, hidden, pooling, normalize, layers, legacy)
    cases = make_cases(model.config, LENGTHS)
    tokens = [compute(model, case) for case in cases]
    outputs = {"tokens": tokens}
    for mode in POOLINGS:
        stage = Pooling(hidden, mode)
        outputs[mode] = [
            stage({"token_embeddings": rows[None], "attention_mask": torch.ones(1, len(rows), dtype=torch.int64)})[
                "sentence_embedding"
            ][0]
            for rows in tokens
        ]
    outputs["pooled"] = outputs[pooling]
    with torch.no_grad():
        for layer in layers:
            outputs["pooled"] = [layer({"sentence_embedding": row})["sentence_embedding"] for row in outputs["pooled"]]
    precise = check_precise(name, auto, folder, cases, tokens)
    sensitive = check_sensitive(name, model, cases, tokens)
    write_golden(folder, cases, outputs)
    if published:
        write_published_config(folder)
    if prompts is not None:
        config = {"prompts": prompts, "default_prompt_name": None, "similarity_fn_name": "cosine"}
        (folder / "config_sentence_transformers.json").write_text(json.dumps(config, indent=2) + "\n")
    if name in TOKENIZERS:
        assert write_tokenizer(folder) <= model.config.vocab_size
    print(f"{name:22} float32 {precise:.1e}   least parameter {sensitive:.1e}")


def make_head(name, family, arguments, labels, problem, kind="float32", shards="1GB", legacy=False):
    names = {0: "LABEL_0"} if labels == 1 else dict(enumerate(LABELS[:labels]))
    arguments = dict(arguments, id2label=names, label2id={label: id for id, label in names.items()})
    if problem is not None:
        arguments["problem_type"] = problem
    made_by = getattr(transformers, f"{family}ForSequenceClassification")
    folder = save(name, family, arguments, made_by, kind, shards)
    if legacy:
        write_legacy_config(folder)
    auto = transformers.AutoModelForSequenceClassification
    model = load(auto, folder, torch.float32)
    cases = make_cases(model.config, HEAD_LENGTHS)
    if hasattr(model, "score"):
        # These heads read the last token that is not padding, or the first token if all are padding.
        padding = model.config.pad_token_id
        cases.append({"ids": [7, 8, padding, 9, padding, padding], "types": [0] * 6})
        cases.append({"ids": [padding, padding], "types": [0] * 2})
    logits = [compute(model, case) for case in cases]
    if problem == "regression":
        scores = logits
    elif labels == 1 or problem == "multi_label_classification":
        scores = [row.sigmoid() for row in logits]
    else:
        scores = [row.softmax(0) for row in logits]
    precise = check_precise(name, auto, folder, cases, logits)
    sensitive = check_sensitive(name, model, cases, logits)
    write_golden(folder, cases, {"logits": logits, "scores": scores})
    if name in TOKENIZERS:
        assert write_tokenizer(folder, lambda case: compute(model, case)) <= model.config.vocab_size
    print(f"{name:22} float32 {precise:.1e}   least parameter {sensitive:.1e}")


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    wanted = sys.argv[1:] or [*EMBEDDERS, *HEADS]
    for name in wanted:
        if name in EMBEDDERS:
            family, arguments, rest = EMBEDDERS[name]
            make_embedder(name, family, arguments, **rest)
        else:
            family, arguments, labels, problem, rest = HEADS[name]
            make_head(name, family, arguments, labels, problem, **rest)
