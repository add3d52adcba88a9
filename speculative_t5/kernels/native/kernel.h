/* Products of few rows, for one instruction set: included once for each, with these defined.
 *
 * WIDTH     floats in a vector
 * COLUMNS   columns of the result in a tile of `dots`, 4 or 2: as many as fit the registers
 * NAME(f)   f, made unique to the instruction set
 * TARGET    attribute of functions that use it
 * MULTIPLY_ADD(a, b, c)  a * b + c, rounded once or twice, but always so: a compiler may choose
 *           anew at each place
 * READ_ONCE(v)  optional: keeps the compiler from reading a vector from memory for each use
 * MANY_TILES     optional: with this many tiles of rows or more, a tile stays in the nearest cache
 *           while many columns are read; with fewer, a column stays. With AVX-512
 *           it gained 2 to 4 % where the matrix was cached, and lost 15 % where it was not
 * SUM4      optional: adds up four vectors into four floats
 * SUM8      optional: adds up two times four vectors, each in the order of SUM4
 */

typedef float NAME(vec) __attribute__((vector_size(4 * WIDTH), aligned(4)));
#define VEC NAME(vec)
#define INLINE static inline __attribute__((always_inline)) TARGET
#ifndef READ_ONCE
#define READ_ONCE(v) ((void)0)
#endif
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

/* A tile's elements, each the sum of a vector. */
INLINE void NAME(put_sums)(const product *p, int row, int column, VEC (*sum)[COLUMNS], int rows,
                           int columns)
{
    UNROLL
    for (int i = 0; i < rows; i += 2) {
        const int both = i + 1 < rows;
        float total[8];
#ifdef SUM4
        if (both && columns == 2) { /* each is summed in the same order, wherever it stands */
            SUM4(sum[i][0], sum[i][1], sum[i + 1][0], sum[i + 1][1], total);
            NAME(put)(p, row + i, column, total, 2);
            NAME(put)(p, row + i + 1, column, total + 2, 2);
            continue;
        }
#endif
#ifdef SUM8
        if (both && columns == 4) {
            SUM8(sum[i], sum[i + 1], total);
        } else
#endif
        {
            NAME(sum4)(sum[i], columns, total);
            if (both)
                NAME(sum4)(sum[i + 1], columns, total + 4);
        }
        NAME(put)(p, row + i, column, total, columns);
        if (both)
            NAME(put)(p, row + i + 1, column, total + 4, columns);
    }
}

/* Some floats, and zeros behind them. */
INLINE VEC NAME(partial)(const float *x, int count)
{
    VEC v = {0};
    for (int i = 0; i < WIDTH; i++)
        v[i] = i < count ? x[i] : 0;
    return v;
}

/* c[row..][column..] for a transposed b: each element is a dot product over contiguous memory.
 * An element is summed in the same order whatever the tile: one row alone gives the same bits.
 * `num_ahead` columns of those to come, from `ahead` on, are fetched meanwhile. */
INLINE void NAME(dots)(const product *p, int row, int column, int rows, int columns,
                       const float *ahead, int num_ahead)
{
    const size_t lda = (size_t)p->lda, ldb = (size_t)p->ldb;
    const float *a = p->a + (size_t)row * lda, *b = p->b + (size_t)column * ldb;
    const int whole = p->k - p->k % WIDTH;
    VEC sum[ROWS][COLUMNS];
    UNROLL
    for (int i = 0; i < rows; i++)
        UNROLL
        for (int j = 0; j < columns; j++)
            sum[i][j] = (VEC){0};
    /* Addresses are a pointer and up to two strides: from one pointer, rows took additions each. */
    const float *upper = a, *lower = rows > 3 ? a + 3 * lda : a, *at = b;
    for (int k = 0; k < whole; k += WIDTH, upper += WIDTH, lower += WIDTH, at += WIDTH) {
        VEC w[COLUMNS];
        UNROLL
        for (int j = 0; j < columns; j++)
            w[j] = *(const VEC *)(at + (size_t)j * ldb);
        UNROLL
        for (int j = 0; j < num_ahead; j++)
            __builtin_prefetch(ahead + (size_t)j * ldb + k, 0, 1);
        UNROLL
        for (int i = 0; i < rows; i++) {
            VEC x = *(const VEC *)((i < 3 ? upper : lower) + (size_t)(i % 3) * lda);
            READ_ONCE(x);
            UNROLL
            for (int j = 0; j < columns; j++)
                sum[i][j] = MULTIPLY_ADD(x, w[j], sum[i][j]);
        }
    }
    if (whole < p->k)
        for (int i = 0; i < rows; i++) {
            VEC x = NAME(partial)(a + (size_t)i * lda + whole, p->k - whole);
            for (int j = 0; j < columns; j++)
                sum[i][j] = MULTIPLY_ADD(
                    x, NAME(partial)(b + (size_t)j * ldb + whole, p->k - whole), sum[i][j]);
        }
    NAME(put_sums)(p, row, column, sum, rows, columns);
}

/* Functions of their own, each with all registers to itself. */
#define DOTS(rows)                                                                              \
    static __attribute__((noinline)) TARGET void NAME(dots##rows)(                              \
        const product *p, int row, int column, const float *ahead, int num_ahead)               \
    {                                                                                           \
        if (num_ahead == COLUMNS)                                                               \
            NAME(dots)(p, row, column, rows, COLUMNS, ahead, COLUMNS);                          \
        else if (num_ahead == 1)                                                                \
            NAME(dots)(p, row, column, rows, COLUMNS, ahead, 1);                                \
        else if (num_ahead == 0)                                                                \
            NAME(dots)(p, row, column, rows, COLUMNS, NULL, 0);                                 \
        else                                                                                    \
            NAME(dots)(p, row, column, rows, COLUMNS, ahead, COLUMNS / 2);                      \
    }                                                                                           \
    static __attribute__((noinline)) TARGET void NAME(dot##rows)(const product *p, int row,      \
                                                                 int column)                    \
    {                                                                                           \
        NAME(dots)(p, row, column, rows, 1, NULL, 0);                                           \
    }
