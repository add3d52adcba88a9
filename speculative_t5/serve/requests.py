"""From the body of a request to prompts and options.

A field that is missing or null has the server's own default, which comes from its command line:
greedy decoding and 256 tokens, where OpenAI's would be temperature 1 and 16 tokens. Fields that the
server cannot honour and that would change the output are refused unless they are switched off, and
so are names that look like a slip of the pen; other unknown fields have no effect.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from ..errors import first_line, not_utf8, shown
from ..generation import GenerationOptions
from ..tokenizers import Prompt
from .fields import LARGEST, OPTIONS, boolean, check_name, is_id, refuse
from .refusals import Refused

MOST_FIELDS = 100
MOST_DIGITS = 1000  # of an integer
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


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
        found = json.loads(body.decode("utf-8"), parse_constant=_no_number, parse_int=_integer)
        if b"\\ud" in body.lower():
            json.dumps(found, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise Refused(400, f"the body is {not_utf8(error)}") from error
    except UnicodeEncodeError as error:
        raise Refused(
            400, "the body has half of a surrogate pair, which is not text: send whole characters"
        ) from error
    except RecursionError as error:
        raise Refused(400, "the body nests too deeply: send a flatter object") from error
    except ValueError as error:
        raise Refused(
            400, f"the body is not JSON ({first_line(error)}): send one JSON object"
        ) from error
    if not isinstance(found, dict):
        raise Refused(400, f"the body must be a JSON object, got {shown(found)}")
    if len(found) > MOST_FIELDS:
        raise Refused(400, f"the body has {len(found)} fields: send at most {MOST_FIELDS}")
    return {name: value for name, value in found.items() if value is not None}


def parse_wanted(
    fields: Mapping[str, Any],
    model: str,
    defaults: GenerationOptions,
    *,
    most_tokens: int = LARGEST,
    draw_seeds: bool = False,
) -> Wanted:
    """Check all fields of a request except its prompts.

    Args:
        fields: Of the body, without those that are null.
        model: The name of the server's model.
        defaults: The options of requests that do not give them.
        most_tokens: The most that `max_tokens` may be.
        draw_seeds: Whether a request without a seed gets one by chance.

    Raises:
        Refused: If the model is another one, or a field is wrong or cannot be honoured.
    """
    check_model(fields.get("model", model), model)
    for name in fields:
        if name != "best_of" or fields[name] != fields.get("n"):  # all outputs are sent
            check_name(name, fields[name])
    changes = {
        option: check(name, fields[name])
        for name, (option, check) in OPTIONS.items()
        if name in fields
    }
    streaming = fields.get("stream_options", {})
    if not isinstance(streaming, Mapping):
        refuse("stream_options", "an object", streaming)
    if changes.get("max_tokens", 0) > most_tokens:
        name = "max_completion_tokens" if "max_completion_tokens" in fields else "max_tokens"
        refuse(name, f"an integer from 1 to {most_tokens}", changes["max_tokens"])
    if draw_seeds:
        changes.setdefault("seed", secrets.randbelow(LARGEST))
    return Wanted(
        _options(defaults, changes),
        boolean("stream", fields.get("stream", False)),
        boolean("stream_options.include_usage", streaming.get("include_usage") or False),
        boolean("speculative_t5", fields.get("speculative_t5", False)),
    )


def check_model(found: object, model: str) -> None:
    """Refuse the name of another model."""
    if not isinstance(found, str):
        refuse("model", "text", found)
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
        refuse("prompt", expected, found)
    if not found:
        raise Refused(400, "prompt is an empty list: give text or ids", param="prompt")
    if all(map(is_id, found)):
        return [found]
    if all(isinstance(each, str) for each in found):
        return list(found)
    if all(isinstance(each, list) and all(map(is_id, each)) for each in found):
        return list(found)
    refuse("prompt", expected, found)


def parse_messages(fields: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the messages of a chat, each with its role and its content as text."""
    found = fields.get("messages", [])
    if not isinstance(found, list):
        refuse("messages", "a list of messages", found)
    if not found:
        raise Refused(400, "the request has no messages: give at least one", param="messages")
    return [_message(f"messages[{number}]", each) for number, each in enumerate(found)]


def last_of_user(messages: list[dict[str, str]]) -> str:
    """Return what the user said last, which is all that a T5 reads of a chat."""
    for message in reversed(messages):
        if message["role"] == "user":
            return message["content"]
    raise Refused(
        400, "messages has none with the role user, which is all that the model reads: give one",
        param="messages",
    )  # fmt: skip


def _message(name: str, found: object) -> dict[str, str]:
    if not isinstance(found, Mapping):
        refuse(name, "an object with role and content", found)
    role, content = found.get("role"), found.get("content")
    if role not in ROLES:
        refuse(f"{name}.role", f"one of {', '.join(ROLES)}", role)
    if isinstance(content, list):
        content = "".join(_part(f"{name}.content", part) for part in content)
    if content is None and role == "assistant":  # it called tools instead
        content = ""
    if not isinstance(content, str):
        refuse(f"{name}.content", "text or a list of parts of text", content)
    # The templates of models know the older name.
    return {"role": "system" if role == "developer" else str(role), "content": content}


def _part(name: str, part: object) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
    if not isinstance(text, str):
        refuse(name, "text or a list of parts of text", part)
    return text


def _options(defaults: GenerationOptions, changes: Mapping[str, Any]) -> GenerationOptions:
    count = changes.get("num_return_sequences", defaults.num_return_sequences)
    if count > 1 and changes.get("temperature", defaults.temperature) == 0:
        if "num_return_sequences" not in changes:  # the server's own number is for sampling
            return _options(defaults, {**changes, "num_return_sequences": 1})
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


def _integer(digits: str) -> int:
    if len(digits) > MOST_DIGITS:  # Python's own limit has a message for programmers
        raise Refused(400, f"the body has a number of {len(digits)} digits: send a shorter one")
    return int(digits)


def _no_number(text: str) -> NoReturn:
    raise ValueError(text)  # NaN, say, which is no JSON
