// The layers of layers.c as operations of MLX's graphs, on the CPU.

#include <algorithm>
#include <cmath>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"
#include "mlx/version.h"

#include "layers.h"

namespace mx = mlx::core;
namespace nb = nanobind;

namespace {

using Arrays = std::vector<mx::array>;
using Maybe = std::optional<mx::array>;

const layer_functions* functions = nullptr;

[[noreturn]] void refuse(const std::string& what) {
  throw std::invalid_argument("speculative_t5 blocks: " + what);
}

void check(bool right, const char* what) {
  if (!right)
    refuse(what);
}

// Memory that a layer works in. The last is kept for the next: what is fresh from the system costs
// a tenth of a long source's encoding, a page at a time.
class Workspace {
 public:
  explicit Workspace(size_t count) : size_(count) {
    {
      std::lock_guard<std::mutex> lock(mutex);
      if (kept_size >= count) {
        memory_ = std::move(kept);
        size_ = std::exchange(kept_size, 0);
      }
    }
    if (!memory_)
      memory_.reset(new float[count]);
  }

  ~Workspace() {
    std::lock_guard<std::mutex> lock(mutex);
    if (size_ > kept_size && size_ <= MOST_KEPT) {
      kept.swap(memory_);
      kept_size = size_;
    }
  }

  Workspace(const Workspace&) = delete;

  operator float*() { return memory_.get(); }

 private:
  static constexpr size_t MOST_KEPT = 1 << 24;  // floats
  static inline std::mutex mutex;
  // Never destroyed: when the program ends, MLX's threads may still be at work.
  static inline auto& kept = *new std::unique_ptr<float[]>;
  static inline size_t kept_size = 0;

  std::unique_ptr<float[]> memory_;
  size_t size_;
};

// An array in row-major order: as it is, where that is known already.
mx::array in_order(const mx::array& a) {
  return a.is_available() && a.flags().row_contiguous ? a : mx::contiguous(a);
}

// What is known of a matrix (outputs, inputs) without its arrays.
struct Kind {
  int outputs, inputs;
  size_t num_arrays;  // 3 if it is quantized: with scales and biases
  matrix empty;

  // The matrix whose arrays are inputs of an operation; `at` goes from their place to the next.
  matrix read(const Arrays& evaluated, size_t& at) const {
    matrix found = empty;
    found.data = evaluated[at].data<char>();
    if (num_arrays == 3) {
      found.scales = evaluated[at + 1].data<char>();
      found.biases = evaluated[at + 2].data<char>();
    }
    at += num_arrays;
    return found;
  }
};

// A matrix of float32 or 16 bits, or as MLX's affine quantization packs it in 8 or 4 bits, with
// scales and biases for each group of inputs.
class Matrix : public Kind {
 public:
  Matrix(const mx::array& weight, const Maybe& scales, const Maybe& biases, int bits) : Kind{} {
    check(weight.ndim() == 2 && weight.size(), "a matrix is (outputs, inputs)");
    outputs = weight.shape(0);
    inputs = weight.shape(1);
    arrays.push_back(in_order(weight));
    if (scales || biases)
      add_groups(weight, scales, biases, bits);
    else
      empty.type = float_type(weight);
    num_arrays = arrays.size();
  }

  Arrays arrays;

 private:
  void add_groups(const mx::array& weight, const Maybe& scales, const Maybe& biases, int bits) {
    check(weight.dtype() == mx::uint32 && (bits == 8 || bits == 4),
          "quantized matrices are uint32, of 8 or 4 bits");
    check(scales && biases && scales->ndim() == 2 && scales->shape() == biases->shape() &&
              scales->dtype() == biases->dtype() && scales->shape(0) == outputs && scales->size(),
          "scales and biases are (outputs, inputs / group), of one type");
    inputs *= 32 / bits;
    empty.type = bits == 8 ? STORED_AFFINE8 : STORED_AFFINE4;
    empty.group = inputs / scales->shape(1);
    empty.scale_type = float_type(*scales);
    check((empty.group == 32 || empty.group == 64 || empty.group == 128) &&
              empty.group * scales->shape(1) == inputs,
          "groups have 32, 64 or 128 inputs");
    arrays.insert(arrays.end(), {in_order(*scales), in_order(*biases)});
  }

