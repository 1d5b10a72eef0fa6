"""Tokenizers of folders: names of pre-tokenizers, and tokenizer.model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tandem.convert import pre_tokenizers
from tandem.convert.pre_tokenizers import pre_tokenizer_name
from tandem.convert.sentencepiece import read_sentencepiece
from tandem.errors import ConversionError, UnsupportedModelError
from tandem.model.pretokenize import FAMILIES, pre_tokenizer
from tests.models.tokenizer_data import SENTENCES

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}


def whole(*steps: dict[str, Any], ignore_merges: bool = False) -> dict[str, Any]:
    return {
        "model": {"ignore_merges": ignore_merges},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(steps)},
    }


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


@pytest.mark.fast
@pytest.mark.parametrize("family", FAMILIES, ids=[names.split()[0] for names, *_ in FAMILIES])
def test_the_name_is_found(family: tuple[Any, ...]) -> None:
    names, patterns, whole_words, _ = family
    stages = [patterns] if isinstance(patterns, str) else patterns
    found = pre_tokenizer_name(whole(*map(split, stages), BYTE_LEVEL, ignore_merges=whole_words), Path("x"))
    assert found == names.split()[0]
    assert pre_tokenizer(found).patterns == tuple(stages)


@pytest.mark.fast
def test_other_spellings(monkeypatch: pytest.MonkeyPatch) -> None:
    gpt2 = {"type": "ByteLevel", "use_regex": True}
    assert pre_tokenizer_name(whole(gpt2), Path("x")) == "gpt-2"
    digits = {"type": "Digits", "individual_digits": True}
    assert pre_tokenizer_name(whole(digits, gpt2), Path("x")) == "starcoder"
    words = {"type": "Split", "pattern": {"String": " "}, "behavior": "Isolated"}
    with pytest.raises(UnsupportedModelError, match="like none"):
        pre_tokenizer_name(whole(words), Path("x"))
    with pytest.raises(UnsupportedModelError, match="WhitespaceSplit"):
        pre_tokenizer_name(whole({"type": "WhitespaceSplit"}), Path("x"))
    monkeypatch.setattr(pre_tokenizers, "SECONDS", 0.1)
    with pytest.raises(ConversionError, match="wrong"):  # it would not end
        pre_tokenizer_name(whole(split(r"((.|..)+)+\d")), Path("x"))


def test_sentencepiece_models(tmp_path: Path) -> None:
    import sentencepiece

    (tmp_path / "text").write_text("\n".join(SENTENCES * 4))
    for kind in ("bpe", "unigram"):
        sentencepiece.SentencePieceTrainer.train(
            input=str(tmp_path / "text"),
            model_prefix=str(tmp_path / kind),
            model_type=kind,
            vocab_size=900,
            byte_fallback=True,
            hard_vocab_limit=False,
            minloglevel=2,
        )
    with pytest.raises(UnsupportedModelError, match="unigram"):
        read_sentencepiece(tmp_path / "unigram.model")
    pieces, adds_space = read_sentencepiece(tmp_path / "bpe.model")
    judge = sentencepiece.SentencePieceProcessor(str(tmp_path / "bpe.model"))
    assert adds_space and len(pieces) == judge.get_piece_size()
    for id, (text, score, type) in enumerate(pieces):
        assert (text, score) == (judge.id_to_piece(id), judge.get_score(id))
        assert (type == 6, type == 3) == (judge.is_byte(id), judge.is_control(id))
    data = (tmp_path / "bpe.model").read_bytes()
    for cut in (0, 1, 5, len(data) // 2):
        (tmp_path / "cut").write_bytes(data[:cut])
        with pytest.raises((ConversionError, UnsupportedModelError)):
            read_sentencepiece(tmp_path / "cut")
