"""The watcher of response senders: it asks only while it may, and says once who is gone."""

from __future__ import annotations

import threading
import time

import pytest

from python_backend.triton.cancel import CancelWatcher
from tests.server.wire import wait_until


class Sender:
    """Says that it is cancelled when told so, and fails the test when it is asked after it was forgotten."""

    def __init__(self) -> None:
        self.cancelled = False
        self.asked = 0
        self.closed = False
        self.may_answer = threading.Event()
        self.may_answer.set()

    def is_cancelled(self) -> bool:
        self.asked += 1
        assert self.may_answer.wait(5)
        assert not self.closed
        return self.cancelled


@pytest.fixture
def gone():
    return []


@pytest.fixture
def watcher(gone):
    watcher = CancelWatcher(0.005, gone.append)
    watcher.start()
    yield watcher
    watcher.stop()


def test_a_cancelled_sender_is_reported_once(watcher, gone):
    sender, other = Sender(), Sender()
    watcher.watch("a", sender)
    watcher.watch("b", other)
    sender.cancelled = True
    wait_until(lambda: gone == ["a"], timeout_s=5)
    before = other.asked
    wait_until(lambda: other.asked > before + 3, timeout_s=5)
    assert gone == ["a"]


def test_a_forgotten_sender_is_never_asked_again(watcher, gone):
    sender, other = Sender(), Sender()
    watcher.watch("a", sender)
    watcher.watch("b", other)
    wait_until(lambda: sender.asked > 0, timeout_s=5)
    watcher.forget("a")
    asked, before = sender.asked, other.asked
    wait_until(lambda: other.asked > before + 3, timeout_s=5)
    assert sender.asked == asked
    assert gone == []


def test_forgetting_waits_for_the_question_under_way(watcher):
    sender = Sender()
    sender.may_answer.clear()
    watcher.watch("a", sender)
    wait_until(lambda: sender.asked == 1, timeout_s=5)
    forgotten = threading.Event()

    def forget() -> None:
        watcher.forget("a")
        sender.closed = True
        forgotten.set()

    threading.Thread(target=forget).start()
    assert not forgotten.wait(0.05)
    sender.may_answer.set()
    assert forgotten.wait(5)


def test_an_idle_watcher_wakes_up_for_a_new_sender(watcher, gone):
    time.sleep(0.05)
    sender = Sender()
    sender.cancelled = True
    watcher.watch("late", sender)
    wait_until(lambda: gone == ["late"], timeout_s=5)
