/* Products of quantized matrices by integers, with AVX-512's VNNI: included once, after stored.h.
 *
 * Numbers of a row that share a scale are rounded to 16 bits, and their higher and lower bytes are
 * multiplied by the matrix's own numbers. Sums of integers are exact, and those of groups are added
 * in one order: a row has the same bits among any other rows. Lanes are columns: four bytes of each
 * of 16 columns are a "quad" vector.
 */

#define TARGET __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")))
#define INLINE static inline __attribute__((always_inline)) TARGET
#define UNROLL _Pragma("GCC unroll 16")

#define LANES 16
#define INTEGER_ROWS 8     /* of a tile: with two sums of integers and one of floats each */
#define MOST_SHARING 64    /* numbers of a row that share a scale */
#define LEAST_SIZE 1e-30f  /* smaller numbers are rounded to zeros */
#define ROUNDED_MOST 32512 /* 127 * 256: the higher byte of what is rounded to it is 127 */

/* How the bytes of a row's numbers are ordered, as those of a matrix are unpacked. */
enum number_order { AS_STORED, IN_EIGHTS, EVEN_FIRST };

struct rounded_rows {
    int size, groups;     /* numbers that share a scale, and how often that is in a row */
    int by_tiles;         /* of AMX */
    enum number_order order;
    int8_t *high, *low;   /* (m, k): a number is (256 * high + low) * scale; or quads of tiles */
    float *scales, *sums; /* (m, groups); sums are those of numbers, as they were rounded */
};

/* Some columns of a product, 16 at most. */
typedef struct {
    const product *p;
    const uint8_t *data;          /* of these columns; only used without quads */
    const __m512i *quads;         /* all of them, or NULL */
    const float *scales, *biases; /* (groups of the matrix, 16) */
    void *unpacked;               /* room for these columns' numbers as bytes */
    int column;
    __mmask16 lanes;
} integer_tile;

static inline int matrix_bits(const matrix *b)
{
    return b->type == STORED_AFFINE8 ? 8 : 4;
}

INLINE __m512i with_16_bytes(__m512i v, int j, const uint8_t *b, __mmask16 bytes)
{
    const __m128i here = bytes == 0xffff ? _mm_loadu_si128((const __m128i *)b)
                                         : _mm_maskz_loadu_epi8(bytes, b);
    return _mm512_mask_broadcast_i32x4(v, (__mmask16)(15 << 4 * j), here);
}

/* The first 16 bytes of each column, or those of a mask, as four vectors; `stride` apart. */
INLINE void transposed_bytes(const uint8_t *b, size_t stride, __mmask16 bytes, __m512i w[4])
{
    __m512i v[4];
    UNROLL
    for (int i = 0; i < 4; i++) {
        v[i] = _mm512_setzero_si512();
        UNROLL
        for (int j = 0; j < 4; j++)
            v[i] = with_16_bytes(v[i], j, b + (size_t)(4 * j + i) * stride, bytes);
    }
    const __m512i low01 = _mm512_unpacklo_epi32(v[0], v[1]);
    const __m512i low23 = _mm512_unpacklo_epi32(v[2], v[3]);
    const __m512i high01 = _mm512_unpackhi_epi32(v[0], v[1]);
    const __m512i high23 = _mm512_unpackhi_epi32(v[2], v[3]);
    w[0] = _mm512_unpacklo_epi64(low01, low23);
    w[1] = _mm512_unpackhi_epi64(low01, low23);
    w[2] = _mm512_unpacklo_epi64(high01, high23);
    w[3] = _mm512_unpackhi_epi64(high01, high23);
}

INLINE void transposed(const uint8_t *b, size_t stride, __m512i w[4])
{
    transposed_bytes(b, stride, 0xffff, w);
}

/* The quads in 16 bytes of each column: 4 of numbers of 8 bits, or 8 of 4 bits. Those are in pairs,
 * of the first, third, fifth and seventh of eight numbers, and of the others. */
INLINE void make_quads(const uint8_t *b, size_t stride, int bits, __m512i w[8])
{
    transposed(b, stride, w);
    if (bits == 8)
        return;
    const __m512i lower = _mm512_set1_epi8(15);
    UNROLL
    for (int t = 3; t >= 0; t--) {
        w[2 * t + 1] = _mm512_and_si512(_mm512_srli_epi16(w[t], 4), lower);
        w[2 * t] = _mm512_and_si512(w[t], lower);
    }
}

