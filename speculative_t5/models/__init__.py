"""Forward passes of T5 and decoder-only models, and their key/value caches.

`t5` is T5 in plain MLX; `decoder_only` runs mlx-lm's models, and `opt`, with the caches of `cache`.
Imports `decoding`, for the protocols that a model implements, `device`, `processes` and `errors`.
"""

from .cache import KeysValues, additive, capacity_for
from .config_json import DRAFT_TYPE, MAX_LAYERS, MAX_SIZE, is_decoder_only, read_size
from .decoder_only import DecoderOnlyModel, build
from .t5.config import Quantization, T5Config
from .t5.identity import is_sample, same_weights, sample_weights
from .t5.layers import (
    CrossAttention,
    Decoder,
    DecoderLayer,
    Encoder,
    EncoderLayer,
    FeedForward,
    Head,
    SelfAttention,
)
from .t5.model import T5
from .t5.positions import position_biases
from .t5.sharding import parts_of, split_of
from .t5.sharing import SharingConfig, SharingDraft, copy_layers
