"""One ABI: C, Slang and Python agree on the constants and layouts of tandem/kernels/abi.py, the only definition."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from pathlib import Path

import numpy as np
import pytest

from tandem.kernels import abi, all_kernels
from tandem.kernels.generate_abi import FILES, FOLDER, STRUCTS, constants, constants_of, offsets
from tandem.kernels.kernel import AFTER_SCALARS
from tandem.native import ffi

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parents[2]
GENERATED = {FOLDER / file for file in FILES}
NAMES = {*constants(), *(name for struct in STRUCTS.values() for name in offsets(struct))}


def sources(*suffixes: str) -> list[Path]:
    folders = (ROOT / "tandem", ROOT / "benchmarks")
    found = (path for folder in folders for suffix in suffixes for path in folder.rglob(f"*{suffix}"))
    return sorted(path for path in found if path not in GENERATED and path.name != "abi.py")


@pytest.mark.parametrize("file", FILES)
def test_generated_files_are_up_to_date(file: str) -> None:
    assert (FOLDER / file).read_text() == FILES[file](), "run `make abi`"


def declared_comments() -> dict[str, str]:
    """Generated constant -> its comment in abi.py: above its declaration, inside it, or behind it."""
    text = Path(abi.__file__).read_text()
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    comments = {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}
    alone = {line for line in comments if text.splitlines()[line - 1].lstrip().startswith("#")}
    declarations: dict[str, ast.expr] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            declarations[node.targets[0].id] = node.value
            if isinstance(node.value, ast.Dict):
                keys = [ast.literal_eval(key) for key in node.value.keys if key]
                declarations |= dict(zip(keys, node.value.values, strict=True))
    expected = {}
    for name, value in declarations.items():
        above = [value.lineno - 1] if value.lineno - 1 in alone else []
        for line in (*above, *range(value.lineno, (value.end_lineno or 0) + 1)):
            for constant in [*constants_of(name)][:1] if line in comments else []:
                expected[constant] = comments[line].removeprefix("# ")
    return {name: comment for name, comment in expected.items() if not comment.startswith("----")}


@pytest.mark.parametrize("file", FILES)
def test_generated_constants_have_their_comments(file: str) -> None:
    generated = dict(re.findall(r"(\w+) = \d+[,;]  // (.*)", (FOLDER / file).read_text()))
    assert {"TOKEN_SOURCE", "q4_k_BYTES", "q6_k_BYTES"} <= set(generated)
    assert generated == declared_comments(), "write the comment on the line of the constant"


def test_c_sees_what_python_declares(tmp_path: Path) -> None:
    """A program compiled with abi.h prints every constant, and every struct's size and offsets."""
    expected = {name: value for name, value in constants().items()}
    printed = {name: name for name in expected}
    for struct_name, struct in STRUCTS.items():
        expected[struct_name] = struct.dtype.itemsize
        printed[struct_name] = f"sizeof({struct_name})"
        for field, (_, offset, *_) in (struct.dtype.fields or {}).items():
            expected[f"{struct_name}.{field}"] = offset
            printed[f"{struct_name}.{field}"] = f"offsetof({struct_name}, {field})"
    body = "".join(f'    printf("{name} %ld\\n", (long)({value}));\n' for name, value in printed.items())
    source, program = tmp_path / "abi.c", tmp_path / "abi"
    source.write_text(f'#include <stdio.h>\n#include "core.h"\nint main(void) {{\n{body}    return 0;\n}}\n')
    subprocess.run(["gcc", f"-I{FOLDER}", str(source), "-o", str(program)], check=True)
    lines = subprocess.run([str(program)], check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    assert {name: int(value) for name, value in map(str.split, lines)} == expected


def test_slang_sees_what_python_declares() -> None:
    text = (FOLDER / "abi.slang").read_text()
    found = {name: int(value) for name, value in re.findall(r"public static const uint (\w+) = (\d+);", text)}
    fields = [offsets(struct) for struct in STRUCTS.values()]
    assert found == {**constants(), **{name: at for each in fields for name, at in each.items()}}


def test_cffi_sees_the_launch_of_launch_h() -> None:
    assert ffi.sizeof("launch_args") == abi.LAUNCH_BYTES == 8 * abi.MAX_BUFFERS + 4 * abi.MAX_SCALARS


def test_no_other_file_defines_a_shared_name() -> None:
    again = []
    for path in sources(".c", ".h"):
        defined = re.findall(r"(?:enum \{|#define|[,{])\s*(\w+)\s*(?:=(?!=)|[\d(])", path.read_text())
        again += [f"{path}: {name}" for name in NAMES & set(defined)]
    for path in sources(".py"):
        tree = ast.parse(path.read_text())
        stored = (n for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
        defined = [name.id for name in stored]
        again += [f"{path}: {name}" for name in set(constants()) & set(defined)]
    assert not again, "these names are defined in tandem/kernels/abi.py: use it"


def test_slang_files_take_the_shared_constants_from_abi_slang() -> None:
    """Through common.slang, which all shaders import; none of them defines one again."""
    assert "import abi;" in (FOLDER / "common.slang").read_text()
    for path in sources(".slang"):
        for statement in re.findall(r"static const u?int ([^;]*);", path.read_text()):
            again = NAMES & set(re.findall(r"(\w+) = ", statement))
            assert not again, f"{path.name} defines {again}: abi.slang has them"


# Sources whose arguments are those of other kernels than their own name says.
ARGUMENTS = {
    "attention_common": ("attention",),
    "coopmat_activations": ("matmul_q4_0", "expert_matmul_q4_0"),
    "embed": ("embed_q8_0",),
    "matmul": ("matmul_q4_0", "matmul_norm_partials_q4_0", "expert_matmul_q4_0"),
    "matmul_common": ("matmul_q4_0", "expert_matmul_q4_0"),
    "norm": ("norm", "combine_norm"),
    "route": ("route", "route_group"),
}


def declared_indices(stem: str) -> dict[str, set[int]]:
    """Names of a source file's buffers and scalars, as its constants have them -> their indices in a launch."""
    indices: dict[str, set[int]] = {}
    for name in ARGUMENTS.get(stem, (stem,)):
        if kernel := all_kernels().get(name):
            numbered = [
                (i if i < AFTER_SCALARS else len(kernel.scalars), buffer) for i, buffer in kernel.addresses
            ]
            for i, argument in (*numbered, *enumerate(name for name, _ in kernel.scalars)):
                indices.setdefault(argument.upper(), set()).add(i)
    return indices


def test_kernels_number_their_arguments_as_declared() -> None:
    """In enums of C files and constants of shaders."""
    checked = 0
    for path in sources(".c", ".slang"):
        indices, text = declared_indices(path.stem), path.read_text()
        if path.suffix == ".c":
            enums = re.findall(r"^enum \{ ([A-Z]\w*(?:, [A-Z]\w*)*)(?: \}|, \w+ = )", text, re.M)
            numbered = [(name, i) for enum in enums for i, name in enumerate(enum.split(", "))]
        else:
            constants = ",".join(re.findall(r"static const uint ([^;]*);", text))
            numbered = [(name, int(i)) for name, i in re.findall(r"\b([A-Z]\w*) = (\d+)\b", constants)]
        for name, i in numbered:
            assert i in indices.get(name, {i}), f"{path.name}: {name} is not {i} in the declaration"
            checked += name in indices
    assert checked > 250


def test_names_are_in_the_order_of_their_values() -> None:
    """Tuples of names that code indexes, and the constants for the same."""
    assert [getattr(abi, f"HEADER_{name.upper()}") for name in abi.COUNTS] == list(range(len(abi.COUNTS)))
    assert [getattr(abi, f"KV_{name.upper()}") for name in abi.KV_TYPES] == list(range(len(abi.KV_TYPES)))


def test_sampling_rows_are_words() -> None:
    """The host writes them through int32 views by column."""
    for row, ints in (
        (abi.SAMPLING_PARAMETERS, abi.SAMPLING_INTS),
        (abi.LOGIT_ADJUSTMENT, abi.ADJUSTMENT_INTS),
        (abi.SAMPLING_RESULT, abi.RESULT_INTS),
    ):
        view = np.zeros(1, row)
        for field in row.names or ():
            if row[field].shape == () and row[field].kind in "iu":
                view[field] = 7
                assert view.view(np.int32)[abi.column(row, field)] == 7
                view[field] = 0
        assert len(view.view(np.int32)) == ints and ints & (ints - 1) == 0, (
            "rows do not straddle a cache line"
        )
