// y = x W^T for few rows of x, in Metal for chips from M1 on: simdgroups of 32 threads, no matrix
// units. MLX puts this before the body of a kernel (products.py), and its own definitions of types
// before this.
//
// A simdgroup computes OUTPUTS columns of y for ROWS rows, so that the rows share what is read of
// W. Each sum is taken in the same order whatever ROWS is: thread by thread over every 32nd stretch
// of the inputs, by fma in float, then over the threads. So the bits of a row do not depend on how
// many rows there are.

using namespace metal;

static constant constexpr const int LANES = 32;

// Four numbers of a row; zeros past its end.
template <typename T>
inline void read_stretch(const device T* row, int at, int size, thread float* found) {
  for (int i = 0; i < 4; i++)
    found[i] = at + i < size ? static_cast<float>(row[at + i]) : 0.0f;
}

// 1 / sqrt(mean of squares + epsilon) of each row, as RMSNorm has it.
template <typename T, int ROWS>
inline void inverse_sizes(
    const device T* x, int first, int rows, int size, float epsilon, uint lane, thread float* found) {
  for (int r = 0; r < ROWS; r++) {
    const device T* row = x + min(first + r, rows - 1) * size;
    float sum = 0.0f;
    for (int i = lane; i < size; i += LANES) {
      float each = static_cast<float>(row[i]);
      sum = fma(each, each, sum);
    }
    found[r] = rsqrt(simd_sum(sum) / size + epsilon);
  }
}

// A matrix of floats of any type, (outputs, size).
template <typename T>
struct Floats {
  const device T* matrix;
  int size;

  static constant constexpr const int STRETCH = 4;  // numbers of a row that a thread reads at a time

  void read(int output, int at, thread float* found) const thread {
    read_stretch(matrix + static_cast<size_t>(output) * size, at, size, found);
  }
};

// A matrix in MLX's affine quantization: packed into uint32, little end first, and for each group
// of inputs a scale and a bias.
template <typename T, int BITS, int GROUP>
struct Quantized {
  const device uint32_t* packed;
  const device T* scales;
  const device T* biases;
  int size;

  static constant constexpr const int STRETCH = 8;
  static constant constexpr const int IN_WORD = 32 / BITS;

  void read(int output, int at, thread float* found) const thread {
    size_t place = static_cast<size_t>(output) * size + at, group = place / GROUP;
    float scale = static_cast<float>(scales[group]), bias = static_cast<float>(biases[group]);
    const device uint32_t* words = packed + place / IN_WORD;
    for (int i = 0; i < STRETCH; i++) {
      uint value = words[i / IN_WORD] >> (i % IN_WORD * BITS) & ((1u << BITS) - 1);
      found[i] = fma(scale, static_cast<float>(value), bias);
    }
  }
};

// Rows as they are.
template <typename T, int ROWS>
struct Plain {
  const device T* x;
  int first, rows, size;

  float value(int r, int i) const thread {
    return static_cast<float>(x[min(first + r, rows - 1) * size + i]);
  }
};

// Rows that RMSNorm makes of others, rounded as MLX rounds them.
template <typename T, int ROWS>
struct Normed {
  Plain<T, ROWS> own;
  const device T* weight;
  float inverse[ROWS];

  float value(int r, int i) const thread {
    T scaled = static_cast<T>(own.value(r, i) * inverse[r]);
    T weighted = static_cast<T>(static_cast<float>(weight[i]) * static_cast<float>(scaled));
    return static_cast<float>(weighted);
  }
};

// The sums for ROWS rows and OUTPUTS columns from `column` on, row by row, in every thread.
template <int ROWS, int OUTPUTS, typename X, typename W>
inline void sums_of(
    thread const X& x, thread const W& w, int column, int columns, uint lane, thread float* sums) {
  for (int i = 0; i < ROWS * OUTPUTS; i++)
    sums[i] = 0.0f;
  float inputs[ROWS * W::STRETCH], weights[W::STRETCH];
  for (int at = lane * W::STRETCH; at < w.size; at += LANES * W::STRETCH) {
    for (int r = 0; r < ROWS; r++)
      for (int i = 0; i < W::STRETCH; i++)
        inputs[r * W::STRETCH + i] = at + i < w.size ? x.value(r, at + i) : 0.0f;
    for (int n = 0; n < OUTPUTS; n++) {
      w.read(min(column + n, columns - 1), at, weights);
      for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < W::STRETCH; i++)
          sums[r * OUTPUTS + n] = fma(inputs[r * W::STRETCH + i], weights[i], sums[r * OUTPUTS + n]);
    }
  }
  for (int i = 0; i < ROWS * OUTPUTS; i++)
    sums[i] = simd_sum(sums[i]);
}
