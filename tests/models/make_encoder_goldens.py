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
MODELS = {"bert": "BertModel", "nomic-bert": "NomicBertModel", "bert-rank": "BertForSequenceClassification"}


def make_model(kind: str, seed: int) -> transformers.PreTrainedModel:
    generator = torch.Generator().manual_seed(seed)
    own = {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}} if "Nomic" in kind else {}
    act = {} if own else {"hidden_act": "gelu_pytorch_tanh", "num_labels": 1}
    name = "NomicBertConfig" if own else "BertConfig"
    config = getattr(transformers, name)(**SIZES, **own, **act)
    model = getattr(transformers, kind)(config).eval()
    for parameter_name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 1:
            value = 0.3 * noise + ("norm" in parameter_name.lower() and parameter_name.endswith("weight"))
        else:
            value = (0.4 if "embeddings" in parameter_name else parameter.shape[-1] ** -0.5) * noise
        parameter.data = torch.round(value * 64) / 64
    return model


def tokenizer() -> tokenizers.Tokenizer:
    vocabulary = {text: id for id, text in enumerate(VOCABULARY)}
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
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
    words = tokenizer()
    for name, kind in MODELS.items():
        model, arrays = make_model(kind, zlib.crc32(name.encode())), {}
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            path = Path(folder, "config.json")
            config = json.loads(path.read_text())
            if config["hidden_act"] == "gelu_pytorch_tanh":
                path.write_text(json.dumps(config | {"hidden_act": "gelu"}))
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
            output = model(**given)
            arrays[f"result_{i}"] = (
                output.logits[0] if name.endswith("rank") else output.last_hidden_state[0]
            ).numpy()
        np.savez_compressed(GOLDENS / f"{name}.npz", **arrays)
        print(name)


if __name__ == "__main__":
    main()
