/* Products with matrices that are stored in fewer bits, for one instruction set: included after
 * kernel.h, with what that needs still defined, and with these.
 *
 * HALVES_AT(p)     WIDTH float16 numbers as floats
 * BYTES_AT(p)      WIDTH bytes as ints
 * NIBBLES_AT(p)    WIDTH numbers of 4 bits as ints
 * HALF(bits)       a float16 number as a float
 *
 * A matrix is read once, and its numbers become floats in registers, or, for several tiles of rows,
 * in a buffer. Sums have the order of `dots`: a matrix stored in 16 bits gives the bits of the same
 * one in float32.
 */

typedef int NAME(ints) __attribute__((vector_size(4 * WIDTH), aligned(4)));
typedef uint16_t NAME(shorts) __attribute__((vector_size(2 * WIDTH), aligned(2)));
#define VEC NAME(vec)
#define INTS NAME(ints)
#define INLINE static inline __attribute__((always_inline)) TARGET
#define UNROLL _Pragma("GCC unroll 16")

INLINE float NAME(number)(const void *data, size_t i, enum stored_type type)
{
    switch (type) {
    case STORED_FLOAT16: return HALF(((const uint16_t *)data)[i]);
    case STORED_BFLOAT16: return from_bits((uint32_t)((const uint16_t *)data)[i] << 16);
    default: return ((const float *)data)[i];
    }
}

/* The numbers from `i` on, which are as many as there are in a vector; of 4 or 8 bits whole ones. */
INLINE VEC NAME(numbers)(const void *data, size_t i, enum stored_type type)
{
    switch (type) {
    case STORED_FLOAT16: return HALVES_AT((const uint16_t *)data + i);
    case STORED_BFLOAT16:
        return (VEC)(__builtin_convertvector(*(const NAME(shorts) *)((const uint16_t *)data + i),
                                             INTS) << 16);
    case STORED_AFFINE8:
        return __builtin_convertvector(BYTES_AT((const uint8_t *)data + i), VEC);
    case STORED_AFFINE4:
        return __builtin_convertvector(NIBBLES_AT((const uint8_t *)data + i / 2), VEC);
    default: return *(const VEC *)((const float *)data + i);
    }
}

/* Some of them, and zeros behind them. */
INLINE VEC NAME(last_numbers)(const void *data, size_t i, int count, enum stored_type type)
{
    VEC v = {0};
    for (int j = 0; j < WIDTH; j++)
        v[j] = j < count ? NAME(number)(data, i + (size_t)j, type) : 0;
    return v;
}

INLINE VEC NAME(same)(float value)
{
    return (VEC){0} + value;
}

/* As `dots`. */
INLINE void NAME(stored_dots)(const product *p, int row, int column, int rows, int columns,
                              enum stored_type type)
{
    const matrix *b = p->stored;
    const float *a = p->a + (size_t)row * (size_t)p->lda;
    const size_t k = (size_t)p->k, first = (size_t)column * k, lda = (size_t)p->lda;
    const int is_affine = type == STORED_AFFINE8 || type == STORED_AFFINE4;
    const int group = is_affine ? b->group : 32;
    const size_t num_groups = k / (size_t)group;
    /* What the next but one tile reads is fetched as this one is read. */
    const size_t bytes = (size_t)group * stored_bits(type) / 8;
    const char *ahead = (const char *)b->data + (first + 2 * COLUMNS * k) * stored_bits(type) / 8;
    VEC sum[ROWS][COLUMNS];
    UNROLL
    for (int i = 0; i < rows; i++)
        UNROLL
        for (int j = 0; j < columns; j++)
            sum[i][j] = (VEC){0};
    size_t at = 0;
    for (size_t g = 0; g < num_groups; g++) {
        VEC scale[COLUMNS], bias[COLUMNS];
        if (is_affine) {
            UNROLL
            for (int j = 0; j < columns; j++) {
                size_t place = ((size_t)column + (size_t)j) * num_groups + g;
                scale[j] = NAME(same)(NAME(number)(b->scales, place, b->scale_type));
                bias[j] = NAME(same)(NAME(number)(b->biases, place, b->scale_type));
            }
        }
        for (size_t line = 0; line < columns * bytes; line += 64, ahead += 64)
            __builtin_prefetch(ahead, 0, 1);
        for (size_t end = at + (size_t)group; at < end; at += WIDTH) {
            VEC w[COLUMNS];
            UNROLL
            for (int j = 0; j < columns; j++) {
                w[j] = NAME(numbers)(b->data, first + (size_t)j * k + at, type);
                if (is_affine)
                    w[j] = MULTIPLY_ADD(w[j], scale[j], bias[j]);
            }
            UNROLL
            for (int i = 0; i < rows; i++) {
                VEC x = *(const VEC *)(a + (size_t)i * lda + at);
                UNROLL
                for (int j = 0; j < columns; j++)
                    sum[i][j] = MULTIPLY_ADD(x, w[j], sum[i][j]);
            }
        }
    }
    for (; at < k; at += WIDTH) { /* what is left of 16 bits or more */
        int left = k - at < WIDTH ? (int)(k - at) : WIDTH;
        VEC w[COLUMNS];
        for (int j = 0; j < columns; j++) {
            size_t i = first + (size_t)j * k + at;
            w[j] = left == WIDTH ? NAME(numbers)(b->data, i, type)
                                 : NAME(last_numbers)(b->data, i, left, type);
        }
        for (int i = 0; i < rows; i++) {
            VEC x = NAME(partial)(a + (size_t)i * lda + at, left);
            for (int j = 0; j < columns; j++)
                sum[i][j] = MULTIPLY_ADD(x, w[j], sum[i][j]);
        }
    }
    NAME(put_sums)(p, row, column, sum, rows, columns);
}

