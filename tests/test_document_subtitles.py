"""What is read in subtitles, and that everything else stays: SubRip, WebVTT, SubStation, lyrics."""

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from speculative_t5.documents import Document, RewriteOptions, read_file
from speculative_t5.documents.marks import least_edits

import pytest
import random_documents
from messages import complaint
from pieces import Scripted

RIGHT = {
    "He go": "He goes",
    "he go": "he goes",
    "She have": "She has",
    "she have": "she has",
    "a apple": "an apple",
    "it are": "it is",
    "HE GO": "HE GOES",
}


def corrected(text: str) -> str:
    for wrong, right in RIGHT.items():
        text = text.replace(wrong, right)
    return text


def turned(text: str) -> str:
    """Reverse the letters of each word."""
    return re.sub(r"[^\W\d_]+", lambda word: word[0][::-1], text)


def srt(*cues: str, seconds: int = 2) -> str:
    """Cues one behind the other."""
    ends = [f"00:00:{n * seconds:02},000" for n in range(len(cues) + 1)]
    times = [" --> ".join(pair) for pair in pairwise(ends)]
    pairs = zip(times, cues, strict=True)
    return "".join(f"{n}\n{time}\n{cue}\n\n" for n, (time, cue) in enumerate(pairs, 1))


def rewritten(
    text: str,
    name: str,
    answer: Callable[[str], str] = corrected,
    languages: tuple[str, str] | None = None,
    **options: Any,
) -> tuple[str, list[str], list[str]]:
    """Return a file that is rewritten, what the model has read, and what is said of it."""
    form = read_file(text.encode(), name)
    assert form.rewritten(form.text).decode() == text, "and nothing is changed without a reason"
    decoder: Any = Scripted(answer, limit=10**6, prefix="", languages=languages)
    document = Document(decoder, form.text, RewriteOptions(**options), form.lines)
    done = document.result(document.rewrite()).text
    return form.rewritten(done).decode(), decoder.read[::-1], form.not_kept()


def pieces(text: str, name: str = "a.srt") -> int:
    """Return how many pieces of a file are translated."""
    form = read_file(text.encode(), name)
    decoder: Any = Scripted(turned, limit=10**6, prefix="", languages=("en", "de"))
    return len(Document(decoder, form.text, RewriteOptions(), form.lines))


def read(text: str, name: str = "a.srt") -> list[str]:
    """Return the lines that are read."""
    return [line for line in read_file(text.encode(), name).text.split("\n") if line]


BEHIND = {  # what stands behind a blank line, and the lines that are read
    "words": ("One of them.\n\nHe go home.", ["One of them.", "He go home."]),
    "words behind blanks": ("One of them.\n \t\nHe go home.", ["One of them.", "He go home."]),
    "a number alone": ("\n200", ["200"]),
    "a number and words": ("He go home.\n\n200\nof them", ["He go home.", "200 of them"]),
    "several": ("He go home.\n\n\n1,000\n\nShe have it.", ["He go home.", "1,000", "She have it."]),
    "a note": ("He go home.\n\nNOTE this one.", ["He go home.", "NOTE this one."]),
    "an arrow": (
        "He go home.\n\nThen File --> Open it.",
        ["He go home.", "Then File --> Open it."],
    ),
}


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("name", BEHIND)
def test_what_stands_behind_a_blank_line_is_read_or_listed(name: str, line_end: str) -> None:
    cue, lines = BEHIND[name]
    text = srt(cue, "All is well.").replace("\n", line_end)
    assert read(text) == [*lines, "All is well."]
    found, _, said = rewritten(text, "a.srt")
    assert found == corrected(text) and not said


