"""Threads that help to load: all is done once, and an error reaches whoever waits."""

from __future__ import annotations

import threading
import time

import pytest

from tandem.threads import BackgroundCall, each

pytestmark = pytest.mark.fast


def test_a_call_beside_returns_or_raises() -> None:
    assert BackgroundCall(divmod, 7, 2).result() == (3, 1)
    with pytest.raises(ZeroDivisionError):
        BackgroundCall(divmod, 7, 0).result()


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_each_item_is_done_once(threads: int) -> None:
    done: list[int] = []
    each(done.append, range(1000), threads)
    assert sorted(done) == list(range(1000))


def test_several_threads_work_at_a_time() -> None:
    meeting = threading.Barrier(3, timeout=30)
    each(lambda _: meeting.wait(), range(3), 3)


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_an_error_ends_it(where: str) -> None:
    done: list[int] = []

    def work(item: int) -> None:
        done.append(item)
        if (threading.current_thread() is threading.main_thread()) == (where == "here"):
            raise ValueError(item)
        time.sleep(0.01)

    with pytest.raises(ValueError):
        each(work, range(1000), 2)
    assert len(done) < 1000
