"""Sentences for the shipped pair, where a user gives no prompt."""

SENTENCES_TO_CORRECT = [
    "correct: my sister have never been too paris. She wants to to go their next summer, but its "
    "very expensive",
    "correct: We was waiting for the the bus when it start to rain.",
    "correct: He dont know were his keys are. He thinks he lost them on the trian",
    "correct: An old man and his dog was walking threw the park. They walks their every day.",
    "correct: I has lived in this city for ten years, but I still get lost sometmies.",
    "correct: She asked me if i wanted a apple. I told her that i was'nt hungry",
]
