"""The NPU of AMD Phoenix (XDNA1): plans for it, their checks and an emulator. Emulated; not yet run on a Phoenix."""
