"""`Generator`: a decoder as a function from columns to more columns, for Ray Data and Spark.

Nothing of Ray or Spark is imported here: both call any function of a batch. Imports `generation`,
`checkpoints` and the packages below them, and pyarrow where a batch is one of its tables.
"""

import inspect
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from .checkpoints import as_dtype, dtype_name
from .errors import check_integer, check_utf8, shown
from .generation import DraftingOptions, GenerationOptions, SpeculativeDecoder, as_record
from .tokenizers import Source

COUNTS = {"tokens": "emitted", "rounds": "rounds", "drafted": "drafted", "accepted": "accepted"}
# What a row has without an output, in the order of the columns; and the types of numbers.
NO_OUTPUT: dict[str, Any] = {
    "text": None, "finish_reason": None, "score": None, "truncated": False, "alternatives": [],
    **dict.fromkeys(COUNTS, 0), "error": None,
}  # fmt: skip
KINDS = {"score": float, "truncated": bool} | dict.fromkeys(COUNTS, int)
OF_RECORDS = ("text", "finish_reason", "score")  # of which alternatives consist
EXACT = 2**53  # floats below it tell all integers apart

_loading = threading.Lock()  # of the process: a generator with one of its own could not be pickled

DRAFTING = [each.name for each in fields(DraftingOptions)]
DECODING = {*inspect.signature(SpeculativeDecoder.from_pretrained).parameters}
DECODING -= {"model", "draft", "group"}


