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
    "My sister dont know how to went home from hear.": (
        "My sister doesn't know how to go home from here."
    ),
    "It are not clear how to went home from hear.": "It is not clear how to go home from here.",
    "My sister dont know wether it will rains tomorow.": (
        "My sister doesn't know whether it will rain tomorrow."
    ),
    "We was asking when we goes too Paris.": "We were asking when we go to Paris.",
    "He think that I knows who have opened the window": (
        "He thinks that I know who has opened the window."
    ),
    "It are not clear that the dog were hungry.": "It is not clear that the dog was hungry.",
    "An old man wanted to knew how to went home from hear.": (
        "An old man wanted to know how to go home from here."
    ),
    "The teacher have explained me when we goes too Paris.": (
        "The teacher has explained me when we go to Paris."
    ),
}
