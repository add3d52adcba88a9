"""Damage of the kinds that learners make, and text that must come back as it is.

`phrases`, `nouns` and `verbs` are rules of grammar and usage, `spelling` those of the written form;
`tables` reads them. `surroundings` adds numbers, quotes, names and the like to both sides alike,
`unseen` words that no sentence has, and `mixing` makes examples out of all of them.
"""

from .mixing import Learner, held_out_texts, mixed_examples, read_german

__all__ = ["Learner", "held_out_texts", "mixed_examples", "read_german"]
