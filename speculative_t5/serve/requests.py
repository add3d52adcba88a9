"""From the body of a request to prompts and options.

A field that is missing or null has the server's own default, which comes from its command line:
greedy decoding and 256 tokens, where OpenAI's would be temperature 1 and 16 tokens. Fields that the
server cannot honour and that would change the output are refused unless they are switched off, and
so are names that look like a slip of the pen; other unknown fields have no effect.

`logprobs` are refused. Verifying a draft gives a probability for the tokens that were sampled, but
none that holds for each accepted token without one more pass over the output.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from ..errors import first_line, not_utf8, shown
from ..generation import GenerationOptions
from ..tokenizers import Prompt
from .refusals import Refused

LARGEST = 2**31 - 1  # of integers that the device computes with
LARGEST_SEED = 2**63 - 1
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
LOGPROBS = (
    "logprobs would need one more pass over each output, which this server does not make: "
    "leave logprobs out"
)

Check = Callable[[str, Any], Any]


@dataclass(frozen=True)
class Wanted:
    """What a request asks for, besides its prompts."""

    options: GenerationOptions
    stream: bool
    usage: bool  # whether a stream ends with the numbers of tokens
    traced: bool  # whether tokens come with their origins, and choices with statistics


def parse_body(body: bytes) -> dict[str, Any]:
    """Parse the body of a request, a JSON object, without the fields that are null."""
    try:
        found = json.loads(body.decode("utf-8"), parse_constant=_no_number)
    except UnicodeDecodeError as error:
        raise Refused(400, f"the body is {not_utf8(error)}") from error
    except (ValueError, RecursionError) as error:
        raise Refused(
            400, f"the body is not JSON ({first_line(error)}): send one JSON object"
        ) from error
    if b"\\ud" in body.lower() and not _is_text(found):
        raise Refused(
            400, "the body has half of a surrogate pair, which is no text: send whole characters"
        )
    if not isinstance(found, dict):
        raise Refused(400, f"the body must be a JSON object, got {shown(found)}")
    return {name: value for name, value in found.items() if value is not None}


def parse_wanted(fields: Mapping[str, Any], model: str, defaults: GenerationOptions) -> Wanted:
    """Check all fields of a request except its prompts.

    Raises:
        Refused: If the model is another one, or a field is wrong or cannot be honoured.
    """
    check_model(fields.get("model", model), model)
    for name in fields:
        _check_name(name, fields[name])
    changes = {
        option: check(name, fields[name])
        for name, (option, check) in OPTIONS.items()
        if name in fields
    }
    streaming = fields.get("stream_options", {})
    if not isinstance(streaming, Mapping):
        _refuse("stream_options", "an object", streaming)
    return Wanted(
        _options(defaults, changes),
        _boolean("stream", fields.get("stream", False)),
        _boolean("stream_options.include_usage", streaming.get("include_usage") or False),
        _boolean("speculative_t5", fields.get("speculative_t5", False)),
    )


def check_model(found: object, model: str) -> None:
    """Refuse the name of another model."""
    if not isinstance(found, str):
        _refuse("model", "text", found)
    if found != model:
        raise Refused(
            404, f"there is no model {shown(found)} here: use {shown(model)}, or leave model out",
            param="model", code="model_not_found",
        )  # fmt: skip


def parse_prompts(fields: Mapping[str, Any]) -> list[Prompt]:
    """Return the prompts of a request for completions: a text, ids, or a list of either."""
    expected = "text, a list of texts, a list of ids or a list of lists of ids"
    if "prompt" not in fields:
        raise Refused(400, "the request has no prompt: give one as text", param="prompt")
    found = fields["prompt"]
    if isinstance(found, str):
        return [found]
    if not isinstance(found, list):
        _refuse("prompt", expected, found)
    if not found:
        raise Refused(400, "prompt is an empty list: give text or ids", param="prompt")
    if all(map(_is_id, found)):
        return [found]
    if all(isinstance(each, str) for each in found):
        return list(found)
    if all(isinstance(each, list) and all(map(_is_id, each)) for each in found):
        return list(found)
    _refuse("prompt", expected, found)


def parse_messages(fields: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the messages of a chat, each with its role and its content as text."""
    found = fields.get("messages", [])
    if not isinstance(found, list):
        _refuse("messages", "a list of messages", found)
    if not found:
        raise Refused(400, "the request has no messages: give at least one", param="messages")
    return [_message(f"messages[{number}]", each) for number, each in enumerate(found)]


def last_of_user(messages: list[dict[str, str]]) -> str:
    """Return what the user said last, which is all that a T5 reads of a chat."""
    for message in reversed(messages):
        if message["role"] == "user":
            return message["content"]
    raise Refused(
        400, "messages has none whose role is user, which is what the model reads: give one",
        param="messages",
    )  # fmt: skip


def _message(name: str, found: object) -> dict[str, str]:
    if not isinstance(found, Mapping):
        _refuse(name, "an object with role and content", found)
    role, content = found.get("role"), found.get("content")
    if role not in ROLES:
        _refuse(f"{name}.role", f"one of {', '.join(ROLES)}", role)
    if isinstance(content, list):
        content = "".join(_part(f"{name}.content", part) for part in content)
    if content is None and role == "assistant":  # it called tools instead
        content = ""
    if not isinstance(content, str):
        _refuse(f"{name}.content", "text or a list of parts of text", content)
    # The templates of models know the older name.
    return {"role": "system" if role == "developer" else str(role), "content": content}


