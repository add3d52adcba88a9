"""From the body of a request to prompts and options, and what clients receive if it is wrong.

A field that is missing or null has the server's own default, which comes from its command line:
greedy decoding and 256 tokens, where OpenAI's would be temperature 1 and 16 tokens.
"""

import difflib
import json
import secrets
from collections.abc import Mapping
from dataclasses import fields as dataclass_fields
from dataclasses import replace
from typing import Any, NoReturn

from starlette.responses import JSONResponse

from ..errors import first_line, not_utf8, shown
from ..generation import GenerationOptions
from ..options import OptionError
from ..tokenizers import Prompt

MOST_FIELDS = 100
MOST_OUTPUT_TOKENS = 4096  # of an output, unless the server's default is more; it is cut there
MAX_INTEGER = 2**31 - 1  # of integers that the device computes with, and so of all but seeds
MOST_TOP = 5  # tokens shown beside each, with the logarithms of their probabilities
LONGEST_NAME = 40  # characters of a field's name that may be misspelt
CHAT_ROLES = ("system", "developer", "user", "assistant", "tool", "function")

SAMPLED_OPTIONS = GenerationOptions(temperature=1.0)  # with which each other option goes
# Fields that would change the output and cannot, with the values that switch them off.
SWITCHED_OFF: dict[str, tuple[Any, ...]] = {
    "echo": (False,),
    "prompt_logprobs": (False,),
    "ignore_eos": (False,),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "scores": (False,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "min_p": (0,),
    "best_of": (1,),
    "num_beams": (1,),
    "length_penalty": (1,),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "suffix": ("",),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "audio": (),
    "web_search_options": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "modalities": (["text"],),
}
OTHER_FIELDS = (
    "model models prompt messages prediction stream stream_options speculative_t5 user logprobs "
    "top_logprobs"
).split()
# Options that no field of their own name sets.
NOT_SET = (
    "max_new_tokens",
    "num_return_sequences",
    "logits_processors",
    "logprobs",  # see `number_of_top`
    "prediction",  # see `parse_prediction`
    *SWITCHED_OFF,
)
# Fields with the options that they set. In chats max_completion_tokens overrides max_tokens.
OPTION_OF_FIELD = {
    each.name: each.name for each in dataclass_fields(GenerationOptions) if each.name not in NOT_SET
} | {"max_completion_tokens": "max_tokens", "n": "num_return_sequences"}
# Those of texts to translate, by the options that they set.
FIELD_OF_OPTION = {"to": "target", "from_": "source"}
# Bounds on what decoding works through at every token, where other requests would wait for it.
MOST_ENTRIES = {
    "stop": 16,
    "bad_words": 100,
    "logit_bias": 1_000,
    "suppress_tokens": 10_000,
    "stop_token_ids": 10_000,
    "forced_tokens": 10_000,
    "begin_suppress_tokens": 10_000,
}
MAX_ENTRY_LENGTH = 500  # characters of a stop or a bad word, or ids of a bad word
EXPECTED_PROMPTS = "text, a list of texts, a list of ids or a list of lists of ids"
EXPECTED_CONTENT = "text or a list of parts of text"


class Refused(Exception):
    """Raised for a request that is not answered; the client gets the message, which is one line.

    `param` is the field of the request that is wrong, and `code` a word for programs, such as
    "model_not_found". `reason` is the part of the message without what to do, where another one
    takes it up.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        reason: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.headers, self.reason = status, headers, reason or message
        # What it is made of, for another process.
        self.keywords = {
            "status": status,
            "message": message,
            "param": param,
            "code": code,
            "headers": headers,
            "reason": reason,
        }
        kind = "server_error" if status >= 500 else "invalid_request_error"
        if status == 429:
            kind = "rate_limit_error"
        # As OpenAI's clients read it.
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
        self.response = JSONResponse(self.body, status, headers)

    @classmethod
    def again(cls, keywords: Mapping[str, Any]) -> "Refused":
        """Return the same refusal as that of another process."""
        return cls(**keywords)


def parse_body(body: bytes) -> dict[str, Any]:
    """Parse the body of a request, a JSON object, without the fields that are null."""
    try:
        found = json.loads(body.decode("utf-8"), parse_constant=_no_number)
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


def _no_number(text: str) -> NoReturn:
    raise ValueError(text)  # NaN, say, which is no JSON


def parse_options(
    fields: Mapping[str, Any], defaults: GenerationOptions, *, draw_seeds: bool = False
) -> GenerationOptions:
    """Check the fields of a request except its model and prompts, and return its options."""
    for name, value in fields.items():
        if name != "best_of" or value != fields.get("n"):  # all outputs are sent
            check_name(name, value)
    most_tokens = max(MOST_OUTPUT_TOKENS, defaults.max_tokens)
    changes = {
        option: parse_option(name, fields[name], most_tokens)
        for name, option in OPTION_OF_FIELD.items()
        if name in fields and not (name == "seed" and is_integer(fields[name], -1))  # for none
    }
    streaming = fields.get("stream_options", {})
    if not isinstance(streaming, Mapping):
        refuse("stream_options", "an object", streaming)
    boolean("stream", fields.get("stream", False))
    boolean("stream_options.include_usage", streaming.get("include_usage") or False)
    boolean("speculative_t5", fields.get("speculative_t5", False))
    if draw_seeds:
        changes.setdefault("seed", secrets.randbelow(MAX_INTEGER))
    if changes.get("temperature", defaults.temperature) == 0:
        count = changes.setdefault("num_return_sequences", 1)  # the server's own is for sampling
        if count > 1:
            wrong = (
                f"n is {count}, and greedy decoding has only one output: give a temperature above 0"
            )
            raise Refused(400, wrong, param="n")
    return replace(defaults, **changes)


def is_integer(found: object, number: int) -> bool:
    """Whether a value is an integer, and this one: 1.0 and true are not 1 in JSON."""
    return type(found) is int and found == number


def check_name(name: str, value: Any) -> None:
    """Refuse a field that would change the output and cannot, or whose name is misspelt."""
    if name in SWITCHED_OFF:
        if any(_is_same(value, off) for off in SWITCHED_OFF[name]):
            return
        wrong = f"{name} is {as_json(value)}, which this server does not do: leave it out"
        raise Refused(400, wrong, param=name)
    known = (*OPTION_OF_FIELD, *OTHER_FIELDS)
    if name in known or len(name) > LONGEST_NAME:  # comparing takes time
        return
    if near := difflib.get_close_matches(name, known, 1, cutoff=0.85):
        raise Refused(400, f"there is no field {shown(name)}: write {near[0]} if you meant that")


def _is_same(value: Any, other: Any) -> bool:
    """Whether two values of JSON are the same: false is no 0 there."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def parse_option(name: str, found: Any, most_tokens: int) -> Any:
    """Return the value of the option that a field sets; what it may be, the option itself says."""
    option = OPTION_OF_FIELD[name]
    if option == "max_tokens" and type(found) is int:  # -1 is for no limit in other servers
        found = most_tokens if found == -1 else min(found, most_tokens)
    most = {"seed": 2**63 - 1}.get(option, MAX_INTEGER)
    if isinstance(found, int) and found > most:
        refuse(name, f"at most {most}", found)
    if option == "speculative":
        return boolean(name, found)
    if option in MOST_ENTRIES:
        _check_entries(name, found)
    value = found
    if option == "top_k" and found == -1:  # which switches it off elsewhere
        value = 0
    if option == "logit_bias":  # whose ids are text in JSON
        value = _biases_by_id(name, found)
    try:
        return getattr(replace(SAMPLED_OPTIONS, **{option: value}), option)
    except OptionError as error:
        wrong = error.spelled(lambda named: name if named == option else named, _in_words)
        raise Refused(400, wrong, param=name) from error
    except ValueError as error:
        raise Refused(400, str(error), param=name) from error


def as_refusal(error: ValueError) -> Refused:
    """Return the refusal for an error of the decoder about one or several options."""
    text, names = str(error), list[str]()
    if isinstance(error, OptionError):
        text = error.spelled(lambda name: FIELD_OF_OPTION.get(name, name), _in_words)
        names = [FIELD_OF_OPTION.get(name, name) for name in error.names]
    param = next(
        (name for name in names if name in (*OPTION_OF_FIELD, *FIELD_OF_OPTION.values())), None
    )
    return Refused(400, " ".join(text.split()), param=param)


def _check_entries(name: str, found: Any) -> None:
    """Refuse too many entries, and texts or lists of ids among them that are too long."""
    most = MOST_ENTRIES[name]
    if isinstance(found, list | dict) and len(found) > most:
        raise Refused(400, f"{name} has {len(found)} entries: give at most {most}", param=name)
    if name in ("stop", "bad_words"):
        for each in found if isinstance(found, list) else [found]:
            if isinstance(each, str | list) and len(each) > MAX_ENTRY_LENGTH:
                wrong = (
                    f"{name} has an entry of length {len(each)}: give at most {MAX_ENTRY_LENGTH}"
                )
                raise Refused(400, wrong, param=name)


def _biases_by_id(name: str, found: Any) -> dict[int, Any]:
    if not isinstance(found, dict):
        refuse(name, "an object of ids and biases", found)
    for token in found:
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            refuse(f"an id of {name}", "the digits of one", token, param=name)
    return {int(token): bias for token, bias in found.items()}


def number_of_top(fields: Mapping[str, Any], *, chat: bool) -> int | None:
    """Return how many of the most probable tokens are to be shown beside each, if any are.

    Completions have their number in `logprobs`; chats in `top_logprobs`, if `logprobs` is true.
    """
    name, asked = "logprobs", fields.get("logprobs", False)
    if chat:
        name, top = "top_logprobs", fields.get("top_logprobs", 0)
        asked = top if boolean("logprobs", asked) else False
        if top and asked is False:
            raise Refused(400, "top_logprobs needs logprobs: give true", param=name)
    if asked is False:
        return None
    if type(asked) is not int or not 0 <= asked <= MOST_TOP:
        refuse(name, f"an integer from 0 to {MOST_TOP}", asked)
    return asked


def boolean(name: str, found: Any) -> bool:
    if not isinstance(found, bool):
        refuse(name, "true or false", found)
    return found


def parse_prompts(fields: Mapping[str, Any]) -> list[Prompt]:
    """Return the prompts of a request for completions: a text, ids, or a list of them."""
    if "prompt" not in fields:
        raise Refused(400, "the request has no prompt: give one as text", param="prompt")
    found = fields["prompt"]
    if found == []:
        raise Refused(400, "prompt is an empty list: give text or ids", param="prompt")
    prompts = [found] if _is_prompt(found) else found
    if not (isinstance(prompts, list) and all(map(_is_prompt, prompts))):
        refuse("prompt", EXPECTED_PROMPTS, found)
    return list(prompts)


def _is_prompt(found: object) -> bool:
    return isinstance(found, str) or (
        isinstance(found, list)
        and all(type(each) is int and abs(each) <= MAX_INTEGER for each in found)
    )


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
        400,
        "messages has none with the role user, which is all that the model reads: give one",
        param="messages",
    )


