"""Changes of machine code that matter are noticed: see mutate.py. docs/AMD.md has the figures of 1,000."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tandem.devices.rdna3.device import EmulatedDevice
from tests.rdna3.mutate import FAULT, WRONG, mutations, noticed


def test_some_changes_are_noticed(wave64: EmulatedDevice) -> None:
    found = Counter(mutations(wave64, 40, random.Random(3)))
    assert noticed(found) >= 0.9 and found[FAULT] and found[WRONG], found


@pytest.mark.soak
def test_changes_are_noticed(device: EmulatedDevice) -> None:
    found = Counter(mutations(device, 500, random.Random(device.lanes)))
    assert noticed(found) >= 0.9, found
