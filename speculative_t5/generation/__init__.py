"""`SpeculativeDecoder`: from prompts to rounds of ids, and from rounds to texts.

`options` of calls and `decoder_options` are values, made once from keyword arguments and passed on
whole; `outputs` are values as well. `engine` is what a decoder does with ids. Imports
`checkpoints`, `tokenizers`, `models`, `decoding` and modules below them; and `documents`, which are
above, where `rewrite` is asked for.
"""

from .decoder import SpeculativeDecoder, process_facts
from .decoder_options import (
    DecodingOptions,
    DraftingOptions,
    LoadingOptions,
    NumDraft,
    VerifyRule,
)
from .encoder import Encoder
from .engine import Engine
from .html import ORIGIN_CSS
from .options import TRANSFORMERS_NAMES, BatchOptions, GenerationOptions, Words, num_rows
from .outputs import Chunk, Generation, as_chunk
from .pipelines import pipeline
from .ranking import (
    MONOT5,
    Ranked,
    rank,
    ranking_prompts,
    ranking_words,
    word_probabilities,
)
from .records import (
    OPTIONAL_FIELDS,
    OUTCOME_FIELDS,
    STATS_IN_JSON,
    as_outcome,
    as_record,
    outcome_of,
)
from .steady import rows_are_alike, steady_width
from .tokens import ORIGIN_MEANINGS, Token