def _message(name: str, found: object) -> dict[str, str]:
    if not isinstance(found, Mapping):
        refuse(name, "an object with role and content", found)
    role, content = found.get("role"), found.get("content")
    if role not in CHAT_ROLES:
        refuse(f"{name}.role", f"one of {', '.join(CHAT_ROLES)}", role)
    if content is None and role == "assistant":  # it called tools instead
        content = ""
    # The templates of models know the older name.
    name = f"{name}.content"
    return {
        "role": "system" if role == "developer" else str(role),
        "content": _content_text(name, content),
    }


def _content_text(name: str, content: object) -> str:
    """Return the text of a content, which may be in parts; `name` is where it stands."""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = []
    for part in parts:
        text = isinstance(part, Mapping) and part.get("type") == "text" and part.get("text")
        if not isinstance(text, str):
            refuse(name, EXPECTED_CONTENT, part if isinstance(content, list) else content)
        texts.append(text)
    return "".join(texts)


def parse_prediction(fields: Mapping[str, Any]) -> str:
    """Return the text that outputs are expected to resemble, as OpenAI has it; "" for none."""
    found = fields.get("prediction")
    if found is None:
        return ""
    if not isinstance(found, Mapping) or found.get("type") != "content":
        refuse("prediction", 'an object with type "content" and content', found)
    return _content_text("prediction.content", found.get("content"))


def refuse(name: str, expected: str, found: object, *, param: str | None = None) -> NoReturn:
    """Refuse what a field, or a part of the field `param`, must not be."""
    raise Refused(400, f"{name} must be {expected}, got {_in_words(found)}", param=param or name)


def _in_words(found: object) -> str:
    """Show what a field holds; an object by its kind, as its colons would read like advice."""
    if isinstance(found, Mapping):
        return "an object"
    if isinstance(found, list | tuple) and "{" in shown(found):
        return "a list that holds an object"
    return as_json(found)


def as_json(found: object) -> str:
    """Show a value of a request, in the words of JSON where Python has others."""
    return json.dumps(found) if found is None or isinstance(found, bool) else shown(found)
