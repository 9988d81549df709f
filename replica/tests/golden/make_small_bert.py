#!/usr/bin/env python3
"""Generates small BERTs with random weights, and the reference outputs of transformers.

Writes, for each of the models below, a folder next to this script with config.json, model.safetensors, modules.json,
1_Pooling/config.json and golden.json: token ids, token types and the vector of each sequence.

Weights are ten times as large as those of a new model, and biases and normalisations are random too, so that no part of
the model is negligible and an error in any part is detected.

Usage (the committed files: Python 3.11.7, torch 2.15.0, transformers 5.23.0)
    python3 -m venv venv && venv/bin/pip install torch transformers
    venv/bin/python make_small_bert.py
"""

import json
import random
import sys
from pathlib import Path

import torch
import transformers

HERE = Path(__file__).parent
LENGTHS = [1, 2, 3, 5, 8, 12, 13, 16, 17, 31, 32, 33, 48, 64, 65, 80]

SMALL = dict(vocab_size=200, num_hidden_layers=2, max_position_embeddings=80, type_vocab_size=2)
MODELS = {
    # Sizes that are multiples of panels and vectors, and CLS pooling.
    "small_bert_cls": (
        dict(SMALL, hidden_size=64, num_attention_heads=4, intermediate_size=128, hidden_act="gelu"),
        "cls",
        True,
    ),
    # Sizes that are multiples of neither, the other activation, and mean pooling without normalisation.
    "small_bert_mean": (
        dict(SMALL, hidden_size=60, num_attention_heads=3, intermediate_size=100, hidden_act="gelu_new"),
        "mean",
        False,
    ),
}


def randomise(model):
    generator = torch.Generator().manual_seed(20231121)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            offset = 1.0 if name.endswith("LayerNorm.weight") else 0.0
            parameter.copy_(offset + 0.2 * noise)


def vector(model, ids, types, pooling, normalize):
    with torch.no_grad():
        states = model(input_ids=torch.tensor([ids]), token_type_ids=torch.tensor([types])).last_hidden_state[0]
    pooled = states[0] if pooling == "cls" else states.mean(dim=0)
    if normalize:
        pooled = torch.nn.functional.normalize(pooled, dim=0)
    return pooled.tolist()


def make(name, sizes, pooling, normalize):
    folder = HERE / name
    (folder / "1_Pooling").mkdir(parents=True, exist_ok=True)
    model = transformers.BertModel(transformers.BertConfig(**sizes), add_pooling_layer=False).eval()
    model.set_attn_implementation("eager")
    randomise(model)
    model.save_pretrained(folder)
    stages = ["Transformer", "Pooling"] + (["Normalize"] if normalize else [])
    modules = [
        {"idx": i, "name": str(i), "path": "" if i == 0 else f"{i}_{stage}", "type": f"sentence_transformers.models.{stage}"}
        for i, stage in enumerate(stages)
    ]
    (folder / "modules.json").write_text(json.dumps(modules, indent=2) + "\n")
    (folder / "1_Pooling/config.json").write_text(json.dumps({"embedding_dimension": 64, "pooling_mode": pooling}) + "\n")
    rng = random.Random(7)
    cases = []
    for length in LENGTHS:
        ids = [rng.randrange(sizes["vocab_size"]) for _ in range(length)]
        boundary = rng.randrange(length + 1)
        types = [0] * boundary + [1] * (length - boundary)
        cases.append({"ids": ids, "types": types, "vector": vector(model, ids, types, pooling, normalize)})
    made_with = {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    lines = ",\n".join(json.dumps(case) for case in cases)
    (folder / "golden.json").write_text(f'{{"made_with": {json.dumps(made_with)},\n"cases": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    for name, (sizes, pooling, normalize) in MODELS.items():
        make(name, sizes, pooling, normalize)
