"""Time and memory of the shape of madlad400-3b-mt, with numbers that mean nothing.

Needs 12 GB. Prints seconds for encoding 101 tokens, and for passes of the decoder.
"""

import time

from speculative_t5.models import T5Config, new_model

import mlx.core as mx
from mlx.utils import tree_flatten

MADLAD = {
    "model_type": "t5",
    "d_model": 1024,
    "d_kv": 128,
    "d_ff": 8192,
    "num_heads": 16,
    "num_layers": 32,
    "num_decoder_layers": 32,
    "vocab_size": 256_000,
    "eos_token_id": 2,
    "pad_token_id": 1,
    "decoder_start_token_id": 0,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
}


def main() -> None:
    model, few = new_model(T5Config.from_dict(MADLAD)), 0.02 * mx.random.normal((2**20,))
    for name, parameter in tree_flatten(model.parameters()):
        size = parameter.size
        numbers = mx.concatenate([few] * -(-size // few.size))[:size].reshape(parameter.shape)
        mx.eval(numbers)
        model.load_weights([(name, numbers)], strict=False)
    began = time.perf_counter()
    session, _ = model.start([[*range(5, 105), 2]])
    mx.eval(session.step(mx.array([[0]])))
    print(f"101 tokens encoded, and a first pass: {time.perf_counter() - began:.1f} s")
    for length in (1, 1, 6, 6):
        began = time.perf_counter()
        mx.eval(session.step(mx.array([[7] * length])))
        print(f"a pass over {length}: {time.perf_counter() - began:.2f} s")
    print(f"peak memory: {mx.get_peak_memory() / 1e9:.1f} GB")


if __name__ == "__main__":
    main()
