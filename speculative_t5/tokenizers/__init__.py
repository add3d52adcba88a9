"""Text to ids, and ids back to text as they arrive.

Imports `models`, `decoding` and modules below them; the libraries sentencepiece, tokenizers and
transformers are imported where a tokenizer of their kind is made.
"""

from .base import TOKENIZER_FILES, ChatTokenizer, Detokenizer, Tokenizer, pieces, unknown_characters
from .bytewise import ByteTokenizer
from .cleaning import clean_up
from .from_transformers import TransformersTokenizer
from .languages import (
    TRANSLATION_TASK,
    Languages,
    is_code,
    language_name,
    main_region,
    read_languages,
    same_language,
)
from .prompt_files import (
    MAX_LINE,
    PROMPT_FIELD,
    PROMPT_SUFFIXES,
    Format,
    Line,
    Shard,
    count_lines,
    read_lines,
)
from .prompts import (
    Prompt,
    PromptEncoder,
    PromptTooLong,
    Source,
    check_prompts,
    keep_beginning,
)
from .t5 import has_tokenizer, load_tokenizer
