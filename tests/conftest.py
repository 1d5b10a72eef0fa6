"""`auto` is the CPU in tests, also on a machine with a GPU: those that want a GPU name it. Nothing is tuned, or was."""

from __future__ import annotations

import os

from tandem.devices import backends

backends.GPU_NODES = ()
os.environ["TANDEM_TUNE"] = "0"
