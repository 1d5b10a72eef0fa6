"""GGUF files without weights, which name a synthetic model: `tandem serve --synthetic` serves one like any other file.

Such a model has every id of its vocabulary as a token, so that texts of any kind are encoded (a byte is a token), and
answers are streamed; but its output makes no sense.
"""

from __future__ import annotations

from pathlib import Path

from tandem.gguf.write import Value, header
from tandem.model.model import SYNTHETIC, SYNTHETIC_FILES
from tandem.model.synthetic import SyntheticModel

NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6  # of tokens
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def write_synthetic_file(name: str, path: Path) -> None:
    """Writes the file of the synthetic model `name`, as SHAPE or SHAPE:FORMAT. Only this process can open it."""
    model = SyntheticModel(name)
    vocab = model.config.vocab
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *(f"▁{id:x}" for id in range(259, vocab))]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (vocab - 259)]
    values: dict[str, Value] = {
        "general.architecture": model.config.architecture,
        SYNTHETIC: name,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * vocab,
        "tokenizer.ggml.token_type": types,
        "tokenizer.chat_template": TEMPLATE,
    }
    path.write_bytes(header(values))
    SYNTHETIC_FILES.add(path.resolve())
