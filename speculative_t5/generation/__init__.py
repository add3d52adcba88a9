"""`SpeculativeDecoder`: from prompts to rounds of ids, and from rounds to texts.

`options` are values, made once from keyword arguments and passed on whole; `outputs` are values as
well. Imports `checkpoints`, `tokenizers`, `models`, `decoding`, `options`, `errors`, `distributed`
and `device`.
"""

from .decoder import SpeculativeDecoder, process_facts
from .engine import Engine
from .html import STYLES as ORIGIN_STYLES
from .options import (
    BatchOptions,
    DecodingOptions,
    DraftingOptions,
    GenerationOptions,
    NumDraft,
    VerifyRule,
    Words,
)
from .outputs import MEANINGS, Chunk, Generation, as_chunk, as_record
from .steady import rows_are_alike, steady_width
