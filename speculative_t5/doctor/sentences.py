"""Sentences to correct, and what the shipped target says to some of them."""

from __future__ import annotations

BEGINNINGS = (
    "My sister dont know", "He think that I knows", "Yesterday they tells us", "We was asking",
    "The teacher have explained me", "An old man wanted to knew", "It are not clear",
    "Nobody in the the house remember", "I has forgot", "Her brothers wants to see",
)  # fmt: skip
ENDINGS = (
    "where there keys is.", "why the trian is late.", "how much do it costs.",
    "who have opened the window", "what the childs are doing.", "when we goes too Paris.",
    "wether it will rains tomorow.", "which book she have readed.", "how to went home from hear.",
    "that the dog were hungry.",
)  # fmt: skip
SENTENCES = tuple(f"{first} {last}" for last in ENDINGS for first in BEGINNINGS)

# The shipped target's greedy outputs in float32, made on a Linux CPU by
#     python -m speculative_t5 batch sentences.txt --regular-decode --dtype float32
# for the sentences in which the best token always has a logit that is larger than the next by 3 or
# more: no device's rounding decides those.
KNOWN = {
    "An old man wanted to knew what the childs are doing.": (
        "An old man wanted to know what the children are doing."
    ),
    "We was asking what the childs are doing.": "We were asking what the children are doing.",
    "It are not clear what the childs are doing.": "It is not clear what the children are doing.",
    "My sister dont know wether it will rains tomorow.": (
        "My sister doesn't know whether it will rain tomorrow."
    ),
    "He think that I knows wether it will rains tomorow.": (
        "He thinks that I know whether it will rain tomorrow."
    ),
    "My sister dont know how to went home from hear.": (
        "My sister doesn't know how to go home from here."
    ),
    "An old man wanted to knew how to went home from hear.": (
        "An old man wanted to know how to go home from here."
    ),
    "It are not clear how to went home from hear.": "It is not clear how to go home from here.",
}
