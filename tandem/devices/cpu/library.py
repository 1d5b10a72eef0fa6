"""Loads the C core (libtandem.so) through cffi. Declarations here mirror core.h and the exported functions."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import cffi

from tandem.errors import DeviceError
from tandem.settings import read_settings

ISAS = ("avx512", "avx2", "plain")  # best first
LIBRARY = Path(__file__).with_name("libtandem.so")

ffi: Any = cffi.FFI()
ffi.cdef("""
typedef struct { void *buffer[8]; union { int32_t i; float f; } scalar[16]; } launch_args;
typedef void kernel_fn(const launch_args *args, int32_t item, const int32_t *step);
typedef struct {
    kernel_fn *kernel; launch_args args; int32_t items, count, count_step, barrier;
} launch;

int tandem_isa_supported(const char *name);
""")


@cache
def load() -> Any:
    """The library; other modules add their declarations with `ffi.cdef` at import."""
    if not LIBRARY.exists():
        raise DeviceError(
            f"the C core is not built: run `make core` in the source tree ({LIBRARY} is missing)"
        )
    return ffi.dlopen(str(LIBRARY))


@cache
def best_isa() -> str:
    forced = read_settings().isa
    if forced is not None and forced not in ISAS:
        raise DeviceError(f"TANDEM_ISA={forced}: use one of {', '.join(ISAS)}")
    for isa in [forced] if forced else ISAS:
        if load().tandem_isa_supported(isa.encode()):
            return isa
    raise DeviceError(f"TANDEM_ISA={forced}: this CPU does not have it; unset it to choose by CPUID")


@cache
def kernel(symbol: str, isa: str) -> Any:
    """The address of a kernel as compiled for an instruction set."""
    name = f"{symbol}_{isa}"
    ffi.cdef(f"void {name}(const launch_args *args, int32_t item, const int32_t *step);")
    return ffi.addressof(load(), name)
