"""Optional back ends are imported only where they are asked for, and one module runs the engine's steps."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.tiny_model import write_tiny_model

OPTIONAL = (
    "tandem.devices.npu",
    "tandem.devices.tensor_parallel",
    "tandem.devices.split",
    "tandem.devices.vulkan",
)
SCRIPT = """
import sys
from tandem import LLM
with LLM(sys.argv[1], device="cpu", threads=1, context=64, batch=1) as llm:
    llm.generate("x", max_tokens=2)
print(*[name for name in sys.modules if name.startswith({optional!r})])
"""


ROOT = Path(__file__).parents[2] / "tandem"


@pytest.mark.fast
def test_one_engine_loop() -> None:
    """LLM, AsyncLLM, server and command line leave the steps to the driver; a draft model has its own engine."""
    folders = ("engine", "server", "cli")
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    callers = [path.name for path in files if "engine.step()" in path.read_text()]
    assert callers == ["draft_model.py", "driver.py"]


@pytest.mark.fast
def test_a_model_on_the_cpu_imports_no_other_back_end(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "tiny.gguf")
    script = SCRIPT.format(optional=OPTIONAL)
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []
