"""The texts of goldens/encoders/, and the metadata of a model that ranks."""

from __future__ import annotations

from tests.gguf_files import Key

TEXTS = [
    "the cat sat on the mat.",
    "Unbelievable!",
    "a",
    "b, c, zebra",
    " ".join(["the cats sat on a mat,"] * 9),
]
QUERY = TEXTS[0]  # of models that rank

# Metadata of goldens/bert-rank.gguf that do not depend on its tokenizer.
BERT_RANK_KEYS: list[Key] = [
    ("general.architecture", "str", "bert"),
    ("bert.context_length", "u32", 128),
    ("bert.embedding_length", "u32", 32),
    ("bert.block_count", "u32", 2),
    ("bert.feed_forward_length", "u32", 64),
    ("bert.attention.head_count", "u32", 4),
    ("bert.pooling_type", "u32", 4),
    ("bert.attention.layer_norm_epsilon", "f32", 1e-3),
    ("bert.attention.causal", "bool", False),
]
