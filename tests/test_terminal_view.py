"""What a terminal shows, recorded as text."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

from speculative_t5.checkpoints.inspection import Listed
from speculative_t5.cli import terminal as terminal_module
from speculative_t5.cli.models import as_lines
from speculative_t5.cli.terminal import legend, shaded, show
from speculative_t5.decoding.results import Stats
from speculative_t5.generation.outputs import Chunk, Generation

import pytest
from rich.console import Console

GREEN, YELLOW, CYAN, END = "\x1b[32m", "\x1b[1;33m", "\x1b[4;36m", "\x1b[0m"
FIRST = Stats((3,), (3,), (1,), 2, 0.1)
SECOND = Stats((3, 3), (3, 3), (1, 3), 6, 0.2)
THIRD = Stats((3, 3, 0), (3, 3, 0), (1, 3, 0), 7, 0.25)
CHUNKS = [
    Chunk("He goes", [5, 6], 1, FIRST, None, ("He", " goes")),
    Chunk(" to the sea", [7, 8, 9, 10], 3, SECOND, None, (" to", " the", " ", "sea")),
    Chunk(".", [11], 0, THIRD, "length", (".",)),
]
SHADED = f"{GREEN}He{END} {YELLOW}goes{END} {GREEN}to{END} {GREEN}the{END} {CYAN}sea{END}."


def recording(monkeypatch: pytest.MonkeyPatch, *, terminal: bool, colour: bool = True) -> Console:
    console = Console(
        record=True, file=io.StringIO(), force_terminal=terminal, highlight=False, soft_wrap=True,
        color_system="standard" if colour else None, width=80,
    )  # fmt: skip
    monkeypatch.setattr(terminal_module, "console", lambda stderr=False: console)
    return console


def test_tokens_are_coloured_as_they_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    console = recording(monkeypatch, terminal=True)
    seen: list[str] = []

    def arriving() -> Iterator[Chunk]:
        for chunk in CHUNKS:
            yield chunk
            seen.append(console.export_text(clear=False))

    assert show(arriving(), drafts=True) == CHUNKS[-1]
    meanings, text = console.export_text(styles=True).splitlines()
    assert text == SHADED
    assert meanings == (
        f"{GREEN}accepted{END} drafted   "
        f"{YELLOW}recovered{END} the target's, for a rejected draft   "
        f"{CYAN}bonus{END} the target's, after a whole draft"
    )
    shown = [each.splitlines()[1] for each in seen]
    assert shown == ["He goes", "He goes to the sea", "He goes to the sea."]


def test_a_finished_output_looks_like_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    console = recording(monkeypatch, terminal=True)
    pieces = tuple(piece for chunk in CHUNKS for piece in chunk.pieces)
    ids = [token for chunk in CHUNKS for token in chunk.tokens]
    console.print(shaded(Generation("He goes to the sea.", ids, "length", THIRD, pieces)))
    assert console.export_text(styles=True) == SHADED + "\n"
    show(CHUNKS, drafts=False)
    assert console.export_text(styles=True) == "He goes to the sea.\n"


def test_outputs_cannot_command_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for drafts in (True, False):
        console = recording(monkeypatch, terminal=True, colour=False)
        evil = Chunk("a\x1b[2Jb\r\n\tc", [5], 1, FIRST, "length", ("a\x1b[2Jb\r\n\tc",))
        show([evil], drafts=drafts)
        text = console.export_text()
        assert "\x1b" not in text and "\r" not in text
        mark = "\N{REPLACEMENT CHARACTER}"
        assert text.splitlines()[-2:] == [f"a{mark}[2Jb{mark}", "        c"]


def test_the_list_of_models_is_a_table() -> None:
    found = [
        Listed(
            Path("weights/big"), "T5 v1.1", 248_000_000, ("bfloat16",), 496_000_000, ("s[all]",)
        ),
        Listed(Path("weights/s[all]"), "T5 v1.1", 3_000_000, ("8 bits",), 3_500_000),
        Listed(Path("weights/torn"), size=12, error="it ends\n[/relu]: convert it again"),
    ]
    assert list(as_lines(found)) == [
        "model   family   parameters  stored as   on disk  drafts that fit",
        "big     T5 v1.1     248.0 M  bfloat16   496.0 MB  s[all], lookup",
        "s[all]  T5 v1.1       3.0 M  8 bits       3.5 MB  lookup",
        "torn cannot be loaded: it ends [/relu]: convert it again",
    ]


def test_no_color_keeps_weight_and_underlines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    console = Console(
        file=(file := io.StringIO()), force_terminal=True, color_system="standard", width=80,
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    console.print(shaded(CHUNKS[0]), legend())
    text = file.getvalue()
    assert not any(code in text for code in ("32m", "33m", "36m"))
    assert "\x1b[1mgoes\x1b[0m" in text and "\x1b[4mbonus\x1b[0m" in text
