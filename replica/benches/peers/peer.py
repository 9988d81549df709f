"""Peer in Python: ONNX Runtime, OpenVINO or sentence-transformers, with the protocol of `driver.py`.

`peer.py KIND MODEL_FOLDER MADE_FOLDER THREADS`

Each library is used as its documentation recommends for a CPU: with its thread count set, the Rust tokenizer in one
call for the whole batch, padding to the longest text of the batch, and pooling inside the graph.
"""

import json
import os
import sys
import time


def pad(tokenizer, texts):
    import numpy as np

    encoded = tokenizer.encode_batch(texts)
    ids = np.array([encoding.ids for encoding in encoded], dtype=np.int64)
    mask = np.array([encoding.attention_mask for encoding in encoded], dtype=np.int64)
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}


def tokenizer_of(model_folder):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(os.path.join(model_folder, "tokenizer.json"))
    tokenizer.enable_truncation(256)
    tokenizer.enable_padding()
    return tokenizer


def onnxruntime(model_folder, graph, threads):
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    # Fusion may have removed an input without effect.
    wanted = [given.name for given in session.get_inputs()]
    tokenizer = tokenizer_of(model_folder)

    def embed(texts):
        inputs = pad(tokenizer, texts)
        return session.run(None, {name: inputs[name] for name in wanted})[0]

    return embed, f"onnxruntime {onnxruntime.__version__}"


def openvino(model_folder, graph, threads):
    import openvino

    # Without the hint OpenVINO may compute "f32" in bfloat16 on processors that have it.
    options = {
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": "f32",
        "PERFORMANCE_HINT": "LATENCY",
    }
    request = openvino.Core().compile_model(graph, "CPU", options).create_infer_request()
    tokenizer = tokenizer_of(model_folder)

    def embed(texts):
        return request.infer(pad(tokenizer, texts))[0]

    return embed, f"openvino {openvino.__version__.split('-')[0]}"


def sentence_transformers(model_folder, threads):
    import sentence_transformers
    import torch

    torch.set_num_threads(threads)
    model = sentence_transformers.SentenceTransformer(model_folder, device="cpu")

    def embed(texts):
        # The library sorts the texts of a call by length.
        return model.encode(texts, batch_size=len(texts), normalize_embeddings=True)

    return embed, f"sentence-transformers {sentence_transformers.__version__}, torch {torch.__version__}"


def load(kind, model_folder, made_folder, threads):
    made = lambda name: os.path.join(made_folder, name)  # noqa: E731
    match kind:
        case "onnxruntime-f32":
            return onnxruntime(model_folder, made("f32.onnx"), threads)
        case "onnxruntime-int8":
            return onnxruntime(model_folder, made("int8.onnx"), threads)
        case "openvino-f32":
            return openvino(model_folder, made("f32.xml"), threads)
        case "openvino-int8":
            return openvino(model_folder, made("int8.xml"), threads)
        case "sentence-transformers":
            return sentence_transformers(model_folder, threads)
    sys.exit(f"unknown peer: {kind}")


def main():
    # Output of the libraries must not mix with the responses, so stdout is redirected to stderr.
    responses = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def send(response):
        responses.write(json.dumps(response) + "\n")
        responses.flush()

    kind, model_folder, made_folder, threads = sys.argv[1:]
    embed, version = load(kind, model_folder, made_folder, int(threads))
    batches = []
    send({"ready": version})
    for line in sys.stdin:
        order = json.loads(line)
        match order["do"]:
            case "embed":
                send({"vectors": [[float(number) for number in row] for row in embed(order["texts"])]})
            case "load":
                batches = order["batches"]
                send({})
            case "time":
                seconds = []
                for batch in batches:
                    begin = time.perf_counter()
                    embed(batch)
                    seconds.append(time.perf_counter() - begin)
                send({"seconds": seconds})
            case other:
                sys.exit(f"unknown command: {other}")


if __name__ == "__main__":
    main()
