"""`Generate`: a decoder as a function from rows to more columns, for Ray Data and Spark.

Nothing of either is imported here: both call any function of a batch.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..decoding import RowError
from ..errors import check_utf8, shown
from ..generation import (
    BatchOptions,
    Generation,
    LoadingOptions,
    SpeculativeDecoder,
    as_outcome,
    num_rows,
    outcome_of,
)
from ..options import (
    OptionError,
    check_integer,
    described,
    option_error,
    python_option,
    takes,
)
from ..tables import pyarrow
from .options import WorkerOptions

EXACT = 2**53  # floats below it tell all integers apart
COUNTS = ("tokens", "rounds", "drafted", "accepted")  # statistics that are integers
RATES = ("acceptance_rate", "tokens_per_round")  # and those that are not

_loading = threading.Lock()  # of the process: a lock of its own would not let an object be pickled


@described
@dataclass(frozen=True, kw_only=True)
class GenerateOptions(BatchOptions, WorkerOptions):
    """The options of `Generate`: its columns, and those of a decoder and of its outputs."""

    column: str = python_option("prompt", "The column of prompts, which are text.")
    id_column: str | None = python_option(
        None,
        "The column of each row's number, an integer of at least 0, which sampling needs: row i "
        "samples as line i + 1 of the command `batch`, in any batch and on any worker.",
    )
    column_prefix: str = python_option(
        "", "Text to put before the names of the columns that are added."
    )

    def __post_init__(self) -> None:
        WorkerOptions.__post_init__(self)
        BatchOptions.__post_init__(self)
        for name in ("column", "column_prefix", "id_column"):
            value = getattr(self, name)
            if not isinstance(value, str) and not (name == "id_column" and value is None):
                raise option_error(name, "text", value)
            check_utf8(name, value or "")
        num_rows(self.batch_size, steady=self.steady)
        if self.temperature > 0 and self.id_column is None:
            raise OptionError(
                "{temperature} is {}, and what a row samples depends on its number: give the "
                "{id_column} that numbers the rows",
                self.temperature,
            )


class Generate:
    """Generates an output for each row of a batch: a callable for Ray Data's `map_batches`.

    Making one checks its options, which are all that a pickle holds. The first batch loads the
    models, once in each worker: one that cannot be loaded then ends a job with the reason, while
    Ray takes whatever fails as a worker is made for a failure of its own.

    Raises:
        ValueError: If an option is out of its range, or rows are to be sampled without numbers.
    """

    @takes(GenerateOptions)
    def __init__(self, model: str | Path, options: GenerateOptions) -> None:
        """Take the name or folder of the target, as `load` does; workers look it up."""
        if not isinstance(model, str | Path) or not str(model):
            raise ValueError(f"model must be a name or a folder, got {model!r}")
        self._model, self._options = model, options
        self._outcome = outcome_of(options.of(BatchOptions), truncate=options.truncate)
        self._check_free(filter(None, (options.column, options.id_column)))
        self._decoder: SpeculativeDecoder | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_decoder": None}

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns that are added; they depend on the options alone."""
        return tuple(self._options.column_prefix + name for name in self._outcome)

    @property
    def decoder(self) -> SpeculativeDecoder:
        """The decoder of this process, which the first use loads."""
        with _loading:
            if self._decoder is None:
                keywords = self._options.of(LoadingOptions)
                made = SpeculativeDecoder.from_pretrained(self._model, **keywords)
                made.check_batch(BatchOptions(**self._options.of(BatchOptions)))
                self._decoder = made
            return self._decoder

    def __call__(self, batch: Any) -> Any:
        """Return a batch with all its columns, and behind them those of the outputs.

        A batch is a table of pyarrow, whose new columns have the same types whatever the rows, a
        dict of NumPy arrays, or a table of pandas; the same is returned. The columns that are added
        are the fields of a record of the command `batch`:

        - `text` and `finish_reason`, and `score` with `scores` or a beam search.
        - `truncated`, with `truncate`: whether the prompt was too long and was cut.
        - `alternatives`, with `num_return_sequences`: a list of the further outputs.
        - `stats`: the numbers of tokens, rounds, drafted and accepted tokens, and two rates.
        - `error`: why a row has no output, and nulls in the columns before it; null for others.

        Raises:
            ValueError: If the batch lacks a column, or has one that would be added; if two rows
                have one number, or a number is wrong; if the models cannot be loaded, or do not go
                with the options.
        """
        self._check_free(names_of(batch))
        options = self._options
        prompts = values_of(batch, options.column, "column")
        ids: Sequence[int] = range(len(prompts))
        if options.id_column is not None:
            ids = as_ids(values_of(batch, options.id_column, "id_column"))
        rows = self._outcomes(dict(zip(ids, prompts, strict=True)))
        added = {name: [rows[index].get(name) for index in ids] for name in self._outcome}
        columns = dict(zip(self.columns, added.items(), strict=True))
        if hasattr(batch, "append_column"):
            for column, (name, values) in columns.items():
                array = pyarrow().array(values, self._type_of(name))
                batch = batch.append_column(column, array)
            return batch
        arrays = {column: as_array(values) for column, (_, values) in columns.items()}
        return {**batch, **arrays} if isinstance(batch, Mapping) else batch.assign(**arrays)

    def _check_free(self, names: Iterable[str]) -> None:
        if taken := [name for name in names if name in self.columns]:
            raise ValueError(
                f"the rows already have a column {taken[0]!r}, which an output would replace: give "
                "a column_prefix for the names of new columns"
            )

    def _outcomes(self, prompts: Mapping[int, Any]) -> dict[int, dict[str, Any]]:
        """Return what the outcome of each prompt is, by its number; models need not be loaded."""
        found: dict[int, dict[str, Any]] = {}
        if not prompts:
            return found
        decoder, sources = self.decoder, {}  # what loading raises is no error of a row
        for index, prompt in prompts.items():
            try:
                sources[index] = decoder.fit(prompt)
            except ValueError as error:
                found[index] = {"error": str(error)}
        while waiting := [(i, source.ids) for i, source in sources.items() if i not in found]:
            try:
                for index, done in decoder.iter_batch(waiting, **self._options.of(BatchOptions)):
                    found[index] = self._outcome_of(done, sources[index].cut > 0)
            except RowError as error:  # which ends those beside it: they are decoded again
                found[error.index] = {"error": error.reason}
        return found

    def _outcome_of(self, done: Generation, truncated: bool) -> dict[str, Any]:
        none = {"truncated": False, "alternatives": []}  # a record leaves them out
        return none | as_outcome(done, truncated=truncated)

    def _type_of(self, name: str) -> Any:
        """Return pyarrow's type of a column, which depends on nothing but its name."""
        types = pyarrow()
        if name == "alternatives":
            parts = [part for part in self._outcome if part in ("text", "finish_reason", "score")]
            return types.list_(types.struct([(part, self._type_of(part)) for part in parts]))
        if name == "stats":
            counts = [(part, types.int64()) for part in COUNTS]
            return types.struct(counts + [(part, types.float64()) for part in RATES])
        kinds = {"score": types.float64(), "truncated": types.bool_()}
        return kinds.get(name, types.string())