NUMBERS = {  # files with lines that are no cue, and what is said
    "before a cue": (
        "1\nTIMES\nOh.\n\n2\n\n2\nTIMES\nWell.\n",
        "line 5: '2' is read as the number",
    ),
    "apart from its cue": ("1\nTIMES\nOh.\n\n2\n\nTIMES\nWell.\n", "line 5: '2' is read as"),
    "without a time": ("1\nTIMES\nOh.\n\n2\nWell.\n\n3\nTIMES\nNo.\n", "line 5: '2' is read as"),
    "before all": ("A film\n\n1\nTIMES\nOh.\n", "line 1: 'A film' is in no cue, and is not read"),
    "at the top of a cue": ("A film\n1\nTIMES\nOh.\n", "line 1: 'A film' is in no cue"),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_what_is_in_no_cue_is_said(name: str) -> None:
    text, said = NUMBERS[name]
    form = read_file(text.replace("TIMES", "00:01,000 --> 00:02,000").encode(), "a.srt")
    assert len(form.not_kept()) == 1 and form.not_kept()[0].startswith(said)
    assert "2" not in form.text and "film" not in form.text
    assert "Well." in form.text or "film" in text


def test_missing_blank_lines_and_numbers_are_no_words() -> None:
    time = "00:01,000 --> 00:02,000"
    note, style = "NOTE no\nno\n\n", "REGION\nid:a\n\nSTYLE\n::cue {}\n\n"
    for text, lines in (
        (f"1\n{time}\nOne.\n2\n{time}\nTwo.\n", ["One.", "Two."]),
        (f"{time}\nOne.\n{time}\nTwo.\n", ["One.", "Two."]),
        (f"{time}\nOne.\n\nTwo.\n{time}\nThree.\n", ["One.", "Two.", "Three."]),
        (f"\ufeff1\n{time}\n2\n{time}\nTwo.", ["Two."]),
        (f"WEBVTT\n\nan id\n{time} line:0\nOne.\n\n{note}{time}\nTwo.", ["One.", "Two."]),
        (f"WEBVTT\n\n{style}{time}\nNOTE it.", ["NOTE it."]),
    ):
        assert read(text) == lines and not read_file(text.encode(), "a.vtt").not_kept()


SPEAKERS = {  # what stands at the beginning of a cue, and whether it is a speaker
    "MAN: ": True,
    "DR. SMITH: ": True,
    "OFFICER #2: ": True,
    "<b>MAN:</b> ": True,
    "- MAN: ": True,
    "MAN:\n": True,
    "ИВАН: ": True,
    ">> ": True,
    ">> MAN: ": True,
    "- ": True,
    "-": True,
    "– ": True,
    "<v Anna>": True,
    "<i>- ": True,
    "Note: ": False,
    "A: ": False,
    "At 10:30 ": False,
    "IT IS NOT A NAME: ": False,
    "-5 degrees. ": False,
    "--- ": False,
    "-> ": False,
    "Man : ": False,
    "(S)": False,
}


@pytest.mark.parametrize("before", SPEAKERS)
def test_names_of_speakers_are_told_from_other_words(before: str) -> None:
    text = srt(f"{before}He go home.", "All is well.")
    shown = read_file(text.encode(), "a.srt").text.split("\n")[0]
    assert (shown == "He go home.") == SPEAKERS[before], shown
    found, _, said = rewritten(text, "a.srt")
    assert found == corrected(text)
    assert any("names of speakers stay" in each for each in said) == bool(
        SPEAKERS[before] and re.search("[A-ZА-Я]{2}", before)
    )


def test_words_in_capitals_are_names_only_where_that_is_clear() -> None:
    for cue, lines in (
        ("MAN: HE GO HOME.", ["HE GO HOME."]),
        ("HE SAID: HE GO HOME.", ["HE SAID: HE GO HOME."]),
        ("HE SAID: [DOOR SLAMS] HE GO HOME.", ["HE SAID: HE GO HOME."]),
        ("DR. SMITH: [DOOR SLAMS]\nHe go home.", ["DOOR SLAMS", "He go home."]),
        ("DR. SMITH: He go home.", ["He go home."]),
        ("So he says\nMAN: He go home.", ["So he says", "He go home."]),
        ("It is so. >> He go. >> No.", ["It is so.", "He go.", "No."]),
        ("&gt;&gt; He go home.", ["He go home."]),
        ("Well, it's half-\n- and he go", ["Well, it's half- - and he go"]),
        ("- Yes\n- no", ["Yes", "no"]),
        ("<v Ann>He go.<v Bob>She have.", ["He go.", "She have."]),
        ("The time is\n10:30 in here", ["The time is 10:30 in here"]),
    ):
        assert read(srt(cue)) == lines, cue


DESCRIPTIONS = {  # what is shown, and what the model reads of it to translate
    "[music] He is here.": ["music", "He is here."],
    "He is here. [laughs]": ["He is here.", "laughs"],
    "(door opens)\nHe is here.": ["door opens", "He is here."],
    "[MUSIC PLAYING]": ["MUSIC PLAYING"],
    "MAN: [sighs] He is here. (coughs)": ["sighs", "He is here.", "coughs"],
    "♪ He is here ♪": ["He is here"],
    "He is [laughs] here.": ["He is here."],
    "He is ♪ here.": ["He is here."],
    "He is (♪) here.": ["He is here."],
    "(♪ ♪) He is here.": ["He is here."],
    "He (coughs) is here.": ["He is here."],
    "He (the man) is here.": ["He (the man) is here."],
    "He is here (and there).": ["He is here (and there)."],
    "[H]e is here.": ["[H]e is here."],
    "# He is here #": ["He is here"],
    "He plays C#": ["He plays C#"],
    "[a man speaks\nin Greek] He is here.": ["a man speaks in Greek", "He is here."],
    "（男）彼はここにいる。": ["男", "彼はここにいる。"],
    "[1] He is here.": ["He is here."],
}


@pytest.mark.parametrize("cue", DESCRIPTIONS)
def test_descriptions_are_read_by_themselves(cue: str) -> None:
    text = srt(cue)
    found, seen, said = rewritten(text, "a.srt", turned, ("en", "de"))
    assert sorted(seen) == sorted(DESCRIPTIONS[cue])
    kept = [each for each in re.findall(r"\[laughs\]|\(coughs\)", cue) if each[1:-1] not in seen]
    assert [each for each in said if "within its sentence" in each] == [
        f"cue 1: {each!r} stays within its sentence" for each in kept
    ]
    shown = found.split("\n", 2)[2]
    for each in kept:
        assert each in shown
    assert re.findall(r"[^\w\s]", shown) == re.findall(r"[^\w\s]", cue)
    form = read_file(found.encode(), "a.srt")
    assert form.rewritten(turned(form.text)).decode().split() == text.split()


def test_a_description_does_not_part_a_sentence() -> None:
    cues = srt("He go home", "[music]", "and she have a house.")
    found, seen, _ = rewritten(cues, "a.srt")
    assert seen == ["He go home and she have a house."] and found == corrected(cues)


def test_a_sentence_goes_on_where_one_can() -> None:
    one = srt("So he go", "home with her.")
    late = one.replace("00:00:02,000 --> 00:00:04,000", "00:09:02,000 --> 00:09:04,000")
    for text, count in (
        (one, 1),
        (late, 2),
        (srt("THE END", "so he go home."), 2),
        (srt("So he go", "- home with her."), 2),
        (srt("<v Ann>So he go", "<v Ann>home with her."), 1),
        (srt("<v Ann>So he go", "<v Bob>home with her."), 2),
        (srt("<v Ann>So he go", "home with her."), 1),
        (one.replace("00:00:02,000 -->", "00:00:00,000 -->"), 2),
    ):
        assert pieces(text) == count, text
        assert rewritten(text, "a.srt")[0] == corrected(text)


BREAKS = {  # what is shown, what the model says, and what of it comes behind each break
    "a longer word": ("He go home\nand he stays.", "He goes home", "and he stays."),
    "a word more": ("He go\nhome to her now.", "He now goes", "home to her now."),
    "a word less": ("He go to\nto his home now.", "He go", "to his home now."),
    "three lines": ("This have\nthree short\nlines.", "This has", "three short", "lines."),
    "a tag": ("He <br>go to<br>his home.", "He ", "goes to", "his home."),
    "letters of an editor": (r"He go to\Nhis old home.", "He goes to", "his old home."),
    "tags with spaces": (
        "< i >He go</ i>\n< / i >to his home.",
        "< i >He goes</ i>",
        "< / i >to his home.",
    ),
    "italics": ("<i>He go</i>\n<i>to his home.</i>", "<i>He goes</i>", "<i>to his home.</i>"),
    "letters without blanks": ("今日は学校へ\n行きまし。", "今日は学校へ", "行きました。"),
}


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
@pytest.mark.parametrize("name", BREAKS)
def test_breaks_stay_before_their_words(name: str, line_end: str) -> None:
    before, *lines = BREAKS[name]
    kind = next(each for each in ("<br>", r"\N", "\n") if each in before)
    joint = "" if name == "letters without blanks" else " "
    said = " ".join(re.sub("<.*?>", "", joint.join(lines)).split())
    text = srt(before).replace("\n", line_end)
    found, _, _ = rewritten(text, "a.srt", lambda _: said, by="paragraph", min_similarity=0)
    assert found == srt(kind.join(lines)).replace("\n", line_end)


ASS = (
    "[Script Info]\nTitle: He go home.\n\n[V4+ Styles]\nFormat: Name, Fontname\nStyle: He go, a\n\n"
    "[Events]\nFormat: Layer, Start, End, Style, Name, MarginL, MarginR, MarginV, Effect, Text\n"
)
DIALOGUES = {  # the text of a line, and what is read of it
    "commas": ("He go home, and she have it.", ["He go home, and she have it."]),
    "overrides": (r"{\an8}{\i1}He go{\i0} home{note: he go}.", ["He go home."]),
    "breaks": (r"He go\Nhome to\nthe\hshop.", ["He go home to the shop."]),
    "drawings": (r"{\p1}m 0 0 l 5 5{\p0}He go home.", ["He go home."]),
    "drawings to the end": (r"He go home.{\pos(1,2)\p4}m 0 0 l 5", ["He go home."]),
    "only a drawing": (r"{\p1}m 0 0 l 5 5", []),
    "syllables": (r"{\k20}So {\k30}He go ho{\k5}me now.", ["So He go home now."]),
    "speakers": (r"- He go home.\N- Yes", ["He go home.", "Yes"]),
    "braces that are shown": (r"He go \{home\} now.", ["He go {home} now."]),
    "an open brace": ("He go { home.", ["He go { home."]),
    "nothing": ("", []),
}


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
@pytest.mark.parametrize("name", DIALOGUES)
def test_lines_of_substation_alpha_keep_what_is_no_text(name: str, line_end: str) -> None:
    shown, lines = DIALOGUES[name]
    text = (
        f"{ASS}Dialogue: 0,0:00:01.00,0:00:02.00,Default,He go,0,0,0,,{shown}\n"
        "Comment: 0,0:00:01.00,0:00:02.00,Default,,0,0,0,,He go home.\n[Fonts]\nHe go\n"
    ).replace("\n", line_end)
    assert read(text, "a.ass") == lines
    found, _, said = rewritten(text, "a.ass")
    wanted = shown.replace("{note: he go}", "{}").replace("He go", "He goes")
    wanted = wanted.replace("{}", "{note: he go}").replace("she have", "she has")
    assert found == text.replace(f",,{shown}{line_end}", f",,{wanted}{line_end}", 1) and not said
    assert (found != text) == bool(lines)


def test_fields_of_substation_alpha_are_those_of_its_format() -> None:
    for fields, line in (
        ("Marked, Start, End, Style, Text", "Marked=0,0:00:01.00,0:00:02.00,A,He go home, he go."),
        ("Text", "He go home, he go."),
        ("Start,End,Text", "0:00:01.00,0:00:02.00,He go home, he go."),
    ):
        text = f"[events]\nFormat: {fields}\nDialogue: {line}\n"
        found, seen, _ = rewritten(text, "a.ssa")
        assert seen == ["He go home, he go."] and found == corrected(text)
    text = (
        f"{ASS}Dialogue: 0,0:00:01.00,a\nDialogue: 0,0:00:01.00,0:00:02.00,A,,0,0,0,,He go home.\n"
    )
    found, _, said = rewritten(text, "a.ass")
    assert said == ["line 10: a Dialogue with 3 of 10 fields is not read"]
    for name in ("a.ass", "a.lrc"):
        with pytest.raises(ValueError, match=f"no cues found in {name}") as error:
            read_file(b"[Events]\nFormat: Text\n", name)
        assert complaint(str(error.value)) is None


def test_lines_at_one_time_or_in_another_style_are_no_sentence() -> None:
    """Signs stand between what is spoken, and shadows are lines that are shown twice."""
    line = "Dialogue: 0,0:00:0{}.00,0:00:0{}.00,{},,0,0,0,,{}\n"
    for second, count in (
        (line.format(3, 4, "A", "to his home."), 1),
        (line.format(3, 4, "Sign", "to his home."), 2),
        (line.format(1, 3, "A", "So he go"), 2),
    ):
        text = ASS + line.format(1, 3, "A", "So he go") + second
        assert pieces(text, "a.ass") == count


LRC = (
    "\ufeff[ar:He go home]\n[ti:He go]\n[offset:+20]\n\n[00:01.00]He go home, he go.\n"
    "[00:02.50][01:10.00] <00:02.50>She <00:02.80>have <00:03.10>a ap<00:03.50>ple.\n"
    "[00:04]\n[00:05:20][music]\n"
)


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_lyrics_keep_their_times_and_tags(line_end: str) -> None:
    text = LRC.replace("\n", line_end)
    assert read(text, "a.lrc") == ["He go home, he go.", "She have a apple.", "music"]
    found, seen, said = rewritten(text, "a.lrc")
    assert seen == ["He go home, he go.", "She have a apple."] and not said
    wanted = LRC.replace("]He go home, he go", "]He goes home, he goes")
    wanted = wanted.replace("have <00:03.10>a ap", "has <00:03.10>an ap").replace("\n", line_end)
    assert found == wanted
    form = read_file(f"{text}He go home.\n".encode(), "a.lrc")
    assert form.not_kept() == ["line 9: 'He go home.' has no time, and is not read"]


TIMES = "00:01.000 --> 00:03.000"
ROLLING = (
    "WEBVTT\n\n00:01.000 --> 00:03.000\n \nso<00:01.500><c> he go</c>\n\n"
    "00:03.000 --> 00:03.010\nso he go\n \n\n"
    "00:03.010 --> 00:05.000\nso he go\nto<00:03.500><c> his home</c>\n\n"
    "00:05.000 --> 00:05.010\nto his home\n \n\n"
    "00:05.010 --> 00:07.000\nto his home\nand stays.\n"
)


def test_lines_of_captions_that_roll_up_are_read_once() -> None:
    for text in (ROLLING, re.sub(r"(\d)\.(\d)", r"\1,\2", ROLLING.replace("WEBVTT\n\n", ""))):
        found, seen, _ = rewritten(text, "a.vtt")
        assert seen == ["so he go to his home and stays."]
        assert found == corrected(text)
    assert len(read(srt("No, no", "No, no"))) == 1
    assert len(read(srt("No", "No"))) == 2, "which people say"


def test_characters_of_webvtt_have_names() -> None:
    text = f"WEBVTT\n\n{TIMES}\nHe go &amp; she have &lt;it&gt;&nbsp;now.\n"
    assert read(text, "a.vtt") == ["He go & she have <it> now."]
    found, _, _ = rewritten(text, "a.vtt")
    assert found == corrected(text)
    for shown in ("the caf&#233; <i>he go</i> to", "<i>He go</i> to the caf&#xe9;", "caf&#233;"):
        at_end = f"WEBVTT\n\n{TIMES}\n{shown} [x]\n"
        form = read_file(at_end.encode(), "a.vtt")
        assert rewritten(at_end, "a.vtt", by="paragraph")[0] == corrected(at_end)
        made = form.rewritten(form.text.replace("café", "bar"))
        assert made.decode() == re.sub("caf&.*?;", "bar", at_end)
    form = read_file(text.encode(), "a.vtt")
    made = form.rewritten("He goes & she has <it> now & then --> here.").decode()
    assert made.endswith("He goes &amp; she has &lt;it&gt;&nbsp;now &amp; then --&gt; here.\n")
    assert read(made, "a.vtt") == ["He goes & she has <it> now & then --> here."]


DIALOGUE = "Dialogue: 0,0:00:{0:02}.00,0:00:{0:02}.90,A,,0,0,0,,{1} {0}\n"
STREET = "so we are in street"
LEFT = {  # what is shown, the words that are wanted, and what is shown then
    "a line": (
        "It is<br><b>very  </b>\nwarm here.",
        "It is warm here.",
        "It is<b>  </b>\nwarm<br>here.",
    ),
    "two lines": ("It is<br><b>so  </b>\nhere.", "It is", "It is<b></b>"),
    "a word of three lines": ("We<br><b>so  </b>\nhere.", "We here.", "We <b></b>here."),
    "beside a bracket": ("So he [x] is in [y] it.", "So he is it.", "So he [x] is [y] it."),
    "words for one": (
        "He (coughs) very\nsoon goes.",
        "He quickly goes.",
        "He\n(coughs) quickly goes.",
    ),
    "words and a tag": (
        "I <i>am</i> not\nat all home.",
        "I am never home.",
        "I <i>am</i>\nnever home.",
    ),
    "a space before": ("It is  [x]\nnow here.", "It is here.", "It is  [x]\nhere."),
    "a long word": ("Ship", "Donaudampfschiffahrt" * 3, "Donaudampfschiffahrt" * 3),
}


@pytest.mark.parametrize("name", LEFT)
def test_words_that_are_left_stay_apart(name: str) -> None:
    shown, wanted, after = LEFT[name]
    form = read_file(srt(shown).encode(), "a.srt")
    assert form.rewritten(wanted).decode() == srt(after)


def test_a_word_that_is_left_out_leaves_the_space_that_stays() -> None:
    for before, after, edits in (
        ("go home; now", "go ; now", [(3, 7, "")]),
        ("go home now", "go now", [(2, 7, "")]),
        ("go very soon home", "go now home", [(3, 12, "now")]),
    ):
        assert [*least_edits(before, after)] == edits


@pytest.mark.parametrize("kind", ["srt", "vtt", "ass", "lrc"])
def test_nothing_else_changes_in_random_subtitles(kind: str) -> None:
    """More of them: scripts/checks/random_documents.py."""
    for seed in range(300):
        assert not random_documents.faults_of(random_documents.KINDS[kind], seed), seed


SPOKEN = {  # without full stops
    "a.srt": srt(*[f"{STREET} {n}" for n in range(30)]),
    "a.ass": ASS + "".join(DIALOGUE.format(n, STREET) for n in range(30)),
    "a.lrc": "".join(f"[00:{n:02}.00]{STREET} {n}\n" for n in range(30)),
}


@pytest.mark.parametrize("languages", [None, ("en", "de")])
@pytest.mark.parametrize("name", SPOKEN)
def test_cues_without_full_stops_are_read_in_runs(name: str, languages: Any) -> None:
    """Of as many tokens as the model was trained on, even where it could read more."""
    text = SPOKEN[name]
    form = read_file(text.encode(), name)
    decoder: Any = Scripted(turned, 10**6, prefix="", trained_length=30, languages=languages)
    options = RewriteOptions(min_similarity=None if languages else 0)
    document = Document(decoder, form.text, options, form.lines)
    found = form.rewritten(document.result(document.rewrite()).text).decode()
    assert max(len(each.split()) for each in decoder.read) <= 30
    assert len(decoder.read) == (30 if languages is None else 6)
    assert found.count("os ew era ni teerts") == 30
    assert found.replace("os ew era ni teerts", "so we are in street") == text


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("今日は学校へ", "行きました"),  # Japanese
        ("我们今天去", "北京大学"),  # Chinese
        ("저는 오늘", "학교에 갔어요"),  # Korean
    ],
)
@pytest.mark.parametrize("name", ["a.srt", "a.vtt", "a.ass", "a.lrc"])
def test_cues_of_other_scripts_are_translated(name: str, first: str, second: str) -> None:
    cues = {
        "a.srt": srt(first, second),
        "a.vtt": "WEBVTT\n\n" + srt(first, second),
        "a.ass": f"[Events]\nFormat: Text\nDialogue: {first}\nDialogue: {second}\n",
        "a.lrc": f"[00:01.00]{first}\n[00:02.00]{second}\n",
    }[name]
    answers = {f"{first} {second}": "today we went there"}
    found, seen, _ = rewritten(cues, name, answers.__getitem__, ("ja", "en"))
    assert [*answers] == seen
    words = re.sub(first, "today we", cues)
    assert found == re.sub(second, "went there", words)
    back = {"today we went there": first + second}
    found, _, _ = rewritten(found, name, back.__getitem__, ("en", "ja"))
    assert first[:2] in found and second[-2:] in found and "today" not in found


