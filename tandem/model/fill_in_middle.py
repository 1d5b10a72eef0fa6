"""Fill-in-the-middle: the control tokens with which a code model is asked for the text between two others.

The file's metadata may name the tokens; otherwise they are known by their texts: Qwen Coder, StarCoder, Granite, Code
Llama, CodeGemma, DeepSeek Coder, Codestral.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import TYPE_CHECKING, NamedTuple

from tandem.errors import RequestError

if TYPE_CHECKING:
    from tandem.gguf.file import GGUF
    from tandem.model.tokenizer import Tokenizer

# (prefix, suffix, middle) of each family.
TEXTS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    ("<PRE>", "<SUF>", "<MID>"),
)
CODESTRAL = ("[PREFIX]", "[SUFFIX]")  # the suffix comes first, and nothing before the middle
REPOSITORY = ("<|repo_name|>", "<|fim_repo|>", "<repo_name>", "<reponame>")
FILE = ("<|file_sep|>", "<file_sep>")
PROJECT, UNNAMED = "project", "unnamed"  # names that the prompt has where a request has none


class FillInMiddle(NamedTuple):
    """The control tokens of a model."""

    prefix: int
    suffix: int
    middle: int | None  # None: Codestral's order
    repository: int | None = None
    file: int | None = None


def find_tokens(gguf: GGUF, tokenizer: Tokenizer) -> FillInMiddle | None:
    """Returns the tokens of a model, or None if it has none."""
    others = _metadata(gguf, tokenizer, "fim_rep", REPOSITORY), _metadata(gguf, tokenizer, "fim_sep", FILE)
    named = [_metadata(gguf, tokenizer, name, ()) for name in ("fim_pre", "fim_suf", "fim_mid")]
    for ids in (named, *([tokenizer.find(text) for text in texts] for texts in TEXTS)):
        prefix, suffix, middle = ids
        if prefix is not None and suffix is not None and middle is not None:
            return FillInMiddle(prefix, suffix, middle, *others)
    prefix, suffix = (tokenizer.find(text) for text in CODESTRAL)
    return None if prefix is None or suffix is None else FillInMiddle(prefix, suffix, None)


def _metadata(gguf: GGUF, tokenizer: Tokenizer, name: str, texts: Sequence[str]) -> int | None:
    """The token that the file names, or the one with the first of these texts."""
    id = gguf.get(f"tokenizer.ggml.{name}_token_id", None)
    if isinstance(id, Integral) and 0 <= int(id) < tokenizer.vocab_size:
        return int(id)
    return next((found for text in texts if (found := tokenizer.find(text)) is not None), None)


def prompt_ids(
    tokenizer: Tokenizer,
    prefix: str,
    suffix: str,
    files: Sequence[tuple[str, str]] = (),
    limit: int | None = None,
) -> list[int]:
    """The prompt that asks for the text between `prefix` and `suffix`. `files`: (name, text) of other files of the
    project. `limit`: stops encoding once there are more than `limit` tokens."""
    tokens = tokenizer.fill_in_middle
    if tokens is None:
        raise RequestError(
            "this model has no tokens for fill-in-the-middle: leave the suffix out, or use Qwen Coder"
        )

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, bos=False, continues=True, limit=limit)

    ids = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    if files:
        ids += [tokens.repository, *encode(f"{PROJECT}\n")] if tokens.repository is not None else []
        for name, text in files:
            mark = [tokens.file] if tokens.file is not None else []
            ids += [*mark, *encode(f"{name}\n{text}\n")]
            if limit is not None and len(ids) > limit:
                return ids
        ids += [tokens.file, *encode(f"{UNNAMED}\n")] if tokens.file is not None else []
    if tokens.middle is None:
        return [*ids, tokens.suffix, *encode(suffix), tokens.prefix, *encode(prefix)]
    return [*ids, tokens.prefix, *encode(prefix), tokens.suffix, *encode(suffix), tokens.middle]
