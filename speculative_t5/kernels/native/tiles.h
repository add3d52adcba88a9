/* Products of quantized matrices by AMX's tiles: included once, by integers.h, where the compiler
 * knows them.
 *
 * A tile takes all numbers of 16 columns that share a scale, as they are stored, and the same of 16
 * rows. Its sums of integers are those that VNNI's instructions find, and they become floats in the
 * same order: a row has the bits that it has without tiles. Lanes are rows here: four bytes of each
 * of 16 rows are a quad. Where there are at most 8 rows, their higher and lower bytes share a tile.
 */

#define TILE_ROWS 16
#define PACKED_ROWS 8 /* at most, for a tile of both bytes */
#define TILE_BYTES(size) (TILE_ROWS * (size_t)(size))
#define TILES                                                                                       \
    __attribute__((target("amx-tile,amx-int8,avx512f,avx512dq,avx512bw,avx512vl,avx512vnni,avx2,"    \
                          "fma,f16c")))
#define TILES_INLINE static inline __attribute__((always_inline)) TILES

enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 }; /* of Linux 5.16 */

/* Numbers of tiles, which become parts of instructions' names: no enum. */
#define HIGH_SUMS 0 /* of the rows' higher bytes, or of both */
#define LOW_SUMS 1
#define HIGH_QUADS 2
#define LOW_QUADS 3
#define NUMBERS 4   /* of columns */
#define NUM_TILES 5

/* The shapes of tiles as LDTILECFG takes them. */
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes_of_row[16];
    uint8_t rows[16];
} tile_shapes;

/* The numbers of 16 columns as bytes: those of a group are `stride` apart from column to column. */
typedef struct {
    const uint8_t *data;
    size_t stride, group_step;
    const uint8_t *ahead; /* what to fetch meanwhile, for each group as many bytes, or NULL */
    size_t bytes_ahead;
} column_bytes;

/* Whether the processor has tiles, and Linux lets this process keep data in them. */
static int may_use_tiles(void)
{
    unsigned a, b, c, features = 0;
    const unsigned wanted = 1u << 24 | 1u << 25; /* AMX-TILE, AMX-INT8 */
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &features) || (features & wanted) != wanted)
        return 0;
    return !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA);
}

/* For this thread, until `leave_tiles`. */
static TILES void enter_tiles(int size)
{
    tile_shapes shapes = {.palette = 1};
    for (int i = 0; i < NUM_TILES; i++) {
        const int are_quads = i == HIGH_QUADS || i == LOW_QUADS;
        shapes.rows[i] = (uint8_t)(are_quads ? size / 4 : TILE_ROWS);
        shapes.bytes_of_row[i] = (uint16_t)(i == NUMBERS ? size : 4 * LANES);
    }
    __asm__ volatile("" ::"r"(&shapes) : "memory"); /* compilers may think that 8 bytes are read */
    _tile_loadconfig(&shapes);
}

static TILES void leave_tiles(void)
{
    _tile_release();
}

/* Round TILE_ROWS rows, or what there is from `row` on, and make quads of them: for each group those
 * of the higher bytes and then those of the lower. */
static TARGET void round_tile(const product *p, const rounded_rows *x, int row)
{
    const int rows = p->m - row < TILE_ROWS ? p->m - row : TILE_ROWS;
    const int are_packed = rows <= PACKED_ROWS, size = x->size;
    int8_t bytes[2 * TILE_ROWS * MOST_SHARING] = {0}, *low = bytes + TILE_BYTES(size);
    if (are_packed)
        low = bytes + TILE_BYTES(size) / 2;
    __m512i *quads = (__m512i *)(x->high + 2 * (size_t)row * (size_t)p->k);
    float *scales = x->scales + (size_t)row * (size_t)x->groups;
    float *sums = x->sums + (size_t)row * (size_t)x->groups;
    const float *a = p->a + (size_t)row * (size_t)p->lda;
    memset(scales, 0, sizeof(float) * TILE_ROWS * (size_t)x->groups);
    memset(sums, 0, sizeof(float) * TILE_ROWS * (size_t)x->groups);
    for (int g = 0; g < x->groups; g++, scales += TILE_ROWS, sums += TILE_ROWS) {
        for (int i = 0; i < rows; i++)
            round_group(a + (size_t)i * (size_t)p->lda + (size_t)(g * size), size, x->order,
                        bytes + i * size, low + i * size, scales + i, sums + i);
        for (int i = 0; are_packed && i < rows; i++) {
            scales[PACKED_ROWS + i] = scales[i];
            sums[PACKED_ROWS + i] = sums[i];
        }
        const uint8_t *tile = (const uint8_t *)bytes;
        for (int t = 0; t < (are_packed ? 1 : 2); t++, tile += TILE_BYTES(size))
            for (int at = 0; at < size; at += 16, quads += 4)
                transposed(tile + at, (size_t)size, quads);
    }
}

