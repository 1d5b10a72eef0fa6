"""Finds the name that GGUF files have for the pre-tokenizer of a tokenizer.json: the one that splits a text alike."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tandem.errors import ConversionError, UnsupportedModelError
from tandem.gguf.cursor import label
from tandem.model.pretokenize import FAMILIES, GPT2, pre_tokenizer

SECONDS = 5.0  # for a pattern of the file, which may not end
MAX_STEPS = 16

# Where pre-tokenizers differ: digits, contractions, capitals, white space, line ends, punctuation, scripts, marks.
PROBES = (
    "Hello, World! It's I'M they'LL we've don'T  ... (yes) a_b-c --- `x`",
    "1 12 123 1234 12345 1234567890 x1 1x 3.14 ٣٤ ½ Ⅷ  7",
    " leading  two   three \t tab\n\nlines \n  \r\n end\r\n\r\n  \n x   ",
    "camelCaseWord HTTPServer ÀÉÎ straße ЁжИк Σίσυφος",
    "a/b//c\n/ path/to\n#include <stdio.h>\n\tint x=0;//!\n!!!\n\n???",
    "你好，世界。日本語かなカナ 한국어 ไทย हिन्दी مرحبا",
    "e\u0301a\u0300 🙂👍🏽 ™© $+<=>^~|` “q” ’s \u3000\u00a0x",
)


def pre_tokenizer_name(whole: dict[str, Any], path: Path) -> str:
    steps = list(_steps(whole.get("pre_tokenizer"), path))
    words = [_split(probe, steps, path) for probe in PROBES]
    whole_words = bool(whole["model"].get("ignore_merges"))
    fitting = []
    for names, _, skips_merges, _ in FAMILIES:
        name = names.split()[0]
        if words == [_our_split(probe, name) for probe in PROBES]:
            fitting.append((skips_merges == whole_words, name))
    if not fitting:
        raise UnsupportedModelError(
            f"{path}: the pre-tokenizer splits text like none that this version knows "
            f"({', '.join(names.split()[0] for names, *_ in FAMILIES)}): use another model"
        )
    return max(fitting, key=lambda found: found[0])[1]


def _our_split(text: str, name: str) -> list[str]:
    words = []
    for part, lengths in pre_tokenizer(name).parts(text.encode()):
        rest = part.decode()
        for length in lengths:
            words.append(rest[:length])
            rest = rest[length:]
    return words


def _steps(part: Any, path: Path) -> Iterator[dict[str, Any]]:
    if not isinstance(part, dict):
        raise UnsupportedModelError(f"{path}: the tokenizer has no pre-tokenizer: use another model")
    if part.get("type") == "Sequence":
        listed = part.get("pretokenizers")
        for inner in (listed if isinstance(listed, list) else [])[:MAX_STEPS]:
            yield from _steps(inner, path)
    else:
        yield part


def _split(text: str, steps: list[dict[str, Any]], path: Path) -> list[str]:
    """Splits as the steps say, in order: each splits the words of the one before."""
    words = [text]
    for step in steps:
        match step.get("type"), step.get("behavior", "Isolated"):
            case "ByteLevel", _:
                pattern = GPT2 if step.get("use_regex", True) else ""
            case "Digits", _:
                pattern = r"\p{N}" if step.get("individual_digits") else r"\p{N}+"
            case "Punctuation", ("Isolated" | "Contiguous") as behaviour:
                pattern = r"\p{P}" if behaviour == "Isolated" else r"\p{P}+"
            case "Split", ("Isolated" | "Removed" as behaviour) if behaviour == "Isolated" or step.get(
                "invert"
            ):
                pattern = _pattern(step, path)
            case kind, behaviour:
                shown = label(f"{kind}, {behaviour}")
                raise UnsupportedModelError(
                    f"{path}: the pre-tokenizer {shown} is not one this version knows: use another model"
                )
        if pattern:
            words = [piece for word in words for piece in _pieces(word, pattern, path)]
    return words


def _pattern(step: dict[str, Any], path: Path) -> str:
    import regex

    given = step.get("pattern")
    given = given if isinstance(given, dict) else {}
    if isinstance(text := given.get("String"), str):
        return str(regex.escape(text))
    if isinstance(text := given.get("Regex"), str):
        return text
    raise ConversionError(f"{path}: a pre-tokenizer has no pattern: fetch it again")


def _pieces(word: str, pattern: str, path: Path) -> Iterator[str]:
    """Yields the matches and the text between them."""
    import regex

    at = 0
    try:
        for match in regex.finditer(pattern, word, timeout=SECONDS):
            if at < match.start():
                yield word[at : match.start()]
            if match[0]:
                yield match[0]
            at = match.end()
    except (regex.error, TimeoutError):
        raise ConversionError(f"{path}: a pattern of the pre-tokenizer is wrong: fetch it again") from None
    if at < len(word):
        yield word[at:]
