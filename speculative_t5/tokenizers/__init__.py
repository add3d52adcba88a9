"""Text to ids, and ids to text as they come."""

from .causal import CausalTokenizer, has_vocabulary
from .encoding import Prompt, PromptEncoder, Source, check_prompts
from .t5 import (
    TOKENIZER_FILES,
    ByteTokenizer,
    Detokenizer,
    JSONTokenizer,
    Tokenizer,
    has_tokenizer,
    load_tokenizer,
    pieces,
    read_prefix,
)

__all__ = [
    "ByteTokenizer",
    "CausalTokenizer",
    "Detokenizer",
    "JSONTokenizer",
    "Prompt",
    "PromptEncoder",
    "Source",
    "TOKENIZER_FILES",
    "Tokenizer",
    "check_prompts",
    "has_tokenizer",
    "has_vocabulary",
    "load_tokenizer",
    "pieces",
    "read_prefix",
]
