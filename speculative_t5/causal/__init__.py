"""Decoder-only models, such as GPT-2, OPT and Qwen3: an extra, which needs mlx-lm.

`checkpoints` finds `decoder_only`, a `Family`, by an entry point (see pyproject.toml). mlx-lm is
imported when a model is read. Imports `checkpoints`, `tokenizers`, `kernels`, `models` and the
packages below them; nothing below imports it.
"""

from .loading import decoder_only
from .model import DecoderOnlyModel
