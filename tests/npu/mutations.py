"""One descriptor, lock or depth of a plan changed, as a slip of the planner might."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from tandem.devices.npu.array import Command, CoreProgram, Descriptor, Push, Set, Use, Wait, Write, words
from tandem.devices.npu.plan import GemmPlan

Mutant = tuple[str, GemmPlan]


def mutate(plan: GemmPlan, rng: random.Random) -> Mutant:
    """A changed plan, and what was changed; never the plan itself."""
    while True:
        kind, change = rng.choice(KINDS)
        mutant = change(plan, rng)
        if mutant != plan:
            return kind, mutant


def _swap(items: tuple[int, ...], rng: random.Random) -> tuple[int, ...]:
    """Two entries exchanged, or one a little, twice or half as large."""
    values = list(items)
    i, j = rng.randrange(len(values)), rng.randrange(len(values))
    if i != j and rng.random() < 0.5:
        values[i], values[j] = values[j], values[i]
    else:
        values[i] = rng.choice((values[i] - 1, values[i] + 1, values[i] * 2, values[i] // 2))
    return tuple(values)


def _use(use: Use | None, rng: random.Random) -> Use | None:
    if use is None or rng.random() < 0.1:
        return None
    if rng.random() < 0.5:
        return replace(use, lock=use.lock + rng.choice((-1, 1)))
    return replace(use, value=use.value + rng.choice((-1, 1)))


def _descriptor(d: Descriptor, rng: random.Random) -> Descriptor:
    field = rng.choice(
        (
            "offset",
            "sizes",
            "reshape",
            "strides",
            "length",
            "acquire",
            "release",
            "next",
            "iterations",
            "step",
        )
    )
    if field == "offset":
        return replace(d, offset=max(0, d.offset + rng.choice((-64, -4, 1, 2, 4, 8, 64))))
    if field == "sizes":
        return replace(d, sizes=_swap(d.sizes, rng))
    if field == "reshape":  # a length that agrees with the wrong sizes
        sizes = _swap(d.sizes, rng)
        return replace(d, sizes=sizes, length=words(sizes))
    if field == "strides":
        return replace(d, strides=_swap(d.strides, rng))
    if field == "length":
        return replace(d, length=d.length + rng.choice((-1, 1)))
    if field == "acquire":
        return replace(d, acquire=_use(d.acquire, rng))
    if field == "release":
        return replace(d, release=_use(d.release, rng))
    if field == "next" and d.next is not None:
        return replace(d, next=max(0, d.next + rng.choice((-1, 1))))
    if field == "iterations":
        return replace(d, iterations=max(1, d.iterations + rng.choice((-1, 1))))
    return replace(d, step=max(0, d.step + rng.choice((-1, 1))))


def _tile_descriptor(plan: GemmPlan, rng: random.Random) -> GemmPlan:
    i = rng.randrange(len(plan.descriptors))
    changed = _descriptor(plan.descriptors[i], rng)
    return replace(plan, descriptors=(*plan.descriptors[:i], changed, *plan.descriptors[i + 1 :]))


def _command(plan: GemmPlan, rng: random.Random) -> GemmPlan:
    """A shim descriptor, a task, or a wait that is left out."""
    i = rng.choice([i for i, command in enumerate(plan.sequence) if not isinstance(command, Set)])
    command = plan.sequence[i]
    changed: tuple[Command, ...] = ()
    if isinstance(command, Write):
        changed = (Write(_descriptor(command.descriptor, rng)),)
    elif isinstance(command, Push):
        number = max(0, command.descriptor + rng.choice((-1, 1)))
        repeat = max(0, command.repeat + rng.choice((-1, 1)))
        changed = (rng.choice((replace(command, descriptor=number), replace(command, repeat=repeat))),)
    else:
        assert isinstance(command, Wait)
    return replace(plan, sequence=(*plan.sequence[:i], *changed, *plan.sequence[i + 1 :]))


def _parameter(plan: GemmPlan, rng: random.Random) -> GemmPlan:
    """A core's parameter: another value, another word, or not written."""
    i = rng.choice([i for i, command in enumerate(plan.sequence) if isinstance(command, Set)])
    command = plan.sequence[i]
    assert isinstance(command, Set)
    changed = rng.choice(
        (
            (replace(command, value=command.value + rng.choice((-1, 1))),),
            (replace(command, parameter=command.parameter + rng.choice((-1, 1))),),
            (),
        )
    )
    return replace(plan, sequence=(*plan.sequence[:i], *changed, *plan.sequence[i + 1 :]))


def _lock(plan: GemmPlan, rng: random.Random) -> GemmPlan:
    i = rng.randrange(len(plan.locks))
    lock = plan.locks[i]
    changed = replace(lock, initial=max(0, lock.initial + rng.choice((-2, -1, 1, 2))))
    return replace(plan, locks=(*plan.locks[:i], changed, *plan.locks[i + 1 :]))


def _core_lock(plan: GemmPlan, rng: random.Random) -> GemmPlan:
    i = rng.randrange(len(plan.programs))
    program: CoreProgram = plan.programs[i]
    name, end = rng.choice("abc"), rng.choice(("acquire", "release"))
    operand = getattr(program, name)
    use = _use(getattr(operand, end), rng) or Use(0, 0)
    changed = replace(program, **{name: replace(operand, **{end: use})})
    return replace(plan, programs=(*plan.programs[:i], changed, *plan.programs[i + 1 :]))


def _depth(plan: GemmPlan, rng: random.Random) -> GemmPlan:
    """A FIFO's depth, or the objects a core thinks it has."""
    if rng.random() < 0.5:
        i = rng.randrange(len(plan.fifos))
        first, *others = plan.fifos[i].depths
        fifo = replace(plan.fifos[i], depths=(first + rng.choice((-1, 1)), *others))
        return replace(plan, fifos=(*plan.fifos[:i], fifo, *plan.fifos[i + 1 :]))
    i = rng.randrange(len(plan.programs))
    name = rng.choice("abc")
    operand = getattr(plan.programs[i], name)
    changed = replace(plan.programs[i], **{name: replace(operand, buffers=operand.buffers[:1])})
    return replace(plan, programs=(*plan.programs[:i], changed, *plan.programs[i + 1 :]))


KINDS: list[tuple[str, Callable[[GemmPlan, random.Random], GemmPlan]]] = [
    ("descriptor of a tile", _tile_descriptor),
    ("descriptor of a tile", _tile_descriptor),
    ("descriptor of a shim", _command),
    ("parameter of a core", _parameter),
    ("lock", _lock),
    ("lock of a core", _core_lock),
    ("depth", _depth),
]
