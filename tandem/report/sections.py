"""`tandem report`: the sections of one file about a machine, without personal data (docs/DOCTOR.md).

The file is written after each section. If a driver hangs or crashes, it has all sections before that, and the name of
the section that failed (`during`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from traceback import extract_tb
from typing import Any

import numpy as np

from tandem import __version__
from tandem.bench import benchmark
from tandem.bench.bandwidth import measure_bandwidth
from tandem.bench.kernel_checks import AnyDevice, check_kernels, open_for_checks, prepare, time_case
from tandem.bench.rounds import Workload
from tandem.devices.cpu.device import CPUDevice
from tandem.devices.device import Device
from tandem.devices.vulkan.device import VulkanDevice
from tandem.doctor import checks
from tandem.doctor.gpu import capability_data
from tandem.engine.engine import Engine
from tandem.errors import DeviceLostError, DoesNotFitError, TandemError
from tandem.files import write_whole
from tandem.kernels import matmul
from tandem.kernels.kernel import Array
from tandem.kernels.matmul_dispatch import MAX_DOT_TOKENS, MAX_ROWS_TOKENS, has_coopmat
from tandem.model.config import Rope
from tandem.model.synthetic import SyntheticModel
from tandem.report.predictions import predictions
from tandem.settings import read_settings

SCHEMA = 2  # 2: rates.products became rates.matmuls
READ_BYTES = 256 << 20
ROUNDS = 5
ON_DEVICE = ("rates", "kernels", "models", "bench")  # sections that need the device

Data = dict[str, Any]
Say = Callable[[str], None]


class Report:
    """Makes the sections, in the order of `sections()`."""

    def __init__(
        self, device: str, *, full: bool = False, npu: bool = False, threads: int | None = None
    ) -> None:
        self.name, self.full, self.npu, self.threads = device, full, npu, threads

    def sections(self) -> dict[str, Callable[[Say], Any]]:
        made: dict[str, Callable[[Say], Any]] = {
            "doctor": lambda _: checks.as_data(list(checks.examine())),
            "device": self._with_device(lambda device, _: describe(device, self.name)),
            "rates": self._with_device(lambda device, _: rates(device)),
            "kernels": self._with_device(kernels),
            "models": self._with_device(models),
            "bench": self._with_device(lambda device, say: bench(device, self.full, say)),
        }
        if self.npu:
            made["npu"] = npu
        return made

    def write(self, file: Path, say: Say = lambda _: None) -> Data:
        """Makes all sections and writes the file. `problems` lists what failed, in sentences."""
        data: Data = {
            "schema": SCHEMA, "version": __version__, "date": datetime.now(UTC).isoformat(timespec="minutes"),
            "asked_for": self.name, "full": self.full, "during": "", "seconds": {}, "problems": [],
        }  # fmt: skip
        for name, section in self.sections().items():
            if name in ON_DEVICE and "error" in data["device"]:
                continue  # the error is in the section `device`
            say(name)
            data["during"], begun = name, time.perf_counter()
            _save(file, data)
            try:
                data[name] = section(say)
            except Exception as error:  # a bug that only shows on this hardware belongs in the report
                data[name] = {"error": sentence(error)}
            data["seconds"][name] = time.perf_counter() - begun
            data["problems"] += problems(name, data[name])
            if "lost" in data[name]:
                break
        if isinstance(data.get("bench"), list) and (found := _predictions(data)):
            data["predictions"] = found
        data["during"] = ""
        return _save(file, data)

    def _with_device(self, section: Callable[[AnyDevice, Say], Any]) -> Callable[[Say], Any]:
        """Opens the device anew for a section, so that sections do not disturb each other."""

        def run(say: Say) -> Any:
            device = open_for_checks(self.name, self.threads)
            try:
                return section(device, say)
            except DeviceLostError as error:
                return {"error": str(error), "lost": True}
            finally:
                device.close()

        return run


def _predictions(data: Data) -> Data | None:
    """Beside what was measured; a report is worth having without it."""
    try:
        return predictions(data)
    except Exception as error:
        return {"error": sentence(error)}


def sentence(error: Exception) -> str:
    if isinstance(error, TandemError):
        return str(error)
    last = extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {Path(last.filename).name}, line {last.lineno}: {error}"


def _save(file: Path, data: Data) -> Data:
    clean: Data = checks.without_names(data)
    text = json.dumps(clean, indent=1, allow_nan=False) + "\n"
    if file.exists() and not file.is_file():  # a pipe or /dev/null is written to, not replaced
        file.write_text(text)
    else:
        write_whole(file, text.encode())
    return clean


def problems(name: str, section: Any) -> list[str]:
    if isinstance(section, dict) and "error" in section:
        return [f"{name}: {section['error']}"]
    if name == "doctor":
        return [f"{f['name']}: {f['found']}" for f in section["findings"] if f["status"] == "fail"]
    if name == "kernels":
        return [failure for kernel in section for failure in kernel["failures"]]
    if name == "models":
        return [f"{m['model']}: error {m['error']:.2g}" for m in section if not m["passed"]]
    if name == "bench":
        return [f"{m['model']}: {row['why']}" for m in section for row in m.get("rows", ()) if row["why"]]
    return []


# ---- sections


def kind_of(device: AnyDevice) -> str:
    """cpu, software, integrated, discrete, virtual or other."""
    return device.capabilities.kind if isinstance(device, VulkanDevice) else "cpu"


def describe(device: AnyDevice, name: str) -> Data:
    data: Data = {"name": device.name, "description": device.describe(), "capabilities": None}
    if isinstance(device, VulkanDevice):
        data["capabilities"] = capability_data(device.capabilities)
        data["heaps_free"] = device.heaps_free()
    return data


LAYOUTS = ("q4_0", "q8_0", "q4_k", "q6_k", "f16")  # of the timed matmuls
MATMUL_TOKENS, COLUMNS = (1, 8, 64, 512), 4096
ROWS = {"cpu": 4096, "software": 512}  # on slow devices
MANY_ROWS = 16384  # on others
DOT, MATRIX, FLOAT, CHOSEN = "int8 dot products", "matrix units", "float", "as chosen"  # paths


def rates(device: AnyDevice) -> Data:
    """The read bandwidth, and the rates of our matmul kernels for one token, some, and a step of a prompt."""
    read, how = measure_bandwidth(device, READ_BYTES)
    prepare(device)
    kind = kind_of(device)
    few = kind == "software"
    found = [
        timed
        for layout in LAYOUTS[: 1 if few else None]
        for tokens in MATMUL_TOKENS[: -1 if few else None]
        for timed in _matmuls(device, layout, tokens, ROWS.get(kind, MANY_ROWS))
    ]
    best = {
        path: max((p["ops_per_s"] for p in found if p["path"] == path), default=None)
        for path in (DOT, MATRIX, FLOAT)
    }
    return {
        "read_bytes_per_s": read,
        "measured_by": how,
        "int8_ops_per_s": best[DOT],
        "fp16_matrix_ops_per_s": best[MATRIX],
        "float_ops_per_s": best[FLOAT],
        "matmuls": found,
    }


def _matmuls(device: AnyDevice, layout: str, tokens: int, rows: int) -> Iterator[Data]:
    """A matmul timed on each path that the device has for it."""
    case = matmul.make_case(layout, tokens, rows, COLUMNS, 0, 0, np.random.default_rng(0))
    kernel = matmul.BY_LAYOUT[layout]
    cost = kernel.cost(case.scalars, case.counts)
    for path in _paths(device, layout, tokens):
        with _dot_products_only(device, path == DOT):
            seconds = time_case(device, kernel, case, 10 if tokens <= 8 else 3)
        yield {
            "layout": layout, "tokens": tokens, "rows": rows, "columns": COLUMNS, "path": path,
            "seconds": seconds, "bytes_per_s": cost.bytes / seconds, "ops_per_s": cost.ops / seconds,
        }  # fmt: skip


def _paths(device: AnyDevice, layout: str, tokens: int) -> list[str]:
    if layout == "f16":
        return [FLOAT]
    if tokens > 1 and isinstance(device, VulkanDevice) and has_coopmat(device.capabilities):
        few = MAX_DOT_TOKENS if device.capabilities.register_coopmat else MAX_ROWS_TOKENS
        return [DOT, CHOSEN if tokens <= few else MATRIX]
    return [DOT]


@contextmanager
def _dot_products_only(device: AnyDevice, only: bool) -> Iterator[None]:
    """Hides the matrix units of the device if `only`."""
    if only and isinstance(device, VulkanDevice):
        kept = device.capabilities
        device.capabilities = replace(kept, matrix_shapes=(), register_coopmat=False)
        try:
            yield
        finally:
            device.capabilities = kept
    else:
        yield


def kernels(device: AnyDevice, say: Say) -> list[Data]:
    """Checks every kernel against its NumPy reference."""
    found = []
    for checked in check_kernels(device):
        say(f"{checked.kernel}: {checked.cases - len(checked.failures)} of {checked.cases} cases agree")
        found.append(asdict(checked))
    return found


# Shapes of the tiny models, and the maximum error of their logits (RMS, relative). With int8 activations, rounding
# gives different quants, and errors as large as those of int8 itself.
TINY = {
    "gemma-3-27b:f16": 0.01,
    "qwen2.5-7b:f16": 0.01,
    "qwen3-8b:f32": 0.01,
    "gemma-3-27b:q4_0": 0.1,
    "llama-3-8b:q4_k": 0.1,
    "qwen2.5-7b:q6_k": 0.1,
    "qwen3-8b:q8_0": 0.1,
}
TOKENS = 40


def models(device: AnyDevice, say: Say) -> list[Data]:
    """Compares the logits of tiny random models with those of plain C kernels: as one prompt, and token by token."""
    found, plain = [], CPUDevice(read_settings().threads)
    plain.isa = "plain"
    for name, bound in TINY.items():
        ids = np.random.default_rng(7).integers(0, 4096, TOKENS).tolist()
        expected = _logits(tiny_model(name), plain, ids, TOKENS)  # the same at once and token by token
        for batch, how in ((TOKENS, "prompt"), (1, "token by token")):
            got = _logits(tiny_model(name), device, ids, batch)
            error = float(np.sqrt(np.mean((got - expected) ** 2) / np.mean(expected**2)))
            same = float(np.mean(got.argmax(axis=1) == expected.argmax(axis=1)))
            passed = bool(error < bound)
            found.append(
                {
                    "model": f"{name}, {how}",
                    "error": error,
                    "bound": bound,
                    "same_choice": same,
                    "passed": passed,
                }
            )
            say(f"{name}, {how}: error {error:.1e}")
    plain.close()
    return found


def tiny_model(name: str) -> SyntheticModel:
    """A few narrow layers of a published family. Attention scores are scaled down: sharp attention from random weights
    would amplify rounding differences."""
    model = SyntheticModel(name, 6 if name.startswith("gemma") else 3)
    old, dim = model.config, 64
    model.config = replace(
        old,
        dim=512,
        ffn_dim=1024,
        q_heads=4,
        kv_heads=2,
        head_dim=dim,
        vocab=4096,
        scale=1 / dim,
        ropes=tuple(Rope(rope.base, dim, rope.linear) for rope in old.ropes),
        layer_window=tuple(16 if window else 0 for window in old.layer_window),
    )
    return model


def _logits(model: SyntheticModel, device: Device, ids: list[int], batch: int) -> Array:
    return Engine.load(model, device, context=64, batch=batch, kv="f32").logits(ids)


SMALL = {"cpu": "gemma-3-270m:q4_0", "software": "smollm2-135m:q4_0"}  # models on slow devices
USUAL = "gemma-3-1b:q4_0"  # the model on others
LARGER = ("gemma-3-4b:q4_0", "llama-3-8b:q4_k", "gemma-3-27b:q4_0")
WORKLOADS = (
    Workload("prefill", 512),
    *(Workload("decode", 32, batch, 128) for batch in (1, 2, 4, 8, 16, 32)),
    Workload("decode", 32, 1, 4096),
)
SHORT = (Workload("prefill", 32), Workload("decode", 2, 1, 128))


def bench(device: AnyDevice, full: bool, say: Say) -> list[Data]:
    kind = kind_of(device)
    workloads = SHORT if kind == "software" else WORKLOADS
    found: list[Data] = []
    for name in (SMALL.get(kind, USUAL), *(LARGER if full else ())):
        say(name)
        try:
            run = benchmark.run(
                SyntheticModel(name),
                device,
                workloads,
                name=name,
                command="tandem report",
                rounds=ROUNDS,
                profiled=True,
                tell=say,
            )
            found.append(dict(run))
        except DoesNotFitError as error:
            found.append({"model": name, "left_out": str(error)})
    return found


def npu(_: Say) -> Any:
    """Tests of the NPU."""
    from tandem.report.npu import collect

    return collect()
