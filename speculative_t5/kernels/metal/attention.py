"""T5's attention of few queries on Metal in one kernel, each query by itself.

The kernels are in attention.metal; here they are put together for `mx.fast.metal_kernel`. The bits
of a query depend neither on the other queries nor on the room for positions.
"""

from functools import cache
from importlib import resources
from typing import Any

import mlx.core as mx

from .products import LANES

ATTENTION = resources.files(__package__).joinpath("attention.metal").read_text("utf-8")
SIMDGROUPS = 4  # of a threadgroup, as attention.metal has them
MAX_HEAD = 128

SELF = """
const size_t row_of = offsets_shape[0] > 1 ? batch * offsets_strides[0] : 0;
const int place = offsets[row_of] + number % length;
const int reach = table_shape[1] / 2;
const int keys = min(place + 1, positions);
"""
SELF_SCORE = (
    "+ static_cast<float>(table[head * table_strides[0]"
    " + (max(key - place, -reach) + reach) * table_strides[1]])"
)
CROSS = """
const int keys = positions;
"""
MASK_SCORE = "+ static_cast<float>(mask[batch * mask_strides[0] + key * mask_strides[3]])"

# Arrays may be parts of larger ones, as a cache with more room than its sources need.
BODY = """
const int heads = cache_shape[2], positions = cache_shape[3], length = queries_shape[1];
const int head = threadgroup_position_in_grid.y, number = threadgroup_position_in_grid.z;
const int batch = number / length, lane = thread_index_in_simdgroup;
const int part = simdgroup_index_in_threadgroup;
{keys}
const size_t first =
    batch * queries_strides[0] + number % length * queries_strides[1] + head * SIZE;
float query[Seen<SIZE>::OWN];
for (int i = 0; i < Seen<SIZE>::OWN; i++)
  query[i] = lane + i * LANES < SIZE
      ? static_cast<float>(queries[first + lane + i * LANES])
      : 0.0f;
const size_t row = batch * cache_strides[1] + head * cache_strides[2];
Seen<SIZE> seen;
seen.begin();
for (int key = part; key < keys; key += SIMDGROUPS) {{
  const size_t own = row + key * cache_strides[3];
  float score = product<T, SIZE>(query, cache + own, lane) {score};
  seen.add(score, cache + cache_strides[0] + own, lane);
}}
threadgroup float bests[SIMDGROUPS], totals[SIMDGROUPS], found[SIMDGROUPS][SIZE];
for (int i = 0; i < Seen<SIZE>::OWN; i++)
  if (lane + i * LANES < SIZE)
    found[part][lane + i * LANES] = seen.values[i];
if (lane == 0) {{
  bests[part] = seen.best;
  totals[part] = seen.total;
}}
threadgroup_barrier(mem_flags::mem_threadgroup);
float best = bests[0];
for (int i = 1; i < SIMDGROUPS; i++)
  best = max(best, bests[i]);
for (int own = thread_index_in_threadgroup; own < SIZE; own += LANES * SIMDGROUPS) {{
  float sum = 0.0f, total = 0.0f;
  for (int i = 0; i < SIMDGROUPS; i++) {{
    const float share = totals[i] > 0.0f ? exp(bests[i] - best) : 0.0f;
    sum = fma(found[i][own], share, sum);
    total = fma(totals[i], share, total);
  }}
  y[(static_cast<size_t>(number) * heads + head) * SIZE + own] = static_cast<T>(sum / total);
}}
"""


def self_attention(
    queries: mx.array, cache: mx.array, table: mx.array, offsets: mx.array
) -> mx.array:
    """Attend from new positions to those up to themselves.

    Arrays may have gaps, but between the numbers of a head.

    Args:
        queries: (B, L, W), of which the first H * D numbers are queries of all heads.
        cache: Keys and values (2, B, H, T, D), the new ones written.
        table: Bias by relative position (H, 2 * max_distance + 1), see `PositionBias.tables`.
        offsets: Position of each row's first query, (B,) or (1,) int32.

    Returns:
        (B, L, H * D), in the type of the queries.
    """
    return _attend({"queries": queries, "cache": cache, "table": table, "offsets": offsets})


def cross_attention(queries: mx.array, source: mx.array, mask: mx.array | None) -> mx.array:
    """Attend from positions (P, L, W) to keys and values of sources (2, P, H, T, D).

    `mask` is added to the scores, (P, 1, 1, T); the result is as of `self_attention`.
    """
    inputs = {"queries": queries, "cache": source}
    return _attend(inputs if mask is None else inputs | {"mask": mask})


def _attend(inputs: dict[str, mx.array]) -> mx.array:
    queries = inputs["queries"]
    rows, length, _ = queries.shape
    _, _, heads, _, size = inputs["cache"].shape
    y: mx.array
    (y,) = _attention_kernel((*inputs,))(
        inputs=[*inputs.values()],
        template=[("T", queries.dtype), ("SIZE", size)],
        grid=(LANES * SIMDGROUPS, heads, rows * length),
        threadgroup=(LANES * SIMDGROUPS, 1, 1),
        output_shapes=[(rows, length, heads * size)],
        output_dtypes=[queries.dtype],
    )
    return y


@cache
def _attention_kernel(names: tuple[str, ...]) -> Any:
    keys, score = (SELF, SELF_SCORE) if "table" in names else (CROSS, "")
    score += MASK_SCORE if "mask" in names else ""
    return mx.fast.metal_kernel(
        name="_".join(["attention", *names[2:]]),
        input_names=names,
        output_names=["y"],
        header=ATTENTION,
        source=BODY.format(keys=keys, score=score),
        ensure_row_contiguous=False,  # or a part of an array would be copied for each pass
    )