/* Functions of their own, each with all registers to itself. */
#define STORED_DOTS(rows)                                                                       \
    static __attribute__((noinline)) TARGET void NAME(stored_dots##rows)(                       \
        const product *p, int row, int column, int columns)                                     \
    {                                                                                           \
        switch (p->stored->type * 2 + (columns == COLUMNS)) {                                   \
            STORED_CASE(rows, STORED_FLOAT16)                                                   \
            STORED_CASE(rows, STORED_BFLOAT16)                                                  \
            STORED_CASE(rows, STORED_AFFINE8)                                                   \
            STORED_CASE(rows, STORED_AFFINE4)                                                   \
        }                                                                                       \
    }
#define STORED_CASE(rows, type)                                                                 \
    case type * 2: NAME(stored_dots)(p, row, column, rows, 1, type); break;                     \
    case type * 2 + 1: NAME(stored_dots)(p, row, column, rows, COLUMNS, type); break;
STORED_DOTS(1)
STORED_DOTS(2)
STORED_DOTS(3)
STORED_DOTS(4)
STORED_DOTS(5)
STORED_DOTS(6)
#undef STORED_DOTS
#undef STORED_CASE

INLINE void NAME(widen_as)(const matrix *b, int k, int column, int count, float *out,
                           enum stored_type type)
{
    const int is_affine = type == STORED_AFFINE8 || type == STORED_AFFINE4;
    const size_t first = (size_t)column * (size_t)k, end = first + (size_t)count * (size_t)k;
    size_t i = first;
    if (is_affine)
        for (size_t group = (size_t)b->group; i < end; i += group) {
            VEC scale = NAME(same)(NAME(number)(b->scales, i / group, b->scale_type));
            VEC bias = NAME(same)(NAME(number)(b->biases, i / group, b->scale_type));
            for (size_t j = i; j < i + group; j += WIDTH)
                *(VEC *)(out + (j - first)) =
                    MULTIPLY_ADD(NAME(numbers)(b->data, j, type), scale, bias);
        }
    for (; i + WIDTH <= end; i += WIDTH)
        *(VEC *)(out + (i - first)) = NAME(numbers)(b->data, i, type);
    for (; i < end; i++)
        out[i - first] = NAME(number)(b->data, i, type);
}

/* Some columns of a matrix as floats, each k long. */
static TARGET void NAME(widen)(const matrix *b, int k, int column, int count, float *out)
{
    switch (b->type) {
    case STORED_FLOAT16: NAME(widen_as)(b, k, column, count, out, STORED_FLOAT16); break;
    case STORED_BFLOAT16: NAME(widen_as)(b, k, column, count, out, STORED_BFLOAT16); break;
    case STORED_AFFINE8: NAME(widen_as)(b, k, column, count, out, STORED_AFFINE8); break;
    case STORED_AFFINE4: NAME(widen_as)(b, k, column, count, out, STORED_AFFINE4); break;
    default: NAME(widen_as)(b, k, column, count, out, STORED_FLOAT32);
    }
}

/* Columns to `end`, for any number of rows. */
static TARGET void NAME(stored_columns)(const product *p, int column, int end)
{
    static void (*const tiles[])(const product *, int, int, int) = {
        NAME(stored_dots1), NAME(stored_dots2), NAME(stored_dots3),
        NAME(stored_dots4), NAME(stored_dots5), NAME(stored_dots6)};
    if (p->m <= DIRECT_ROWS) {
        /* A scale and a bias for each column need registers, too. */
        const int most = WIDTH < 16 && p->stored->type >= STORED_AFFINE8 ? 4 : ROWS;
        for (int columns; column < end; column += columns) {
            columns = column + COLUMNS <= end ? COLUMNS : 1;
            for (int row = 0, rows; row < p->m; row += rows) {
                rows = NAME(height)(p->m - row, most);
                tiles[rows - 1](p, row, column, columns);
            }
        }
        return;
    }
    const int step = widened_columns(WIDENED, p->k, COLUMNS);
    float *wide = thread_memory(WIDE, (size_t)step * (size_t)p->k);
    for (; column < end; column += step) {
        int count = end - column < step ? end - column : step;
        NAME(widen)(p->stored, p->k, column, count, wide);
        const char *next = (const char *)p->stored->data +
            (size_t)(column + count) * (size_t)p->k * stored_bits(p->stored->type) / 8;
        const size_t bytes = (size_t)count * (size_t)p->k * stored_bits(p->stored->type) / 8;
        for (size_t i = 0; i < bytes; i += 64)
            __builtin_prefetch(next + i, 0, 2);
        product part = *p;
        part.n = count;
        part.b = wide;
        part.ldb = p->k;
        part.c += column;
        NAME(dot_columns)(&part, 0, count, 0);
    }
}

#undef INLINE
#undef UNROLL
#undef VEC
#undef INTS
