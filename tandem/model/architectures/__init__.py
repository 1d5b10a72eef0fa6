"""One file per family with three functions: config (from metadata), tensors (names and shapes), build (the ops)."""

from tandem.model.architectures import gemma2, gemma3, llama, olmoe, qwen2, qwen2moe, qwen3, qwen3moe

ARCHITECTURES = {
    "gemma2": gemma2,
    "gemma3": gemma3,
    "llama": llama,
    "olmoe": olmoe,
    "qwen2": qwen2,
    "qwen2moe": qwen2moe,
    "qwen3": qwen3,
    "qwen3moe": qwen3moe,
}
