"""Steady passes: how wide they must be for every row to be computed alike."""

import random
from itertools import count

import mlx.core as mx

from .. import device
from ..decoding import LanguageModel
from ..models import capacity_for

ROW_BLOCKS = (1, 4, 8, 16)  # of rows that kernels compute at a time
MAX_WIDTH = 128  # so that some capacity holds all the positions that are compared
FAR_POSITION = 256  # position in a text beyond which rows are compared again on GPUs


def steady_width(model: LanguageModel, length: int) -> int:
    """Return the width for steady passes over up to `length` tokens.

    A kernel may compute some rows of a product differently from others, such as those left over
    after blocks of eight. Which widths are free of that depends on the device, the type and the
    model's shapes, and is found by trying: first `length` and the next multiples of 4, 8 and 16;
    then 16, 8, 4 and 1, if less than `length`, for which a pass is divided. 1 always serves.
    """
    wider = {-(-length // block) * block for block in ROW_BLOCKS}
    narrower = [block for block in reversed(ROW_BLOCKS) if block < length]
    starts = (0,) if device.on_cpu() else (0, FAR_POSITION)
    with device.turn():
        return next(
            width
            for width in [*sorted(wider), *narrower]
            if all(rows_are_alike(model, width, start) for start in starts)
        )


def rows_are_alike(model: LanguageModel, width: int, start: int = 0) -> bool:
    """Whether a position's logits have the same bits in every row of a pass of `width` positions.

    All passes tried begin at `start` or later, where the cache keeps one capacity throughout. The
    ids are the same in every run. Widths above `MAX_WIDTH` are not tried.
    """
    if width > MAX_WIDTH:
        return False
    rng = random.Random(0)
    prompt = [*rng.choices(range(model.info.vocab_size), k=7), model.info.eos_token_id]
    session, (context,) = model.start([prompt], width=width)
    begin = session.lengths[0]
    # The first position from which 2 * width - 1 positions have the same capacity.
    start = next(
        n
        for n in count(max(begin, start))
        if capacity_for(n + width) == capacity_for(n + 3 * width - 2)
    )
    more = rng.choices(range(model.info.vocab_size), k=start + 2 * width)
    tokens = mx.array([[context[-1], *more]], dtype=mx.int32)  # from position `begin` on
    if start > begin:
        session.step(tokens[:, : start - begin])
    first = None
    for offset in range(width):  # `start + width - 1` is the pass's last row, then the one before
        session.truncate([start + offset])
        fed = start + offset - begin
        logits = session.step(tokens[:, fed : fed + width])[:, width - 1 - offset]
        if first is None:
            first = logits
        elif not mx.array_equal(first, logits, equal_nan=True).item():
            return False
    return True
