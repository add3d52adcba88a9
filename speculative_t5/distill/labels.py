"""Has the target label prompts, chunk by chunk, and groups labels into batches."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from ..decoding import LanguageModel, in_order_of_length
from ..files import LineFile, json_line, json_object
from ..generation import GenerationOptions, SpeculativeDecoder
from ..models import EncoderDecoder, additive
from ..options import check_integer
from .data import Example


@dataclass(frozen=True)
class Label:
    """An output to learn."""

    line: int  # the number of the prompt's line in its file, from 1
    prompt: list[int]  # source ids, EOS included
    tokens: list[int]  # target ids; EOS is the last unless `max_tokens` cut the output


def label(
    target: LanguageModel,
    examples: Sequence[Example],
    path: Path,
    *,
    max_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    batch_size: int = 16,
    chunk: int = 256,
    enough: Callable[[list[Label]], bool] = lambda labels: False,
    progress: Callable[[int, int], None] = lambda examples, tokens: None,
) -> list[Label]:
    """Label examples, in their order, and return the labels.

    An example's completion is its label; without one the target generates it. A sampled label
    depends on its place among the examples and the seed. The file at `path` gets a line of JSON
    for each; a line that is not the label of its example is refused. Each chunk is decoded by
    itself and synced with the disk, and whole chunks are kept, so that a killed run that is
    resumed, with the same options, gives the same bytes.

    `enough` takes all labels so far, after each chunk, and True ends the labelling. `progress`
    takes the numbers of examples labelled so far and of tokens in their labels, at the start and as
    each output ends.
    """
    # What was allowed in the data may be longer than the target was made for.
    longest = max((len(example.prompt) for example in examples), default=0)
    decoder = SpeculativeDecoder(target, max_source_length=max(longest, 2))
    options = GenerationOptions(max_tokens=max_tokens, temperature=temperature, seed=seed)
    check_integer("batch_size", batch_size, 1)
    decoder.engine.check(options)  # refused, if they are, before the file is made
    with LineFile(path) as file:
        labels = _whole_chunks(file, path, examples, chunk)
        tokens = sum(len(known.tokens) for known in labels)
        progress(len(labels), tokens)
        while len(labels) < len(examples) and not (labels and enough(labels)):
            first = len(labels)
            part = dict(enumerate(examples[first : first + chunk], first))
            found: dict[int, list[int]] = {}
            for index, output in _outputs(decoder, part, options, batch_size):
                found[index] = output
                tokens += len(output)
                progress(first + len(found), tokens)
            new = [Label(e.line, e.prompt, found[i]) for i, e in part.items()]
            file.append_bytes(b"".join(json_line(vars(each)) for each in new), sync=True)
            labels += new
        return labels


def _outputs(
    decoder: SpeculativeDecoder,
    part: Mapping[int, Example],
    options: GenerationOptions,
    batch_size: int,
) -> Iterator[tuple[int, list[int]]]:
    """Yield index and output of each example of a chunk, EOS included, as they end."""
    wanted = []
    for index, example in part.items():
        if example.completion is None:
            wanted.append((index, example.prompt))
        else:
            yield index, example.completion
    # Rows of similar length pad less; the order within a chunk is the same in a resumed run.
    for done in decoder.engine.rounds(in_order_of_length(wanted, len(part)), options, batch_size):
        if done.finish_reason:
            end = [] if done.end_id is None else [done.end_id]
            yield done.index, done.output + end


def _whole_chunks(
    file: LineFile, path: Path, examples: Sequence[Example], chunk: int
) -> list[Label]:
    """Read the labels of whole chunks, and cut off the rest, which a killed run may have left."""
    labels: list[Label] = []
    size = kept = end = 0
    for raw, example in zip(file.lines(), examples, strict=False):
        if not raw.endswith(b"\n"):
            break
        found = json_object(raw)
        label = Label(example.line, example.prompt, found.get("tokens", []))
        if found != vars(label):
            raise ValueError(
                f"{path}, line {len(labels) + 1}, is not a label of line {example.line} of the "
                "data: delete the file to label again, or move it"
            )
        labels.append(label)
        size += len(raw)
        if len(labels) % chunk == 0 or len(labels) == len(examples):
            kept, end = len(labels), size
    file.cut(end)
    return labels[:kept]


@dataclass(frozen=True)
class LabelBatch:
    """Labelled prompts, encoded and padded."""

    memory: mx.array  # the encoder's output, (B, S, d_model) in the target's type
    mask: mx.array  # what to add to attention's scores, (B, 1, 1, S)
    # What the decoder reads, the start token and then all labels but the last, (B, L) int32.
    fed: mx.array
    # The tokens and masks, as in `block_places`, that a label follows: indices of the flattened
    # (B * M * L,) array, (P,) int32.
    positions: mx.array
    labels: mx.array  # the token that each of these is to predict, (P,) int32
    # The token before each label, as an index of the flattened `fed`, (B * L,), (P,) int32.
    before: mx.array


def make_batch(examples: Sequence[Label], target: EncoderDecoder, block: int = 1) -> LabelBatch:
    """Encode examples and pad them to one batch, for a draft with blocks of M tokens."""
    start, pad = target.config.decoder_start_token_id, target.config.pad_token_id

    def padded(rows: Sequence[list[int]], width: int) -> mx.array:
        return mx.array([row + [pad] * (width - len(row)) for row in rows], dtype=mx.int32)

    sources = [example.prompt for example in examples]
    fed = [[start, *example.tokens[:-1]] for example in examples]
    width, length = max(map(len, sources)), max(map(len, fed))
    real = mx.array([len(ids) for ids in sources])[:, None] > mx.arange(width)
    mask = additive(real, target.dtype)
    memory = target.encode(padded(sources, width), mask)
    mx.eval(memory)
    # By example, part of the block and place of the token.
    predicted = [
        ((row * block + part) * length + i, tokens[i + part], row * length + i + part)
        for row, tokens in enumerate(example.tokens for example in examples)
        for part in range(block)
        for i in range(len(tokens) - part)
    ]
    columns = (mx.array(column, dtype=mx.int32) for column in zip(*predicted, strict=True))
    return LabelBatch(memory, mask, padded(fed, length), *columns)


def group(examples: Sequence[Label], batch_tokens: int) -> list[list[Label]]:
    """Group examples of similar length, at most `batch_tokens` tokens a group, padding included.

    An example that has more makes a group of its own.
    """
    groups: list[list[Label]] = []
    width = length = 0
    for example in sorted(examples, key=lambda e: (len(e.prompt), len(e.tokens), e.line)):
        width, length = max(width, len(example.prompt)), max(length, len(example.tokens))
        if not groups or (len(groups[-1]) + 1) * (width + length) > batch_tokens:
            groups.append([])
            width, length = len(example.prompt), len(example.tokens)
        groups[-1].append(example)
    return groups


def shuffled(count: int, seed: int, first: int = 0) -> Iterator[int]:
    """Yield the numbers below `count` in random order, again and again, from place `first` on.

    The order depends on the seed only, so that a run can be resumed anywhere.
    """
    epoch, place = divmod(first, count)
    while True:
        yield from random.Random(f"{seed} {epoch}").sample(range(count), count)[place:]
        epoch, place = epoch + 1, 0