/* Scales or biases of `count` columns, (groups, 16), with zeros for columns that are not there. */
static TARGET void columns_of_scales(const void *data, enum stored_type type, size_t first,
                                     int groups, int count, float *out)
{
    const int is_wide = type == STORED_FLOAT32, each = is_wide ? 4 : 8; /* in 16 bytes */
    if (count < LANES) {
        for (int g = 0; g < groups; g++)
            for (size_t j = 0; j < LANES; j++)
                out[(size_t)g * LANES + j] = j >= (size_t)count ? 0 : number_avx512(
                    data, (first + j) * (size_t)groups + (size_t)g, type);
        return;
    }
    const size_t stride = (size_t)groups * stored_bits(type) / 8;
    const uint8_t *b = (const uint8_t *)data + first * stride;
    for (int g = 0; g < groups; g += each) {
        const int at = g + each <= groups || groups < each ? g : groups - each;
        const int there = groups < each ? groups : each;
        __m512i w[4];
        if (there == each)
            transposed(b + (size_t)at * stored_bits(type) / 8, stride, w);
        else
            transposed_bytes(b, stride, (__mmask16)((1 << 16 / each * there) - 1), w);
        for (int t = 0; t < there; t++) {
            const __m512i here = is_wide ? w[t] : _mm512_srli_epi32(w[t / 2], t % 2 ? 16 : 0);
            const __m256i halves = _mm512_cvtepi32_epi16(here);
            __m512 numbers = _mm512_castsi512_ps(here);
            if (type == STORED_FLOAT16)
                numbers = _mm512_cvtph_ps(halves);
            else if (type == STORED_BFLOAT16)
                numbers = _mm512_castsi512_ps(
                    _mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
            _mm512_storeu_ps(out + (at + t) * LANES, numbers);
        }
    }
}

INLINE __m512i four_bytes(const int8_t *x)
{
    return _mm512_set1_epi32((int)word_at(x));
}

/* A sum of floats, and what a group adds to it: the same however `whole` came about. */
INLINE __m512 add_group(__m512 sum, __m512i whole, __m512 scale, __m512 bias, __m512 row_scale,
                        __m512 row_sum)
{
    sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole), _mm512_mul_ps(scale, row_scale), sum);
    return _mm512_fmadd_ps(bias, row_sum, sum);
}

INLINE void store_columns(const integer_tile *tile, int row, __m512 sum)
{
    const product *p = tile->p;
    float *c = p->c + (size_t)row * (size_t)p->ldc + tile->column;
    sum = _mm512_mul_ps(sum, _mm512_set1_ps(p->alpha));
    if (p->beta != 0)
        sum = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(tile->lanes, c), _mm512_set1_ps(p->beta), sum);
    _mm512_mask_storeu_ps(c, tile->lanes, sum);
}

INLINE void integer_rows(const integer_tile *tile, int row, int rows, int bits, int is_unpacked)
{
    const product *p = tile->p;
    const rounded_rows *x = p->rounded;
    const size_t k = (size_t)p->k, stride = k * (size_t)bits / 8;
    const int numbers = 128 / bits, slices = x->size / numbers, per = p->stored->group / x->size;
    const uint8_t *b = tile->data, *ahead = b + LANES * stride;
    const __m512i *quads = tile->quads;
    size_t at = (size_t)row * k;
    __m512 sum[INTEGER_ROWS];
    UNROLL
    for (int i = 0; i < rows; i++)
        sum[i] = _mm512_setzero_ps();
    for (int g = 0; g < x->groups; g++) {
        __m512i high[INTEGER_ROWS], low[INTEGER_ROWS];
        UNROLL
        for (int i = 0; i < rows; i++)
            high[i] = low[i] = _mm512_setzero_si512();
        for (int s = 0; s < slices; s++, at += (size_t)numbers) {
            __m512i w[8];
            if (is_unpacked) {
                UNROLL
                for (int t = 0; t < numbers / 4; t++)
                    w[t] = *quads++;
            } else {
                make_quads(b, stride, bits, w);
                b += 16;
                UNROLL
                for (int line = 0; line < 4; line++, ahead += 64)
                    __builtin_prefetch(ahead, 0, 1);
            }
            UNROLL
            for (int t = 0; t < numbers / 4; t++)
                UNROLL
                for (int i = 0; i < rows; i++) {
                    const size_t place = at + (size_t)i * k + 4 * (size_t)t;
                    high[i] = _mm512_dpbusd_epi32(high[i], w[t], four_bytes(x->high + place));
                    low[i] = _mm512_dpbusd_epi32(low[i], w[t], four_bytes(x->low + place));
                }
        }
        const __m512 scale = _mm512_loadu_ps(tile->scales + g / per * LANES);
        const __m512 bias = _mm512_loadu_ps(tile->biases + g / per * LANES);
        UNROLL
        for (int i = 0; i < rows; i++) {
            const size_t place = (size_t)(row + i) * (size_t)x->groups + (size_t)g;
            const __m512i whole = _mm512_add_epi32(_mm512_slli_epi32(high[i], 8), low[i]);
            sum[i] = add_group(sum[i], whole, scale, bias, _mm512_set1_ps(x->scales[place]),
                               _mm512_set1_ps(x->sums[place]));
        }
    }
    UNROLL
    for (int i = 0; i < rows; i++)
        store_columns(tile, row + i, sum[i]);
}

