"""`SpeculativeDecoder`: from prompts to rounds of ids, and from rounds to texts.

Options are values (`options`), made at the door and passed on whole; `outputs` are values as well.
Imports `decoding`, `tokenizers`, `checkpoints`, `errors` and `device`.
"""

from .decoder import SpeculativeDecoder
from .options import DraftingOptions, GenerationOptions, NumDraft, VerifyRule
from .outputs import MEANINGS, Chunk, Generation
