"""The decoder's passes, compiled by MLX for each shape that they come in."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import mlx.core as mx

from ..cache import KeysValues

if TYPE_CHECKING:
    from .model import T5
    from .sharing import SharingDraft

MAX_SHAPES = 100  # that a thread keeps compiled for a model at a time

Output = Literal["logits", "argmax"]
Pass = Callable[..., tuple[mx.array, list[KeysValues]]]


class _Functions(threading.local):
    """One thread's compiled functions by shape, the least recently used first.

    MLX keeps a trace in each thread that called a function, but drops it in one thread only. A
    function that threads shared would leave its trace, with the weights in it, in the others, and
    MLX would run that trace, with the wrong model's weights, for a later function at its address.
    """

    def __init__(self) -> None:
        self.by_shape: OrderedDict[tuple[Any, ...], Pass] = OrderedDict()


class CompiledDecoder:
    """A model's decoder, compiled with its weights as constants.

    Passed as inputs, every weight would be checked in each pass. Each shape has a function of
    its own, so that dropping the function frees its trace, a third of a megabyte for a small model.
    """

    def __init__(self, model: T5 | SharingDraft) -> None:
        self._model = model
        self._tables = model.decoder.position_bias.tables()
        # What has not been evaluated would be computed again in every pass.
        mx.eval(model.parameters(), self._tables)
        self._functions = _Functions()

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Become None in copies and pickles of a model, which compile for themselves."""
        return type(None), ()

    def run(
        self,
        output: Output,
        vocab_size: int | None,
        tokens: mx.array,
        offsets: mx.array,
        cache: list[KeysValues],
        sources: list[KeysValues],
        mask: mx.array | None,
    ) -> tuple[mx.array, list[KeysValues]]:
        """Run the decoder over new tokens (B, L) int32; the others are as in `Decoder`.

        Returns:
            Logits (B, L, V) of what follows each token, or their argmax (B, L) int32, over the
            first `vocab_size` ids or all; and the cache with the new positions.
        """
        functions = self._functions.by_shape
        keys = sources[0][0].shape
        widths = cache[0][0].shape[2], keys[0], keys[2]
        # All that changes the graph: one offset is written as a slice, several by index.
        shape = output, vocab_size, tokens.shape, offsets.size, widths, mask is None
        function = functions.pop(shape, None)
        if function is None:
            function = mx.compile(partial(self._pass, output, vocab_size))
            if len(functions) >= MAX_SHAPES:
                functions.popitem(last=False)
        functions[shape] = function
        return function(tokens, offsets, cache, sources, mask)

    def _pass(
        self, output: Output, vocab_size: int | None, tokens: mx.array, *others: Any
    ) -> tuple[mx.array, list[KeysValues]]:
        model, inputs = self._model, (*others, self._tables)
        x, cache = model.decoder(model.shared(tokens), *inputs)
        head = model.logits if output == "logits" else model.argmax
        return head(x, vocab_size), cache
