"""`pipeline`: the calls and returns of transformers 4's pipelines for encoder-decoders.

transformers 5 has removed those for summaries, translation and text to text. What is different
here, docs/transformers.md says.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from types import EllipsisType
from typing import Any

import mlx.core as mx

from .. import device as devices
from ..checkpoints import KNOWN_SETTINGS, ModelFolder, locate, settings_as_options
from ..errors import shown
from ..tokenizers import TRANSLATION_TASK, Tokenizer, clean_up
from .decoder import SpeculativeDecoder
from .options import USUAL_BATCH_SIZE, BatchOptions
from .outputs import Generation

TextRecord = dict[str, str]  # "summary_text" and so on
TASKS = {
    "summarization": "summary_text",
    "translation": "translation_text",
    "text2text-generation": "generated_text",
}
ANY_LENGTH = 2**20  # tokens of a text, where nothing is cut: positions of a T5 are relative
OWN_OPTIONS = (  # that are not of transformers' `generate`
    "prefix",
    "truncation",
    "src_lang",
    "tgt_lang",
    "clean_up_tokenization_spaces",
    "stop_sequence",
    "seed",
    "return_text",
    "return_tensors",
    "num_workers",  # that prepare texts elsewhere; here it means nothing
)
SAME_LENGTH = {  # names of one limit: a later one takes the place of an earlier
    "max_length": "max_new_tokens",
    "max_new_tokens": "max_length",
    "min_length": "min_new_tokens",
    "min_new_tokens": "min_length",
}


def pipeline(
    task: str,
    model: str | Path | SpeculativeDecoder | None = None,
    *,
    draft: str | Path | EllipsisType | None = ...,
    tokenizer: Tokenizer | None = None,
    device: int | str | None = None,
    dtype: mx.Dtype | str | None = None,
    batch_size: int | None = None,
    **defaults: Any,
) -> TextPipeline:
    """Return a pipeline by its name in transformers 4.

    Args:
        task: "summarization", "translation", "translation_xx_to_yy" with two languages, or
            "text2text-generation".
        model: A name or folder, as `load` takes it, or a decoder.
        draft: As for `SpeculativeDecoder.from_pretrained`; not beside a decoder.
        tokenizer: That of the model, if not its own.
        device: "cpu" or -1, "mps", "cuda" or a number, only to check that MLX computes there.
        dtype: As for `load`.
        batch_size: Texts to decode side by side; None is 16.
        defaults: Options of calls, see `TextPipeline`.

    Raises:
        ValueError: If there is no such task or model, or an option is not offered.
    """
    kind = "translation" if TRANSLATION_TASK.fullmatch(task) else task
    if kind not in TASKS:
        known = ", ".join(map(repr, [*TASKS, "translation_en_to_de"]))
        raise ValueError(f"there is no pipeline for the task {task!r}: choose one of {known}")
    if model is None:
        raise ValueError("a pipeline has no model of its own: give one, such as google-t5/t5-base")
    check_device(device)
    if isinstance(model, SpeculativeDecoder):
        if draft is not ... or dtype is not None:
            raise ValueError("a decoder has its draft and type: leave draft and dtype out")
        decoder, settings = model, {}
    else:
        folder = locate(model)
        task = task_of(folder, task)
        decoder = SpeculativeDecoder.from_pretrained(model, draft, dtype=dtype)
        settings = settings_of(folder, task)
    if tokenizer is not None:
        decoder = with_tokenizer(decoder, tokenizer)
    return TextPipeline(task, decoder, settings, batch_size, defaults)


def with_tokenizer(decoder: SpeculativeDecoder, tokenizer: Tokenizer) -> SpeculativeDecoder:
    """Return a decoder that drafts and verifies alike, and reads texts by another tokenizer."""
    other = copy.copy(decoder)
    other.engine = copy.copy(decoder.engine)
    other.engine.tokenizer = tokenizer
    other.prompts = replace(decoder.prompts, tokenizer=tokenizer)
    return other


def task_of(folder: ModelFolder, task: str) -> str:
    """Return a task; for "translation" the first pair of languages that a checkpoint has."""
    tasks = folder.config.get("task_specific_params")
    named = [*filter(TRANSLATION_TASK.fullmatch, tasks)] if isinstance(tasks, dict) else []
    return named[0] if task == "translation" and named else task


def settings_of(folder: ModelFolder, task: str) -> dict[str, Any]:
    """Return what a checkpoint's files say of a task, by transformers' names."""
    tasks = folder.config.get("task_specific_params")
    own = tasks.get(task) if isinstance(tasks, dict) else None
    general = folder.generation_config
    found = {name: general[name] for name in general if name in KNOWN_SETTINGS}
    if isinstance(prefix := folder.config.get("prefix"), str):
        found["prefix"] = prefix
    return merged(found, own if isinstance(own, dict) else {})


def check_device(device: int | str | None) -> None:
    """Refuse a device other than the one that MLX computes on."""
    if device is None:
        return
    wants_cpu = device == -1 or str(device) == "cpu"
    if wants_cpu != devices.on_cpu():
        here = "the CPU" if devices.on_cpu() else "a GPU"
        raise ValueError(
            f"device is {device!r}, and MLX computes on {here}: leave it out, or set "
            "SPECULATIVE_T5_DEVICE=cpu before Python starts"
        )


def merged(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of which later ones win, a length over the same one by its other name."""
    found: dict[str, Any] = {}
    for layer in layers:
        for name, value in layer.items():
            if value is not None:
                found.pop(SAME_LENGTH.get(name, ""), None)
                found[name] = value
    return found


