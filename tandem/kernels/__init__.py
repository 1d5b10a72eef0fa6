"""A kernel `name` has name.py (declaration), name.c (CPU) and name.slang (GPU). expert_matmul shares matmul's code.

A fused kernel that only GPUs run has no C file, and may be an entry point of another kernel's Slang file, which its
docstring names. name.py declares one kernel as KERNEL, or several as KERNELS.
"""

from __future__ import annotations

from tandem.kernels.kernel import Kernel


def all_kernels() -> dict[str, Kernel]:
    """Every kernel declared in this folder, by name."""
    import importlib
    import pkgutil

    kernels: list[Kernel] = []
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        kernels += getattr(module, "KERNELS", [])
        kernels += [module.KERNEL] if hasattr(module, "KERNEL") else []
    by_name = {kernel.name: kernel for kernel in kernels}
    assert len(by_name) == len(kernels), f"two kernels share a name: {sorted(k.name for k in kernels)}"
    return by_name
