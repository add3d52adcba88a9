"""`distill`: trains a draft for a T5 from prompts alone.

It goes by stages, each of which a killed run resumes to the same bytes: `data` reads the prompts
and sets some aside, `labels` has the target label them. Imports `generation`, `tokenizers`,
`decoding` and `errors`.
"""

from .agreement import Agreement
from .data import Data, Example, read_data
from .labels import Label, LabelFile, label
