"""A conversation saved by one process goes on in another as if nothing had happened."""

from __future__ import annotations

import os
from hashlib import blake2b
from pathlib import Path

import pytest

from tandem import LLM
from tandem.engine.kv_memory import kv_layers
from tandem.engine.kv_snapshot import CHECKSUM, MAGIC
from tandem.errors import ContextError, StateFileError
from tests.models.test_reference import GOLDENS

BAD = (-1, 100_000, 1 << 31, 1 << 70)  # token ids outside the vocabulary
PROMPT = [(7 * i) % 250 + 3 for i in range(75)]


def open_llm(name: str = "gemma3-pattern3", **options: object) -> LLM:
    settings = {"threads": 1, "context": 128, "batch": 2, "device": "cpu", **options}
    return LLM(GOLDENS / f"{name}.gguf", **settings)  # type: ignore[arg-type]


def computed(llm: LLM, prompt: list[int]) -> tuple[list[int], int]:
    """The answer, and how many tokens of the prompt had to be computed."""
    reply = llm.prepare(prompt, max_tokens=9)
    llm.engine.enqueue(reply.sequence)
    llm.engine.scheduler._admit()
    shared = reply.sequence.state.computed
    while reply.sequence.finish_reason is None:
        llm.engine.step()
    return [sampled.id for sampled in reply.sequence.generated], len(prompt) - shared


@pytest.mark.parametrize(
    ("name", "kv"),
    [("gemma3-pattern3", "f16"), ("llama", "f16"), ("gemma3-pattern3", "q8"), ("qwen2", "q8"),
     ("deepseek-v3", "f16"), ("glm4moe-lite", "q8")],
)  # fmt: skip
def test_the_same_continuation(name: str, kv: str, tmp_path: Path) -> None:
    with open_llm(name, kv=kv) as llm:
        expected, _ = computed(llm, PROMPT)
        assert llm.save(PROMPT, tmp_path / "state") == 64
    with open_llm(name, kv=kv, context=112) as llm:
        assert llm.restore(tmp_path / "state") == PROMPT[:64]
        assert llm.restore(tmp_path / "state") == PROMPT[:64]  # again does no harm
        assert llm.engine.cache.free_blocks == llm.engine.cache.blocks
        assert computed(llm, PROMPT) == (expected, 75 - 64)
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


@pytest.mark.parametrize("name", sorted(path.stem for path in GOLDENS.glob("*.gguf")))
def test_every_cache_is_saved(name: str) -> None:
    """Those of latent attention were not: restored prompts had the keys and values of others."""
    with open_llm(name) as llm:
        launches = llm.engine.program.launches
        caches = {cache.name for one in launches if (cache := one.buffers.get("cache")) is not None}
        assert {layer.tensor.name for layer in kv_layers(llm.engine.program)} == caches
        assert all(layer.nbytes for layer in kv_layers(llm.engine.program))


def test_a_file_that_is_damaged_or_foreign_is_refused(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with open_llm() as llm:
        llm.save(PROMPT, state)
        good = state.read_bytes()
        for bad in (
            b"",
            b"GGUF",
            good[:40],
            good[:-1],
            good[:-40],
            good[:500] + b"?" + good[501:],
            good + b"x",
        ):
            state.write_bytes(bad)
            with pytest.raises(StateFileError, match="save it again"):
                llm.restore(state)
        with pytest.raises(StateFileError, match="cannot be read"):
            llm.restore(tmp_path / "nothing")
        state.write_bytes(good)
        assert llm.restore(state) == PROMPT[:64]
    for options in ({"name": "gemma3-global"}, {"name": "llama"}, {"kv": "f32"}, {"kv": "q8"}):
        with (
            open_llm(**options) as other,
            pytest.raises(StateFileError, match="another model, or other settings"),
        ):  # type: ignore[arg-type]
            other.restore(state)
    with (
        open_llm(context=48) as small,
        pytest.raises(ContextError, match="64 tokens, for which there is no room"),
    ):
        small.restore(state)


def test_a_mixture_of_which_one_expert_changed_is_another_model(tmp_path: Path) -> None:
    with open_llm("mixtral") as llm:
        llm.save(PROMPT, tmp_path / "state")
        last = llm._model.gguf.tensor("blk.0.ffn_up_exps.weight")
        at = last.offset + last.nbytes // last.shape[0] * (last.shape[0] - 1)
    data = bytearray((GOLDENS / "mixtral.gguf").read_bytes())
    data[at] ^= 1
    (tmp_path / "tuned.gguf").write_bytes(data)
    with (
        LLM(tmp_path / "tuned.gguf", threads=1, context=128, batch=2, device="cpu") as other,
        pytest.raises(StateFileError, match="another model"),
    ):
        other.restore(tmp_path / "state")


def test_a_file_made_up_by_someone_is_refused(tmp_path: Path) -> None:
    """With a checksum that is right."""
    state = tmp_path / "state"
    with open_llm() as llm:
        llm.save(PROMPT, state)
        good = state.read_bytes()
        begin = len(MAGIC) + 4
        end = begin + int.from_bytes(good[len(MAGIC) : begin], "little")
        for header, blocks in (
            (b"[" * 100_000, b""),
            (b"{}", b""),
            (b'{"tokens": ["1"]}', b""),
            *(
                (good[begin:end].replace(b'"tokens": [3,', b'"tokens": [%d,' % bad), good[end:-CHECKSUM])
                for bad in BAD
            ),
            (good[begin:end].replace(b'"tokens": [3,', b'"tokens": ['), good[end:-CHECKSUM]),
            (b"\xff\xfe", b""),
            (good[begin:end], good[end : -CHECKSUM - 1]),
        ):
            data = MAGIC + len(header).to_bytes(4, "little") + header + blocks
            state.write_bytes(data + blake2b(data, digest_size=CHECKSUM).digest())
            with pytest.raises(StateFileError, match="does not hold what its header says: save it again"):
                llm.restore(state)
        assert llm.engine.cache.free_blocks == llm.engine.cache.blocks


def test_only_a_regular_file_is_replaced(tmp_path: Path) -> None:
    pipe, folder, loop, link = (tmp_path / name for name in ("pipe", "folder", "loop", "link"))
    os.mkfifo(pipe)
    folder.mkdir()
    loop.symlink_to(loop)
    link.symlink_to(tmp_path / "state")
    special = (pipe, folder, loop)
    before = [path.lstat() for path in special]
    with open_llm() as llm:
        computed(llm, PROMPT)
        for path in special:
            with pytest.raises(StateFileError, match=f"{path} cannot be written: not a regular file"):
                llm.save(PROMPT, path)
        for _ in range(2):
            assert llm.save(PROMPT, link) == 64
            assert llm.restore(tmp_path / "state") == PROMPT[:64]
    assert [path.lstat()[:3] for path in special] == [status[:3] for status in before]
    assert link.is_symlink() and len(list(tmp_path.iterdir())) == 5
