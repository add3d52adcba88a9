"""The fields of a request: which option each sets, what it may be, and which are refused.

`logprobs` are refused. Verifying a draft gives a probability for the tokens that were sampled, but
none that holds for each accepted token without one more pass over the output.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn

from ..errors import shown
from .refusals import Refused

LARGEST = 2**31 - 1  # of integers that the device computes with
LARGEST_SEED = 2**63 - 1
# Bounds on what decoding works through at every token, where other requests would wait for it.
MOST_STOPS, MOST_WORDS, MOST_IDS, MOST_BIASES = 16, 100, 10_000, 1_000
LONGEST = 500  # characters of a stop or a bad word, or ids of a bad word
LONGEST_NAME = 40  # characters of a field's name that may be misspelt
LOGPROBS = (
    "logprobs would need one more pass over each output, which this server does not make: "
    "leave logprobs out"
)

Check = Callable[[str, Any], Any]


def check_name(name: str, value: Any) -> None:
    """Refuse a field that would change the output and cannot, or whose name is misspelt."""
    if name in OFF:
        if any(value == off and isinstance(value, bool) == isinstance(off, bool)
               for off in OFF[name]):  # fmt: skip
            return
        if "logprobs" in name:
            raise Refused(400, LOGPROBS, param=name)
        raise Refused(
            400, f"{name} is {as_json(value)}, which this server does not do: leave it out",
            param=name,
        )  # fmt: skip
    if name in OPTIONS or name in OTHERS:
        return
    if len(name) > LONGEST_NAME:  # comparing takes time, and it is no slip of the pen
        return
    if near := difflib.get_close_matches(name, [*OPTIONS, *OTHERS], 1, cutoff=0.85):
        raise Refused(400, f"there is no field {shown(name)}: write {near[0]} if you meant that")


def refuse(name: str, expected: str, found: object, *, param: str | None = None) -> NoReturn:
    """Refuse what a field, or a part of the field `param`, must not be."""
    objects = found if isinstance(found, list) else [found]
    if any(isinstance(each, Mapping) for each in objects):  # their colons would read like advice
        kind = "a list that holds an object" if isinstance(found, list) else "an object"
    else:
        kind = as_json(found)
    raise Refused(400, f"{name} must be {expected}, got {kind}", param=param or name)


def as_json(found: object) -> str:
    """Show a value of a request, in the words of JSON where Python has others."""
    words: dict[object, str] = {True: "true", False: "false", None: "null"}
    return words[found] if found is None or isinstance(found, bool) else shown(found)


def boolean(name: str, found: Any) -> bool:
    if not isinstance(found, bool):
        refuse(name, "true or false", found)
    return found


def _integer(least: int, most: int = LARGEST) -> Check:
    def check(name: str, found: Any) -> int:
        if not isinstance(found, int) or isinstance(found, bool) or not least <= found <= most:
            refuse(name, f"an integer from {least} to {most}", found)
        return found

    return check


def _number(name: str, found: Any, *, param: str | None = None) -> float:
    try:
        number = float(found) if not isinstance(found, str | bool) else math.nan
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        refuse(name, "a number", found, param=param)
    return number


def _top_k(name: str, found: Any) -> int:
    return 0 if found == -1 else _integer(0)(name, found)  # -1 switches it off elsewhere


def is_id(found: object) -> bool:
    return isinstance(found, int) and not isinstance(found, bool) and abs(found) <= LARGEST


def _ids(name: str, found: Any) -> tuple[int, ...]:
    if not isinstance(found, list) or not all(map(is_id, found)):
        refuse(name, "a list of ids", found)
    _bound(name, found, MOST_IDS)
    return tuple(found)


def _set_of_ids(name: str, found: Any) -> tuple[int, ...]:
    return tuple(dict.fromkeys(_ids(name, found)))


def _forced(name: str, found: Any) -> str | tuple[int, ...]:
    return found if isinstance(found, str) else _ids(name, found)


def _bound(name: str, found: Collection[object], most: int) -> None:
    """Refuse too many entries, and texts or lists of ids among them that are too long."""
    if len(found) > most:
        raise Refused(400, f"{name} has {len(found)} entries: give at most {most}", param=name)
    longest = max((len(each) for each in found if isinstance(each, str | tuple)), default=0)
    if longest > LONGEST:
        raise Refused(
            400, f"{name} has an entry of length {longest}: give at most {LONGEST}", param=name
        )


def _texts(name: str, found: Any) -> tuple[str, ...]:
    texts = [found] if isinstance(found, str) else found
    if not isinstance(texts, list) or not all(isinstance(each, str) for each in texts):
        refuse(name, "text or a list of texts", found)
    if "" in texts:
        raise Refused(400, f"{name} has a text that is empty: leave it out", param=name)
    _bound(name, texts, MOST_STOPS)
    return tuple(texts)


def _words(name: str, found: Any) -> tuple[str | tuple[int, ...], ...]:
    words = [found] if isinstance(found, str) else found
    if not isinstance(words, list):
        refuse(name, "text or a list of texts and of lists of ids", found)
    checked = tuple(word if isinstance(word, str) else _ids(name, word) for word in words)
    _bound(name, checked, MOST_WORDS)
    return checked


def _biases(name: str, found: Any) -> dict[int, float]:
    if not isinstance(found, dict):
        refuse(name, "an object of ids and biases", found)
    _bound(name, found, MOST_BIASES)
    biases = {}
    for token, bias in found.items():
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            refuse(f"an id of {name}", "the digits of one", token, param=name)
        biases[int(token)] = _number(f"a bias of {name}", bias, param=name)
    return biases


# Fields with the options that they set.
OPTIONS: dict[str, tuple[str, Check]] = {
    "max_tokens": ("max_tokens", _integer(1)),
    "max_completion_tokens": ("max_tokens", _integer(1)),  # its name in chats; comes over it
    "temperature": ("temperature", _number),
    "top_k": ("top_k", _top_k),
    "top_p": ("top_p", _number),
    "seed": ("seed", _integer(0, LARGEST_SEED)),
    "n": ("num_return_sequences", _integer(1)),
    "stop": ("stop", _texts),
    "stop_token_ids": ("stop_token_ids", _set_of_ids),
    "logit_bias": ("logit_bias", _biases),
    "repetition_penalty": ("repetition_penalty", _number),
    "no_repeat_ngram_size": ("no_repeat_ngram_size", _integer(0)),
    "min_tokens": ("min_tokens", _integer(0)),
    "suppress_tokens": ("suppress_tokens", _set_of_ids),
    "bad_words": ("bad_words", _words),
    "forced_tokens": ("forced_tokens", _forced),
    "speculative": ("speculative", boolean),
}
# Fields that would change the output and cannot, with the values that switch them off.
OFF: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (False,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "min_p": (0,),
    "ignore_eos": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "use_beam_search": (False,),
    "num_beams": (1,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "scores": (False,),
}
OTHERS = (
    "model", "models", "prompt", "messages", "stream", "stream_options", "speculative_t5", "user",
)  # fmt: skip
