"""Turns a BERT encoder that was exported to ONNX into a folder that `tandem convert` reads.

    python -m benchmarks.onnx_to_folder MODEL.onnx TOKENIZER.json FOLDER [mean | cls]

Needs the packages onnx and safetensors. Matrices lose their names in ONNX; those of the nodes that use them say what
they are. Weights in int8 become float32.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np

NODES = {"MatMul", "Gemm", "MatMulInteger", "Attention"}
HEAD_DIM = 64  # of BERT; that of MiniLM, whose width is 384, is half of it


def weights_of(path: Path) -> dict[str, Any]:
    import onnx

    graph = onnx.load(str(path)).graph
    stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}

    def values(name: str) -> Any:
        """Float32, also of an initializer in int8."""
        base = name.removesuffix("_quantized")
        if base == name:
            return stored[name].astype(np.float32)
        zero, scale = stored[f"{base}_zero_point"].astype(np.float32), stored[f"{base}_scale"]
        return (stored[name].astype(np.float32) - zero) * scale

    found = {}
    for name in stored:
        base = name.removesuffix("_quantized")
        if base.endswith((".weight", ".bias")) and not base.startswith("onnx::"):
            found[base] = values(name)
    layer = 0
    for node in graph.node:
        constants = [name for name in node.input if name in stored]
        if node.op_type == "Attention":
            prefix = f"encoder.layer.{layer}.attention.self"
            for kind, tensor in zip(("weight", "bias"), constants[:2], strict=True):
                for part, value in zip(
                    ("query", "key", "value"), np.split(values(tensor), 3, -1), strict=True
                ):
                    found[f"{prefix}.{part}.{kind}"] = value.T if kind == "weight" else value
            layer += 1
        elif node.op_type in NODES and constants:
            stem = node.name.strip("/").replace("/", ".").rpartition(".")[0]
            matrix = values(constants[0])
            if matrix.ndim == 2 and not any(stem.endswith(name) for name in ("pooler.dense", "classifier")):
                found[f"{stem}.weight"] = matrix.T
    for name in ("bert.pooler.dense.weight", "classifier.weight"):
        if f"{name}_quantized" in stored:  # ONNX has them the other way round
            found[name] = found[name].T
    return found


def write_folder(model: Path, tokenizer: Path, folder: Path, pooling: str) -> None:
    from safetensors.numpy import save_file

    weights = weights_of(model)
    stem = "bert." if any(name.startswith("bert.") for name in weights) else ""
    vocab, dim = weights[f"{stem}embeddings.word_embeddings.weight"].shape
    layers = 1 + max(
        int(name.split("layer.")[1].split(".")[0]) for name in weights if "encoder.layer." in name
    )
    config = {
        "model_type": "bert",
        "architectures": ["BertForSequenceClassification" if stem else "BertModel"],
        "hidden_size": dim,
        "num_hidden_layers": layers,
        "num_attention_heads": dim // (HEAD_DIM // 2 if dim == 384 else HEAD_DIM),
        "intermediate_size": weights[f"{stem}encoder.layer.0.intermediate.dense.weight"].shape[0],
        "max_position_embeddings": weights[f"{stem}embeddings.position_embeddings.weight"].shape[0],
        "vocab_size": vocab,
        "type_vocab_size": 2,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: np.ascontiguousarray(value, np.float32) for name, value in weights.items()},
        str(folder / "model.safetensors"),
    )
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(tokenizer, folder / "tokenizer.json")
    if pooling:
        (folder / "1_Pooling").mkdir(exist_ok=True)
        modes = {"mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token"}
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({modes[pooling]: True}))


if __name__ == "__main__":
    if not 4 <= len(sys.argv) <= 5:
        raise SystemExit(__doc__)
    write_folder(*map(Path, sys.argv[1:4]), sys.argv[4] if len(sys.argv) > 4 else "")