/* Sums of a group's products, (columns, rows), of the rows' higher and of their lower bytes. */
TILES_INLINE void multiply_group(const column_bytes *columns, size_t g, const __m512i *quads,
                                 int size, int are_packed, __m512i sums[2][LANES])
{
    _tile_zero(HIGH_SUMS);
    _tile_loadd(NUMBERS, columns->data + g * columns->group_step, columns->stride);
    _tile_loadd(HIGH_QUADS, quads, 4 * LANES);
    _tile_dpbusd(HIGH_SUMS, NUMBERS, HIGH_QUADS);
    if (!are_packed) {
        _tile_zero(LOW_SUMS);
        _tile_loadd(LOW_QUADS, quads + size / 4, 4 * LANES);
        _tile_dpbusd(LOW_SUMS, NUMBERS, LOW_QUADS);
    }
    _tile_stored(HIGH_SUMS, sums[0], 4 * LANES);
    if (!are_packed)
        _tile_stored(LOW_SUMS, sums[1], 4 * LANES);
}

/* Add a group's sums to those of all: for each column one vector, or for two if they are packed. */
TILES_INLINE void add_sums(const __m512i sums[2][LANES], const float *scales, const float *biases,
                           __m512 row_scales, __m512 row_sums, int are_packed, __m512 *total)
{
    const int count = are_packed ? LANES / 2 : LANES;
    UNROLL
    for (int i = 0; i < count; i++) {
        __m512i high = sums[0][i], low = sums[1][i];
        __m512 scale = _mm512_set1_ps(scales[i]), bias = _mm512_set1_ps(biases[i]);
        if (are_packed) {
            high = _mm512_shuffle_i32x4(sums[0][2 * i], sums[0][2 * i + 1], 0x44);
            low = _mm512_shuffle_i32x4(sums[0][2 * i], sums[0][2 * i + 1], 0xee);
            scale = _mm512_mask_mov_ps(_mm512_set1_ps(scales[2 * i]), 0xff00,
                                       _mm512_set1_ps(scales[2 * i + 1]));
            bias = _mm512_mask_mov_ps(_mm512_set1_ps(biases[2 * i]), 0xff00,
                                      _mm512_set1_ps(biases[2 * i + 1]));
        }
        total[i] = add_group(total[i], _mm512_add_epi32(_mm512_slli_epi32(high, 8), low), scale,
                             bias, row_scales, row_sums);
    }
}

/* Rows from `row` on, as many as `round_tile` took. While the sums of one group become floats, the
 * next is multiplied: what a tile has stored cannot be read at once. */
