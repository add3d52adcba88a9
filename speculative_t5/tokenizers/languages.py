"""The languages that a model translates between, and what goes before a text to ask for one."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from ..decoding import Vocabulary
from ..errors import first_line
from ..options import OptionError, option_error
from .base import LANGUAGE_TOKEN

TRANSLATION_TASK = re.compile(r"translation_([a-z]+)_to_([a-z]+)")  # T5's, in task_specific_params
# Of languages, see langcodes.tag_distance: another region; another language.
NEAR_DISTANCE, FAR_DISTANCE = 5, 25
MOST_PAIRS = 10**5  # that a config.json may name
MOST_CHARACTERS = 100  # of a language's name or code: langcodes takes long for more, or fails


@dataclass(frozen=True)
class Languages:
    """What a model translates, by BCP 47 codes of the source and the target.

    The source is "" where the model need not be told it.
    """

    prefixes: Mapping[tuple[str, str], str] = field(default_factory=dict)

    def pair(self, to: str, from_: str | None = None) -> tuple[str, str]:
        """Return the pair of codes that is meant by languages' names or codes.

        Raises:
            ValueError: If a language is unknown, or none of the model's, or has to be given.
        """
        if not self.prefixes:
            raise OptionError(
                "{to} is {!r}, and this model does not translate, as far as its config.json says: "
                "choose one that does, or give a {prefix} or write languages into its config.json",
                to,
            )
        target = _closest("to", to, (target for _, target in self.prefixes))
        sources = [source for source, t in self.prefixes if t == target]
        if from_ is None and len(sources) == 1:
            return sources[0], target
        if from_ is None:
            raise OptionError(
                "the model has to be told the language of the text: give {from_}, one of {}",
                _named_languages(sources),
            )
        if "" in sources:
            return _code("from_", from_, {}), target
        return _closest("from_", from_, sources), target

    def prefix(self, to: str, from_: str | None = None) -> str:
        """Return what goes before a text to translate it; for errors see `pair`."""
        source, target = self.pair(to, from_)
        return self.prefixes.get((source, target)) or self.prefixes["", target]


def read_languages(config: Mapping[str, Any], vocabulary: Vocabulary) -> Languages:
    """Return the languages that config.json names, or else those of a known family.

    An object `languages` has a `prefix` with {to} and perhaps {from} for codes, or {to_name} and
    {from_name} for English names; a list `to` of codes; and a list `from`, if it is needed.
    """
    if (own := config.get("languages")) is not None:
        return Languages(_own_prefixes(own, vocabulary))
    if vocabulary.languages:
        from langcodes import standardize_tag

        return Languages({("", standardize_tag(c)): f"<2{c}> " for c in vocabulary.languages})
    found = {}
    tasks = config.get("task_specific_params")
    for name, task in tasks.items() if isinstance(tasks, dict) else ():
        prefix = task.get("prefix") if isinstance(task, dict) else None
        if isinstance(prefix, str) and (pair := TRANSLATION_TASK.fullmatch(name)):
            found[pair[1], pair[2]] = prefix
    return Languages(found)


def _own_prefixes(own: Any, vocabulary: Vocabulary) -> dict[tuple[str, str], str]:
    from langcodes import get

    def filled(source: str, target: str) -> str:
        values = {"to": target, "to_name": names[target]}
        values |= {"from": source, "from_name": names[source]} if source else {}
        return re.sub(r"\{([^{}]*)\}", lambda name: values[name[1]], own["prefix"])

    try:
        targets, sources = own["to"], own.get("from", [""])
        codes = filter(is_code, (*targets, *filter(None, sources)))
        names = {code: get(code).display_name() for code in codes}
        if len(targets) * len(sources) > MOST_PAIRS:
            targets = ()
        found = {(s, t): filled(s, t) for s in sources for t in targets if s != t}
        fault = "" if found else f"no languages, or more than {MOST_PAIRS:,} pairs of them"
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        fault = f"{type(error).__name__}: {first_line(error)}"
    if fault:
        raise ValueError(
            f"languages in config.json cannot be read ({fault}): write an object with a prefix, "
            "such as '<2{to}> ', and lists of codes, to and from"
        )
    for prefix in found.values():
        for code in LANGUAGE_TOKEN.findall(prefix):
            if code not in vocabulary.languages:
                raise ValueError(
                    f"languages in config.json asks for the token <2{code}>, which the tokenizer "
                    "lacks: leave that language out"
                )
    return found


def _closest(name: str, language: str, codes: Iterable[str]) -> str:
    """Return which of the model's codes a language's name or code means; refuse others."""
    from langcodes import closest_match, get

    known = {get(code).display_name().casefold(): code for code in codes}
    code = _code(name, language, known)
    near, distance = closest_match(code, [*known.values()], max_distance=FAR_DISTANCE)
    if distance <= NEAR_DISTANCE and get(near).maximize().script == get(code).maximize().script:
        return near
    if near == "und":
        named = f"from {_named_languages(known.values())}"
    else:
        named = f"{_named_languages([near])}, the nearest"
    raise OptionError(
        f"{{{name}}} is {{!r}}, which is not among the model's languages: choose {{}}",
        language,
        named,
    )


def _code(name: str, language: str, known: Mapping[str, str]) -> str:
    """Return the code of a language, given that or a name; `known` are the model's, by name."""
    from langcodes import find, standardize_tag

    if not isinstance(language, str):
        raise option_error(name, "a language's name or code", language)
    if (asked := language.casefold()) in known:
        return known[asked]
    try:
        if is_code(language):
            return standardize_tag(language)
        if len(language) > MOST_CHARACTERS:
            raise ValueError(f"it has {len(language)} characters")
        return str(find(language))
    except (LookupError, ValueError) as error:
        near = get_close_matches(asked, known, 3)
        meant = f"{_named_languages(known[each] for each in near)} if you meant that"
        raise OptionError(
            f"{{{name}}} is {{!r}}, which names no language: give {{}}",
            language,
            meant if near else "a name such as German, or a code such as de or pt-BR",
        ) from error


def same_language(to: str, from_: str) -> bool:
    """Whether two names or codes are those of one language, in one script and region.

    Raises:
        ValueError: If one of them names no language.
    """
    from langcodes import get

    one, other = _code("to", to, {}), _code("from_", from_, {})
    return bool(get(one).maximize() == get(other).maximize())


def is_code(text: str) -> bool:
    """Whether a text is a BCP 47 code of a language."""
    from langcodes import tag_is_valid

    return len(text) <= MOST_CHARACTERS and tag_is_valid(text)


def language_name(code: str) -> str:
    """Return the English name of a language."""
    from langcodes import get

    return get(code).display_name()


def main_region(code: str) -> str:
    """Return the region where most speakers of a language are, such as FR for fr."""
    from langcodes import get

    return get(code).maximize().territory or ""


def _named_languages(codes: Iterable[str], most: int = 10) -> str:
    names = [f"{language_name(code)} ({code})" for code in codes]
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
