"""The time and memory budget of one run of a chat template: operations are charged before they run.

Every value that a template creates is charged when it is created, and has at most MAX_VALUE bytes with its contents. So
the arguments of an operation bound its cost, and the TemplateBudget bounds the cost of all operations.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator, KeysView, Sequence, ValuesView
from itertools import chain
from sys import getsizeof
from time import thread_time
from typing import Any, NoReturn

from jinja2.exceptions import SecurityError
from jinja2.runtime import Undefined

from tandem.errors import TemplateError
from tandem.threads import throttle

MAX_VALUE = 16 << 20  # maximum bytes of one value with its contents
MAX_NUMBER = 1 << 60  # larger integers could share one hash
BUDGET = 256 << 20  # maximum bytes created in one run, plus STEP for each operation
STEP = 512  # bytes charged for an operation
SECONDS = 3.0  # maximum processor time of one run
ADVICE = "run the model with a plain prompt"

BACKWARD_SEARCHES = ("rfind", "rindex", "rpartition", "rsplit")  # quadratic in CPython
STRIPS = ("lstrip", "rstrip", "strip", "trim")
ITERATE = "dictsort list map max min reject rejectattr select selectattr sort splitlines title unique"
PIECEWISE = frozenset(ITERATE.split())  # filters and methods that split a text


class TemplateBudget:
    """The remaining budget of one run of a template."""

    def __init__(self) -> None:
        self.left, self.deadline = BUDGET, thread_time() + SECONDS
        # id -> (object, bytes); the objects are kept so that their ids stay unique.
        self._weights: dict[int, tuple[object, int]] = {}

    def spend(self, amount: int = 0) -> None:
        throttle()
        self.left -= amount + STEP
        if self.left < 0 or thread_time() > self.deadline:
            raise TemplateError(f"the model's chat template exceeds its time or memory budget: {ADVICE}")

    def weigh(self, value: Any) -> int:
        """Returns the bytes of a value with its contents; values that occur twice count twice. Refuses other than plain
        data."""
        if isinstance(value, list | tuple | dict):
            known = self._weights.get(id(value))
            if known is None:
                parts = chain(value.keys(), value.values()) if isinstance(value, dict) else value
                known = value, getsizeof(value) + sum(map(self.weigh, parts))
                self._weights[id(value)] = known
            return known[1]
        if value is None or isinstance(value, str | int | float | range | Undefined):
            return getsizeof(value)
        refuse(f"uses a {type(value).__name__} as a value")

    def charge(self, value: Any) -> Any:
        """Charges a new value, and returns it as plain data."""
        if type(value) is not str and isinstance(value, str):
            value = str(value)  # Jinja marks text as safe for HTML; there is no HTML here
        elif isinstance(value, Iterator | KeysView | ItemsView | ValuesView):
            value = list(self.steps(value))
        if self.weigh(value) > MAX_VALUE or (isinstance(value, int) and abs(value) >= MAX_NUMBER):
            refuse("makes a value that is too large")
        self.spend(getsizeof(value))
        return value

    def steps(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self.spend()
            yield value

    def text(self, value: Any) -> str:
        if isinstance(value, Undefined) and value._undefined_exception is SecurityError:
            value._fail_with_undefined_error()
        if not isinstance(value, str):
            self.weigh(value)
        text: str = self.charge(str(value))
        return text


def refuse(action: str) -> NoReturn:
    raise TemplateError(f"the model's chat template {action}, which is not allowed: {ADVICE}")


def check_cost(name: str, value: Any, args: Sequence[Any]) -> None:
    """Refuses a call of a filter or method whose time or result could be too large, given its arguments."""
    size = len(value) if isinstance(value, str) else 0
    longest = max((len(a) for a in args if hasattr(a, "__len__")), default=0)
    if name == "replace" and len(args) > 1:
        text, old, new = str(value), str(args[0]), str(args[1])
        cost = len(text) + (text.count(old) * len(new))
    elif name == "join":
        short, long = sorted((longest, len(value) if hasattr(value, "__len__") else 0))
        cost = (short + 64) * long
    elif name == "indent":
        cost = size * (64 + max([longest, *(a for a in args if isinstance(a, int))]))
    elif name in BACKWARD_SEARCHES or name in STRIPS:
        cost = size * longest // 64
    else:
        cost = 0
    if name in ("split", "rsplit"):
        separator = args[0] if args and isinstance(args[0], str) and args[0] else None
        cost += 64 * (value.count(separator) if separator else size)
    elif name in PIECEWISE:
        cost += 64 * size
    elif name in ("int", "float") and size > 4096:
        cost = MAX_VALUE + 1
    if cost > MAX_VALUE:
        refuse(f"asks too much of {name!r}")
