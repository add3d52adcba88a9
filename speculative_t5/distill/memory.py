"""How much memory training takes, estimated before it begins."""

from __future__ import annotations

from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..models import SharingDraft
from .losses import LOGITS, needs_target
from .options import DistillOptions

# Numbers of 4 bytes that exist at the peak. Counted by `mx.get_peak_memory` on the CPU for one and
# two layers of the shapes of t5-base, flan-t5-small and correct-base; all within 20 %.
OWN = 4  # a weight, its gradient and the two moments of Adam
HEADS = {True: 14, False: 8}  # a logit that exists: with the target's distributions, without
WIDTH, INNER, SCORES = 8, 4, 6  # for each token and layer, by its widths and attention's scores


def training_memory(draft: SharingDraft, options: DistillOptions, length: float) -> int:
    """Estimate the bytes that training takes at its peak, the target's weights included.

    Args:
        draft: The draft to train.
        options: How.
        length: Tokens of a typical prompt; outputs are taken to be as long.
    """
    config = draft.config
    inner = config.d_ff * (2 if config.gated else 1)
    scores = 2 * length * config.num_heads
    token = config.num_decoder_layers * (WIDTH * config.d_model + INNER * inner + SCORES * scores)
    activations = options.batch_tokens / 2 * token
    heads = HEADS[needs_target(options.loss)] * LOGITS
    numbers = OWN * own_parameters(draft) + heads + activations
    output = draft.target.output
    if hasattr(output, "scales") or output.weight.dtype != mx.float32:
        numbers += (draft.draft_vocab or draft.vocab_size) * config.d_model  # a copy in float32
    return sum(weight.nbytes for weight in _weights(draft.target)) + round(4 * numbers)


def own_parameters(draft: SharingDraft) -> int:
    """Return the number of weights that are the draft's own."""
    return sum(weight.size for weight in _weights(draft))


def _weights(model: nn.Module) -> list[mx.array]:
    flat = cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))
    return [weight for _, weight in flat]
