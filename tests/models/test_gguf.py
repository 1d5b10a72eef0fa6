"""The GGUF reader on good files: ours, and those that the `gguf` package writes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tandem.errors import ModelFileError, ModelNotFoundError
from tandem.gguf.file import GGUF, StringArray
from tandem.gguf.formats import by_name, dequantise, quantise
from tests.gguf_files import Key, build, tiny_keys, tiny_tensors, write

pytestmark = pytest.mark.fast


def plain(value: Any) -> Any:
    """Arrays of any kind as lists."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    return [plain(item) for item in value] if isinstance(value, StringArray | list) else value


@pytest.mark.parametrize("version", [2, 3])
def test_metadata_and_tensors_come_back(tmp_path: Path, version: int) -> None:
    path = write(tmp_path / "tiny.gguf", tiny_keys(), tiny_tensors(), version=version)
    with GGUF.open(path) as model:
        assert list(model.metadata) == [key for key, _, _ in tiny_keys()]
        for key, kind, value in tiny_keys():
            expected = float(np.float32(value)) if kind == "f32" else value
            assert plain(model.metadata[key]) == expected
        assert model.path == path and model.file_size == path.stat().st_size
        assert list(model.tensors) == [name for name, _, _ in tiny_tensors()]
        for name, format, values in tiny_tensors():
            info = model.tensors[name]
            assert (info.format.name, info.shape, info.path) == (format, values.shape, path)
            raw = model.raw(name)
            assert (
                raw.shape == (values.size // values.shape[-1], info.row_bytes) and raw.nbytes == info.nbytes
            )
            assert np.array_equal(raw, quantise(by_name(format), values).reshape(raw.shape))
            assert raw.flags.owndata  # not a view of the file, which may change


def test_files_of_the_package(tmp_path: Path) -> None:
    path = tmp_path / "theirs.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    added = {
        "a.uint8": (writer.add_uint8, 200),
        "a.int8": (writer.add_int8, -100),
        "a.uint16": (writer.add_uint16, 60000),
        "a.int16": (writer.add_int16, -30000),
        "a.uint32": (writer.add_uint32, 2**32 - 1),
        "a.int32": (writer.add_int32, -(2**31)),
        "a.uint64": (writer.add_uint64, 2**64 - 1),
        "a.int64": (writer.add_int64, -(2**63)),
        "a.float32": (writer.add_float32, 0.5),
        "a.float64": (writer.add_float64, 0.1),
        "a.bool": (writer.add_bool, True),
        "a.string": (writer.add_string, "text ünd émoji 🙂"),
        "a.strings": (writer.add_array, ["", "a", "▁ ü", "\n"]),
        "a.ints": (writer.add_array, [3, -2, 1]),
        "a.floats": (writer.add_array, [0.25, -8.0]),
        "a.nested": (writer.add_array, [["x", "y"], ["z"]]),
    }
    for key, (add, value) in added.items():
        add(key, value)
    rng = np.random.default_rng(1)
    values = {
        "x": rng.standard_normal((3, 64)),
        "y": rng.standard_normal((2, 3, 32)),
        "z": rng.standard_normal(7),
    }
    kinds = {"x": "Q5_1", "y": "Q4_0", "z": "F32"}
    for name, array in values.items():
        kind = gguf.GGMLQuantizationType[kinds[name]]
        writer.add_tensor(name, gguf.quants.quantize(array.astype(np.float32), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GGUF.open(path) as model:
        assert {key: plain(model.metadata[key]) for key in added} == {
            key: value for key, (_, value) in added.items()
        }
        for tensor in gguf.GGUFReader(path).tensors:
            info = model.tensors[tensor.name]
            assert info.format.name == kinds[tensor.name] and info.offset == tensor.data_offset
            assert info.shape == values[tensor.name].shape and info.nbytes == tensor.n_bytes
            theirs = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            assert np.array_equal(dequantise(info.format, model.raw(tensor.name)).ravel(), theirs.ravel())


@pytest.mark.parametrize("alignment", [1, 2, 4, 8, 16, 24, 40, 64, 4096])
def test_any_alignment(tmp_path: Path, alignment: int) -> None:
    keys = [*tiny_keys(), ("general.alignment", "u32", alignment)]
    with GGUF.open(write(tmp_path / "a.gguf", keys, tiny_tensors(), alignment=alignment)) as model:
        for name, format, values in tiny_tensors():
            assert model.tensors[name].offset % alignment == 0
            assert np.array_equal(model.raw(name).ravel(), quantise(by_name(format), values).ravel())


def test_a_vocabulary_alone(tmp_path: Path) -> None:
    with GGUF.open(write(tmp_path / "vocab.gguf", tiny_keys())) as model:
        assert model.tensors == {}


def test_strings_are_decoded_on_access(tmp_path: Path) -> None:
    texts = ["", "a", "▁the", b"\xff\xfe", "🙂" * 100]
    with GGUF.open(write(tmp_path / "s.gguf", [("s", "[str]", texts)])) as model:
        strings = model.require("s", StringArray)
    assert len(strings) == 5 and strings[2] == "▁the" and strings[-1] == "🙂" * 100
    assert strings[3] == "\ufffd\ufffd" and strings.bytes_at(3) == b"\xff\xfe"
    assert strings[1:3] == ["a", "▁the"] and list(strings) == [strings[i] for i in range(5)]
    assert strings.lengths.tolist() == [0, 1, 6, 2, 400] and strings.offsets.dtype == np.int64
    for i, (start, length) in enumerate(zip(strings.offsets, strings.lengths, strict=True)):
        assert strings.blob[start : start + length].tobytes() == strings.bytes_at(i)
    with pytest.raises(IndexError):
        strings[5]


def test_a_vocabulary_of_262144_opens_at_once(tmp_path: Path) -> None:
    size = 262144
    keys: list[Key] = [
        ("tokenizer.ggml.tokens", "[str]", [f"▁token{i}" for i in range(size)]),
        ("tokenizer.ggml.scores", "[f32]", [-float(i) for i in range(size)]),
        ("tokenizer.ggml.token_type", "[i32]", [1] * size),
    ]
    path = write(tmp_path / "large.gguf", keys)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        with GGUF.open(path) as model:
            seconds.append(time.perf_counter() - start)
            assert model.metadata["tokenizer.ggml.tokens"][size - 1] == f"▁token{size - 1}"
    assert min(seconds) < 0.5  # 0.01 in practice


def parts(folder: Path, **changes: Any) -> list[Path]:
    """A model in three files; `changes` overrides keys or adds tensors in the second, or the total in all."""
    paths = []
    for index in range(3):
        changed = changes if index == 1 else {}
        keys = tiny_keys() if index == 0 else []
        keys += [
            ("split.no", "u16", changed.get("no", index)),
            ("split.count", "u16", changed.get("count", 3)),
        ]
        keys += [("split.tensors.count", "i32", changes.get("total", 5))]
        path = folder / f"tiny-{index + 1:05d}-of-00003.gguf"
        paths.append(write(path, keys, tiny_tensors()[index::3] + changed.get("more", [])))
    return paths


def test_split_files(tmp_path: Path) -> None:
    paths = parts(tmp_path)
    with GGUF.open(paths[0]) as model:
        assert model.require("llama.block_count", int) == 2
        assert model.file_size == sum(path.stat().st_size for path in paths)
        assert set(model.tensors) == {name for name, _, _ in tiny_tensors()}
        for index, (name, format, values) in enumerate(tiny_tensors()):
            assert model.tensors[name].path == paths[index % 3]
            assert np.array_equal(model.raw(name).ravel(), quantise(by_name(format), values).ravel())


@pytest.mark.parametrize("part", [1, 2])
def test_a_split_model_is_opened_by_its_first_file(tmp_path: Path, part: int) -> None:
    with pytest.raises(
        ModelFileError, match=f"part {part + 1} of 3: open tiny-00001-of-00003.gguf"
    ) as caught:
        GGUF.open(parts(tmp_path)[part])
    assert caught.value.field == "split.no"


def test_a_missing_part(tmp_path: Path) -> None:
    paths = parts(tmp_path)
    paths[2].unlink()
    with pytest.raises(ModelNotFoundError, match=r"tiny-00003-of-00003.gguf: part 3 of 3 is missing"):
        GGUF.open(paths[0])


def test_a_renamed_first_part(tmp_path: Path) -> None:
    path = parts(tmp_path)[0].rename(tmp_path / "model.gguf")
    with pytest.raises(ModelFileError, match=r"ends in -00001-of-00003.gguf"):
        GGUF.open(path)


@pytest.mark.parametrize(
    "changes, field, part",
    [
        ({"no": 2}, "split.no", 1),
        ({"count": 4}, "split.count", 1),
        ({"total": 6}, "split.tensors.count", 0),
        ({"more": tiny_tensors()[:1]}, "token_embd.weight", 1),
    ],
)
def test_parts_that_do_not_belong_together(
    tmp_path: Path, changes: dict[str, Any], field: str, part: int
) -> None:
    paths = parts(tmp_path, **changes)
    with pytest.raises(ModelFileError) as caught:
        GGUF.open(paths[0])
    assert (caught.value.field, caught.value.path) == (field, str(paths[part]))


def test_typed_values(tmp_path: Path) -> None:
    with GGUF.open(write(tmp_path / "tiny.gguf", tiny_keys(), tiny_tensors())) as model:
        assert model.require("llama.block_count", int) == 2
        assert model.require("llama.block_count", float) == 2.0
        assert model.require("tokenizer.ggml.add_bos_token", bool) is True
        assert model.require("test.flags", np.ndarray).dtype == np.bool_
        assert model.get("no.such.key", 7) == 7 and model.get("no.such.key") is None
        assert model.get("llama.block_count", 9) == 2 and model.get("general.name", "") == "Tiny ✓"
        assert model.get("test.nested")[0].tolist() == [1, 2]
        assert model.tensor("output_norm.weight").shape == (33,)
        for key, kind in {
            "general.name": int,
            "llama.rope.freq_base": int,
            "tokenizer.ggml.add_bos_token": int,
            "llama.block_count": bool,
            "tokenizer.ggml.tokens": str,
            "tokenizer.ggml.scores": StringArray,
            "no.such.key": int,
        }.items():
            with pytest.raises(ModelFileError) as caught:
                model.require(key, kind)
            assert caught.value.field == key
        offset = build(tiny_keys()).marks["llama.block_count"]
        with pytest.raises(
            ModelFileError, match=f"llama.block_count at byte {offset}: this must be text, not int"
        ):
            model.get("llama.block_count", "two")
        with pytest.raises(ModelFileError, match=r"nothing.weight at byte 24: the tensor is missing"):
            model.raw("nothing.weight")


def test_values_outlive_the_model(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((64, 1024)).astype(np.float32)
    model = GGUF.open(write(tmp_path / "m.gguf", tiny_keys(), [("w", "F32", values)]))
    view = model.raw("w")
    model.close()
    model.close()
    assert np.array_equal(view.view(np.float32), values)
    assert model.metadata["tokenizer.ggml.tokens"][3] == "token3"