  static stored_type float_type(const mx::array& a) {
    if (a.dtype() == mx::float32)
      return STORED_FLOAT32;
    if (a.dtype() == mx::float16)
      return STORED_FLOAT16;
    check(a.dtype() == mx::bfloat16, "matrices and scales are float32, float16 or bfloat16");
    return STORED_BFLOAT16;
  }
};

void append(Arrays& inputs, const Matrix& m) {
  inputs.insert(inputs.end(), m.arrays.begin(), m.arrays.end());
}

// The keys, part 0, or the values, part 1, of an array (2, B, H, T, D).
layer_heads heads(const mx::array& a, int part) {
  float* data = const_cast<float*>(a.data<float>()) + part * a.strides(0);
  return {data, a.strides(1), a.strides(2), a.strides(3)};
}

// One with a place to write to: that of `from`, if nobody else looks at it. Whether it is another.
bool take_place(const mx::array& from, mx::array& to) {
  if (from.is_donatable() && from.flags().row_contiguous) {
    to.copy_shared_buffer(from);
    return false;
  }
  to.set_data(mx::allocator::malloc(to.nbytes()));
  return true;
}

// Each output of an operation holds its inputs, so that none of several could take an input's place.
// Let go of all copies but the one that is in use: MLX drops them, too, when all are evaluated.
void hold_once(const Arrays& inputs, Arrays& outputs) {
  for (auto& output : outputs)
    if (&output.inputs() != &inputs && !output.is_tracer())
      output.inputs().clear();
}

void copy_heads(const layer_heads& from, float* to, const mx::Shape& shape) {
  for (int b = 0; b < shape[1]; b++)
    for (int h = 0; h < shape[2]; h++)
      for (int t = 0; t < shape[3]; t++, to += shape[4])
        std::copy_n(from.data + b * from.batch + h * from.head + t * from.place, shape[4], to);
}

const float* data_in_order(const mx::array& a, const char* refusal) {
  check(a.flags().row_contiguous, refusal);
  return a.data<float>();
}

const char* const X_ORDER = "x has to be in row-major order";

class Operation : public mx::Primitive {
 public:
  using Primitive::Primitive;

  void eval_gpu(const Arrays&, Arrays&) override { refuse("they run on the CPU alone"); }
};

// y = x + f(norm(x)): inputs x (B, L, d), the norm's weight and others; y is the first output.
class Layer : public Operation {
 public:
  Layer(mx::Stream stream, float epsilon) : Operation(stream), epsilon_(epsilon) {}

 protected:
  layer_io io(const Arrays& inputs, Arrays& outputs) {
    const auto& x = inputs[0];
    const float* data = data_in_order(x, X_ORDER);
    take_place(x, outputs[0]);
    return {data, outputs[0].data<float>(), inputs[1].data<float>(), epsilon_,
            x.shape(0), x.shape(1), x.shape(2)};
  }

  float epsilon_;
};

// Inputs: x, norm, the arrays of into and out; then encoder: bias, mask; decoder: bias, the cache,
// at; cross: the source, mask. A mask need not be there. Cache and source have keys and values.
class Attention : public Layer {
 public:
  Attention(mx::Stream stream, float epsilon, layer_kind kind, int num_heads, const Kind& into,
            const Kind& out)
      : Layer(stream, epsilon), kind_(kind), num_heads_(num_heads), into_(into), out_(out) {}

