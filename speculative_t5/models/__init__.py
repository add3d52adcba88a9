"""Forward passes of T5 and T5Gemma in plain MLX, and their key/value caches.

Imports `decoding`, for the protocols that a model implements, `distributed`, `device` and
`errors`.
"""

from .cache import SMALLEST_CAPACITY, EncodedPrompt, KVCache, additive, capacity_for, write
from .config import (
    DRAFT_TYPE,
    ENCODER_ALONE,
    MAX_LAYERS,
    MAX_SIZE,
    MODEL_TYPES,
    OWN_TYPES,
    T5GEMMA_TYPES,
    T5Config,
    is_decoder_only,
    is_encoder_alone,
    is_t5gemma,
    read_size,
)
from .encoder_decoder import CompiledFunctions, CompiledModel, EncoderDecoder
from .layer_copies import copy_layers
from .position_bias import Padding, position_biases
from .quantization import (
    QUANTIZATION_CONFIG,
    Packing,
    Quantization,
    Steps,
    is_embedding,
    is_wo,
    plain_weight,
    read_quantization,
)
from .session import HeadOutput
from .t5 import T5
from .t5_draft import MOST_BLOCK, SharingConfig, SharingDraft
from .t5_parallel import parts_of, shard, split_of
from .t5gemma import T5Gemma
from .t5gemma_config import ModelConfig, T5GemmaConfig
from .text_encoder import TextEncoder, new_model
from .weight_samples import is_sample, quantization_step, same_weights, sample_weights
