"""Converts a Hugging Face folder to a GGUF file. The header is checked before any weight is read."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

from tandem.convert.families import FAMILIES
from tandem.convert.family import Family
from tandem.convert.hf_config import HFConfig
from tandem.convert.metadata import encoder_keys, model_keys, rope_tensors
from tandem.convert.safetensors import Safetensors, read_json
from tandem.convert.tensors import Output, outputs, vector
from tandem.convert.vocabulary import tokenizer_keys
from tandem.errors import ConversionError, ModelFileError, UnsupportedModelError
from tandem.gguf.cursor import label
from tandem.gguf.formats import by_name
from tandem.gguf.write import NewTensor, Value, fits, header, padding
from tandem.model.model import open_model

Progress = Callable[[str, int, int], None]  # file name, bytes written, bytes in all
FILE_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 7, "bf16": 32}  # `general.file_type`
EMBEDDING, HEAD = "token_embd.weight", "output.weight"


def convert(
    folder: Path,
    output: Path,
    type: str = "f16",
    progress: Progress = lambda *_: None,
    changed: Mapping[str, Value | None] | None = None,
) -> None:
    """Writes the model of `folder` to the file `output`, which is there when it is whole.

    `type`: one of FILE_TYPES, the format of matrices. `changed`: keys with other values; None leaves one out.
    """
    config = read_json(folder / "config.json")
    family = _family(folder, config)
    c = HFConfig(folder / "config.json", config, family.defaults)
    weights = Safetensors(folder)
    try:
        computed = [vector(name, values) for name, values in rope_tensors(c).items()]
        planned = computed + outputs(weights, c, family, folder)
        named = {tensor.name: tensor for tensor in planned}
        if EMBEDDING not in named:
            raise ConversionError(f"{folder} has no embedding: fetch all files of the model")
        keys: dict[str, Value] = {"general.architecture": family.architecture}
        keys |= {"general.name": folder.resolve().name, "general.file_type": FILE_TYPES[type]}
        keys |= {f"{family.architecture}.{key}": value for key, value in model_keys(c, family).items()}
        keys |= encoder_keys(folder, c, family)
        keys |= tokenizer_keys(folder, named[EMBEDDING].shape[0])
        wanted: dict[str, Value | None] = {**keys, **(changed or {})}
        keys = {key: value for key, value in wanted.items() if value is not None}
        for key, value in keys.items():
            if not fits(value):
                raise ConversionError(
                    f"{folder / 'config.json'}: {key} would be {label(str(value))}, which a GGUF file cannot hold: "
                    "fetch it again"
                )
        head = HEAD if HEAD in named else EMBEDDING
        tensors = [tensor.tensor(by_name(type.upper()), head) for tensor in planned]
        _write(folder, output, keys, list(zip(tensors, planned, strict=True)), len(computed), progress)
        weights.check_unchanged()
    finally:
        weights.close()


def _family(folder: Path, config: dict[str, object]) -> Family:
    classes = config.get("architectures")
    name = classes[0] if isinstance(classes, list) and classes else None
    if not isinstance(name, str) or name not in FAMILIES:
        raise UnsupportedModelError(
            f"{folder} is a {label(str(name))}, which this version does not convert; "
            f"it converts {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[name]


def _write(
    folder: Path,
    output: Path,
    keys: dict[str, Value],
    tensors: list[tuple[NewTensor, Output]],
    computed: int,
    progress: Progress,
) -> None:
    """Writes a file. `computed`: how many tensors, the first ones, are needed to check the header."""
    target = Path(os.path.realpath(output))
    if target.exists() and not target.is_file():
        raise ConversionError(f"{output} is not a regular file: name another")
    head = header(keys, [tensor for tensor, _ in tensors])
    total = len(head) + sum(tensor.nbytes + len(padding(tensor.nbytes)) for tensor, _ in tensors)
    free = shutil.disk_usage(target.parent).free
    if total > free:
        raise ConversionError(f"{output} would have {total} bytes, but {free} are free: name another disk")
    unfinished = target.with_name(f"{target.name}.{os.getpid()}.part")
    with open(unfinished, "xb") as file:
        try:
            file.write(head)
            file.truncate(total)  # takes no room, and the header can be checked
            for i, (tensor, source) in enumerate(tensors):
                if i == computed:
                    file.flush()
                    _check(folder, unfinished)
                _write_tensor(file, tensor, source)
                progress(target.name, file.tell(), total)
            assert file.tell() == total
            os.fsync(file.fileno())
            unfinished.replace(target)
        except BaseException:
            unfinished.unlink()
            raise


def _write_tensor(file: BinaryIO, tensor: NewTensor, source: Output) -> None:
    begin = file.tell()
    for part in source.parts(tensor.format):
        file.write(part)
    assert file.tell() - begin == tensor.nbytes, tensor.name
    file.write(padding(tensor.nbytes))


def _check(folder: Path, path: Path) -> None:
    """Opens the file as the engine does: a missing tensor, or one of another shape than the config's, is an error."""
    try:
        open_model(path).gguf.close()
    except ModelFileError as error:
        raise ConversionError(f"{folder}: {error.field}: {error.problem}") from None
