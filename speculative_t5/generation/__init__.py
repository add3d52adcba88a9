"""`SpeculativeDecoder`: prompts to rounds of ids, and rounds to texts."""

from .decoder import NumDraft, SpeculativeDecoder, VerifyRule
from .outputs import MEANINGS, Chunk, Generation

__all__ = [
    "Chunk",
    "Generation",
    "MEANINGS",
    "NumDraft",
    "SpeculativeDecoder",
    "VerifyRule",
]
