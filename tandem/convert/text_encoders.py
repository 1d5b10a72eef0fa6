"""Classes of models that embed and rank texts, and what they are called in GGUF files: as families.py."""

from __future__ import annotations

from dataclasses import replace

from tandem.convert.family import MEAN, RANK, Family, Keys, Names
from tandem.convert.hf_config import HFConfig

# BERT, after the names of its layers and of what is around them have become those of other models (tensors.py).
BERT_NAMES: Names = {
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}
NOMIC_BERT_NAMES: Names = {
    "attn.Wqkv": "attn_qkv",
    "attn.out_proj": "attn_output",
    "mlp.fc11": "ffn_up",
    "mlp.fc12": "ffn_gate",
    "mlp.fc2": "ffn_down",
    "norm1": "attn_output_norm",
    "norm2": "layer_output_norm",
}
MODERN_BERT_NAMES: Names = {
    "attn_norm": "attn_norm",
    "attn.Wqkv": "attn_qkv",
    "attn.Wo": "attn_output",
    "mlp_norm": "ffn_norm",
    "mlp.Wi": "ffn_up",
    "mlp.Wo": "ffn_down",
}
BERT_MODEL = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
}


def bert(c: HFConfig) -> Keys:
    return {"attention.causal": False}


def nomic_bert(c: HFConfig) -> Keys:
    return bert(c) | {"rope.freq_base": c.numbers("rope_theta", [c.rope()["rope_theta"]])[0]}


def modern_bert(c: HFConfig) -> Keys:
    period = c.count("global_attn_every_n_layers", default=3, least=1)
    if (sliding := c.sliding()) and sliding != [i % period != 0 for i in range(c.layers)]:
        c.fail("layer_types", "files of this architecture have global attention in layers at equal distances")
    whole, local = c.rope(), c.rope("sliding_attention")
    bases = [
        c.get("global_rope_theta", default=whole["rope_theta"]),
        c.get("local_rope_theta", default=local.get("rope_theta", 10000.0)),
    ]
    keys: Keys = dict(
        zip(("rope.freq_base", "rope.freq_base_swa"), c.numbers("rope_theta", bases), strict=True)
    )
    return (
        bert(c)
        | keys
        | {
            "attention.sliding_window": c.count("local_attention"),
            "attention.sliding_window_pattern": period,
            "vocab_size": c.count("vocab_size"),
        }
    )


BERT_IMPLIES = {"hidden_act": "gelu", "position_embedding_type": "absolute"}
BERT = Family(
    "bert", bert, BERT_NAMES, layer_norm=True, required=BERT_IMPLIES, model=BERT_MODEL, pooling=MEAN
)
BERT_RANKS = replace(
    BERT,
    required=BERT_IMPLIES,
    model=BERT_MODEL | {"pooler.dense": "cls", "classifier": "cls.output"},
    pooling=RANK,
)
TEXT_ENCODERS = {
    "BertForSequenceClassification": BERT_RANKS,
    "BertModel": BERT,
    "ModernBertModel": Family(
        "modern-bert",
        modern_bert,
        MODERN_BERT_NAMES,
        layer_norm=True,
        required={
            "hidden_activation": "gelu",
            **dict.fromkeys(("attention_bias", "mlp_bias", "norm_bias"), False),
        },
        model={
            "embeddings.tok_embeddings": "token_embd",
            "embeddings.norm": "token_embd_norm",
            "final_norm": "output_norm",
        },
        pooling=MEAN,
    ),
    "NomicBertModel": Family(
        "nomic-bert",
        nomic_bert,
        NOMIC_BERT_NAMES,
        layer_norm=True,
        required={"hidden_act": "silu"},
        model=BERT_MODEL | {"emb_ln": "token_embd_norm"},
        pooling=MEAN,
    ),
}
