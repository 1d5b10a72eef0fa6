"""Splits text into words for byte-level BPE, as `tokenizer.ggml.pre` of the file says. Merges stay within a word.

The models were trained with these patterns. A pre-tokeniser is one pattern that matches every character, or stages:
each splits the parts of the previous stage into its matches and the text between them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from itertools import islice, pairwise
from typing import Any, NamedTuple

import numpy as np

from tandem.errors import UnsupportedModelError
from tandem.kernels.kernel import Array

CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# GPT-2 after each digit was cut out: spaces before a digit are at the end of their stretch
SINGLE_DIGITS = r"\p{N}|'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
LLAMA3 = (
    rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}"
)
QWEN2 = rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}"
QWEN35 = (
    rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{SPACES}"
)
SEED = rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+|{SPACES}"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = [rf"[^\r\n\p{{L}}\p{{N}}]?{word}" for word in (f"{UPPER}*{LOWER}+", f"{UPPER}+{LOWER}*")]
CASED_REST = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}"
TEKKEN = rf"{CASED[0]}|{CASED[1]}|\p{{N}}|{CASED_REST}"
GPT4O = rf"{CASED[0]}{CONTRACTION}?|{CASED[1]}{CONTRACTION}?|\p{{N}}{{1,3}}|{CASED_REST}"
CASED_LETTERS = (  # of the scripts that have upper and lower case, as DeepSeek lists them
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5"
    "\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba"
    "\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45"
    "\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe"
    "\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102"
    "\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    "\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)
HAN_HANGUL = r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{CASED_LETTERS}]+",
    r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"(?<!\s)\s+$",  # without the lookbehind, each space of a stretch would be a start to search from
    HAN_HANGUL,
    r"\p{N}+",
)
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", HAN_HANGUL, r"\p{N}")
DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    r"[\u4e00-\u9fa5\u3040-\u30ff]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + SPACES,
)
FALCON = (r"[\p{P}$+<=>^~|`]+", GPT2, r"[0-9]{3}")
DEFAULT = (r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", r"[0-9]{3}")

# names in `tokenizer.ggml.pre`: patterns, whether whole words that are tokens skip the merges, whether text begins
# with BOS where the file does not say
FAMILIES: tuple[tuple[str, str | tuple[str, ...], bool, bool], ...] = (
    ("default", DEFAULT, False, False),
    (
        "gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 gigachat a.x-4.0 mellum modern-bert",
        GPT2,
        False,
        False,
    ),
    ("starcoder refact command-r smollm codeshell exaone minerva-7b", SINGLE_DIGITS, False, False),
    ("llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2", LLAMA3, True, True),
    ("dbrx smaug-bpe glm4 chatglm-bpe", LLAMA3, False, False),
    ("qwen2 deepseek-r1-qwen kormo f2llmv2 stablelm2 hunyuan megrez solar-open grok-2", QWEN2, False, False),
    ("qwen35", QWEN35, False, False),
    ("seed-coder", SEED, False, False),
    ("tekken", TEKKEN, True, True),
    ("gpt-4o llama4 kanana2 minimax-m2", GPT4O, False, False),
    ("deepseek-llm", DEEPSEEK_LLM, False, False),
    ("deepseek-coder", DEEPSEEK_CODER, False, False),
    ("deepseek-v3 hunyuan-dense joyai-llm", DEEPSEEK_V3, False, False),
    ("falcon", FALCON, False, False),
)
BY_NAME = {name: family for family in FAMILIES for name in family[0].split()}


# Unicode properties as ASCII characters: `re` has no Unicode properties, and importing `regex` is slow.
ASCII = {"L": "A-Za-z", "Lu": "A-Z", "Ll": "a-z", "N": "0-9", "P": r"!-#%-*,-/:;?@\[-\]_{}", "S": "$+<->^`|~"}
CLASS_OR_PROPERTY = re.compile(r"\[(?:\\.|[^\]\\])+\]|\\p\{\w+\}")
PROPERTY = re.compile(r"\\p\{(\w+)\}")
PART = 1 << 14  # characters of a text that are split at once


class PreTokenizer(NamedTuple):
    patterns: tuple[str, ...]
    whole_words: bool
    add_bos: bool

    def parts(self, data: bytes) -> Iterator[tuple[bytes, list[int] | Array]]:
        """Yields UTF-8 text in parts of whole words, and the lengths of their words in characters. The GIL is not held
        for longer than a part takes, or the longest word."""
        text = data.decode()
        patterns = _compiled(self.patterns, text.isascii())
        if len(patterns) > 1:
            yield data, _staged_lengths(text, patterns)
        elif len(text) <= PART:
            yield data, list(map(len, patterns[0].findall(text)))
        else:
            words, begin = patterns[0].finditer(text), 0
            while ends := [word.end() for word in islice(words, PART // 4)]:
                yield text[begin : ends[-1]].encode(), np.diff(ends, prepend=begin)
                begin = ends[-1]


def _staged_lengths(text: str, patterns: tuple[Any, ...]) -> list[int]:
    cuts = [0, len(text)]
    for pattern in patterns:
        more: list[int] = []
        for start, end in pairwise(cuts):
            more.append(start)
            for match in pattern.finditer(text, start, end):
                more += match.span()
        more.append(len(text))
        cuts = [cut for cut, following in pairwise(more) if cut != following]
        cuts.append(len(text))
    return [end - start for start, end in pairwise(cuts)]


@cache
def _compiled(patterns: tuple[str, ...], ascii: bool) -> tuple[Any, ...]:
    if ascii:
        return tuple(re.compile(_for_ascii(pattern), re.ASCII) for pattern in patterns)
    import regex

    return tuple(regex.compile(pattern) for pattern in patterns)


def _for_ascii(pattern: str) -> str:
    """Returns the pattern with properties replaced by their ASCII characters."""

    def spelled(part: re.Match[str]) -> str:
        inside = PROPERTY.sub(lambda name: ASCII.get(name[1], ""), part[0])
        return inside if part[0].startswith("[") else f"[{inside}]"

    return CLASS_OR_PROPERTY.sub(spelled, pattern)


@cache
def pre_tokenizer(name: str) -> PreTokenizer:
    if name not in BY_NAME:
        known = ", ".join(sorted(BY_NAME))
        raise UnsupportedModelError(
            f"the file's pre-tokenizer {name!r} is not one this engine knows ({known}): fetch another conversion"
        )
    _, patterns, whole_words, add_bos = BY_NAME[name]
    return PreTokenizer((patterns,) if isinstance(patterns, str) else patterns, whole_words, add_bos)