  const char* name() const override { return "Attention"; }

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override {
    hold_once(inputs, outputs);
    layer_attention a{};
    a.io = io(inputs, outputs);
    a.kind = kind_;
    a.num_heads = num_heads_;
    a.head_dim = out_.inputs / num_heads_;
    size_t next = 2;
    a.into = into_.read(inputs, next);
    a.out = out_.read(inputs, next);
    a.num_keys = a.io.length;
    if (kind_ != LAYER_CROSS) {
      const auto& bias = inputs[next++];
      a.bias = data_in_order(bias, "the bias has to be in row-major order");
      a.reach = bias.shape(1) / 2;
    }
    auto& encoder = mx::cpu::get_command_encoder(stream());
    if (kind_ == LAYER_DECODER) {
      const auto &cache = inputs[next], &at = inputs[next + 1];
      check_pieces(cache);
      auto old_keys = heads(cache, 0), old_values = heads(cache, 1);
      bool elsewhere = take_place(cache, outputs[1]);
      a.keys = heads(outputs[1], 0);
      a.values = heads(outputs[1], 1);
      a.num_keys = cache.shape(3);
      a.at = at.data<int>();
      a.at_step = at.size() == 1 ? 0 : (int)at.strides(0);
      encoder.dispatch([=, shape = cache.shape(), f = functions] {
        if (elsewhere) {
          copy_heads(old_keys, a.keys.data, shape);
          copy_heads(old_values, a.values.data, shape);
        }
        if (f->attend(&a, Workspace(f->attend_memory(&a))))
          refuse("a position is not in the cache");
      });
      return;
    }
    if (kind_ == LAYER_CROSS) {
      const auto& source = inputs[next++];
      check_pieces(source);
      a.keys = heads(source, 0);
      a.values = heads(source, 1);
      a.num_keys = source.shape(3);
    }
    if (inputs.size() > next)
      a.mask = data_in_order(inputs[next], "the mask has to be in row-major order");
    encoder.dispatch([a, f = functions] { f->attend(&a, Workspace(f->attend_memory(&a))); });
  }

 private:
  static void check_pieces(const mx::array& a) {
    check(a.strides(4) == 1 || a.shape(4) == 1, "heads have to be in one piece");
  }

  layer_kind kind_;
  int num_heads_;
  Kind into_, out_;
};

// Inputs: x, norm, the arrays of into and out.
class FeedForward : public Layer {
 public:
  FeedForward(mx::Stream stream, float epsilon, bool gated, layer_activation activation,
              const Kind& into, const Kind& out)
      : Layer(stream, epsilon), gated_(gated), activation_(activation), into_(into), out_(out) {}

  const char* name() const override { return "FeedForward"; }

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override {
    size_t next = 2;
    matrix into = into_.read(inputs, next), out = out_.read(inputs, next);
    layer_feed_forward layer{io(inputs, outputs), out_.inputs, into, out, gated_, activation_};
    mx::cpu::get_command_encoder(stream()).dispatch([layer, f = functions] {
      f->feed_forward(&layer, Workspace(f->feed_forward_memory(&layer)));
    });
  }

 private:
  bool gated_;
  layer_activation activation_;
  Kind into_, out_;
};

// An operation with one matrix, whose arrays come last in its inputs.
class WithMatrix : public Operation {
 public:
  WithMatrix(mx::Stream stream, const Kind& kind) : Operation(stream), kind_(kind) {}

 protected:
  matrix read_matrix(const Arrays& inputs) const {
    size_t first = inputs.size() - kind_.num_arrays;
    return kind_.read(inputs, first);
  }

  Kind kind_;
};

// Inputs: the encoder's output, and a matrix. Keys and values are as wide as the output says.
class KeysValues : public WithMatrix {
 public:
  using WithMatrix::WithMatrix;

  const char* name() const override { return "KeysValues"; }

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override {
    const auto& x = inputs[0];
    auto& out = outputs[0];
    out.set_data(mx::allocator::malloc(out.nbytes()));
    layer_source s{data_in_order(x, X_ORDER), x.shape(0), x.shape(1), x.shape(2), out.shape(2),
                   out.shape(4), read_matrix(inputs), heads(out, 0).data, heads(out, 1).data,
                   out.shape(3)};
    mx::cpu::get_command_encoder(stream()).dispatch([s, f = functions] {
      f->keys_values(&s, Workspace(f->keys_values_memory(&s)));
    });
  }
};

// Inputs: x and a matrix.
class Linear : public WithMatrix {
 public:
  using WithMatrix::WithMatrix;

  const char* name() const override { return "Linear"; }

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override {
    const auto& x = inputs[0];
    auto& out = outputs[0];
    out.set_data(mx::allocator::malloc(out.nbytes()));
    mx::cpu::get_command_encoder(stream()).dispatch(
        [from = data_in_order(x, X_ORDER), w = read_matrix(inputs), n = kind_.outputs,
         m = (int)(x.size() / kind_.inputs), k = kind_.inputs, to = out.data<float>(),
         f = functions] {
          if (m > 0)
            f->linear(from, &w, m, n, k, to);
        });
  }
};

// Inputs: x, the norm's weight, and the head's matrix, of which the first rows are used. The output
// is logits (B, L, V); the best ids (B, L); or judged ones, each with the bits of the logarithm of its
// probability (B, L, 2).
class Head : public WithMatrix {
 public:
  Head(mx::Stream stream, const Kind& kind, float epsilon, float scale, int num_ids)
      : WithMatrix(stream, kind), epsilon_(epsilon), scale_(scale), num_ids_(num_ids) {}

