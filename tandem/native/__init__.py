"""Loads the C core (libtandem.so) through cffi; exports.h declares its functions."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from tandem.errors import DeviceError
from tandem.settings import read_settings

ISAS = ("avx512", "avx2", "plain")  # best first
LIBRARY = Path(__file__).with_name("libtandem.so")

try:
    from tandem.native import _core  # written by setup.py from launch.h and exports.h
except ImportError as error:
    raise DeviceError("the C core is not built: run `make core` in the source tree") from error

ffi: Any = _core.ffi


@cache
def load() -> Any:
    """The library, with the functions of exports.h."""
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
    found = load().tandem_kernel(f"{symbol}_{isa}".encode())
    if found == ffi.NULL:
        raise DeviceError(f"the C core has no kernel {symbol} for {isa}: run `make core` in the source tree")
    return found
