/* Products of few rows, for one instruction set: included once for each, with these defined.
 *
 * WIDTH     floats in a vector
 * COLUMNS   columns of the result in a tile of `dots`, 4 or 2: as many as fit the registers
 * NAME(f)   f, made unique to the instruction set
 * TARGET    attribute of functions that use it
 * SUM4      optional: adds up four vectors into four floats
 */

typedef float NAME(vec) __attribute__((vector_size(4 * WIDTH), aligned(4)));
#define VEC NAME(vec)
#define INLINE static inline __attribute__((always_inline)) TARGET
#define UNROLL _Pragma("GCC unroll 16") /* sums that are looked up by a variable leave registers */

INLINE void NAME(sum4)(const VEC *a, int count, float *out)
{
#ifdef SUM4
    VEC zero = {0};
    SUM4(a[0], count > 1 ? a[1] : zero, count > 2 ? a[2] : zero, count > 3 ? a[3] : zero, out);
#else
    for (int i = 0; i < count; i++) {
        out[i] = 0;
        for (int j = 0; j < WIDTH; j++)
            out[i] += a[i][j];
    }
#endif
}

INLINE void NAME(put)(const product *p, int row, int column, const float *values, int count)
{
    float *c = p->c + (size_t)row * p->ldc + column;
    if (p->alpha == 1 && p->beta == 0) {
        UNROLL
        for (int i = 0; i < count; i++)
            c[i] = values[i];
        return;
    }
    for (int i = 0; i < count; i++)
        c[i] = p->alpha * values[i] + (p->beta != 0 ? p->beta * c[i] : 0);
}

/* c[row..][column..] for a transposed b: each element is a dot product over contiguous memory.
 * An element is summed in the same order whatever the tile: one row alone gives the same bits. */
INLINE void NAME(dot_tile)(const product *p, int row, int column, int rows, int columns)
{
    const float *a = p->a + (size_t)row * p->lda, *b = p->b + (size_t)column * p->ldb;
    const int whole = p->k - p->k % WIDTH;
    /* Columns to come are fetched meanwhile, an equal part of them by each tile of these. */
    const int tiles = (p->m + ROWS - 1) / ROWS, step = WIDTH / tiles;
    const float *ahead = b + (size_t)(2 * columns) * p->ldb + (size_t)(row * (long)whole / p->m);
    VEC sum[ROWS][COLUMNS];
    UNROLL
    for (int i = 0; i < rows; i++)
        UNROLL
        for (int j = 0; j < columns; j++)
            sum[i][j] = (VEC){0};
    for (int k = 0; k < whole; k += WIDTH) {
        VEC w[COLUMNS];
        UNROLL
        for (int j = 0; j < columns; j++) {
            w[j] = *(const VEC *)(b + (size_t)j * p->ldb + k);
            __builtin_prefetch(ahead + (size_t)j * p->ldb, 0, 1);
        }
        ahead += step;
        UNROLL
        for (int i = 0; i < rows; i++) {
            VEC x = *(const VEC *)(a + (size_t)i * p->lda + k);
            UNROLL
            for (int j = 0; j < columns; j++)
                sum[i][j] += x * w[j];
        }
    }
    UNROLL
    for (int i = 0; i < rows; i++) {
        float total[4];
        NAME(sum4)(sum[i], columns, total);
        for (int k = whole; k < p->k; k++)
            for (int j = 0; j < columns; j++)
                total[j] += a[(size_t)i * p->lda + k] * b[(size_t)j * p->ldb + k];
        NAME(put)(p, row + i, column, total, columns);
    }
}

/* c[row..][column..] for b as it is: vectors along its rows, each scaled by an element of a. */
INLINE void NAME(axpy_tile)(const product *p, int row, int column, int rows, int vectors)
{
    const float *a = p->a + (size_t)row * p->lda;
    VEC sum[ROWS][COLUMNS];
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < vectors; j++)
            sum[i][j] = (VEC){0};
    for (int k = 0; k < p->k; k++) {
        const float *b = p->b + (size_t)k * p->ldb + column;
        VEC w[COLUMNS];
        for (int j = 0; j < vectors; j++)
            w[j] = *(const VEC *)(b + WIDTH * j);
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < vectors; j++)
                sum[i][j] += a[(size_t)i * p->lda + k] * w[j];
    }
    UNROLL
    for (int i = 0; i < rows; i++) {
        UNROLL
        for (int j = 0; j < vectors; j++)
            NAME(put)(p, row + i, column + WIDTH * j, (const float *)&sum[i][j], WIDTH);
    }
}

/* The number of rows must be a constant, for the sums to stay in registers. */
#define TILES(tile, column, columns)                                                   \
    for (int row = 0, left = p->m; left; ) {                                           \
        int rows = (left + (left - 1) / ROWS) / ((left - 1) / ROWS + 1);               \
        switch (rows) {                                                                \
        case 1: NAME(tile)(p, row, column, 1, columns); break;                         \
        case 2: NAME(tile)(p, row, column, 2, columns); break;                         \
        case 3: NAME(tile)(p, row, column, 3, columns); break;                         \
        case 4: NAME(tile)(p, row, column, 4, columns); break;                         \
        case 5: NAME(tile)(p, row, column, 5, columns); break;                         \
        default: NAME(tile)(p, row, column, 6, columns);                               \
        }                                                                              \
        row += rows;                                                                   \
        left -= rows;                                                                  \
    }

static TARGET void NAME(columns)(const product *p, int column, int end)
{
    if (p->b_transposed) {
        for (; column + COLUMNS <= end; column += COLUMNS)
            TILES(dot_tile, column, COLUMNS)
        for (; column < end; column++)
            TILES(dot_tile, column, 1)
        return;
    }
    for (; column + COLUMNS * WIDTH <= end; column += COLUMNS * WIDTH)
        TILES(axpy_tile, column, COLUMNS)
    for (; column + WIDTH <= end; column += WIDTH)
        TILES(axpy_tile, column, 1)
    /* As whole vectors are summed: a plain loop would round by how many it takes at a time. */
    for (int i = 0; column < end && i < p->m; i++) {
        const int left = end - column;
        VEC sum = {0};
        for (int k = 0; k < p->k; k++) {
            VEC w = {0};
            for (int j = 0; j < left; j++)
                w[j] = p->b[(size_t)k * p->ldb + column + j];
            sum += p->a[(size_t)i * p->lda + k] * w;
        }
        NAME(put)(p, i, column, (const float *)&sum, left);
    }
}

#undef TILES
#undef INLINE
#undef UNROLL
#undef VEC