def test_lines_without_blanks_are_parted_where_no_sign_forbids_it() -> None:
    for letters, wanted in (
        ("学校" * 12, "学校" * 6 + "\n" + "学校" * 6),
        ("学校" * 5 + "へ。」" + "校" * 9, "学校" * 5 + "\nへ。」" + "校" * 9),
        ("学校" * 5 + "へ「行" + "学校" * 5, "学校" * 5 + "へ\n「行" + "学校" * 5),
        ("学校" * 9, "学校" * 9),
    ):
        form = read_file(srt("We go to school.").encode(), "a.srt")
        assert form.rewritten(letters).decode() == srt(wanted)


def test_translations_that_are_too_fast_to_read_are_listed() -> None:
    slow, fast = "We go there now.", "We go there now, as all of us did the day before."
    long = "Nun machen sich alle auf den Weg dorthin, wie am Tag davor."
    ass = f"{ASS}Dialogue: 0,0:00:01.00,0:00:03.00,A,,0,0,0,,{{\\an8}}%s\n"
    vtt = f"WEBVTT\n\n{TIMES}\n<v Ann>%s</v>\n"
    for name, form in (("a.srt", srt("%s")), ("a.vtt", vtt), ("a.ass", ass)):
        for text, answer, said in (
            (
                form % slow,
                long,
                ["cue 1: 30 characters a second, more than the 20 that can be read"],
            ),
            (form % fast, fast.replace("We", "You"), []),  # which most words of stay
            (form % f"{fast} {fast}", long, []),  # it was as fast
            (form % slow, "Nun gehen wir dahin.", []),
        ):
            read_as = read_file(text.encode(), name)
            read_as.rewritten(answer)
            assert read_as.not_kept() == said, text
    lyrics = read_file(f"[00:01.00]{slow}\n[00:01.10]A\n".encode(), "a.lrc")
    lyrics.rewritten(f"{long * 9}\nA")
    assert not lyrics.not_kept(), "which have no ends"
    behind = read_file(srt(f"We go.\n\n{slow}").encode(), "a.srt")
    behind.rewritten(f"{long}\n{long}")
    assert behind.not_kept()[0].startswith("cue 1: 59 characters"), "both are shown at once"


