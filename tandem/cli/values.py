"""Values of options: numbers, lists, devices. What is wrong with one is said in words, not by a function's name."""

from __future__ import annotations

from argparse import ArgumentTypeError

from tandem.errors import RequestError


class UsageError(RequestError):
    """Options that do not go together: the exit code is 2, as for those that argparse refuses."""


def device_name(text: str) -> str:
    for name in text.split(","):
        if name not in ("auto", "cpu") and name.partition(":")[0] != "vulkan":
            raise ArgumentTypeError(
                f"no device {name!r}: use cpu, vulkan, vulkan:<index or part of a name> or auto"
            )
    return text


def layers(text: str) -> list[int] | None:
    return None if text == "auto" else [positive(part) for part in text.split(",")]


def positive(text: str) -> int:
    number = _whole(text)
    if number < 1:
        raise ArgumentTypeError(f"{number} is less than 1")
    return number


def above_zero(text: str) -> float:
    number = _number(text)
    if not 0 < number < float("inf"):
        raise ArgumentTypeError(f"{text} is not a number above 0")
    return number


def numbers(text: str) -> list[int]:
    found = [_whole(part) for part in text.split(",")]
    if min(found) < 0:
        raise ArgumentTypeError(f"{min(found)} is less than 0")
    return found


def positives(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


def floats(text: str) -> list[float]:
    return [_number(part) for part in text.split(",")]


def words(text: str) -> list[str]:
    return text.split(",")


def replicas(text: str) -> tuple[int, int]:
    fewest, _, most = text.partition("-")
    found = _whole(fewest), _whole(most or fewest)
    if not 1 <= found[0] <= found[1]:
        raise ArgumentTypeError(f"{text} is not a number of replicas, or a range such as 1-4")
    return found


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a whole number") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a number") from None
