// Attention of a few queries over cached keys and values, each by itself, in Metal for chips from
// M1 on. MLX puts this before the body of a kernel (attention.py).
//
// A threadgroup computes one query of one head. Its simdgroups take every SIMDGROUPS-th key, and
// what they found is put together in the end: so the bits of a query depend neither on how many
// others there are nor on how many positions the cache has room for.

using namespace metal;

static constant constexpr const int LANES = 32, SIMDGROUPS = 4;

// What a simdgroup has seen of the keys: softmax as it goes (Milakov and Gimelshein 2018, "Online
// normalizer calculation for softmax", arXiv:1805.02867). A thread has every 32nd number of a head.
template <int SIZE>
struct Seen {
  static constant constexpr const int OWN = (SIZE + LANES - 1) / LANES;

  float best;  // score
  float total;  // of the exponentials
  float values[OWN];

  void begin() thread {
    best = -numeric_limits<float>::infinity();
    total = 0.0f;
    for (int i = 0; i < OWN; i++)
      values[i] = 0.0f;
  }

  template <typename T>
  void add(float score, const device T* value, int lane) thread {
    if (score == -numeric_limits<float>::infinity())
      return;
    const float higher = max(best, score);
    const float kept = exp(best - higher), own = exp(score - higher);
    total = fma(total, kept, own);
    for (int i = 0; i < OWN; i++)
      if (lane + i * LANES < SIZE)
        values[i] = fma(values[i], kept, own * static_cast<float>(value[lane + i * LANES]));
    best = higher;
  }
};

// A query's product with a key, in every thread.
template <typename T, int SIZE>
inline float product(thread const float* query, const device T* key, int lane) {
  float sum = 0.0f;
  for (int i = 0; i < Seen<SIZE>::OWN; i++)
    if (lane + i * LANES < SIZE)
      sum = fma(query[i], static_cast<float>(key[lane + i * LANES]), sum);
  return simd_sum(sum);
}
