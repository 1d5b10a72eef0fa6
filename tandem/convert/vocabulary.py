"""The tokenizer of a folder as keys of a GGUF file: tokenizer.model (SentencePiece), or tokenizer.json.

A byte-level BPE is known in GGUF files by the name of its pre-tokenizer. We look for the one that splits a text in the
same way.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tandem.convert.pre_tokenizers import MAX_STEPS, pre_tokenizer_name
from tandem.convert.safetensors import read_json
from tandem.convert.sentencepiece import read_sentencepiece
from tandem.errors import ConversionError, UnsupportedModelError
from tandem.files import read_regular
from tandem.gguf.cursor import label
from tandem.gguf.write import Value
from tandem.model.tokenizer import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED

MAX_TEMPLATE = 1 << 20  # bytes
MAX_VOCABULARY = 1 << 22
NO_SCORE = -1e4  # of a token that no merge makes: text never becomes it
Keys = dict[str, Value]
SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # names in GGUF files
SPECIAL_OF_BERT = {"cls": "cls", "sep": "seperator", "mask": "mask"}


def tokenizer_keys(folder: Path, vocab_size: int) -> Keys:
    """Returns the keys of the tokenizer and of the chat template. `vocab_size`: rows of the embedding."""
    options = _optional(folder / "tokenizer_config.json")
    whole = _optional(folder / "tokenizer.json")
    if (folder / "tokenizer.model").exists():
        tokens, keys = _from_sentencepiece(folder / "tokenizer.model")
    elif whole:
        tokens, keys = _from_json(whole, folder / "tokenizer.json")
    else:
        raise ConversionError(f"{folder} has neither tokenizer.json nor tokenizer.model: fetch one of them")
    for id, text, type in _added(whole, options, _optional(folder / "added_tokens.json")):
        if not 0 <= id < MAX_VOCABULARY:
            raise ConversionError(f"{folder}: token {id} is beyond any vocabulary: fetch the tokenizer again")
        old = tokens.get(id)
        is_special = old is not None and old[2] in (CONTROL, UNKNOWN)
        tokens[id] = (text, 0.0, old[2] if old and is_special else type)
    if tokens and max(tokens) >= vocab_size:
        raise ConversionError(
            f"{folder}: the tokenizer has {max(tokens) + 1} tokens, the embedding {vocab_size} rows: "
            "fetch the tokenizer of this model"
        )
    ids = {text: id for id, (text, _, _) in tokens.items()}
    listed = [tokens.get(id, (f"[PAD{id}]", NO_SCORE, UNUSED)) for id in range(vocab_size)]
    keys |= {"tokenizer.ggml.tokens": [text for text, _, _ in listed]}
    keys |= {"tokenizer.ggml.token_type": [type for _, _, type in listed]}
    if keys["tokenizer.ggml.model"] == "llama":
        keys |= {"tokenizer.ggml.scores": [score for _, score, _ in listed]}
    special = SPECIAL | (SPECIAL_OF_BERT if keys["tokenizer.ggml.model"] == "bert" else {})
    keys |= _special_ids(folder, options, ids, special)
    if (adds := _adds_bos(whole, options)) is not None:
        keys |= {"tokenizer.ggml.add_bos_token": adds}
    if isinstance(adds_eos := options.get("add_eos_token"), bool):
        keys |= {"tokenizer.ggml.add_eos_token": adds_eos}
    if template := _chat_template(folder, options):
        keys |= {"tokenizer.chat_template": template}
    return keys


Tokens = dict[int, tuple[str, float, int]]  # id -> text, score, type


def _from_sentencepiece(path: Path) -> tuple[Tokens, Keys]:
    pieces, adds_space = read_sentencepiece(path)
    tokens = dict(enumerate(pieces))
    keys: Keys = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default"}
    return tokens, keys | {"tokenizer.ggml.add_space_prefix": adds_space}


def _from_json(whole: dict[str, Any], path: Path) -> tuple[Tokens, Keys]:
    model = whole.get("model")
    model = model if isinstance(model, dict) else {}
    # Old files leave the type out; only BPE has merges.
    kind = model.get("type") or ("BPE" if "merges" in model else "of no type")
    if kind not in ("BPE", "WordPiece"):
        raise UnsupportedModelError(
            f"{path}: the tokenizer is {label(str(kind))}; this version converts BPE, SentencePiece's BPE and WordPiece"
        )
    vocabulary, merges = model.get("vocab"), list(_merges(model.get("merges"), path))
    if not isinstance(vocabulary, dict) or len(vocabulary) > MAX_VOCABULARY:
        raise ConversionError(f"{path}: there is no vocabulary: fetch it again")
    if not all(type(id) is int and 0 <= id < MAX_VOCABULARY for id in vocabulary.values()):
        raise ConversionError(f"{path}: the ids of tokens are no numbers: fetch it again")
    if kind == "WordPiece":
        return _word_pieces(vocabulary, model), {
            "tokenizer.ggml.model": "bert",
            "tokenizer.ggml.pre": "default",
        }
    if model.get("byte_fallback"):  # made of a SentencePiece model: the first merges have the best scores
        scores: dict[str, float] = {}
        for rank, (left, right) in enumerate(merges):
            scores.setdefault(left + right, -float(rank))
        single = -float(len(merges))
        tokens = {
            id: (text, scores.get(text, single if len(text) == 1 else NO_SCORE), _piece_type(text, model))
            for text, id in vocabulary.items()
        }
        keys: Keys = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default"}
        return tokens, keys | {"tokenizer.ggml.add_space_prefix": _adds_space(whole)}
    tokens = {id: (text, 0.0, NORMAL) for text, id in vocabulary.items()}
    keys = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre_tokenizer_name(whole, path)}
    return tokens, keys | {"tokenizer.ggml.merges": [f"{left} {right}" for left, right in merges]}


def _word_pieces(vocabulary: dict[str, int], model: dict[str, Any]) -> Tokens:
    """A token that begins a word gets a mark, and one that goes on loses its own; those in brackets are no text."""
    unknown, mark = model.get("unk_token"), model.get("continuing_subword_prefix", "##")

    def spelled(text: str) -> str:
        if text.startswith("[") and text.endswith("]"):
            return text
        return text.removeprefix(mark) if text.startswith(mark) else f"\u2581{text}"

    return {
        id: (spelled(text), 0.0, UNKNOWN if text == unknown else NORMAL) for text, id in vocabulary.items()
    }


def _merges(listed: Any, path: Path) -> Iterator[tuple[str, str]]:
    """Yields pairs: "a b" in old files, ["a", "b"] in new ones."""
    for merge in listed if isinstance(listed, list) else ():
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
            raise ConversionError(f"{path}: {label(str(merge))} is no merge of two tokens: fetch it again")
        yield pair[0], pair[1]


def _piece_type(text: str, model: dict[str, Any]) -> int:
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        return BYTE
    return UNKNOWN if text == model.get("unk_token") else NORMAL


def _adds_space(whole: dict[str, Any]) -> bool:
    """Whether a space is put before the text: by a normalizer, or by a pre-tokenizer."""

    def steps(part: Any) -> Iterator[dict[str, Any]]:
        if isinstance(part, dict):
            yield part
            for key in ("normalizers", "pretokenizers"):
                for inner in _listed(part.get(key))[:MAX_STEPS]:
                    yield from steps(inner)

    for step in (*steps(whole.get("normalizer")), *steps(whole.get("pre_tokenizer"))):
        if step.get("type") == "Prepend":
            return True
        if step.get("type") == "Metaspace":
            never = step.get("prepend_scheme") == "never" or step.get("add_prefix_space") is False
            return not never
    return False


def _added(*files: dict[str, Any]) -> Iterator[tuple[int, str, int]]:
    """Yields tokens that were added to the vocabulary, by the three files that may have them."""
    whole, options, plain = files
    listed = whole.get("added_tokens")
    for entry in listed if isinstance(listed, list) else ():
        if isinstance(entry, dict) and type(entry.get("id")) is int and isinstance(entry.get("content"), str):
            yield entry["id"], entry["content"], CONTROL if entry.get("special") else USER_DEFINED
    decoder = options.get("added_tokens_decoder")
    for id, entry in (decoder if isinstance(decoder, dict) else {}).items():
        if id.isdecimal() and isinstance(entry, dict) and isinstance(entry.get("content"), str):
            yield int(id), entry["content"], CONTROL if entry.get("special") else USER_DEFINED
    known = {entry[1] for entry in _added(whole, options, {})} if plain else set()
    for text, id in plain.items():
        if type(id) is int and text not in known:
            yield id, text, USER_DEFINED


def _special_ids(folder: Path, options: dict[str, Any], ids: dict[str, int], special: dict[str, str]) -> Keys:
    """The special tokens as tokenizer_config.json names them, or else as config.json numbers them."""
    config, keys = read_json(folder / "config.json"), Keys()
    generation = _optional(folder / "generation_config.json")
    for name, ours in special.items():
        text = options.get(f"{name}_token")
        text = text.get("content") if isinstance(text, dict) else text
        id = ids.get(text) if isinstance(text, str) else None
        numbers = _numbers(config.get(f"{name}_token_id"))
        id = id if id is not None else next((number for number in numbers if number in ids.values()), None)
        if id is not None:
            keys[f"tokenizer.ggml.{ours}_token_id"] = id
    ends = _numbers(generation.get("eos_token_id")) + _numbers(config.get("eos_token_id"))
    last = keys.get("tokenizer.ggml.eos_token_id")
    if more := [id for id in ends if id != last and id in ids.values()]:
        keys["tokenizer.ggml.eot_token_id"] = more[0]
    return keys


def _numbers(value: Any) -> list[int]:
    return [id for id in (value if isinstance(value, list) else [value]) if type(id) is int]


def _adds_bos(whole: dict[str, Any], options: dict[str, Any]) -> bool | None:
    """Whether text begins with BOS: as the options say, or as the template of the post-processor."""
    if isinstance(adds := options.get("add_bos_token"), bool):
        return adds
    processor = whole.get("post_processor")
    if not isinstance(processor, dict):
        return None
    for step in (processor, *_listed(processor.get("processors"))):
        if isinstance(step, dict) and step.get("type") == "TemplateProcessing":
            first = (_listed(step.get("single")) or [{}])[0]
            return isinstance(first, dict) and "SpecialToken" in first
    return None


def _chat_template(folder: Path, options: dict[str, Any]) -> str:
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            return read_regular(path, MAX_TEMPLATE).decode(errors="replace")
        except OSError as error:
            raise ConversionError(f"{path} cannot be read ({error.strerror}): fetch it again") from None
    template = options.get("chat_template") or _optional(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):  # several, with names
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else ""


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}
