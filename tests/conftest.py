"""`auto` is the CPU in tests, also on a machine with a GPU: those that want a GPU name it."""

from __future__ import annotations

from tandem.devices import opening

opening.GPU_NODES = ()
