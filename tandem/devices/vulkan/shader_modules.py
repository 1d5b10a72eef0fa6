"""SPIR-V modules with many entry points, and the part of a module that one entry point needs.

A driver may translate a whole module for each pipeline (NVIDIA's takes a third longer), so a pipeline gets a module of
its own: the declarations, and the functions that its entry point calls.
"""

from __future__ import annotations

import hashlib
from array import array
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

from tandem.errors import DeviceError

SPIRV = Path(__file__).with_name("spirv")
HEADER_WORDS = 5
OP_ENTRY_POINT, OP_EXECUTION_MODE, OP_CAPABILITY, OP_EXECUTION_MODE_ID = 15, 16, 17, 331
OP_FUNCTION, OP_FUNCTION_PARAMETER, OP_FUNCTION_END, OP_FUNCTION_CALL, OP_DECORATE = 54, 55, 56, 57, 71
FUNCTION_DECORATIONS = {20}  # Aliased: the only decoration that Slang gives to values inside a function
# SPIR-V capability -> the device feature that it needs
NEEDS = {
    9: "shaderFloat16",
    22: "shaderInt16",
    39: "shaderInt8",
    4433: "storageBuffer16BitAccess",
    4448: "storageBuffer8BitAccess",
    5345: "vulkanMemoryModel",
    6018: "shaderIntegerDotProduct",
    6019: "shaderIntegerDotProduct",
    6022: "cooperativeMatrix",
}


class Function(NamedTuple):
    begin: int  # index of its first word
    end: int
    calls: tuple[int, ...]  # ids of functions
    parameters: tuple[int, ...]  # their ids


class ShaderModule:
    """The entry points and functions of a SPIR-V module."""

    def __init__(self, code: bytes) -> None:
        self.words = words = array("I", code)
        self.entry_points: dict[str, int] = {}  # name -> id of its function
        self.features: set[str] = set()  # features that a device must have
        at, end = HEADER_WORDS, len(words)
        while at < end and (op := words[at] & 0xFFFF) not in (OP_DECORATE, OP_FUNCTION):
            if op == OP_ENTRY_POINT:
                name = words[at + 3 : at + (words[at] >> 16)].tobytes().partition(b"\0")[0].decode()
                self.entry_points[name] = words[at + 2]
            elif op == OP_CAPABILITY and words[at + 1] in NEEDS:
                self.features.add(NEEDS[words[at + 1]])
            at += words[at] >> 16

    @cached_property
    def declarations(self) -> list[tuple[int, array[int]]]:
        """Everything before the first function, as (id of the function or value it decorates, or 0, words)."""
        words, at = self.words, HEADER_WORDS
        parts, shared = [], at
        while (op := words[at] & 0xFFFF) != OP_FUNCTION:
            end = at + (words[at] >> 16)
            inside = op == OP_DECORATE and words[at + 2] in FUNCTION_DECORATIONS
            if inside or op in (OP_ENTRY_POINT, OP_EXECUTION_MODE, OP_EXECUTION_MODE_ID):
                about = words[at + 2] if op == OP_ENTRY_POINT else words[at + 1]
                parts += [(0, words[shared:at]), (about, words[at:end])]
                shared = end
            at = end
        return [*parts, (0, words[shared:at])]

    @cached_property
    def functions(self) -> dict[int, Function]:
        """Functions by id."""
        words, end = self.words, len(self.words)
        begin = at = HEADER_WORDS + sum(len(part) for _, part in self.declarations)
        functions: dict[int, Function] = {}
        calls: list[int] = []
        parameters: list[int] = []
        while at < end:
            first = words[at]
            op = first & 0xFFFF
            if OP_FUNCTION <= op <= OP_FUNCTION_CALL:  # rare: this loop takes most of the time
                if op == OP_FUNCTION_CALL:
                    calls.append(words[at + 3])
                elif op == OP_FUNCTION:
                    begin, calls, parameters = at, [], []
                elif op == OP_FUNCTION_PARAMETER:
                    parameters.append(words[at + 2])
                elif op == OP_FUNCTION_END:
                    own = tuple(dict.fromkeys(calls)), tuple(parameters)
                    functions[words[begin + 2]] = Function(begin, at + 1, *own)
            at += first >> 16
        return functions

    def extract(self, entry_point: str) -> bytes:
        """A module with this entry point, the functions that it calls, and the declarations that these use."""
        entry = self.entry_points[entry_point]
        if len(self.entry_points) == 1:
            return self.words.tobytes()
        reached, waiting = {entry}, [entry]
        while waiting:
            new = set(self.functions[waiting.pop()].calls) - reached
            reached |= new
            waiting += new
        body, others = array("I"), set[int]()
        for id, function in self.functions.items():
            if id in reached:
                body += self.words[function.begin : function.end]
            else:
                others.update(function.parameters)
        # Words of the body that are ids, or numbers that happen to be those of other functions' parameters.
        kept, ids = self.words[:HEADER_WORDS], {0, entry, *body} - others
        for about, words in self.declarations:
            if about in ids and (about not in self.functions or about == entry):
                kept += words
        return (kept + body).tobytes()


@cache
def shader_modules(folder: Path) -> dict[str, ShaderModule]:
    """Entry point -> its module, for all modules of a folder."""
    modules = [ShaderModule(path.read_bytes()) for path in sorted(folder.glob("*.spv"))]
    return {name: module for module in modules for name in module.entry_points}


def find_module(shader: str) -> ShaderModule:
    """The module with this entry point."""
    module = shader_modules(SPIRV).get(shader)
    if module is None:
        raise DeviceError(f"the shader {shader} is not built: run `make shaders` in the source tree")
    return module


@cache
def shader_checksum() -> str:
    total = hashlib.sha256()
    for path in sorted(SPIRV.glob("*.spv")):
        total.update(path.name.encode() + path.read_bytes())
    return total.hexdigest()[:16]
