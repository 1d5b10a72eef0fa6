"""Tandem: LLM inference from GGUF files on x86-64 CPUs and Vulkan GPUs.

from tandem import LLM
with LLM("qwen2.5-coder-0.5b") as llm:
    print(llm.chat([{"role": "user", "content": "What is the capital of France?"}]).text)
"""

TYPE_CHECKING = False  # as in `typing`, whose import takes milliseconds before Ctrl-C is handled
if TYPE_CHECKING:
    from tandem.engine.async_llm import AsyncLLM
    from tandem.engine.llm import LLM, Result, Token, Usage
    from tandem.engine.params import SamplingParams
    from tandem.errors import TandemError

__all__ = ["LLM", "AsyncLLM", "Result", "SamplingParams", "TandemError", "Token", "Usage"]
__version__ = "0.1.0"

_HOMES = {
    "AsyncLLM": "tandem.engine.async_llm",
    "SamplingParams": "tandem.engine.params",
    "TandemError": "tandem.errors",
}


def __getattr__(name: str) -> object:
    """Imports on first use, so that `tandem --help` does not wait for NumPy."""
    if name not in __all__:
        raise AttributeError(f"module 'tandem' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES.get(name, "tandem.engine.llm")), name)
