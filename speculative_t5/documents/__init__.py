"""Texts of any length: sentences go through a model, everything else stays as it is.

`splitting` finds the sentences, `rewriting` sends them through a decoder and judges the outputs,
`layout` puts the words of an output where those of its source were, `comparison` shows what
changed, `readers` knows which files are read. Imports `generation`, `tokenizers`, `decoding`,
`options` and `errors`.
"""

from .alignment import num_same
from .comparison import changes, edits, lines
from .formats import FormatOptions, PlainFile
from .judging import Written
from .layout import arranged, similarity
from .readers import (
    DOCUMENT_FORMATS,
    DOCUMENT_NAMES,
    DOCUMENT_SUFFIXES,
    FILE_FORMATS,
    NO_TEXT,
    NOT_READ,
    check_read,
    format_of,
    is_document,
    read_file,
    suffix_of,
)
from .rewriting import (
    Document,
    Piece,
    RewriteOptions,
    Rewritten,
    TextOptions,
    check_rewriting,
    rewrite,
)
from .splitting import PLAIN_LINES, SENTENCE_LANGUAGES, FileLines, identifier, read_identifier_ahead
from .text_decoder import TextDecoder
from .web import WebPage
