"""Writes goldens/encoders/: tiny random models that embed or rank texts, as GGUF files, and what `transformers` gives.

Run by hand, as make_goldens.py:
    python -m tests.models.make_encoder_goldens
`transformers` computes GELU with the error function, and Tandem with tanh, as llama.cpp does: the goldens use tanh.
"""

from __future__ import annotations

import json
import tempfile
import zlib
from pathlib import Path

import numpy as np
import tokenizers
import torch
import transformers

from tandem.convert.convert import convert
from tests.models.encoder_texts import QUERY, TEXTS

GOLDENS = Path(__file__).parent / "goldens" / "encoders"
WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "mat",
    "un",
    "##believ",
    "##able",
    "##s",
    "##t",
    "a",
    "b",
    "c",
    ".",
    ",",
    "!",
]
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
SIZES = dict(
    vocab_size=len(VOCABULARY),
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=128,
    type_vocab_size=2,
    pad_token_id=0,
    layer_norm_eps=1e-3,
    attn_implementation="eager",
)
MODELS = {
    "bert": "BertModel",
    "nomic-bert": "NomicBertModel",
    "modern-bert": "ModernBertModel",
    "bert-rank": "BertForSequenceClassification",
}
# Texts are longer than what near tokens are; the fourth layer sees all again.
MODERN = {
    "num_hidden_layers": 4, "local_attention": 10, "hidden_activation": "gelu_pytorch_tanh", "norm_eps": 1e-3,
    "rope_parameters": {
        f"{kind}_attention": {"rope_type": "default", "rope_theta": base}
        for kind, base in (("full", 50.0), ("sliding", 20.0))
    },
    **dict.fromkeys(("bos_token_id", "cls_token_id"), 2), **dict.fromkeys(("eos_token_id", "sep_token_id"), 3),
}  # fmt: skip


def make_model(kind: str, seed: int, vocabulary: int) -> transformers.PreTrainedModel:
    generator = torch.Generator().manual_seed(seed)
    if "Modern" in kind:
        config = transformers.ModernBertConfig(**SIZES | MODERN | {"vocab_size": vocabulary})
        return _random(transformers.ModernBertModel(config).eval(), generator)
    own = {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}} if "Nomic" in kind else {}
    act = {} if own else {"hidden_act": "gelu_pytorch_tanh", "num_labels": 1}
    name = "NomicBertConfig" if own else "BertConfig"
    config = getattr(transformers, name)(**SIZES, **own, **act)
    return _random(getattr(transformers, kind)(config).eval(), generator)


def _random(model: transformers.PreTrainedModel, generator: torch.Generator) -> transformers.PreTrainedModel:
    for parameter_name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 1:
            value = 0.3 * noise + ("norm" in parameter_name.lower() and parameter_name.endswith("weight"))
        else:
            value = (0.4 if "embeddings" in parameter_name else parameter.shape[-1] ** -0.5) * noise
        parameter.data = torch.round(value * 64) / 64
    return model


def byte_pairs() -> tokenizers.Tokenizer:
    """Bytes, a few pairs of them, and the special tokens of BERT."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("a", "t"), ("c", "at"), ("m", "at"), ("s", "at"), ("\u0120", "the")]
    vocabulary = {text: id for id, text in enumerate([*VOCABULARY[:5], *letters, *map("".join, merges)])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    return made


def word_pieces() -> tokenizers.Tokenizer:
    vocabulary = {text: id for id, text in enumerate(VOCABULARY)}
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    return made


def tokenizer(name: str) -> tokenizers.Tokenizer:
    made = byte_pairs() if name == "modern-bert" else word_pieces()
    made.add_special_tokens(VOCABULARY[:5])
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return made


@torch.no_grad()
def main() -> None:
    GOLDENS.mkdir(exist_ok=True)
    for name, kind in MODELS.items():
        words = tokenizer(name)
        model, arrays = make_model(kind, zlib.crc32(name.encode()), words.get_vocab_size()), {}
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            path = Path(folder, "config.json")
            config = json.loads(path.read_text())
            act = "hidden_activation" if name == "modern-bert" else "hidden_act"
            if config[act] == "gelu_pytorch_tanh":
                path.write_text(json.dumps(config | {act: "gelu"}))
            words.save(str(Path(folder, "tokenizer.json")))
            options = {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]", "pad_token": "[PAD]"}
            Path(folder, "tokenizer_config.json").write_text(json.dumps(options))
            convert(Path(folder), GOLDENS / f"{name}.gguf", "f32", changed={"general.name": None})
        for i, text in enumerate(TEXTS):
            pair = (QUERY, text) if name.endswith("rank") else (text,)
            encoded = words.encode(*pair)
            given = {
                "input_ids": torch.tensor([encoded.ids]),
                "token_type_ids": torch.tensor([encoded.type_ids]),
            }
            arrays[f"ids_{i}"] = np.array(encoded.ids, np.int32)
            if name == "modern-bert":
                del given["token_type_ids"]
            output = model(**given)
            arrays[f"result_{i}"] = (
                output.logits[0] if name.endswith("rank") else output.last_hidden_state[0]
            ).numpy()
        np.savez_compressed(GOLDENS / f"{name}.npz", **arrays)
        print(name)


if __name__ == "__main__":
    main()