@dataclass(frozen=True)
class NamedModel:
    """What a pipeline's model is known by."""

    name_or_path: str


class TextPipeline:
    """Makes texts of texts, as transformers 4's pipelines did.

    Calls take one text, a list, or any iterable (a generator, a dataset): a text and an iterable
    give a list of records for each text, with as many as `num_return_sequences`; a list of texts
    with one output each gives a list of records. An iterable is read a batch at a time, as its
    results are.

    Options are those of transformers' `generate` that `SpeculativeDecoder.generate` has, by
    transformers' names: `max_length` and `min_length` count the decoder's start token, `do_sample`
    samples (at temperature 1 among the 50 best if nothing else is said), `seed` is ours. Besides:
    `truncation` cuts texts that are longer than the model is made for, `prefix`, `src_lang` and
    `tgt_lang`, `clean_up_tokenization_spaces`.
    """

    def __init__(
        self,
        task: str,
        decoder: SpeculativeDecoder,
        settings: Mapping[str, Any],
        batch_size: int | None,
        defaults: Mapping[str, Any],
    ) -> None:
        self.task, self.decoder, self.batch_size = task, decoder, batch_size
        kind = "translation" if TRANSLATION_TASK.fullmatch(task) else task
        self.return_name = TASKS[kind]  # the key of records
        self._settings = dict(settings)
        self._defaults = self._checked(defaults)
        self._runner(self._defaults)  # refused at once

    @property
    def model(self) -> NamedModel:
        """The name of the model, which programs over pipelines ask for; `decoder` has the model."""
        return NamedModel(getattr(self.decoder.model, "name", None) or "")

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the model."""
        return self.decoder.tokenizer

    def __call__(
        self,
        inputs: str | Sequence[str] | Iterable[str],
        *,
        batch_size: int | None = None,
        **options: Any,
    ) -> list[TextRecord] | list[list[TextRecord]] | Iterator[list[TextRecord]]:
        """Return records of what is generated; for errors see `SpeculativeDecoder.generate`."""
        runner = self._runner(merged(self._defaults, self._checked(options)))
        size = batch_size if batch_size is not None else self.batch_size
        if isinstance(inputs, str):
            return runner.records([inputs], size)[0]
        if not isinstance(inputs, list):
            return runner.iterate(iterable_of(inputs), size)
        for each in inputs:
            check_text(each)
        found = runner.records(inputs, size) if inputs else []
        is_single = all(len(records) == 1 for records in found)
        return [records[0] for records in found] if is_single else found

    def _checked(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return options; refuse unknown ones, and those that have no meaning here."""
        if options.get("return_tensors"):
            raise ValueError("return_tensors is not offered: use SpeculativeDecoder for ids")
        known = (*KNOWN_SETTINGS, *OWN_OPTIONS)
        for name in options:
            if name not in known:
                near = get_close_matches(name, known, 1, cutoff=0.8)
                advice = f"write {near[0]} if you meant that" if near else "leave it out"
                raise ValueError(f"the pipeline {self.task} has no option {name!r}: {advice}")
        return dict(options)

    def _runner(self, given: Mapping[str, Any]) -> Runner:
        """Return what makes records with options; refuse wrong ones."""
        options = merged(self._settings, given)
        own = {name: options.pop(name, None) for name in OWN_OPTIONS}
        keywords = settings_as_options(options, "the pipeline is asked for", "leave it out")
        for name, ours in (("seed", "seed"), ("stop_sequence", "stop")):
            if own[name] is not None:
                keywords[ours] = own[name]
        decoder = self._reading(own)
        decoder.check_batch(BatchOptions(**keywords))
        cleans_up = bool(own["clean_up_tokenization_spaces"])
        return Runner(decoder, keywords, self.return_name, cleans_up, bool(own["truncation"]))

    def _reading(self, own: Mapping[str, Any]) -> SpeculativeDecoder:
        """Return the decoder with texts read as asked."""
        decoder = copy.copy(self.decoder)  # with the same engine
        source, target, prefix = own["src_lang"], own["tgt_lang"], own["prefix"]
        named = TRANSLATION_TASK.fullmatch(self.task)
        if named and source is None and target is None and prefix is None:
            source, target = named.groups()
        prompts = decoder.prompts
        if target is not None:
            prompts = prompts.translating(target, source)
        elif prefix is not None:
            prompts = replace(prompts, prefix=prefix, to=None, from_=None)
        cuts = bool(own["truncation"])
        decoder.prompts = replace(
            prompts,
            prefix=prompts.prefix,
            to=None,
            from_=None,
            truncate=cuts,
            max_source_length=None if cuts else ANY_LENGTH,
        )
        return decoder