DOTS(1)
DOTS(2)
DOTS(3)
DOTS(4)
DOTS(5)
DOTS(6)
#undef DOTS

/* Of the rows that are left, as many as make tiles of like heights, `most` at most. */
INLINE int NAME(height)(int left, int most)
{
    const int tiles = (left - 1) / most + 1;
    return (left + tiles - 1) / tiles;
}

/* Columns to `end`; the tiles of a group of columns share what is to be fetched ahead: those that are
 * `distance` columns on, or nothing new if that is 0. */
static TARGET void NAME(dot_columns)(const product *p, int column, int end, int distance)
{
    static void (*const many[])(const product *, int, int, const float *, int) = {
        NAME(dots1), NAME(dots2), NAME(dots3), NAME(dots4), NAME(dots5), NAME(dots6)};
    static void (*const one[])(const product *, int, int) = {
        NAME(dot1), NAME(dot2), NAME(dot3), NAME(dot4), NAME(dot5), NAME(dot6)};
    const int tiles = (p->m + ROWS - 1) / ROWS;
#ifdef MANY_TILES
    const int span = widened_columns(TILES_SHARE, p->k, COLUMNS);
    const int whole = tiles < MANY_TILES ? column : end - (end - column) % COLUMNS;
    for (int last; column < whole; column = last) {
        last = whole - column < span ? whole : column + span;
        for (int row = 0, rows; row < p->m; row += rows) {
            rows = NAME(height)(p->m - row, ROWS);
            for (int i = column; i < last; i += COLUMNS)
                many[rows - 1](p, row, i, NULL, 0);
        }
    }
#endif
    const int num_ahead = tiles == 1 ? COLUMNS : tiles < COLUMNS ? COLUMNS / 2 : 1;
    for (; column + COLUMNS <= end; column += COLUMNS) {
        const float *ahead = p->b + (size_t)(column + distance) * (size_t)p->ldb;
        for (int row = 0, rows, turn = 0; row < p->m; row += rows, turn += num_ahead) {
            rows = NAME(height)(p->m - row, ROWS);
            many[rows - 1](p, row, column, ahead + (size_t)(turn % COLUMNS) * (size_t)p->ldb,
                           num_ahead);
        }
    }
    for (; column < end; column++)
        for (int row = 0, rows; row < p->m; row += rows) {
            rows = NAME(height)(p->m - row, ROWS);
            one[rows - 1](p, row, column);
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
                sum[i][j] = MULTIPLY_ADD((VEC){0} + a[(size_t)i * p->lda + k], w[j], sum[i][j]);
    }
    UNROLL
    for (int i = 0; i < rows; i++) {
        UNROLL
        for (int j = 0; j < vectors; j++)
            NAME(put)(p, row + i, column + WIDTH * j, (const float *)&sum[i][j], WIDTH);
    }
}

#define AXPYS(rows)                                                                         \
    static __attribute__((noinline)) TARGET void NAME(axpys##rows)(                         \
        const product *p, int row, int column, int vectors)                                 \
    {                                                                                       \
        if (vectors == COLUMNS)                                                             \
            NAME(axpy_tile)(p, row, column, rows, COLUMNS);                                 \
        else                                                                                \
            NAME(axpy_tile)(p, row, column, rows, 1);                                       \
    }
AXPYS(1)
AXPYS(2)
AXPYS(3)
AXPYS(4)
AXPYS(5)
AXPYS(6)
#undef AXPYS

static TARGET void NAME(axpy_tiles)(const product *p, int column, int vectors)
{
    static void (*const axpys[])(const product *, int, int, int) = {
        NAME(axpys1), NAME(axpys2), NAME(axpys3), NAME(axpys4), NAME(axpys5), NAME(axpys6)};
    for (int row = 0, rows; row < p->m; row += rows) {
        rows = NAME(height)(p->m - row, ROWS);
        axpys[rows - 1](p, row, column, vectors);
    }
}

static TARGET void NAME(columns)(const product *p, int column, int end)
{
    if (p->b_transposed) {
        NAME(dot_columns)(p, column, end, 2 * COLUMNS);
        return;
    }
    for (; column + COLUMNS * WIDTH <= end; column += COLUMNS * WIDTH)
        NAME(axpy_tiles)(p, column, COLUMNS);
    for (; column + WIDTH <= end; column += WIDTH)
        NAME(axpy_tiles)(p, column, 1);
    /* As whole vectors are summed: a plain loop would round by how many it takes at a time. */
    for (int i = 0; column < end && i < p->m; i++) {
        const int left = end - column;
        VEC sum = {0};
        for (int k = 0; k < p->k; k++) {
            VEC w = {0};
            for (int j = 0; j < left; j++)
                w[j] = p->b[(size_t)k * p->ldb + column + j];
            sum = MULTIPLY_ADD((VEC){0} + p->a[(size_t)i * p->lda + k], w, sum);
        }
        NAME(put)(p, i, column, (const float *)&sum, left);
    }
}

#undef INLINE
#undef UNROLL
#undef VEC
#undef READ_ONCE
#undef MANY_TILES
