"""The rules that keep the source readable: imports go down, one place reads the environment, files stay small."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import tandem
from tandem.model.architectures import ARCHITECTURES, MISSING
from tandem.model.encoders import ENCODERS
from tandem.model.lazy_modules import LazyModules
from tandem.program.graph import SHAPES
from tandem.program.lower import EXTENSIONS, _Lowering

pytestmark = pytest.mark.fast

PACKAGE = Path(tandem.__file__).parent
# Each may import from itself and from what follows it.
LAYERS = [
    *("cli", "server", "report", "doctor", "tune", "plan", "bench", "convert"),
    *("engine", "model", "gguf", "devices", "program", "kernels", "native"),
]
COMMON = {"errors", "files", "interrupts", "settings", "threads"}  # for all
MAX_LINES = 600


def imported(source: Path) -> Iterator[str]:
    """The layers that a file imports from, at its top or inside a function."""
    for node in ast.walk(ast.parse(source.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source}: write imports in full, so that the layer shows"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            top, _, rest = name.partition(".")
            if top == "tandem" and rest:
                layer = rest.split(".")[0]
                yield "engine" if layer in tandem.__all__ else layer


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_go_down(layer: str) -> None:
    allowed = COMMON | {"__version__"} | set(LAYERS[LAYERS.index(layer) :])
    for source in (PACKAGE / layer).rglob("*.py"):
        above = set(imported(source)) - allowed
        assert not above, f"{source.relative_to(PACKAGE)} imports from {above}, which is above {layer}"


def test_everything_has_a_layer() -> None:
    assert {path.parent.name for path in PACKAGE.glob("*/*.py")} <= set(LAYERS)
    assert {path.stem for path in PACKAGE.glob("*.py")} == COMMON | {"__init__", "__main__"}


def test_only_settings_reads_the_environment() -> None:
    words = ("os.environ", "getenv", "import environ")
    readers = [p.name for p in PACKAGE.rglob("*.py") if any(word in p.read_text() for word in words)]
    assert readers == ["settings.py"]


def test_files_are_short() -> None:
    folders = (PACKAGE, Path(__file__).parent)
    sources = [p for folder in folders for p in folder.rglob("*") if p.suffix in (".py", ".c", ".h")]
    long = {p.name: n for p in sources if (n := len(p.read_text().splitlines())) > MAX_LINES}
    assert sources and not long, f"more than {MAX_LINES} lines: {long}"


def test_a_class_name_has_one_meaning() -> None:
    """One name, one class. APIs may share names, for each has those of its own specification."""
    pairs = {"Arena", "Choices"}  # a Protocol of what another room needs, and the classes that have it
    apis = {"openai", "anthropic", "ollama", "llama_cpp"}
    places: dict[str, set[str]] = {}
    for source in PACKAGE.rglob("*.py"):
        api = source.parent.name in apis
        place = "an API" if api else str(source.relative_to(PACKAGE))
        for node in ast.parse(source.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, set()).add(place)
    several = {name: found for name, found in places.items() if len(found) > 1 and name not in pairs}
    assert len(places) > 300 and not several, several


def test_every_kernel_but_those_of_gpus_alone_has_a_c_file() -> None:
    folder = PACKAGE / "kernels"
    modules = {p.stem: importlib.import_module(f"tandem.kernels.{p.stem}") for p in folder.glob("[!_]*.py")}
    declared = {
        stem: [*getattr(module, "KERNELS", []), *([module.KERNEL] if hasattr(module, "KERNEL") else [])]
        for stem, module in modules.items()
    }
    on_cpus = {stem for stem, kernels in declared.items() if any(not kernel.gpu_only for kernel in kernels)}
    shared = {"expert_matmul"}  # its loop is that of matmul.c, which has its code too
    assert on_cpus - shared == {p.stem for p in folder.glob("*.c")}
    assert not [stem for stem in on_cpus if any(kernel.gpu_only for kernel in declared[stem])]


@pytest.mark.parametrize(
    ("modules", "functions", "others"),
    [
        (ARCHITECTURES, {"config", "tensors", "build"}, {"blocks"}),
        (ENCODERS, {"config", "prepare", "tensors", "build", "parts"}, {"blocks", "config"}),
    ],
)
def test_modules_that_are_imported_when_they_are_used(
    modules: LazyModules, functions: set[str], others: set[str]
) -> None:
    """Each name has a module, and each module a name."""
    found = {Path(str(modules[name].__file__)) for name in modules}
    assert all(functions <= vars(module).keys() for module in modules.values())
    folder = next(iter(found)).parent
    assert {path.stem for path in found} == {path.stem for path in folder.glob("[!_]*.py")} - others


def test_a_family_that_runs_lacks_nothing() -> None:
    assert set(ARCHITECTURES).isdisjoint(MISSING)


def test_each_op_is_lowered_in_one_place() -> None:
    """An op of an extension that EXTENSIONS does not list would be missing from models without the others."""
    places = {kind: [_Lowering] for kind in SHAPES if hasattr(_Lowering, f"_{kind}")}
    for (module, name), kinds in EXTENSIONS.items():
        extension = getattr(importlib.import_module(f"tandem.program.{module}"), name)
        assert {kind for kind in SHAPES if f"_{kind}" in vars(extension)} == set(kinds), name
        places |= {kind: [*places.get(kind, []), extension] for kind in kinds}
    assert places.keys() == SHAPES.keys() and all(len(found) == 1 for found in places.values()), places


def test_the_public_surface() -> None:
    """A name here is a promise to users."""
    assert sorted(tandem.__all__) == [
        "AsyncLLM",
        "LLM",
        "Result",
        "SamplingParams",
        "TandemError",
        "Token",
        "Usage",
    ]
    for name in tandem.__all__:
        assert getattr(tandem, name).__name__ == name