  const char* name() const override { return "Head"; }

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override {
    const auto& x = inputs[0];
    auto& out = outputs[0];
    out.set_data(mx::allocator::malloc(out.nbytes()));
    bool best = out.dtype() == mx::int32, judges = best && out.ndim() == 3;
    layer_head h{data_in_order(x, X_ORDER), inputs[1].data<float>(), epsilon_, scale_,
                 x.shape(0) * x.shape(1), x.shape(2), num_ids_, read_matrix(inputs),
                 best ? nullptr : out.data<float>(), best ? out.data<int>() : nullptr, judges};
    mx::cpu::get_command_encoder(stream()).dispatch(
        [h, f = functions] { f->head(&h, Workspace(f->head_memory(&h))); });
  }

 private:
  float epsilon_, scale_;
  int num_ids_;
};

// Inputs: ids and an embedding. There is no row for an id that is out of range: it gives NaN. The mark
// of a draft whose own logits are NaN stands for any id, as what a draft says is judged.
class Embed : public WithMatrix {
 public:
  using WithMatrix::WithMatrix;

  const char* name() const override { return "Embed"; }

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override {
    const auto& ids = inputs[0];
    auto& out = outputs[0];
    out.set_data(mx::allocator::malloc(out.nbytes()));
    mx::cpu::get_command_encoder(stream()).dispatch(
        [from = ids.data<int>(), batch = ids.shape(0), length = ids.shape(1),
         row = ids.strides(0), place = ids.strides(1), rows = read_matrix(inputs),
         to = out.data<float>(), num_rows = kind_.outputs, width = kind_.inputs,
         f = functions]() mutable {
          for (int b = 0; b < batch; b++)
            for (int t = 0; t < length; t++, to += width) {
              int id = from[b * row + t * place];
              if (id == LAYER_NAN)
                id = 0;
              if (id >= 0 && id < num_rows)
                f->row(&rows, id, width, to);
              else
                std::fill_n(to, width, NAN);
            }
        });
  }
};

mx::Stream here() {
  return mx::default_stream(mx::Device::cpu);
}

// x, the norm, and the arrays of two matrices.
Arrays inputs_of(const mx::array& x, const mx::array& norm, const Matrix& into,
                 const Matrix& out) {
  check(functions, "not initialized");
  check(x.dtype() == mx::float32 && norm.dtype() == mx::float32, "x and norm have to be float32");
  int width = x.ndim() == 3 && x.size() ? x.shape(2) : -1;
  check(norm.ndim() == 1 && norm.shape(0) == width && into.inputs == width && out.outputs == width,
        "x is (B, L, d), the norm (d,), the weights (outputs, d) and (d, inputs)");
  Arrays inputs{x, in_order(norm)};
  append(inputs, into);
  append(inputs, out);
  return inputs;
}

void check_bias(const mx::array& bias, const Matrix& into, const Matrix& out) {
  check(bias.dtype() == mx::float32 && bias.ndim() == 2 && bias.shape(1) % 2 == 1 &&
            bias.shape(0) > 0,
        "the bias is (H, 2 * reach + 1), float32");
  check(out.inputs % bias.shape(0) == 0 && into.outputs == 3 * out.inputs,
        "the weights are (3 H D, d) and (d, H D)");
}

void add_mask(Arrays& inputs, const Maybe& mask, int batch, int num_keys) {
  if (!mask)
    return;
  check(mask->dtype() == mx::float32 && mask->size() == (size_t)batch * num_keys,
        "the mask is (B, 1, 1, T), float32");
  inputs.push_back(*mask);
}

void check_heads(const mx::array& kv, const mx::array& x, int inner) {
  check(kv.dtype() == mx::float32 && kv.ndim() == 5 && kv.shape(0) == 2 &&
            kv.shape(2) * kv.shape(4) == inner,
        "keys and values are (2, B, H, T, D), float32");
  check(kv.shape(1) == x.shape(0), "x and keys have different numbers of rows");
}

mx::array encoder_attention(const mx::array& x, const mx::array& norm, const Matrix& into,
                            const Matrix& out, const mx::array& bias, const Maybe& mask,
                            float epsilon) {
  Arrays inputs = inputs_of(x, norm, into, out);
  check_bias(bias, into, out);
  inputs.push_back(bias);
  add_mask(inputs, mask, x.shape(0), x.shape(1));
  return mx::array(x.shape(), mx::float32,
                   std::make_shared<Attention>(here(), epsilon, LAYER_ENCODER, bias.shape(0), into,
                                               out),
                   std::move(inputs));
}

std::tuple<mx::array, mx::array> decoder_attention(
    const mx::array& x, const mx::array& norm, const Matrix& into, const Matrix& out,
    const mx::array& bias, const mx::array& cache, const mx::array& at, float epsilon) {
  Arrays inputs = inputs_of(x, norm, into, out);
  check_bias(bias, into, out);
  check_heads(cache, x, out.inputs);
  check(bias.shape(0) == cache.shape(2), "bias and keys have different numbers of heads");
  check(x.shape(1) <= cache.shape(3), "there are more positions than places");
  check(at.dtype() == mx::int32 && at.ndim() == 1 &&
            (at.size() == 1 || at.size() == (size_t)cache.shape(1)),
        "at is (B,) or (1,), int32");
  inputs.insert(inputs.end(), {bias, cache, at});
  auto made = mx::array::make_arrays(
      {x.shape(), cache.shape()}, {mx::float32, mx::float32},
      std::make_shared<Attention>(here(), epsilon, LAYER_DECODER, cache.shape(2), into, out),
      inputs);
  return {made[0], made[1]};
}

mx::array cross_attention(const mx::array& x, const mx::array& norm, const Matrix& into,
                          const Matrix& out, const mx::array& source, const Maybe& mask,
                          float epsilon) {
  Arrays inputs = inputs_of(x, norm, into, out);
  check_heads(source, x, out.inputs);
  check(into.outputs == out.inputs, "the weights are (H D, d) and (d, H D)");
  inputs.push_back(source);
  add_mask(inputs, mask, source.shape(1), source.shape(3));
  return mx::array(x.shape(), mx::float32,
                   std::make_shared<Attention>(here(), epsilon, LAYER_CROSS, source.shape(2), into,
                                               out),
                   std::move(inputs));
}

mx::array feed_forward(const mx::array& x, const mx::array& norm, const Matrix& into,
                       const Matrix& out, const std::string& activation, bool gated,
                       float epsilon) {
  static const std::pair<const char*, layer_activation> known[] = {
      {"relu", LAYER_RELU}, {"gelu", LAYER_GELU}, {"gelu_new", LAYER_GELU_NEW},
      {"silu", LAYER_SILU}};
  Arrays inputs = inputs_of(x, norm, into, out);
  check(into.outputs == (gated ? 2 : 1) * out.inputs, "the weights are (d_ff, d), (d, d_ff)");
  for (const auto& [name, value] : known)
    if (name == activation)
      return mx::array(x.shape(), mx::float32,
                       std::make_shared<FeedForward>(here(), epsilon, gated, value, into, out),
                       std::move(inputs));
  refuse("unknown activation " + activation);
}

mx::array keys_values(const mx::array& x, const Matrix& into, int num_heads, int num_keys) {
  check(functions, "not initialized");
  check(x.dtype() == mx::float32 && x.ndim() == 3 && x.size() && into.inputs == x.shape(2),
        "x is (B, L, d), float32, and the weight (2 H D, d)");
  check(num_heads > 0 && into.outputs % (2 * num_heads) == 0, "the weight is (2 H D, d)");
  check(num_keys >= x.shape(1), "there have to be as many keys as positions");
  Arrays inputs{x};
  append(inputs, into);
  return mx::array({2, x.shape(0), num_heads, num_keys, into.outputs / (2 * num_heads)},
                   mx::float32, std::make_shared<KeysValues>(here(), into), std::move(inputs));
}

mx::array linear(const mx::array& x, const Matrix& weight) {
  check(functions, "not initialized");
  check(x.dtype() == mx::float32 && x.ndim() > 0 && x.shape(-1) == weight.inputs,
        "x is (..., inputs), float32, and the weight (outputs, inputs)");
  mx::Shape shape = x.shape();
  shape.back() = weight.outputs;
  Arrays inputs{in_order(x)};
  append(inputs, weight);
  return mx::array(std::move(shape), mx::float32, std::make_shared<Linear>(here(), weight),
                   std::move(inputs));
}

enum class HeadOutput { logits, best, judged };

mx::array head_of(const mx::array& x, const mx::array& norm, const Matrix& weight, float scale,
                  float epsilon, int num_ids, HeadOutput output) {
  check(functions, "not initialized");
  check(x.dtype() == mx::float32 && norm.dtype() == mx::float32, "x and norm have to be float32");
  check(x.ndim() == 3 && norm.ndim() == 1 && norm.shape(0) == x.shape(2) &&
            weight.inputs == x.shape(2),
        "x is (B, L, d), the norm (d,), the weight (V, d)");
  check(num_ids > 0 && num_ids <= weight.outputs, "num_ids is more than the ids of the weight");
  mx::Shape shape{x.shape(0), x.shape(1)};
  if (output != HeadOutput::best)
    shape.push_back(output == HeadOutput::logits ? num_ids : 2);
  Arrays inputs{x, in_order(norm)};
  append(inputs, weight);
  return mx::array(shape, output == HeadOutput::logits ? mx::float32 : mx::int32,
                   std::make_shared<Head>(here(), weight, epsilon, scale, num_ids),
                   std::move(inputs));
}

mx::array embed(const mx::array& ids, const Matrix& weight) {
  check(functions, "not initialized");
  check(ids.dtype() == mx::int32 && ids.ndim() == 2, "ids are (B, L), int32");
  Arrays inputs{ids};
  append(inputs, weight);
  return mx::array({ids.shape(0), ids.shape(1), weight.inputs}, mx::float32,
                   std::make_shared<Embed>(here(), weight), std::move(inputs));
}

}  // namespace

