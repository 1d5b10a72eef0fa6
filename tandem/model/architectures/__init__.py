"""One file per family with three functions: config (from metadata), tensors (names and shapes), build (the ops)."""

from tandem.model.lazy_modules import LazyModules

# By the architecture in the file: the name of the module.
ARCHITECTURES = LazyModules(
    __name__,
    {
        "bert": "bert",
        "cohere2": "cohere2",
        "deepseek2": "deepseek2",
        "ernie4_5": "ernie4_5",
        "ernie4_5-moe": "ernie4_5",
        "exaone4": "exaone4",
        "falcon-h1": "falcon_h1",
        "gemma2": "gemma2",
        "gemma3": "gemma3",
        "gemma4": "gemma4",
        "glm4": "glm4",
        "glm4moe": "glm4moe",
        "gpt-oss": "gpt_oss",
        "granite": "granite",
        "granitemoe": "granite",
        "granitehybrid": "granitehybrid",
        "hunyuan-dense": "hunyuan",
        "hunyuan-moe": "hunyuan",
        "lfm2": "lfm2",
        "lfm2moe": "lfm2",
        "llama": "llama",
        "mamba2": "mamba2",
        "mistral3": "mistral3",
        "modern-bert": "modern_bert",
        "nemotron_h": "nemotron_h",
        "nemotron_h_moe": "nemotron_h",
        "nomic-bert": "bert",
        "olmo2": "olmo2",
        "olmoe": "olmoe",
        "phi3": "phi3",
        "qwen2": "qwen2",
        "qwen2moe": "qwen2moe",
        "qwen2vl": "qwen2vl",
        "qwen3": "qwen3",
        "qwen35": "qwen35",
        "qwen35moe": "qwen35",
        "qwen3moe": "qwen3moe",
        "qwen3next": "qwen35",
        "qwen3vl": "qwen3vl",
        "qwen3vlmoe": "qwen3vl",
        "seed_oss": "seed_oss",
        "smollm3": "smollm3",
        "stablelm": "stablelm",
        "starcoder2": "starcoder2",
    },
)

# What other families need that no op computes, by the beginning of their names.
MISSING = {
    "deepseek32": "sparse attention",
    "glm-dsa": "sparse attention",
    "jamba": "Mamba-1 layers",
    "mamba": "Mamba-1 layers",
    "plamo2": "state-space layers of its own",
    "kimi-linear": "Kimi Delta Attention",
    "arwkv7": "RWKV layers",
    "rwkv": "RWKV layers",
    "gemma3n": "AltUp",
    "llama4": "attention in chunks",
    "nomic-bert-moe": "experts without a gate",
    "jina-bert": "ALiBi",
    "t5": "an encoder beside the decoder",
    "bloom": "ALiBi",
    "mpt": "ALiBi",
    "gpt2": "learned positions",
    "starcoder": "learned positions",
}


def missing(architecture: str) -> str:
    """Returns what an unknown architecture needs, or "" if that is not known."""
    fitting = [name for name in MISSING if architecture.startswith(name)]
    return MISSING[max(fitting, key=len)] if fitting else ""
