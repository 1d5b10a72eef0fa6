"""An accelerator computes partitions of a step beside the main device: it holds weights and returns futures.

`DeviceAccelerator` makes one of the CPU or a GPU, which can also run whole launches. int8.py computes the NPU's
arithmetic on the host.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np

from tandem.devices.device import Bytes, Device, Recording
from tandem.devices.split.cut import OWN
from tandem.devices.tensor_parallel.cut import Gemm, TensorMap, Work, padded
from tandem.errors import DeviceError, DoesNotFitError
from tandem.kernels.abi import HEADER_INTS
from tandem.kernels.q8_tiles import q8_bytes
from tandem.program.program import Launch, Program, Tensor
from tandem.program.step_inputs import bytes_in_use
from tandem.program.weight_plan import align

MAX_RECENT_TIMES = 8192  # recent partitions whose times are kept


class Partition(NamedTuple):
    """A device's part of a step: units [first, first + units) of a matmul, or all of another Work."""

    work: int
    first: int
    units: int
    tokens: int
    inputs: Sequence[Bytes]  # rows of the Work's `entering` tensors; valid until the result is there
    step: Bytes  # StepInputs


class PartitionResult(NamedTuple):
    outputs: Sequence[Bytes]  # a matmul: its own columns; otherwise the Work's `leaving` tensors
    begun: float
    ended: float


class Accelerator(Protocol):
    """Computes partitions in the order of submission. Nothing is allocated after `allocate`."""

    @property
    def name(self) -> str: ...

    @property
    def times(self) -> deque[tuple[float, float]]:
        """Begin and end of recent partitions."""

    def describe(self) -> str: ...

    def supports(self, gemm: Gemm) -> bool:
        """Whether it may compute this matmul."""

    def allocate(self, works: Sequence[Work], program: Program, *, copies: bool) -> None:
        """Allocates the Works' weights. `copies`: results must stay valid while the next partition runs."""

    def load(self, work: int, operands: Mapping[str, Bytes]) -> None:
        """Loads a matmul's weights (panels) and bias, by buffer name: once, before the first partition."""

    def submit(self, partition: Partition) -> Future[PartitionResult]: ...

    def close(self) -> None: ...


def rows_bytes(tensor: Tensor, tokens: int) -> int:
    """Returns the bytes of the first `tokens` rows of a tensor."""
    size = q8_bytes(tokens, tensor.stride) if tensor.dtype == "q8" else 4 * tokens * tensor.stride
    return min(size, tensor.nbytes)


class AcceleratorThread:
    """A thread that computes partitions one after the other, and keeps their times."""

    def __init__(self, name: str) -> None:
        self.times: deque[tuple[float, float]] = deque(maxlen=MAX_RECENT_TIMES)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"tandem {name}")

    def supports(self, gemm: Gemm) -> bool:
        return True

    def submit(self, partition: Partition) -> Future[PartitionResult]:
        return self._thread.submit(self._timed, partition)

    def _timed(self, partition: Partition) -> PartitionResult:
        begun = time.perf_counter()
        outputs = self.run(partition)
        ended = time.perf_counter()
        self.times.append((begun, ended))
        return PartitionResult(outputs, begun, ended)

    def run(self, partition: Partition) -> Sequence[Bytes]:
        raise NotImplementedError

    def close(self) -> None:
        self._thread.shutdown()


@dataclass(eq=False)
class PlacedWork:
    """A Work with its tensors and launches on this device."""

    work: Work
    inputs: list[Tensor]
    launches: list[Launch]
    outputs: list[Tensor]
    tables: list[Tensor]  # of StepInputs


