"""Compares mixtures of experts with llama.cpp on the CPU: the same files and threads, alternating rounds.

    python -m benchmarks.mixtures --peer PYTHON [--rounds N] [--only N,...] [--cpu-time] [--output FILE] [NAME=FILE ...]

Beside the files it compares a synthetic mixture of about a billion parameters in Q4_K: 32 experts, of which a token
uses 4, with SmolLM2's vocabulary and random weights. PYTHON has llama_cpp, built for this CPU (`make bench` builds it).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from benchmarks.against_llama_cpp import machine, say, versions
from benchmarks.measures import PREFILL, STEPS, Comparison, measure_name
from benchmarks.pairs import Pair
from tandem.bench.statistics import ratio_of_medians, summarise
from tests.packages import model_path

# Ratios to reach in prefill and in decoding 1, 8 and 32 sequences.
TARGETS = (2.5, 1.2, 2.5, 2.5)
LAYERS, DIM, HEADS, KV_HEADS, EXPERTS, USED, HIDDEN = 16, 1024, 16, 4, 32, 4, 512
BLOCK, BLOCK_BYTES = 256, 144  # of Q4_K


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", metavar="NAME=FILE")
    parser.add_argument("--peer", required=True, metavar="PYTHON")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", default="", help="sequences, 0 for prefill: 0,1,8,32")
    parser.add_argument(
        "--cpu-time", action="store_true", help="processor time of one thread, where others use the machine"
    )
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "machine": machine(),
        "settings": {
            "threads": 1 if options.cpu_time else options.threads,
            "rounds": options.rounds,
            "cpu_time": options.cpu_time,
        },
        "versions": versions(options.peer),
        "models": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(file) for name, _, file in (given.partition("=") for given in options.models)}
        files["synthetic-1b"] = write_synthetic(Path(folder) / "synthetic-1b.gguf")
        for name, file in files.items():
            threads = 1 if options.cpu_time else options.threads
            compared = Comparison(
                name, file, options.peer, threads, options.rounds, cpu_time=options.cpu_time
            )
            wanted = [int(n) for n in options.only.split(",") if n] or (0, *STEPS)
            rows = []
            with compared.opened():
                for sequences in wanted:
                    rows.append(row(sequences, compared.pairs(sequences)))
                    say(f"{name}: {one_line(rows[-1])}")
            results["models"].append({"name": name, "rows": rows})
            if options.output:
                options.output.write_text(json.dumps(results, indent=1) + "\n")


def row(sequences: int, pairs: Sequence[Pair]) -> dict[str, Any]:
    tokens = STEPS.get(sequences, 1) * sequences or PREFILL
    ours, peer = (
        [tokens / side.seconds for side in sides]
        for sides in zip(*((p.ours, p.peer) for p in pairs), strict=True)
    )
    return {
        "measure": measure_name(sequences),
        "ours": asdict(summarise(ours)),
        "peer": asdict(summarise(peer)),
        "ratio": asdict(ratio_of_medians(ours, peer)),
        "target": dict(zip((0, *STEPS), TARGETS, strict=True))[sequences],
        "others": [pair.others for pair in pairs],  # share of the machine that other processes took
    }


def one_line(row: dict[str, Any]) -> str:
    ratio = row["ratio"]
    rates = f"{row['ours']['median']:.1f} tok/s, llama.cpp {row['peer']['median']:.1f}"
    between = f"{ratio['value']:.2f}x ({ratio['low']:.2f}-{ratio['high']:.2f})"
    return f"{row['measure']}: {rates}, {between}, target {row['target']}"


def write_synthetic(path: Path) -> Path:
    writer, rng = gguf.GGUFWriter(path, "qwen3moe"), np.random.default_rng(0)
    source = gguf.GGUFReader(model_path("smollm2"))
    for key, field in source.fields.items():
        if key.startswith("tokenizer."):
            kind, *rest = field.types
            writer.add_key_value(key, field.contents(), kind, sub_type=rest[-1] if rest else None)
    vocab = len(source.fields["tokenizer.ggml.tokens"].data)
    head = DIM // HEADS
    sizes = {
        "block_count": LAYERS, "context_length": 8192, "embedding_length": DIM, "feed_forward_length": HIDDEN,
        "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "attention.key_length": head,
        "attention.value_length": head, "expert_count": EXPERTS, "expert_used_count": USED,
        "expert_feed_forward_length": HIDDEN,
    }  # fmt: skip
    for key, size in sizes.items():
        writer.add_uint32(f"qwen3moe.{key}", size)
    writer.add_float32("qwen3moe.attention.layer_norm_rms_epsilon", 1e-6)
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (vocab, DIM), "output_norm": (DIM,)}
    for i in range(LAYERS):
        own = {
            "attn_norm": (DIM,), "ffn_norm": (DIM,), "attn_q_norm": (head,), "attn_k_norm": (head,),
            "attn_q": (HEADS * head, DIM), "attn_k": (KV_HEADS * head, DIM), "attn_v": (KV_HEADS * head, DIM),
            "attn_output": (DIM, HEADS * head), "ffn_gate_inp": (EXPERTS, DIM),
            "ffn_gate_exps": (EXPERTS, HIDDEN, DIM), "ffn_up_exps": (EXPERTS, HIDDEN, DIM),
            "ffn_down_exps": (EXPERTS, DIM, HIDDEN),
        }  # fmt: skip
        shapes |= {f"blk.{i}.{name}": shape for name, shape in own.items()}
    for name, shape in shapes.items():
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
        elif "gate_inp" in name:
            writer.add_tensor(f"{name}.weight", rng.standard_normal(shape, np.float32))
        else:
            rows = q4_k(shape, rng)
            writer.add_tensor(f"{name}.weight", rows, raw_dtype=gguf.GGMLQuantizationType.Q4_K)
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        write()
    return path


def q4_k(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Blocks with values of mean 0 and about the deviation columns^-1/2: scales of 32, minima of 7.5 steps."""
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // BLOCK, BLOCK_BYTES), np.uint8)
    step = shape[-1] ** -0.5 / (32 * 4.6)
    blocks[..., :4] = np.array([step, 7.5 * step], np.float16).view(np.uint8)
    # Eight 6-bit scales and minima of 32: their low 6 bits, or low 4 and upper 2 in two places.
    blocks[..., 4:12], blocks[..., 12:16] = 32 | 2 << 6, 0
    return blocks.reshape(*shape[:-1], -1)


if __name__ == "__main__":
    main()
