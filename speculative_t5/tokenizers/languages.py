"""The languages that a model translates between, and what goes before a text to ask for one."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from ..decoding import Vocabulary
from ..errors import first_line
from .base import LANGUAGE

TASK = re.compile(r"translation_([a-z]+)_to_([a-z]+)")  # T5's, in task_specific_params
# Of languages, see langcodes.tag_distance: another spelling or region; another language.
NEAR, FAR = 5, 25


@dataclass(frozen=True)
class Languages:
    """What a model translates, by BCP 47 codes of the source and the target.

    The source is "" where the model need not be told it.
    """

    prefixes: Mapping[tuple[str, str], str] = field(default_factory=dict)

    def prefix(self, to: str, from_: str | None = None) -> str:
        """Return what goes before a text to translate it; languages are names or codes.

        Raises:
            ValueError: If a language is unknown, or none of the model's, or has to be given.
        """
        if not self.prefixes:
            raise ValueError(
                f"to is {to!r}, and the model does not say how it is asked for a language: give a "
                "prefix instead, or write languages into its config.json"
            )
        target = _closest("to", to, (target for _, target in self.prefixes))
        by_source = {source: text for (source, t), text in self.prefixes.items() if t == target}
        if from_ is None and len(by_source) == 1:
            return next(iter(by_source.values()))
        if from_ is None:
            raise ValueError(
                "the model has to be told the language of the text: give from, one of "
                f"{_listed(by_source)}"
            )
        if "" in by_source:
            _code("from", from_, ())
            return by_source[""]
        return by_source[_closest("from", from_, by_source)]


def read_languages(config: Mapping[str, Any], vocabulary: Vocabulary) -> Languages:
    """Return the languages that config.json names, or else those of a known family.

    An object `languages` has a `prefix` with {to} and perhaps {from} for codes, or {to_name} and
    {from_name} for English names; a list `to` of codes; and a list `from`, if it is needed.
    """
    if (own := config.get("languages")) is not None:
        return Languages(_own_prefixes(own, vocabulary))
    found: dict[tuple[str, str], str] = {}
    if vocabulary.languages:
        import langcodes

        # Beside languages, madlad400 has tokens for texts without one.
        codes = filter(langcodes.tag_is_valid, vocabulary.languages)
        found = {("", langcodes.standardize_tag(code)): f"<2{code}> " for code in codes}
    tasks = config.get("task_specific_params")
    for name, task in tasks.items() if isinstance(tasks, dict) else ():
        prefix = task.get("prefix") if isinstance(task, dict) else None
        if isinstance(prefix, str) and (pair := TASK.fullmatch(name)):
            found[pair[1], pair[2]] = prefix
    return Languages(found)


def _own_prefixes(own: Any, vocabulary: Vocabulary) -> dict[tuple[str, str], str]:
    import langcodes

    try:
        template, sources = own["prefix"], own.get("from", [""])
        found = {
            (source, target): str(template).format_map(
                {"from": source, "from_name": source and langcodes.get(source).display_name()}
                | {"to": target, "to_name": langcodes.get(target).display_name()}
            )
            for source in map(str, sources)
            for target in map(str, own["to"])
            if source != target
        }
    except (AttributeError, KeyError, IndexError, LookupError, TypeError, ValueError) as error:
        raise ValueError(
            f"languages in config.json cannot be read ({type(error).__name__}: {first_line(error)})"
            ": write an object with a prefix, such as '<2{to}> ', and lists of codes, to and from"
        ) from error
    for prefix in found.values():
        for code in LANGUAGE.findall(prefix):
            if code not in vocabulary.languages:
                raise ValueError(
                    f"languages in config.json asks for the token <2{code}>, which the tokenizer "
                    "lacks: leave that language out"
                )
    return found


def _closest(name: str, language: str, codes: Iterable[str]) -> str:
    """Return which of the model's codes a language's name or code means; refuse others."""
    import langcodes

    known = [*dict.fromkeys(codes)]
    code = _code(name, language, known)
    near, distance = langcodes.closest_match(code, known, max_distance=FAR)
    if distance <= NEAR:
        return near
    named = f"{_listed([near])}, the nearest" if near != "und" else f"from {_listed(known)}"
    raise ValueError(
        f"{name} is {language!r}, which is not among the model's languages: choose {named}"
    )


def _code(name: str, language: str, known: Iterable[str]) -> str:
    """Return the code of a language that is given as a code or a name, in any language."""
    import langcodes

    try:
        if langcodes.tag_is_valid(language):
            return langcodes.standardize_tag(language)
        return str(langcodes.find(language))
    except (LookupError, ValueError) as error:
        names = {langcodes.get(code).display_name().lower(): code for code in known}
        near = get_close_matches(str(language).lower(), names, 3)
        meant = f"{_listed(names[each] for each in near)} if you meant that"
        raise ValueError(
            f"{name} is {language!r}, which names no language: give "
            + (meant if near else "a name such as German, or a code such as de or pt-BR")
        ) from error


def _listed(codes: Iterable[str], most: int = 10) -> str:
    import langcodes

    names = [f"{langcodes.get(code).display_name()} ({code})" for code in codes]
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
