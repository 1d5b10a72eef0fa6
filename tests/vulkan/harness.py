"""Runs a Slang kernel on one of its cases and compares it with its NumPy reference.

`python -m tests.vulkan.harness KERNEL [DEVICE]` compiles the kernel's shader if it is stale, checks every case and
prints its time on the device (lavapipe unless another is named, here or in TANDEM_TEST_DEVICE); KERNEL may be a
prefix, such as `matmul_`.
"""

from __future__ import annotations

import os
import sys
import zlib

import numpy as np

from tandem.bench.kernel_checks import check_case, check_matmul, prepare, run_kernel, runs, time_case
from tandem.devices.vulkan import compile_shaders
from tandem.devices.vulkan.device import VulkanDevice
from tandem.kernels import all_kernels
from tandem.kernels.dispatch_table import DISPATCH_RULES
from tandem.kernels.kernel import Case, Kernel

__all__ = ["cases_of", "check_case", "check_matmul", "open_device", "run_kernel", "runs"]
DEVICE = os.environ.get("TANDEM_TEST_DEVICE", "vulkan:lavapipe")


def open_device(name: str = DEVICE) -> VulkanDevice:
    device = VulkanDevice(name)
    prepare(device)
    return device


def cases_of(kernel: Kernel) -> list[Case]:
    return list(kernel.cases(np.random.default_rng(zlib.crc32(kernel.name.encode()))))


def module_of(kernel: str) -> str:
    """The Slang file of a kernel: the longest name that begins the kernel's."""
    return max((m for m in compile_shaders.modules() if kernel.startswith(m)), key=len, default="")


def main() -> None:
    kernels = {name: kernel for name, kernel in all_kernels().items() if name in DISPATCH_RULES}
    wanted = [k for name, k in kernels.items() if len(sys.argv) > 1 and name.startswith(sys.argv[1])]
    if not wanted:
        sys.exit(f"usage: python -m tests.vulkan.harness KERNEL [DEVICE], one of {', '.join(kernels)}")
    compile_shaders.refresh([module_of(kernel.name) for kernel in wanted])
    device = open_device(sys.argv[2] if len(sys.argv) > 2 else DEVICE)
    print(device.capabilities.describe())
    failed = 0
    for kernel in wanted:
        for case in cases_of(kernel):
            if not runs(device, kernel, case):
                continue
            try:
                check_case(device, kernel, case)
                verdict = "ok"
            except AssertionError as error:
                failed += 1
                verdict = "FAILS: " + " ".join(str(error).split())[:300]
            cost, best = kernel.cost(case.scalars, case.counts), time_case(device, kernel, case)
            rates = f"{cost.bytes / best / 1e9:8.2f} GB/s {cost.ops / best / 1e9:8.2f} GOP/s"
            print(f"{best * 1e6:10.2f} us {rates}  {kernel.name}: {case.label}: {verdict}")
    device.close()
    sys.exit(f"{failed} cases fail" if failed else 0)


if __name__ == "__main__":
    main()