/* Functions of their own, each with all registers to itself. */
#define INTEGER_TILE(rows)                                                                      \
    static __attribute__((noinline)) TARGET void integer_rows##rows(const integer_tile *tile,   \
                                                                    int row)                    \
    {                                                                                           \
        const int bits = matrix_bits(tile->p->stored);                                          \
        if (bits == 8 && tile->quads)                                                           \
            integer_rows(tile, row, rows, 8, 1);                                                \
        else if (bits == 8)                                                                     \
            integer_rows(tile, row, rows, 8, 0);                                                \
        else if (tile->quads)                                                                   \
            integer_rows(tile, row, rows, 4, 1);                                                \
        else                                                                                    \
            integer_rows(tile, row, rows, 4, 0);                                                \
    }
INTEGER_TILE(1)
INTEGER_TILE(2)
INTEGER_TILE(3)
INTEGER_TILE(4)
INTEGER_TILE(5)
INTEGER_TILE(6)
INTEGER_TILE(7)
INTEGER_TILE(8)
#undef INTEGER_TILE

/* A row's numbers that share a scale: `count` from `a` on. Infinities and NaN make the scale NaN. */
static TARGET void round_group(const float *a, int count, enum number_order order, int8_t *high,
                               int8_t *low, float *scale, float *sum)
{
    const __m128i in_eights = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    const __m128i even_first = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    __m512i most = _mm512_setzero_si512(); /* as integers, sizes have the order that they have */
    for (int i = 0; i < count; i += LANES)
        most = _mm512_max_epu32(most, _mm512_and_si512(_mm512_loadu_si512(a + i),
                                                       _mm512_set1_epi32(0x7fffffff)));
    const float size = from_bits(_mm512_reduce_max_epu32(most));
    const int is_number = size <= 3.402823466e38f, is_zero = size < LEAST_SIZE;
    const __m512 steps = _mm512_set1_ps(is_number && !is_zero ? ROUNDED_MOST / size : 0);
    __m512i total = _mm512_setzero_si512();
    for (int i = 0; i < count; i += LANES) {
        const __m512i v = _mm512_cvtps_epi32(_mm512_mul_ps(
            is_number ? _mm512_loadu_ps(a + i) : _mm512_setzero_ps(), steps));
        const __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(v, _mm512_set1_epi32(128)), 8);
        __m128i h = _mm512_cvtepi32_epi8(upper), l = _mm512_cvtepi32_epi8(v);
        if (order != AS_STORED) {
            h = _mm_shuffle_epi8(h, order == IN_EIGHTS ? in_eights : even_first);
            l = _mm_shuffle_epi8(l, order == IN_EIGHTS ? in_eights : even_first);
        }
        if (order == EVEN_FIRST) { /* of all numbers */
            _mm_storel_epi64((__m128i *)(high + i / 2), h);
            _mm_storel_epi64((__m128i *)(low + i / 2), l);
            _mm_storeh_pd((double *)(high + (count + i) / 2), _mm_castsi128_pd(h));
            _mm_storeh_pd((double *)(low + (count + i) / 2), _mm_castsi128_pd(l));
        } else {
            _mm_storeu_si128((__m128i *)(high + i), h);
            _mm_storeu_si128((__m128i *)(low + i), l);
        }
        total = _mm512_add_epi32(total, v);
    }
    *scale = is_number ? (is_zero ? 0 : size / ROUNDED_MOST) : NAN;
    *sum = *scale * (float)_mm512_reduce_add_epi32(total);
}

/* Several tiles of rows share quads. */
static TARGET void unpack_quads(const uint8_t *b, size_t stride, int bits, __m512i *quads)
{
    const uint8_t *ahead = b + LANES * stride;
    for (size_t at = 0; at < stride; at += 16) {
        __m512i w[8];
        make_quads(b + at, stride, bits, w);
        for (int t = 0; t < 32 / bits; t++)
            *quads++ = w[t];
        for (int line = 0; line < 4; line++, ahead += 64)
            __builtin_prefetch(ahead, 0, 2);
    }
}