class DeviceAccelerator(AcceleratorThread):
    """A device with its own memory and kernels. It holds a copy of the main device's weights."""

    def __init__(self, device: Device) -> None:
        super().__init__(device.name)
        self.device, self.name = device, device.name
        self._placed: list[PlacedWork] = []
        self._own: dict[Tensor, Tensor] = {}  # weights and KV caches of the Program -> tensors of this device
        self._recordings: dict[tuple[int, int, int], tuple[Recording, list[Tensor]]] = {}
        self._counts: dict[str, int] = {}
        self._copies = False

    def describe(self) -> str:
        return self.device.describe()

    def allocate(self, works: Sequence[Work], program: Program, *, copies: bool) -> None:
        sizes = {"step": program.arena_bytes["step"]}
        self._counts, self._copies, self._own = dict(program.max_counts), copies, {}
        self._recordings.clear()
        self._placed = [_place(work, sizes, self._own) for work in works]
        launches = [launch for placed in self._placed for launch in placed.launches]
        nbytes, free = sum(sizes.values()), self.device.free_memory()[1]
        if nbytes > free:
            raise DoesNotFitError(
                f"the partitioned matmuls take up to {nbytes / 1e9:.2f} GB more, and {self.name} has "
                f"{free / 1e9:.2f} GB free: use one device, or a smaller model"
            )
        self.device.allocate(Program(launches, self._counts, sizes))

    def load(self, work: int, operands: Mapping[str, Bytes]) -> None:
        for launch in self._placed[work].launches:
            for name, tensor in launch.buffers.items():
                if tensor is not None and name in operands:
                    self.device.write(tensor, operands[name])

    def mapped(self, tensor: Tensor) -> Tensor | None:
        """Returns the tensor on this device for a KV cache of the whole Program; None: it is not placed here."""
        root = self._own.get(tensor.root)
        if root is None or tensor is tensor.root:
            return root
        return replace(tensor, offset=tensor.start - tensor.root.start, base=root)

    def run(self, partition: Partition) -> Sequence[Bytes]:
        placed = self._placed[partition.work]
        recording, outputs = self._recorded(partition)
        step = self.device.memory("step")
        header = partition.step[: 4 * HEADER_INTS]
        step[: len(header)] = header
        for table in placed.tables:
            begin, end = table.start, table.start + bytes_in_use(table, header.view(np.int32))
            step[begin:end] = partition.step[begin:end]
        step[:4].view(np.int32)[0] = partition.tokens
        for tensor, data in zip(placed.inputs, partition.inputs, strict=True):
            self.device.write(tensor, data)
        recording.replay()
        results = [self.device.read(replace(t, nbytes=rows_bytes(t, partition.tokens))) for t in outputs]
        return [data.copy() for data in results] if self._copies else results

    def _recorded(self, partition: Partition) -> tuple[Recording, list[Tensor]]:
        """Returns the Recording of a partition, and its outputs; recorded at its first use."""
        key = partition.work, partition.first, partition.units
        if key not in self._recordings:
            placed = self._placed[partition.work]
            launches, outputs = placed.launches, placed.outputs
            if isinstance(placed.work, Gemm):
                launch, out = _partition(
                    placed.work, partition.first, partition.units, launches[0], self._counts["tokens"]
                )
                launches, outputs = [launch], [out]
            self._recordings[key] = self.device.record(Program(launches, self._counts, {})), outputs
        return self._recordings[key]

    def close(self) -> None:
        super().close()
        self.device.close()


def _place(work: Work, sizes: dict[str, int], own: dict[Tensor, Tensor]) -> PlacedWork:
    """Places a Work: weights and KV caches after the ones already placed; activations from 0 (one Work at a time)."""
    used = 0

    def put(root: Tensor) -> int:
        nonlocal used
        if root.arena in OWN:
            at = sizes.get(root.arena, 0)
            sizes[root.arena] = at + align(root.nbytes)
            return at
        if root.arena != "activations":
            return root.offset
        at, used = used, used + align(root.nbytes)
        sizes["activations"] = max(sizes.get("activations", 0), used)
        return at

    tensor_map = TensorMap(put, own)
    launches = [tensor_map.launch(launch) for launch in work.launches]
    touched = {t for launch in launches for t in launch.buffers.values() if t is not None}
    return PlacedWork(
        work,
        [tensor_map.mapped(t) for t in work.entering],
        launches,
        [tensor_map.mapped(t) for t in work.leaving],
        [t for t in touched if t.arena == "step"],
    )


def _partition(gemm: Gemm, first: int, count: int, whole: Launch, tokens: int) -> tuple[Launch, Tensor]:
    """Returns the launch for these units of a matmul, and its output tensor with dense rows."""
    _, width = gemm.columns(first, count)
    stride = width if gemm.out.dtype == "q8" else padded(width)
    place = whole.buffers["out"]
    assert place is not None
    nbytes = min(place.nbytes, gemm.out_bytes(tokens, width))
    out = Tensor(place.name, place.arena, place.dtype, nbytes, stride, 0, place)
    return gemm.partition(first, count, dict(whole.buffers), out), out


def check_gemm(work: Work, name: str) -> Gemm:
    if not isinstance(work, Gemm):
        raise DeviceError(f"{name} computes matmuls only: use --placement columns")
    return work
