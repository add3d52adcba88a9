from __future__ import annotations

import os
import signal
from collections.abc import Iterator

from speculative_t5.cli.terminal import printable, signals_held

import pytest

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Ended(Exception):
    pass


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Handlers that raise, whatever the runner's are."""

    def end(number: int, _: object) -> None:
        raise Ended(number)

    before = {number: signal.signal(number, end) for number in ENDING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", ENDING)
def test_a_signal_waits_for_the_block(number: int) -> None:
    done = []
    with pytest.raises(Ended, match=str(int(number))), signals_held():
        os.kill(os.getpid(), number)
        done.append("all of it")
    assert done
    with pytest.raises(Ended):
        os.kill(os.getpid(), number)


def test_a_second_signal_acts_at_once() -> None:
    with pytest.raises(Ended, match=str(int(signal.SIGTERM))), signals_held():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        pytest.fail("it should have ended")


def test_ignored_signals_stay_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with signals_held():
        os.kill(os.getpid(), signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_what_a_terminal_would_obey_is_not_shown() -> None:
    assert printable("a\n b\x1b[31m") == "a b\N{REPLACEMENT CHARACTER}[31m"
