"""Reference implementation of JinaBERT, which transformers lacks, for make_families.py.

JinaBERT is a BERT without position embeddings: attention scores decrease with distance (symmetric ALiBi), and the
feed-forward block is gated. Implemented from the paper (https://arxiv.org/abs/2310.19923), with the tensor names of the
published checkpoints; simple, not fast.
"""

import json
import math

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import BertConfig
from transformers.modeling_outputs import BaseModelOutput


def slopes(heads):
    """Returns the ALiBi slopes: a geometric sequence from 2^(-8/heads).

    If `heads` is not a power of two, every second slope of the next power of two fills the rest.
    """
    power = 2 ** math.floor(math.log2(heads))
    row = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    if power < heads:
        row += slopes(2 * power)[0::2][: heads - power]
    return row


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        hidden = config.hidden_size
        self.heads = config.num_attention_heads
        self.self = nn.ModuleDict({part: nn.Linear(hidden, hidden) for part in ["query", "key", "value"]})
        self.output = nn.ModuleDict(
            {"dense": nn.Linear(hidden, hidden), "LayerNorm": nn.LayerNorm(hidden, config.layer_norm_eps)}
        )

    def forward(self, states):
        split = lambda part: self.self[part](states).unflatten(-1, (self.heads, -1)).transpose(0, 1)
        query, key, value = split("query"), split("key"), split("value")
        place = torch.arange(len(states))
        distance = (place[:, None] - place).abs().to(states.dtype)
        slope = torch.tensor(slopes(self.heads), dtype=states.dtype)[:, None, None]
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1]) - slope * distance
        gathered = (scores.softmax(-1) @ value).transpose(0, 1).flatten(-2)
        return self.output["LayerNorm"](self.output["dense"](gathered) + states)


class GatedFeedForward(nn.Module):
    def __init__(self, config):
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gated_layers = nn.Linear(hidden, 2 * inner, bias=False)
        self.wo = nn.Linear(inner, hidden)
        self.layernorm = nn.LayerNorm(hidden, config.layer_norm_eps)

    def forward(self, states):
        gate, other = self.gated_layers(states).chunk(2, -1)
        return self.layernorm(self.wo(nn.functional.gelu(gate) * other) + states)


class JinaBert(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        self.embeddings = nn.ModuleDict(
            {
                "word_embeddings": nn.Embedding(config.vocab_size, hidden),
                "token_type_embeddings": nn.Embedding(config.type_vocab_size, hidden),
                "LayerNorm": nn.LayerNorm(hidden, config.layer_norm_eps),
            }
        )
        layer = lambda: nn.ModuleDict({"attention": Attention(config), "mlp": GatedFeedForward(config)})
        layers = nn.ModuleList([layer() for _ in range(config.num_hidden_layers)])
        self.encoder = nn.ModuleDict({"layer": layers})

    def forward(self, input_ids, token_type_ids, attention_mask):
        assert attention_mask.all() and len(input_ids) == 1
        words = self.embeddings["word_embeddings"](input_ids[0])
        states = self.embeddings["LayerNorm"](words + self.embeddings["token_type_embeddings"](token_type_ids[0]))
        for layer in self.encoder["layer"]:
            states = layer["mlp"](layer["attention"](states))
        return BaseModelOutput(last_hidden_state=states[None])

    def tie_weights(self):
        pass

    def save_pretrained(self, folder, max_shard_size):
        folder.mkdir()
        save_file(self.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
        config = self.config.to_dict() | {"architectures": ["JinaBertModel"]}
        (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")

    @classmethod
    def from_pretrained(cls, folder, dtype, attn_implementation):
        model = cls(BertConfig(**json.loads((folder / "config.json").read_text())))
        model.load_state_dict(load_file(folder / "model.safetensors"))
        return model.to(dtype)