def _part(name: str, part: object) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
    if not isinstance(text, str):
        _refuse(name, "text or a list of parts of text", part)
    return text


def _options(defaults: GenerationOptions, changes: Mapping[str, Any]) -> GenerationOptions:
    count = changes.get("num_return_sequences", defaults.num_return_sequences)
    if count > 1 and changes.get("temperature", defaults.temperature) == 0:
        raise Refused(
            400, f"n is {count}, and greedy decoding has only one output: give a temperature "
            "above 0", param="n",
        )  # fmt: skip
    try:
        return replace(defaults, **changes)
    except ValueError as error:
        raise as_refusal(error) from error


def as_refusal(error: ValueError, param: str | None = None) -> Refused:
    """Return the refusal for an error of the decoder about a prompt or an option."""
    text = " ".join(str(error).split())
    named = text.split(" ", 1)[0]
    return Refused(400, text, param=named if named in OPTIONS else param)


def _check_name(name: str, value: Any) -> None:
    """Refuse a field that would change the output and cannot, or whose name is misspelt."""
    if name in OFF:
        if any(value == off and isinstance(value, bool) == isinstance(off, bool)
               for off in OFF[name]):  # fmt: skip
            return
        if "logprobs" in name:
            raise Refused(400, LOGPROBS, param=name)
        raise Refused(
            400, f"{name} is {shown(value)}, which this server does not do: leave it out",
            param=name,
        )  # fmt: skip
    if name in OPTIONS or name in OTHERS:
        return
    if near := difflib.get_close_matches(name, [*OPTIONS, *OTHERS], 1, cutoff=0.85):
        raise Refused(400, f"there is no field {shown(name)}: write {near[0]} if that is meant")


def _refuse(name: str, expected: str, found: object) -> NoReturn:
    objects = found if isinstance(found, list) else [found]
    if any(isinstance(each, Mapping) for each in objects):  # their colons would read like advice
        kind = "a list that holds an object" if isinstance(found, list) else "an object"
    else:
        kind = shown(found)
    raise Refused(400, f"{name} must be {expected}, got {kind}", param=name)


def _is_text(found: object) -> bool:
    """Whether all texts in a value of JSON can be written in UTF-8."""
    try:
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _no_number(text: str) -> NoReturn:
    raise ValueError(text)  # NaN, say, which is no JSON


def _boolean(name: str, found: Any) -> bool:
    if not isinstance(found, bool):
        _refuse(name, "true or false", found)
    return found


def _integer(least: int, most: int = LARGEST) -> Check:
    def check(name: str, found: Any) -> int:
        if not isinstance(found, int) or isinstance(found, bool) or not least <= found <= most:
            _refuse(name, f"an integer from {least} to {most}", found)
        return found

    return check


def _number(name: str, found: Any) -> float:
    try:
        number = float(found) if not isinstance(found, str | bool) else math.nan
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        _refuse(name, "a number", found)
    return number


def _top_k(name: str, found: Any) -> int:
    return 0 if found == -1 else _integer(0)(name, found)  # -1 switches it off elsewhere


def _is_id(found: object) -> bool:
    return isinstance(found, int) and not isinstance(found, bool) and abs(found) <= LARGEST


def _ids(name: str, found: Any) -> tuple[int, ...]:
    if not isinstance(found, list) or not all(map(_is_id, found)):
        _refuse(name, "a list of ids", found)
    return tuple(found)


def _forced(name: str, found: Any) -> str | tuple[int, ...]:
    return found if isinstance(found, str) else _ids(name, found)


def _texts(name: str, found: Any) -> tuple[str, ...]:
    texts = [found] if isinstance(found, str) else found
    if not isinstance(texts, list) or not all(isinstance(each, str) for each in texts):
        _refuse(name, "text or a list of texts", found)
    if "" in texts:
        raise Refused(400, f"{name} has a text that is empty: leave it out", param=name)
    return tuple(texts)


def _words(name: str, found: Any) -> tuple[str | tuple[int, ...], ...]:
    words = [found] if isinstance(found, str) else found
    if not isinstance(words, list):
        _refuse(name, "text or a list of texts and of lists of ids", found)
    return tuple(word if isinstance(word, str) else _ids(name, word) for word in words)


def _biases(name: str, found: Any) -> dict[int, float]:
    if not isinstance(found, dict):
        _refuse(name, "an object of ids and biases", found)
    biases = {}
    for token, bias in found.items():
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            _refuse(f"an id of {name}", "the digits of one", token)
        biases[int(token)] = _number(f"a bias of {name}", bias)
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
    "stop_token_ids": ("stop_token_ids", _ids),
    "logit_bias": ("logit_bias", _biases),
    "repetition_penalty": ("repetition_penalty", _number),
    "no_repeat_ngram_size": ("no_repeat_ngram_size", _integer(0)),
    "min_tokens": ("min_tokens", _integer(0)),
    "suppress_tokens": ("suppress_tokens", _ids),
    "bad_words": ("bad_words", _words),
    "forced_tokens": ("forced_tokens", _forced),
    "speculative": ("speculative", _boolean),
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
OTHERS = ("model", "prompt", "messages", "stream", "stream_options", "speculative_t5", "user")