def names_of(batch: Any) -> list[str]:
    """Return the names of a batch's columns; refuse what is no batch."""
    if isinstance(batch, Mapping):
        return [*batch]
    for names in ("column_names", "columns"):  # of pyarrow's tables, and of pandas's
        if hasattr(batch, names):
            return [*getattr(batch, names)]
    raise ValueError(
        "a batch must be a dict of NumPy arrays, or a table of pyarrow or pandas, got "
        f"{type(batch).__name__}"
    )


def values_of(batch: Any, name: str, option: str) -> list[Any]:
    """Return the values of a column, which an option names, as Python's own."""
    names = names_of(batch)
    if name not in names:
        there = ", ".join(map(shown, names)) or "none"
        raise ValueError(
            f"the rows have no column {name!r}, only {there}: give one of them as {option}"
        )
    column = batch[name]
    convert = getattr(column, "to_pylist", None) or getattr(column, "tolist", None)
    return list(convert() if convert else column)


def as_ids(values: Sequence[Any]) -> list[int]:
    """Return the numbers of rows, of which NumPy makes floats where some are null."""
    found = [
        check_integer(
            "the number of a row",
            int(each) if isinstance(each, float) and each == each // 1 < EXACT else each,
            0,
        )
        for each in values
    ]
    if len({*found}) < len(found):
        [(twice, _)] = Counter(found).most_common(1)
        raise ValueError(f"two rows have the number {twice}: give each its own")
    return found


def as_array(values: Sequence[Any]) -> np.ndarray:
    """Return values of any kind as an array (N,) of objects."""
    array = np.empty(len(values), object)
    for place, value in enumerate(values):  # at once, lists would become rows
        array[place] = value
    return array