/* Memory for columns of a product: scales, biases, numbers unpacked, and numbers of the last. */
static float *columns_memory(const product *p)
{
    const size_t k = (size_t)p->k, bits = (size_t)matrix_bits(p->stored);
    return thread_memory(WIDE, 2 * k / (size_t)p->stored->group * LANES + k * LANES / 4 +
                                   k * bits / 8 * LANES / 4);
}

/* Columns from `column` on: as many as there are lanes, with zeros from `end` on. */
static TARGET integer_tile next_columns(const product *p, int column, int end, float *memory)
{
    const matrix *b = p->stored;
    const int count = end - column < LANES ? end - column : LANES, groups = p->k / b->group;
    const size_t stride = (size_t)p->k * (size_t)matrix_bits(b) / 8;
    float *scales = memory, *biases = scales + (size_t)groups * LANES;
    float *unpacked = biases + (size_t)groups * LANES, *rest = unpacked + (size_t)p->k * LANES / 4;
    integer_tile tile = {.p = p, .scales = scales, .biases = biases, .unpacked = unpacked};
    tile.column = column;
    tile.lanes = (__mmask16)((1 << count) - 1);
    tile.data = (const uint8_t *)b->data + (size_t)column * stride;
    columns_of_scales(b->scales, b->scale_type, (size_t)column, groups, count, scales);
    columns_of_scales(b->biases, b->scale_type, (size_t)column, groups, count, biases);
    if (count < LANES) {
        memset(rest, 0, LANES * stride);
        memcpy(rest, tile.data, (size_t)count * stride);
        tile.data = (const uint8_t *)rest;
    }
    return tile;
}

/* Fetch the first columns; those that follow are fetched while these are multiplied. */
static TARGET void fetch_columns(const product *p, int column)
{
    const size_t stride = (size_t)p->k * (size_t)matrix_bits(p->stored) / 8;
    const uint8_t *data = (const uint8_t *)p->stored->data + (size_t)column * stride;
    for (size_t at = 0; at < LANES * stride; at += 64)
        __builtin_prefetch(data + at, 0, 2);
}

/* Columns to `end`, for any number of rows. */
static TARGET void integer_columns(const product *p, int column, int end)
{
    static void (*const tiles[])(const integer_tile *, int) = {
        integer_rows1, integer_rows2, integer_rows3, integer_rows4,
        integer_rows5, integer_rows6, integer_rows7, integer_rows8};
    const int bits = matrix_bits(p->stored);
    float *memory = columns_memory(p);
    fetch_columns(p, column);
    for (; column < end; column += LANES) {
        integer_tile tile = next_columns(p, column, end, memory);
        if (p->m > INTEGER_ROWS) {
            unpack_quads(tile.data, (size_t)p->k * (size_t)bits / 8, bits, tile.unpacked);
            tile.quads = tile.unpacked;
        }
        for (int row = 0, rows; row < p->m; row += rows) {
            rows = height_avx512(p->m - row, INTEGER_ROWS);
            tiles[rows - 1](&tile, row);
        }
    }
}

static TARGET void round_rows(const product *p, const rounded_rows *x, int row, int end)
{
    for (; row < end; row++)
        for (int g = 0; g < x->groups; g++) {
            const size_t place = (size_t)row * (size_t)x->groups + (size_t)g;
            const size_t at = (size_t)(g * x->size), to = (size_t)row * (size_t)p->k + at;
            round_group(p->a + (size_t)row * (size_t)p->lda + at, x->size, x->order, x->high + to,
                        x->low + to, x->scales + place, x->sums + place);
        }
}

/* Room for a product's rows; for whole tiles of them. */
static rounded_rows new_rounded(const product *p, int by_tiles)
{
    rounded_rows x;
    x.by_tiles = by_tiles;
    x.order = matrix_bits(p->stored) == 8 ? AS_STORED : by_tiles ? EVEN_FIRST : IN_EIGHTS;
    x.size = p->stored->group < MOST_SHARING ? p->stored->group : MOST_SHARING;
    x.groups = p->k / x.size;
    const size_t m = (size_t)(by_tiles ? (p->m + LANES - 1) / LANES * LANES : p->m);
    const size_t groups = m * (size_t)x.groups, count = m * (size_t)p->k;
    x.high = (int8_t *)thread_memory(ROUNDED, 2 * groups + count / 2 + 1);
    x.low = x.high + count;
    x.scales = (float *)(x.low + count);
    x.sums = x.scales + groups;
    return x;
}

#if defined(HAS_TILES)
#include "tiles.h"
#endif

#undef TARGET
#undef INLINE
#undef UNROLL