def test_many_cues_with_tags_are_said_in_one_line() -> None:
    for number, lines in ((5, 5), (6, 1)):
        form = read_file(srt(*[f"We <i>go</i> to {n}." for n in range(number)]).encode(), "a.srt")
        form.rewritten("\n".join(["Wir gehen hin."] * number))
        estimated = [said for said in form.not_kept() if "are estimates" in said]
        assert len(estimated) == lines and estimated[0].startswith("cue 1")
    assert estimated == ["cue 1 and 5 other cues: the places of tags within them are estimates"]


def test_times_without_a_length_have_no_speed() -> None:
    for times in ("00:01,000 --> 00:01,000", "00:02,000 --> 00:01,000", "00:01,000 -->"):
        form = read_file(f"1\n{times}\nWe go there now.\n".encode(), "a.srt")
        form.rewritten("Nun machen sich alle auf den Weg dorthin. " * 9)
        assert not form.not_kept()


def large(name: str) -> str:
    """About 100,000 characters."""
    shown = "He go home with a apple, and <i>she have</i> it."
    if name == "a.ass":
        line = f"Dialogue: 0,0:00:01.00,0:00:03.00,A,,0,0,0,,{shown}\n"
        return "[Events]\n" + line.replace("<i>", r"{\i1}").replace("</i>", r"{\i0}") * 1000
    if name == "a.lrc":
        return f"[00:01.00]{shown}\n".replace("<i>", "<00:01.00>").replace("</i>", "") * 2000
    return "WEBVTT\n\n" * (name == "a.vtt") + srt(*[shown] * 1200)


@pytest.mark.parametrize("name", ["a.srt", "a.vtt", "a.ass", "a.lrc"])
def test_each_character_is_looked_at_a_few_times(name: str, monkeypatch: Any) -> None:
    from speculative_t5.documents import subtitles

    seen = []
    whole = subtitles.Cue.masked

    def masked(cue: Any, text: str) -> str:
        seen.append(len(text))
        return whole(cue, text)

    monkeypatch.setattr(subtitles.Cue, "masked", masked)
    text = large(name)
    form = read_file(text.encode(), name)
    assert form.rewritten(corrected(form.text)).decode() == corrected(text)
    assert sum(seen) <= 4 * len(text)
