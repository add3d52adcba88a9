"""Products of few rows on Metal: y = x W^T in one kernel, with what is before and after it.

The kernels are in products.metal; here they are put together for `mx.fast.metal_kernel`. The bits
of a row do not depend on how many rows there are.
"""

from functools import cache
from importlib import resources
from typing import Any, NamedTuple

import mlx.core as mx

PRODUCTS = resources.files(__package__).joinpath("products.metal").read_text("utf-8")
SHARED_ROWS = 8  # that share what is read of a matrix; more are divided evenly
OUTPUTS, TOGETHER = 4, 4  # columns of a simdgroup, and simdgroups of a threadgroup
LANES = 32
GROUPS = (32, 64, 128)  # of quantized matrices
FUSED_ACTIVATIONS = {  # of `linear`, in float
    "relu": "(gate < 0.0f ? 0.0f : gate)",
    "silu": "gate / (1.0f + exp(-gate))",
    "gelu_new": (
        "0.5f * gate * (1.0f + tanh(0.7978845608f * fma(0.044715f * gate * gate, gate, gate)))"
    ),
}


class Matrix(NamedTuple):
    """A matrix (N, K) of floats, or in MLX's affine quantization."""

    weight: mx.array  # (N, K), or (N, K * bits / 32) uint32
    scales: mx.array | None = None  # (N, K / group_size), as the biases
    biases: mx.array | None = None
    bits: int = 0
    group_size: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        outputs, width = self.weight.shape
        return outputs, width * 32 // self.bits if self.bits else width

    def first(self, outputs: int) -> "Matrix":
        """Return the matrix of the first outputs alone."""
        if self.scales is None or self.biases is None:
            return self._replace(weight=self.weight[:outputs])
        scales, biases = self.scales[:outputs], self.biases[:outputs]
        return self._replace(weight=self.weight[:outputs], scales=scales, biases=biases)

    @property
    def dtype(self) -> mx.Dtype:
        """The type of what it is multiplied with."""
        return self.weight.dtype if self.scales is None else self.scales.dtype


class Norm(NamedTuple):
    """RMSNorm."""

    weight: mx.array  # (K,)
    epsilon: float


def product(
    x: mx.array,
    matrix: Matrix,
    *,
    norm: Norm | None = None,
    added: mx.array | None = None,
    activation: str | None = None,
    gated: bool = False,
) -> mx.array:
    """Return x W^T, (M, N) in the type of x (M, K).

    Args:
        x: Rows, float16, bfloat16 or float32.
        matrix: Of the same type, or with scales of it.
        norm: What x goes through before.
        added: (M, N), what the product is added to.
        activation: What the product goes through, one of FUSED_ACTIVATIONS.
        gated: Whether the first half of the matrix makes the gate, which the activation is for, and
            the other half what it is multiplied by; y is then (M, N / 2).
    """
    rows, outputs = len(x), len(matrix.weight) // (1 + gated)
    shared = -(-rows // -(-rows // SHARED_ROWS))
    inputs: dict[str, mx.array] = {"x": x, "weight": matrix.weight}
    if matrix.scales is not None and matrix.biases is not None:
        inputs |= {"scales": matrix.scales, "biases": matrix.biases}
    if norm:
        inputs |= {"norm_weight": norm.weight, "epsilon": mx.array(norm.epsilon)}
    if added is not None:
        inputs["added"] = added
    kernel = _product_kernel((*inputs,), activation, gated, matrix.bits, matrix.group_size)
    y: mx.array
    (y,) = kernel(
        inputs=[*inputs.values()],
        template=[("T", x.dtype), ("ROWS", shared), ("OUTPUTS", OUTPUTS)],
        grid=(LANES, -(-outputs // OUTPUTS), -(-rows // shared)),
        threadgroup=(LANES, TOGETHER, 1),
        output_shapes=[(rows, outputs)],
        output_dtypes=[x.dtype],
    )
    return y


@cache
def _product_kernel(
    names: tuple[str, ...], activation: str | None, gated: bool, bits: int, group: int
) -> Any:
    packed = f"{bits}_{group}" if bits else ""
    parts = "product", packed, *names[2:], activation, "gated" if gated else ""
    return mx.fast.metal_kernel(
        name="_".join(filter(None, parts)),
        input_names=names,
        output_names=["y"],
        header=PRODUCTS,
        source=_body(names, activation, gated, bits, group),
    )


def _body(
    names: tuple[str, ...], activation: str | None, gated: bool, bits: int, group: int
) -> str:
    matrix = "Floats<T> w = {weight, size};"
    if bits:
        matrix = f"Quantized<T, {bits}, {group}> w = {{weight, scales, biases, size}};"
    rows = "thread const Plain<T, ROWS>& input = own;"
    if "norm_weight" in names:
        rows = (
            "Normed<T, ROWS> input = {own, norm_weight, {}};\n"
            "inverse_sizes<T, ROWS>(x, first, rows, size, epsilon, lane, input.inverse);"
        )
    sums = "float {0}[ROWS * OUTPUTS];\nsums_of<ROWS, OUTPUTS>(input, w, {1}, matrix, lane, {0});"
    second = sums.format("linear", "column + columns") if gated else ""
    made = FUSED_ACTIVATIONS.get(activation or "", "gate")
    other, more = "linear[r * OUTPUTS + n]" if gated else "1.0f", "0.0f"
    if "added" in names:
        more = "static_cast<float>(added[place])"
    return f"""
const int rows = x_shape[0], size = x_shape[1], matrix = weight_shape[0];
const int columns = matrix / {1 + gated};
const int first = thread_position_in_grid.z * ROWS, column = thread_position_in_grid.y * OUTPUTS;
const uint lane = thread_index_in_simdgroup;
Plain<T, ROWS> own = {{x, first, rows, size}};
{rows}
{matrix}
{sums.format("gates", "column")}
{second}
for (int r = 0; r < ROWS; r++)
  for (int n = 0; n < OUTPUTS; n++)
    if (int(lane) == r * OUTPUTS + n && first + r < rows && column + n < columns) {{
      const size_t place = static_cast<size_t>(first + r) * columns + column + n;
      const float gate = gates[r * OUTPUTS + n];
      y[place] = static_cast<T>(fma({made}, {other}, {more}));
    }}
"""