@dataclass(frozen=True)
class Runner:
    """Makes records of texts with the options of one call."""

    decoder: SpeculativeDecoder
    keywords: Mapping[str, Any]  # of `generate_batch`
    return_name: str
    cleans_up: bool
    cuts: bool

    def records(self, texts: Sequence[str], batch_size: int | None) -> list[list[TextRecord]]:
        """Return the records of each text."""
        sources = [self.ids(text) for text in texts]
        outputs = self.decoder.generate_batch(sources, batch_size=batch_size, **self.keywords)
        return [[self.record(each) for each in (out, *out.alternatives)] for out in outputs]

    def iterate(self, texts: Iterable[str], batch_size: int | None) -> Iterator[list[TextRecord]]:
        """Yield the records of each text, reading as many as are decoded side by side."""
        waiting = iter(texts)
        while group := list(islice(waiting, batch_size or USUAL_BATCH_SIZE)):
            for each in group:
                check_text(each)
            yield from self.records(group, batch_size)

    def ids(self, text: str) -> list[int]:
        """Return the ids of a text, which may be empty; warn if it is longer than the model."""
        prompts = self.decoder.prompts
        if not text.strip() and prompts.tokenizer is not None:
            return prompts.tokenizer.encode((prompts.prefix or "") + text)
        found, limit = self.decoder.fit(text).ids, self.decoder.model.info.max_source_length
        if len(found) > limit and not self.cuts:
            warnings.warn(
                f"a text has {len(found)} tokens, more than the {limit} that the model is made "
                "for: set truncation=True to cut it, or use rewrite for long texts",
                stacklevel=5,
            )
        return found

    def record(self, output: Generation) -> TextRecord:
        """Return an output's record; sentinels and other special tokens have no text."""
        tokenizer = self.decoder.tokenizer
        assert tokenizer is not None  # or there would have been no ids
        special = tokenizer.vocabulary.special
        text = tokenizer.decode([token for token in output.tokens if token not in special])
        return {self.return_name: clean_up(text) if self.cleans_up else text}


def check_text(value: object) -> None:
    """Refuse what is no text."""
    if not isinstance(value, str):
        raise ValueError(f"inputs must be texts, got {shown(value)}: give texts")


def iterable_of(inputs: object) -> Iterable[str]:
    """Return texts to iterate over: of an iterable, or of a dataset with a length."""
    dataset: Any = inputs
    if not isinstance(inputs, bytes | Mapping | tuple):
        if isinstance(inputs, Iterable):
            return inputs
        if hasattr(inputs, "__getitem__") and hasattr(inputs, "__len__"):
            return (dataset[i] for i in range(len(dataset)))
    raise ValueError(
        f"inputs must be a text, a list of texts or an iterable, got {shown(inputs)}: give a text"
    )
