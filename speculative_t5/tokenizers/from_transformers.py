"""Tokenizers of T5Gemma and decoder-only models: transformers reads them and fills in templates.

The only file that imports transformers.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..decoding import Vocabulary
from ..errors import check_utf8, first_line
from .base import VOCABULARY_FILES, Message, as_vocabulary
from .steps import check_steps, in_one_line

# As in pyproject.toml. transformers reads a tokenizer.model with protobuf, chats with jinja2.
NEEDS_TRANSFORMERS, NEEDS_PROTOBUF, NEEDS_JINJA2 = "transformers>=5", "protobuf>=4", "jinja2>=3.1.6"


class TransformersTokenizer:
    """A tokenizer made by transformers from a folder's files; no code in the folder is run."""

    def __init__(self, folder: Path) -> None:
        # transformers would make an empty tokenizer.
        if not any((folder / name).is_file() for name in VOCABULARY_FILES):
            raise ValueError(
                f"no tokenizer in {folder}: expected one of {', '.join(VOCABULARY_FILES)}; "
                "copy it there from the model that this one was tuned from"
            )
        self._backend, self._folder = _read_backend(folder), folder
        ids: dict[str, int] = self._backend.get_vocab()
        added = self._backend.added_tokens_decoder.items()
        special = {*self._backend.all_special_ids, *(i for i, token in added if token.special)}
        self._known = frozenset(ids.values())
        self.vocabulary: Vocabulary = as_vocabulary(ids, special)

    @property
    def ends(self) -> list[int]:
        """The id that the tokenizer's files name as EOS, if they do."""
        end: int | None = self._backend.eos_token_id
        return [] if end is None else [end]

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, no EOS; the begin token goes first unless it is there."""
        begun = bool(self._backend.bos_token) and text.startswith(self._backend.bos_token)
        advice = "give another one, or download or copy the files again"
        with in_one_line(f"the tokenizer in {self._folder} fails on this text", advice):
            ids: list[int] = self._backend.encode(text, add_special_tokens=not begun)
        return ids

    @property
    def has_chat_template(self) -> bool:
        """Whether chats can be encoded."""
        return bool(self._backend.chat_template)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of a chat in the model's template, up to where its answer begins."""
        for message in messages:
            _check_message(message)
        try:
            ids: list[int] = self._backend.apply_chat_template(
                [dict(message) for message in messages],
                add_generation_prompt=True,
                return_dict=False,
            )
        except ImportError as error:
            raise ValueError(
                f"a chat needs a package that is not installed ({first_line(error)}): "
                f"run pip install '{NEEDS_JINJA2}'"
            ) from error
        except Exception as error:  # a template raises its own errors, and those of its library
            raise ValueError(
                f"the model's chat template refuses these messages ({first_line(error)}): "
                "give others, or leave chat out"
            ) from error
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids; control tokens and vocabulary padding have none."""
        text: str = self._backend.decode(
            [token for token in ids if token in self._known],
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )
        return text


def _read_backend(folder: Path) -> Any:
    if (folder / "tokenizer.json").is_file():
        check_steps(folder / "tokenizer.json")
    try:
        import transformers  # takes a second or two

        transformers.logging.set_verbosity_error()
        return transformers.AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except ImportError as error:
        raise ValueError(
            f"the tokenizer in {folder} needs a package that is not installed "
            f"({first_line(error)}): run pip install '{NEEDS_TRANSFORMERS}' '{NEEDS_PROTOBUF}'"
        ) from error
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the type differs by kind and version; a panic is no Exception
        raise ValueError(
            f"no tokenizer can be made of {folder} ({first_line(error)}): "
            "copy its files there from the model that this one was tuned from"
        ) from error


def _check_message(message: Message) -> None:
    parts = dict(message) if isinstance(message, Mapping) else {}
    if not all(isinstance(parts.get(key), str) for key in ("role", "content")):
        found = [f"{type(value).__name__} for {key}" for key, value in parts.items()]
        raise ValueError(
            "a message must be a text for role and one for content, "
            f"got {', '.join(found) or ('nothing' if message == {} else type(message).__name__)}"
        )
    check_utf8("the content of a message", parts["content"])