NB_MODULE(_blocks, m) {
  m.attr("mlx_version") = std::to_string(MLX_VERSION_MAJOR) + "." +
                          std::to_string(MLX_VERSION_MINOR) + "." +
                          std::to_string(MLX_VERSION_PATCH);  // of the headers
  m.def("initialize", [](size_t address) {
    const auto* found = reinterpret_cast<const layer_functions*>(address);
    check(found && found->version == LAYERS_VERSION, "another version of the layers");
    functions = found;
  });
  nb::class_<Matrix>(m, "Matrix")
      .def(nb::init<const mx::array&, const Maybe&, const Maybe&, int>(), nb::arg("weight"),
           nb::arg("scales").none() = nb::none(), nb::arg("biases").none() = nb::none(),
           nb::arg("bits") = 0);
  nb::implicitly_convertible<mx::array, Matrix>();
  m.def("linear", &linear);
  m.def("encoder_attention", &encoder_attention, nb::arg("x"), nb::arg("norm"), nb::arg("into"),
        nb::arg("out"), nb::arg("bias"), nb::arg("mask").none(), nb::arg("epsilon"));
  m.def("decoder_attention", &decoder_attention);
  m.def("cross_attention", &cross_attention, nb::arg("x"), nb::arg("norm"), nb::arg("into"),
        nb::arg("out"), nb::arg("source"), nb::arg("mask").none(), nb::arg("epsilon"));
  m.def("feed_forward", &feed_forward);
  m.def("keys_values", &keys_values);
  m.def("embed", &embed);
  m.def("logits", [](const mx::array& x, const mx::array& norm, const Matrix& weight,
                     float scale, float epsilon, int num_ids) {
    return head_of(x, norm, weight, scale, epsilon, num_ids, HeadOutput::logits);
  });
  m.def("best", [](const mx::array& x, const mx::array& norm, const Matrix& weight, float scale,
                   float epsilon, int num_ids) {
    return head_of(x, norm, weight, scale, epsilon, num_ids, HeadOutput::best);
  });
  m.def("judged", [](const mx::array& x, const mx::array& norm, const Matrix& weight, float scale,
                     float epsilon, int num_ids) {
    return head_of(x, norm, weight, scale, epsilon, num_ids, HeadOutput::judged);
  });
}
