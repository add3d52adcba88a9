"""Texts of any length: sentences go through a model, everything else stays as it is.

`splitting` finds the sentences, `rewriting` sends them through a decoder and judges the outputs,
`layout` puts the words of an output where those of its source were, `comparison` shows what
changed. Imports `generation`, `tokenizers`, `decoding`, `options` and `errors`.
"""

from .comparison import changes, edits, lines
from .formats import DOCUMENT_FORMATS, DOCUMENT_SUFFIXES, PlainFile, format_of, read_file
from .layout import arranged
from .rewriting import (
    Document,
    Piece,
    RewriteOptions,
    Rewritten,
    TextOptions,
    check_rewriting,
    rewrite,
)
from .splitting import SENTENCE_LANGUAGES, Breaks
from .subtitles import Subtitles
from .text_decoder import TextDecoder
from .translation import identifier
from .web import WebPage
from .word import WordFile
