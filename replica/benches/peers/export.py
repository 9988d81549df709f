"""Exports the weights to the formats of the peers, once, and keeps the files.

Converts a sentence-transformers model to ONNX (as exported, fused by ONNX Runtime's transformer optimiser, and
quantised dynamically) and to OpenVINO (as converted, and quantised after training by NNCF, calibrated on texts of the
mixes). Each graph contains pooling and normalisation, so that no peer computes them in Python.

Each peer gets its fastest form: the export fails if attention is not fused, because a comparison with a badly exported
peer is meaningless.
"""

import os
import sys

import numpy as np

HIDDEN_INPUTS = ("input_ids", "attention_mask", "token_type_ids")


def make(model_folder: str, out: str, calibration: list[str]) -> None:
    """Creates the missing files in `out`."""
    os.makedirs(out, exist_ok=True)
    place = lambda name: os.path.join(out, name)  # noqa: E731
    if not os.path.exists(place("f32.onnx")):
        export_onnx(model_folder, place("plain.onnx"))
        fuse(model_folder, place("plain.onnx"), place("f32.onnx"))
    if not os.path.exists(place("int8.onnx")):
        quantise_onnx(place("f32.onnx"), place("int8.onnx"))
    if not os.path.exists(place("f32.xml")):
        convert_openvino(place("plain.onnx"), place("f32.xml"))
    if not os.path.exists(place("int8.xml")):
        quantise_openvino(model_folder, place("f32.xml"), place("int8.xml"), calibration)


def export_onnx(model_folder: str, path: str) -> None:
    import torch
    from transformers import AutoModel

    class Sentence(torch.nn.Module):
        """Transformer with mean pooling over the tokens that are not padding, and normalisation to length one."""

        def __init__(self, transformer):
            super().__init__()
            self.transformer = transformer

        def forward(self, input_ids, attention_mask, token_type_ids):
            hidden = self.transformer(
                input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids
            ).last_hidden_state
            weight = attention_mask.unsqueeze(-1).to(hidden.dtype)
            mean = (hidden * weight).sum(1) / weight.sum(1)
            return torch.nn.functional.normalize(mean, dim=1)

    # The optimiser recognises attention in its plain form only; scaled_dot_product_attention would not be fused.
    transformer = AutoModel.from_pretrained(model_folder, attn_implementation="eager").eval()
    example = torch.ones((2, 7), dtype=torch.int64)
    axes = {name: {0: "batch", 1: "tokens"} for name in HIDDEN_INPUTS}
    torch.onnx.export(
        Sentence(transformer).eval(),
        (example, example, example * 0),
        written_whole(path),
        input_names=list(HIDDEN_INPUTS),
        output_names=["vectors"],
        dynamic_axes={**axes, "vectors": {0: "batch"}},
        opset_version=17,
        dynamo=False,
    )
    os.replace(written_whole(path), path)


def fuse(model_folder: str, plain: str, path: str) -> None:
    from onnxruntime.transformers.optimizer import optimize_model
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model_folder)
    fused = optimize_model(
        plain, model_type="bert", num_heads=config.num_attention_heads, hidden_size=config.hidden_size, opt_level=2
    )
    found = fused.get_fused_operator_statistics()
    if found.get("Attention", 0) != config.num_hidden_layers:
        sys.exit(f"ONNX Runtime fused {found.get('Attention', 0)} of {config.num_hidden_layers} attentions: {found}")
    fused.save_model_to_file(written_whole(path))
    os.replace(written_whole(path), path)


def quantise_onnx(f32: str, path: str) -> None:
    from onnx import TensorProto
    from onnxruntime.quantization import QuantType, quantize_dynamic

    # VNNI multiplies signed weights by unsigned activations in one instruction. The output types of the fused operators
    # are not inferred and must be set.
    quantize_dynamic(
        f32,
        written_whole(path),
        per_channel=True,
        weight_type=QuantType.QInt8,
        extra_options={"DefaultTensorType": TensorProto.FLOAT},
    )
    os.replace(written_whole(path), path)


def convert_openvino(plain: str, path: str) -> None:
    import openvino

    openvino.save_model(openvino.convert_model(plain), path, compress_to_fp16=False)


def quantise_openvino(model_folder: str, f32: str, path: str, calibration: list[str]) -> None:
    import nncf
    import openvino
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(os.path.join(model_folder, "tokenizer.json"))
    tokenizer.no_padding()

    def inputs(text: str) -> dict[str, np.ndarray]:
        ids = np.array([tokenizer.encode(text).ids], dtype=np.int64)
        return {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}

    model = openvino.Core().read_model(f32)
    quantised = nncf.quantize(
        model,
        nncf.Dataset(calibration, inputs),
        model_type=nncf.ModelType.TRANSFORMER,
        preset=nncf.QuantizationPreset.MIXED,
        subset_size=len(calibration),
    )
    openvino.save_model(quantised, path, compress_to_fp16=False)


def written_whole(path: str) -> str:
    """Returns the temporary name of a file, which is renamed once it is complete."""
    return path.replace(".onnx", ".new.onnx")