TILES_INLINE void tile_rows(const integer_tile *tile, const column_bytes *columns, int row,
                            int are_packed)
{
    const product *p = tile->p;
    const rounded_rows *x = p->rounded;
    const int size = x->size, groups = x->groups, per = p->stored->group / size;
    const __m512i *quads = (const __m512i *)(x->high + 2 * (size_t)row * (size_t)p->k);
    const float *row_scales = x->scales + (size_t)row * (size_t)groups;
    const float *row_sums = x->sums + (size_t)row * (size_t)groups;
    const float *scales = tile->scales, *biases = tile->biases;
    const uint8_t *ahead = columns->ahead;
    __m512i sums[2][2][LANES];
    __m512 total[LANES];
    UNROLL
    for (int i = 0; i < LANES; i++)
        total[i] = _mm512_setzero_ps();
    __asm__ volatile("" ::: "memory"); /* not all compilers know that tiles are read from memory */
    multiply_group(columns, 0, quads, size, are_packed, sums[0]);
    for (int g = 0, left = per; g < groups; g++) {
        quads += (are_packed ? 1 : 2) * size / 4;
        if (g + 1 < groups)
            multiply_group(columns, (size_t)g + 1, quads, size, are_packed, sums[(g + 1) % 2]);
        for (size_t line = 0; ahead && line < columns->bytes_ahead; line += 64, ahead += 64)
            __builtin_prefetch(ahead, 0, 2);
        add_sums((const __m512i(*)[LANES])sums[g % 2], scales, biases, _mm512_loadu_ps(row_scales),
                 _mm512_loadu_ps(row_sums), are_packed, total);
        row_scales += TILE_ROWS;
        row_sums += TILE_ROWS;
        if (!--left) { /* the next group of the matrix */
            left = per;
            scales += LANES;
            biases += LANES;
        }
    }
    const int rows = p->m - row < TILE_ROWS ? p->m - row : TILE_ROWS;
    const size_t stride = are_packed ? 2 * LANES : 4 * LANES; /* bytes of a column's sums */
    const int count = are_packed ? LANES / 2 : LANES;
    UNROLL
    for (int i = 0; i < count; i++)
        sums[0][0][i] = _mm512_castps_si512(total[i]);
    for (int i = 0; i < rows; i += 4) {
        __m512i of_rows[4];
        transposed((const uint8_t *)sums + 4 * i, stride, of_rows);
        for (int j = 0; j < 4 && i + j < rows; j++)
            store_columns(tile, row + i + j, _mm512_castsi512_ps(of_rows[j]));
    }
}

static __attribute__((noinline)) TILES void full_tile(const integer_tile *tile,
                                                      const column_bytes *columns, int row)
{
    tile_rows(tile, columns, row, 0);
}

static __attribute__((noinline)) TILES void packed_tile(const integer_tile *tile,
                                                        const column_bytes *columns, int row)
{
    tile_rows(tile, columns, row, 1);
}

/* Numbers of 4 bits as bytes, group by group: the even ones, and then the odd ones. */
static TARGET void widen_nibbles(const uint8_t *b, size_t stride, int size, uint8_t *out)
{
    const __m256i lower = _mm256_set1_epi8(15);
    for (size_t at = 0; at < stride; at += (size_t)size / 2)
        for (size_t i = 0; i < LANES; i++, out += size) {
            const __m256i *from = (const __m256i *)(b + i * stride + at);
            const __m256i v = size == 64
                                  ? _mm256_loadu_si256(from)
                                  : _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)from));
            const __m256i even = _mm256_and_si256(v, lower);
            const __m256i odd = _mm256_and_si256(_mm256_srli_epi16(v, 4), lower);
            if (size == 64) {
                _mm256_storeu_si256((__m256i *)out, even);
                _mm256_storeu_si256((__m256i *)(out + 32), odd);
            } else {
                _mm_storeu_si128((__m128i *)out, _mm256_castsi256_si128(even));
                _mm_storeu_si128((__m128i *)(out + 16), _mm256_castsi256_si128(odd));
            }
        }
}

/* Columns to `end`, as integer_columns computes them. */
static TILES void tile_columns(const product *p, int column, int end)
{
    const int size = p->rounded->size, bits = matrix_bits(p->stored);
    const size_t stride = (size_t)p->k * (size_t)bits / 8;
    float *memory = columns_memory(p);
    fetch_columns(p, column);
    enter_tiles(size);
    for (; column < end; column += LANES) {
        const integer_tile tile = next_columns(p, column, end, memory);
        column_bytes columns = {tile.data, stride, (size_t)size, tile.data + LANES * stride,
                                LANES * (size_t)(size * bits / 8)};
        if (bits == 4) {
            widen_nibbles(tile.data, stride, size, tile.unpacked);
            columns.data = tile.unpacked;
            columns.stride = (size_t)size;
            columns.group_step = TILE_BYTES(size);
        }
        for (int row = 0; row < p->m; row += TILE_ROWS) {
            (p->m - row <= PACKED_ROWS ? packed_tile : full_tile)(&tile, &columns, row);
            columns.ahead = NULL;
        }
    }
    leave_tiles();
}

#undef TILES
#undef TILES_INLINE
