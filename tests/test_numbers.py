"""Numbers in messages: rounded so that what they say stays true."""

import random
from pathlib import Path

from speculative_t5 import serve
from speculative_t5.errors import escaped, rounded_down, rounded_up

import pytest
from commands import Call
from conftest import REPOSITORY
from messages import check_message


@pytest.mark.parametrize("seed", range(20))
def test_what_is_needed_is_enough_and_what_is_there_is_there(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(200):
        number = chance.uniform(0, 10 ** chance.randint(-6, 6))
        number = round(number, chance.randint(0, 9)) if chance.random() < 0.5 else number
        for digits in range(5):
            up, down = rounded_up(number, digits), rounded_down(number, digits)
            assert float(down.replace(",", "")) <= number <= float(up.replace(",", ""))
            assert float(up.replace(",", "")) - number < 10**-digits
            assert len(up.partition(".")[2]) == len(down.partition(".")[2]) == digits
    assert (rounded_up(0.0585, 4), rounded_up(0.05851, 4), rounded_down(0.74999, 2)) == (
        "0.0585",
        "0.0586",
        "0.74",
    )


def test_the_least_memory_that_is_named_is_enough(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("serve", "--model", "correct-base", "--model", "correct-small", "--port", "0")
    (line,) = call(*command, "--memory", "0.0101").err
    check_message(line.removeprefix("error: "), "--memory must be at least 0.0")
    least = line.partition("at least ")[2].partition(",")[0]
    assert line.endswith(", got 0.0101") and float(least) > 0.0101
    below = repr(float(least) - 0.0001)
    (line,) = call(*command, "--memory", below).err
    assert line.endswith(f"got {below}"), "one step below it is refused"

    (line,) = call("serve", "--port", "0", "--memory", "0").err
    assert line.startswith("error: --memory must be at least 0.0"), "of a single model, too"

    def start(*_: object) -> None:
        raise ValueError("it starts")

    monkeypatch.setattr(serve, "Models", start)
    assert call(*command, "--memory", least).err == ["error: it starts"]


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "weights").symlink_to(REPOSITORY / "weights")
    return tmp_path


def test_names_have_nothing_that_a_terminal_obeys(call: Call, here: Path) -> None:
    name = "out\x1b[31m\nred\u202e"
    assert escaped(name) == "out\\x1b[31m\\nred\\u202e"
    done = call("convert", "weights/correct-small", "--output", name)
    assert done.code == 0 and done.out.startswith(escaped(name)), done.err
    shown = done.out + "".join(done.err)
    again = call("convert", "weights/correct-small", "--inspect")
    assert all(c.isprintable() or c == "\n" for c in shown + again.out)
    (here / "a\x1b.txt").write_text("He go home.\n")
    for arguments in (
        ("batch", "a\x1b.txt", "--output", "b\x1b.csv"),
        ("batch", "a\x1b.txt", "--output", "b\x1b.csv", "--resume"),
        ("document", "a\x1b.txt", "--in-place", "--diff", "html"),
        ("document", "no\x1b.txt"),
        ("batch", "no\x1b.txt"),
    ):
        done = call(*arguments)
        assert "\x1b" not in done.out + "".join(done.err)
