"""Text to ids, and ids back to text as they arrive.

`load_tokenizer` reads a T5's tokenizer from its folder, `CausalTokenizer` a decoder-only model's.
`PromptEncoder` turns prompts into ids, `Detokenizer` ids into text piece by piece;
`prompt_files` reads files of prompts. Imports `models`, `decoding` and `errors`; the libraries
sentencepiece, tokenizers and transformers are imported where a tokenizer of their kind is made.
"""

from .base import ChatTokenizer, Tokenizer, unknown_characters
from .byt5 import ByteTokenizer
from .causal import CausalTokenizer, has_vocabulary
from .detokenizer import Detokenizer, pieces
from .encoding import Prompt, PromptEncoder, PromptTooLong, Source, check_prompts
from .files import GENERATION_CONFIG, TOKENIZER_FILES, read_prefix
from .loading import has_tokenizer, load_tokenizer
from .prompt_files import (
    JSON_SUFFIXES,
    MAX_LINE,
    PROMPT_FIELD,
    Format,
    Line,
    Shard,
    count_lines,
    open_input,
    read_lines,
)