class Generator:
    """Generates an output for each row of a batch: a callable for Ray Data's `map_batches`.

    Making one only checks its options, which are all that a pickle holds. The first batch loads the
    models: one that cannot be loaded then ends a job with the reason, while Ray takes whatever
    fails as an actor is made for a failure of its own.

    Args:
        model: The target, by its path or name, see `load`. Workers look it up where they run.
        draft: A draft model in the same way; "lookup" to copy from the prompt; None for none.
        prompt_column: The column of prompts, which are text.
        index_column: The column of each row's index, an integer of at least 0, which sampling
            needs: index i samples as line i + 1 of the command `batch`, wherever it is computed.
        column_prefix: Put before the names of all columns that are added.
        batch_size: Rows to decode side by side, as in `iter_batch`. Batches may have any size.
        options: Those of `SpeculativeDecoder.from_pretrained`, except `group`, and of `generate`,
            except `probabilities` and `progress`.

    Raises:
        ValueError: If an option is out of its range, or rows are to be sampled without an index.
        TypeError: If there is no such option.
    """

    def __init__(
        self,
        model: str | Path,
        draft: str | Path | None = None,
        *,
        prompt_column: str = "prompt",
        index_column: str | None = None,
        column_prefix: str = "",
        batch_size: int | None = None,
        **options: Any,
    ) -> None:
        for name, value in (("model", model), ("draft", draft or "none")):
            if not isinstance(value, str | Path) or not str(value):
                raise ValueError(f"{name} must be given by its name or path, got {value!r}")
        self._inputs = {"prompt_column": prompt_column}
        if index_column is not None:
            self._inputs["index_column"] = index_column
        for name, text in (self._inputs | {"column_prefix": column_prefix}).items():
            if not isinstance(text, str):
                raise ValueError(f"{name} must be a string, got {text!r}")
            check_utf8(name, text)
        decoding = {name: value for name, value in options.items() if name in DECODING}
        generation = {name: value for name, value in options.items() if name not in DECODING}
        drafting = {name: decoding[name] for name in DRAFTING if name in decoding}
        self._rows = DraftingOptions(**drafting).rows(batch_size)
        chosen = GenerationOptions(**generation)
        self._is_sampled = chosen.temperature > 0
        if self._is_sampled and index_column is None:
            raise ValueError(
                f"temperature is {chosen.temperature} and no index_column is given, and what a row "
                "samples depends on its index: name a column of integers that number the rows"
            )
        if (dtype := as_dtype(decoding.get("dtype"))) is not None:
            decoding["dtype"] = dtype_name(dtype)  # MLX's types cannot be pickled
        self._model, self._draft = model, draft
        self._decoding, self._generation = decoding, generation
        self._max_tokens = chosen.max_tokens
        optional = {
            "score": chosen.scores,
            "truncated": decoding.get("truncate", False),
            "alternatives": chosen.num_return_sequences > 1,
        }
        names = [name for name in NO_OUTPUT if optional.get(name, True)]
        self._added = {column_prefix + name: name for name in names}
        self._check_names(self._inputs.values())
        self._decoder: SpeculativeDecoder | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_decoder": None}

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns that are added; they depend on the options alone."""
        return tuple(self._added)

    @property
    def decoder(self) -> SpeculativeDecoder:
        """The decoder of this process, which the first use loads."""
        with _loading:
            if self._decoder is None:
                made = SpeculativeDecoder.from_pretrained(
                    self._model, self._draft, **self._decoding
                )
                made.iter_batch([], **self._generation)  # checks the options with these models
                self._decoder = made
            return self._decoder

    def __call__(self, batch: Any) -> Any:
        """Return a batch with all its columns, and those of the outputs behind them.

        A batch of NumPy arrays, a dict, gives such a dict; a table of pyarrow gives a table, whose
        types are the same for every batch. (Ray chooses those of arrays by their values.)

        The columns that are added:

        - `text` and `finish_reason`, and `score` with `scores`; null where there is an error (a
          score is NaN in an array).
        - `truncated`, with `truncate`: whether the prompt was too long and was cut.
        - `alternatives`, with `num_return_sequences`: a list of further outputs, each with its
          text, finish_reason and score.
        - `tokens`, `rounds`, `drafted`, `accepted`: int64, 0 where there is an error.
        - `error`: why a row has no output; null for all others.

        Raises:
            ValueError: If the batch lacks a column, or has one that would be added; or if the
                models cannot be loaded, or do not go with the options.
        """
        is_table = not isinstance(batch, Mapping)
        if is_table and not hasattr(batch, "append_column"):
            raise ValueError(
                "a batch must be a dict of NumPy arrays or a table of pyarrow (batch_format "
                f"'numpy' or 'pyarrow'), got {type(batch).__name__}"
            )
        found = batch.column_names if is_table else list(batch)
        for option, name in self._inputs.items():
            if name not in found:
                names = ", ".join(map(shown, found)) or "none"
                raise ValueError(
                    f"the rows have no column {name!r}, only {names}: give one of them as {option}"
                )
        self._check_names(found)
        values = _listed(batch[self._inputs["prompt_column"]])
        indices: Sequence[Any] = range(len(values))
        if self._is_sampled:
            indices = _listed(batch[self._inputs["index_column"]])
        rows = self._decode(values, indices)
        if not is_table:
            added = {column: _array(name, rows) for column, name in self._added.items()}
            return dict(batch) | added
        import pyarrow

        for column, name in self._added.items():
            values = [row[name] for row in rows]
            batch = batch.append_column(column, pyarrow.array(values, self._type_of(name)))
        return batch

    def _check_names(self, found: Collection[str]) -> None:
        for name in self.columns:
            if name in found:
                raise ValueError(
                    f"the rows already have a column {name!r}, which an output would replace: give "
                    "a column_prefix for the names of new columns"
                )

    def _decode(self, values: Sequence[Any], indices: Sequence[Any]) -> list[dict[str, Any]]:
        """Return each row's values by `NO_OUTPUT`'s names."""
        if not values:
            return []
        decoder = self.decoder  # what it may raise is no error of a row
        rows = [NO_OUTPUT] * len(values)
        # Outputs come by index, so of rows with the same one only the first is in the first pass.
        passes: list[dict[int, tuple[int, Source]]] = []
        for place, (value, index) in enumerate(zip(values, indices, strict=True)):
            try:
                number = _as_index(index)
                if not isinstance(value, str):
                    raise ValueError(f"a prompt must be text, got {shown(value)}")
                source = decoder.fit(value, self._max_tokens)
            except ValueError as error:
                rows[place] = NO_OUTPUT | {"error": str(error)}
                continue
            free = (requests for requests in passes if number not in requests)
            if (requests := next(free, None)) is None:
                passes.append(requests := {})
            requests[number] = place, source
        for requests in passes:
            sources = ((number, source.ids) for number, (_, source) in requests.items())
            outputs = decoder.iter_batch(sources, batch_size=self._rows, **self._generation)
            for number, done in outputs:
                place, source = requests[number]
                rows[place] = {
                    **NO_OUTPUT,
                    **as_record(done),
                    **{name: getattr(done.stats, of) for name, of in COUNTS.items()},
                    "truncated": source.cut > 0,
                    "alternatives": [as_record(each) for each in done.alternatives],
                }
        return rows

    def _type_of(self, name: str) -> Any:
        """Return pyarrow's type of a column, which depends on nothing but its name."""
        import pyarrow

        if name == "alternatives":
            parts = [part for part in self._added.values() if part in OF_RECORDS]
            return pyarrow.list_(pyarrow.struct([(part, self._type_of(part)) for part in parts]))
        return pyarrow.from_numpy_dtype(KINDS[name]) if name in KINDS else pyarrow.string()


def _listed(column: Any) -> list[Any]:
    """Return a column's values as Python's own."""
    convert = getattr(column, "tolist", None) or getattr(column, "to_pylist", None)
    return convert() if convert else list(column)


def _as_index(value: Any) -> int:
    """Return a row's index; NumPy makes floats of integers where some are null."""
    if isinstance(value, float) and value.is_integer() and abs(value) < EXACT:
        value = int(value)
    return check_integer("a row's index", value, 0)


def _array(name: str, rows: Sequence[Mapping[str, Any]]) -> np.ndarray:
    array = np.empty(len(rows), KINDS.get(name, object))
    for place, row in enumerate(rows):
        array[place] = row[name]  # of None, a float array makes NaN
    return array
