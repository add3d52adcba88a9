/* cblas_sgemm for few rows: what decoding is made of.
 *
 * A pass over 1 to 30 tokens multiplies few rows by large matrices, and takes as long as it takes
 * to read those. BLAS libraries are made for many rows: they copy the matrix first, and wait for
 * threads. Here each matrix is read once, in place, by all threads.
 *
 * Loaded before MLX with its symbols global, this takes the place of the cblas_sgemm that MLX
 * would call; what is not for it is passed on to the library given to `products_init`.
 */

#define _GNU_SOURCE
#include <limits.h>
#include <linux/futex.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "products.h"

#define ROWS 6           /* of a tile: with COLUMNS as many sums as there are registers for */
#define MIN_WORK 8192    /* elements of b that are worth another thread's attention */
#define MIN_OTHER 1e6    /* multiplications that are worth it, in another library's products */
#define MAX_THREADS 64
#define MAX_ALIGNED (1 << 18) /* elements of a that are worth a copy */
#define AWAKE 1e-3       /* seconds that a worker without work looks out for more */

enum { ROW_MAJOR = 101, COLUMN_MAJOR = 102, NO_TRANSPOSE = 111, TRANSPOSE = 112 };

typedef void (*sgemm)(int, int, int, int, int, int, float, const float *, int, const float *, int,
                      float, float *, int);

/* Of a matrix that is stored in fewer bits: */
#define DIRECT_ROWS 12              /* for more, columns become floats that tiles of rows share */
#define WIDENED (1 << 12)           /* floats of such columns: a core's nearest cache holds them */
#define WIDENED_FOR_OTHER (1 << 20) /* the same for another library, which gains by more of them */
#define TILES_SHARE (1 << 15)       /* floats of b that many tiles of rows read: a core's second cache */
#define LEAST_BY_TILES(bits) ((bits) == 8 ? 6 : 9) /* rows of a product that AMX computes */
#define MOST_ROUNDED (1 << 19)      /* numbers of rows that are multiplied before others are rounded */
#define ROUNDED_CHUNK 16            /* rows to round that are worth another thread's attention */

static float from_bits(uint32_t bits)
{
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static uint32_t word_at(const void *p)
{
    uint32_t word;
    memcpy(&word, p, sizeof word);
    return word;
}

/* A float16 number, its exponent moved to float32's. */
static float half(uint16_t bits)
{
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, rest = (uint32_t)(bits & 0x7fff) << 13;
    if (rest >= 0x7c00 << 13) /* infinite, or no number */
        return from_bits(sign | 0x7f800000 | rest);
    float size = from_bits(rest) * 0x1p112f;
    return sign ? -size : size;
}

static inline size_t stored_bits(enum stored_type type)
{
    static const size_t bits[] = {32, 16, 16, 8, 4};
    return bits[type];
}

/* How many columns of `k` inputs to make floats of at once: whole tiles. */
static inline int widened_columns(int floats, int k, int tile)
{
    int tiles = floats / k / tile;
    return (tiles ? tiles : 1) * tile;
}

/* What a thread's buffers are for: a matrix's numbers, and a product's rows. */
enum { WIDE, ROUNDED, NUM_BUFFERS };

static pthread_key_t buffer_keys[NUM_BUFFERS];
static pthread_once_t buffers_once = PTHREAD_ONCE_INIT;

typedef struct {
    size_t count;
    float numbers[] __attribute__((aligned(64))); /* no vector straddles cache lines */
} buffer;

static void make_buffer_keys(void)
{
    for (int i = 0; i < NUM_BUFFERS; i++)
        pthread_key_create(&buffer_keys[i], free);
}

/* Memory of this thread, which keeps it: at least `count` floats. */
static float *thread_memory(int purpose, size_t count)
{
    pthread_once(&buffers_once, make_buffer_keys);
    buffer *b = pthread_getspecific(buffer_keys[purpose]);
    if (!b || b->count < count) {
        free(b);
        if (posix_memalign((void **)&b, 64, sizeof *b + sizeof(float) * count))
            abort(); /* the interface has no way to fail */
        b->count = count;
        pthread_setspecific(buffer_keys[purpose], b);
    }
    return b->numbers;
}

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

#define AVX2 __attribute__((target("avx2,fma,f16c")))
#define AVX512 __attribute__((target("avx512f,avx512dq,avx2,fma,f16c")))

#define SUM_OF_8S(a, b, c, d, out)                                                          \
    do {                                                                                   \
        __m256 sums = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));          \
        _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(sums),                        \
                                      _mm256_extractf128_ps(sums, 1)));                    \
    } while (0)
/* The halves of two vectors, and then neighbours in two, added. */
#define ADD_HALVES(a, b)                                                                   \
    _mm512_add_ps(_mm512_shuffle_f32x4((__m512)(a), (__m512)(b), 0x44),                    \
                  _mm512_shuffle_f32x4((__m512)(a), (__m512)(b), 0xee))
#define ADD_NEIGHBOURS(a, b)                                                               \
    _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd))
#define SUM_OF_8_16S(a, b, out)                                                            \
    do {                                                                                   \
        __m512 pairs = ADD_NEIGHBOURS(ADD_HALVES((a)[0], (b)[0]), ADD_HALVES((a)[1], (b)[1])); \
        __m512 others = ADD_NEIGHBOURS(ADD_HALVES((a)[2], (b)[2]), ADD_HALVES((a)[3], (b)[3])); \
        __m512 sums = ADD_NEIGHBOURS(pairs, others);                                       \
        sums = _mm512_add_ps(sums, _mm512_shuffle_f32x4(sums, sums, 0xb1));                \
        _mm_storeu_ps(out, _mm512_castps512_ps128(sums));                                  \
        _mm_storeu_ps((out) + 4, _mm512_extractf32x4_ps(sums, 2));                         \
    } while (0)
#define HALVES(v)                                                                          \
    _mm256_add_ps(_mm512_castps512_ps256((__m512)(v)), _mm512_extractf32x8_ps((__m512)(v), 1))

#define HALF(bits) _cvtsh_ss(bits)

#define WIDTH 8
#define COLUMNS 2
#define NAME(f) f##_avx2
#define TARGET AVX2
#define READ_ONCE(v) __asm__("" : "+v"(v))
#define MANY_TILES 3
#define MULTIPLY_ADD(a, b, c) ((VEC)_mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(c)))
#define SUM4(a, b, c, d, out) SUM_OF_8S((__m256)(a), (__m256)(b), (__m256)(c), (__m256)(d), out)
#define HALVES_AT(p) ((VEC)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p))))
#define BYTES_AT(p) ((INTS)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(p))))
#define NIBBLES_AT(p)                                                                      \
    ((INTS)_mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32(word_at(p)),               \
                                              _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28)), \
                            _mm256_set1_epi32(15)))
#include "kernel.h"
#include "stored.h"
#undef WIDTH
#undef COLUMNS
#undef NAME
#undef TARGET
#undef MULTIPLY_ADD
#undef SUM4
#undef HALVES_AT
#undef BYTES_AT
#undef NIBBLES_AT

#define WIDTH 16
#define COLUMNS 4
#define NAME(f) f##_avx512
#define TARGET AVX512
#define READ_ONCE(v) __asm__("" : "+v"(v))
#define MULTIPLY_ADD(a, b, c) ((VEC)_mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(c)))
#define SUM8 SUM_OF_8_16S
#define SUM4(a, b, c, d, out) SUM_OF_8S(HALVES(a), HALVES(b), HALVES(c), HALVES(d), out)
#define HALVES_AT(p) ((VEC)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p))))
#define BYTES_AT(p) ((INTS)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(p))))
#define NIBBLES_AT(p)                                                                      \
    ((INTS)_mm512_and_si512(                                                               \
        _mm512_srlv_epi32(                                                                 \
            _mm512_permutexvar_epi32(                                                      \
                _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1),         \
                _mm512_castsi128_si512(_mm_loadl_epi64((const __m128i *)(p)))),            \
            _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28)),  \
        _mm512_set1_epi32(15)))
#include "kernel.h"
#include "stored.h"
#undef WIDTH
#undef COLUMNS
#undef NAME
#undef TARGET
#undef MULTIPLY_ADD
#undef SUM8
#undef SUM4
#undef HALF
#undef HALVES_AT
#undef BYTES_AT
#undef NIBBLES_AT

#if __has_include(<amxint8intrin.h>) || __has_include(<amxintrin.h>) /* GCC's, clang's */
#define HAS_TILES
#endif
#include "integers.h"
#endif

#define WIDTH 4
#define COLUMNS 2
#define NAME(f) f##_plain
#define TARGET
#define MANY_TILES 3
#if defined(__aarch64__)
#include <arm_neon.h>
#define MULTIPLY_ADD(a, b, c) \
    ((VEC)vfmaq_f32((float32x4_t)(c), (float32x4_t)(a), (float32x4_t)(b)))
#else
#define MULTIPLY_ADD(a, b, c) ((a) * (b) + (c)) /* not fused where there are no such instructions */
#endif
#define HALF(bits) half(bits)
#define HALVES_AT(p) ((VEC){half((p)[0]), half((p)[1]), half((p)[2]), half((p)[3])})
#define BYTES_AT(p) ((INTS){(p)[0], (p)[1], (p)[2], (p)[3]})
#define NIBBLES_AT(p) ((INTS){(p)[0] & 15, (p)[0] >> 4, (p)[1] & 15, (p)[1] >> 4})
#include "kernel.h"
#include "stored.h"

typedef struct {
    void (*columns)(const product *, int, int);
    void (*stored_columns)(const product *, int, int);
    void (*widen)(const matrix *, int, int, int, float *);
} product_functions;

#define FUNCTIONS(set) {columns_##set, stored_columns_##set, widen_##set}
static const product_functions of_level[] = {
    FUNCTIONS(plain),
#if defined(__x86_64__)
    FUNCTIONS(avx2), FUNCTIONS(avx512),
#endif
};

static sgemm other_sgemm;
static int other_is_shared;
static pthread_mutex_t other_busy = PTHREAD_MUTEX_INITIALIZER;
static int max_rows, num_threads = 1, num_workers, instructions;
static __thread int thread_index;
static const product_functions *functions = of_level;

/* The job at hand, and which of its parts are taken. */
static part do_part;
static const void *job;
static _Atomic uint64_t claims;   /* number of the job << 32 | next part */
static atomic_uint job_number;    /* what idle workers wait on */
static atomic_int num_parts, num_done, num_asleep;
static pthread_mutex_t busy = PTHREAD_MUTEX_INITIALIZER;

static void take_parts(uint32_t number)
{
    for (;;) {
        uint64_t claim = atomic_load(&claims);
        uint32_t i = (uint32_t)claim;
        if (claim >> 32 != number || i >= (uint32_t)atomic_load(&num_parts))
            return;
        if (!atomic_compare_exchange_weak(&claims, &claim, claim + 1))
            continue;
        do_part(job, (int)i);
        atomic_fetch_add(&num_done, 1);
    }
}

static void pause_briefly(void)
{
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* The number of the job after `last`: awake for a while, then asleep. */
static uint32_t wait_for_job(uint32_t last)
{
    for (;;) {
        double until = seconds() + AWAKE;
        do {
            for (int i = 0; i < 32; i++) {
                uint32_t next = (uint32_t)(atomic_load(&claims) >> 32);
                if (next != last)
                    return next;
                pause_briefly();
            }
        } while (seconds() < until);
        atomic_fetch_add(&num_asleep, 1);
        syscall(SYS_futex, &job_number, FUTEX_WAIT_PRIVATE, last, NULL, NULL, 0);
        atomic_fetch_sub(&num_asleep, 1);
    }
}

static void *work(void *index)
{
    thread_index = (int)(intptr_t)index;
    for (uint32_t last = 0;;) {
        last = wait_for_job(last);
        take_parts(last);
    }
    return NULL;
}

static int start_workers(void)
{
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    while (num_workers < num_threads - 1) {
        pthread_t worker;
        if (pthread_create(&worker, &attributes, work, (void *)(intptr_t)(num_workers + 1)))
            break;
        num_workers++;
    }
    pthread_attr_destroy(&attributes);
    return num_workers;
}

/* After a fork the child has no workers; it starts its own when it needs them. */
static void forget_workers(void)
{
    num_workers = 0;
    atomic_store(&num_asleep, 0);
    atomic_store(&claims, (uint64_t)atomic_load(&job_number) << 32 | INT_MAX);
    pthread_mutex_init(&busy, NULL);
    pthread_mutex_init(&other_busy, NULL);
}

/* Prepare; to be called once, before the first product.
 *
 * library: the cblas_sgemm for products of many rows, or NULL to do all here.
 * shared: whether it uses one thread, and may be called by several at once, each for a part.
 * rows: the most rows of a product to compute here.
 * threads: to use, the caller's among them; 0 is as many as there are processors for this process.
 * level: 4 for AMX where there is, 3 for AVX-512 with VNNI, 2 without, 1 for at most AVX2, 0 for
 * neither.
 */
EXPORTED void products_init(void *library, int shared, int rows, int threads, int level)
{
    other_sgemm = (sgemm)library;
    other_is_shared = shared;
    max_rows = rows;
    cpu_set_t available;
    if (threads < 1)
        threads = sched_getaffinity(0, sizeof available, &available) ? 1 : CPU_COUNT(&available);
    num_threads = threads < MAX_THREADS ? threads : MAX_THREADS;
    instructions = 0;
#if defined(__x86_64__)
    unsigned a, b, features = 0, d; /* clang 14 does not know F16C by its name */
    __get_cpuid(1, &a, &b, &features, &d);
    if (level > 0 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
        features & bit_F16C)
        instructions = 1;
    if (instructions == 1 && level > 1 && __builtin_cpu_supports("avx512f") &&
        __builtin_cpu_supports("avx512dq"))
        instructions = 2;
    if (instructions == 2 && level > 2 && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni"))
        instructions = 3;
#endif
#if defined(HAS_TILES)
    if (instructions == 3 && level > 3 && may_use_tiles())
        instructions = 4;
#endif
    functions = &of_level[instructions < 3 ? instructions : 2];
    pthread_atfork(NULL, NULL, forget_workers);
}

int products_threads(void)
{
    return num_threads;
}

int products_thread(void)
{
    return thread_index;
}

EXPORTED int products_level(void)
{
    return instructions;
}

/* Do all parts of a job; the caller holds `busy`. */
static void share(part f, const void *context, int count)
{
    start_workers();
    do_part = f;
    job = context;
    atomic_store(&num_parts, count);
    atomic_store(&num_done, 0);
    uint32_t next = atomic_load(&job_number) + 1;
    atomic_store(&job_number, next);
    atomic_store(&claims, (uint64_t)next << 32);
    if (atomic_load(&num_asleep))
        syscall(SYS_futex, &job_number, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
    take_parts(next);
    while (atomic_load(&num_done) < count)
        pause_briefly();
    /* Nobody may take a part of the next job for one of this. */
    atomic_store(&claims, (uint64_t)next << 32 | INT_MAX);
}

void products_share(part f, const void *context, int count)
{
    if (count < 2 || num_threads < 2 || pthread_mutex_trylock(&busy)) {
        for (int i = 0; i < count; i++)
            f(context, i);
        return;
    }
    share(f, context, count);
    pthread_mutex_unlock(&busy);
}

/* A product, a chunk of columns, or of rows, for each part. */
typedef struct {
    product p;
    int chunk;
} columns_job;

static void do_columns(const product *p, int column, int end)
{
#if defined(HAS_TILES)
    if (p->rounded && p->rounded->by_tiles) {
        tile_columns(p, column, end);
        return;
    }
#endif
#if defined(__x86_64__)
    if (p->rounded) {
        integer_columns(p, column, end);
        return;
    }
#endif
    (p->stored ? functions->stored_columns : functions->columns)(p, column, end);
}

void products_row(const matrix *b, int row, int count, float *out)
{
    functions->widen(b, count, row, 1, out);
}

static void do_chunk(const void *context, int i)
{
    const columns_job *j = context;
    int end = (i + 1) * j->chunk;
    do_columns(&j->p, i * j->chunk, end < j->p.n ? end : j->p.n);
}

/* Put several rows where no vector of them straddles two cache lines: each is read many times. */
static void align_rows(product *p)
{
    static float rows[MAX_ALIGNED] __attribute__((aligned(64)));
    int stride = (p->k + 15) / 16 * 16;
    int is_aligned = (uintptr_t)p->a % 64 == 0 && p->lda % 16 == 0;
    if (p->m < 4 || (long)p->m * stride > MAX_ALIGNED || p->rounded || is_aligned)
        return;
    for (int i = 0; i < p->m; i++)
        memcpy(rows + (size_t)i * stride, p->a + (size_t)i * p->lda, sizeof(float) * (size_t)p->k);
    p->a = rows;
    p->lda = stride;
}

void products_alone(const product *p)
{
    do_columns(p, 0, p->n);
}

static void multiply(const product *p)
{
    long parts = (long)p->n * p->k / MIN_WORK;
    if (parts < 2 || num_threads < 2 || pthread_mutex_trylock(&busy)) {
        products_alone(p);
        return;
    }
    if (parts > 4 * num_threads)
        parts = 4 * num_threads;
    columns_job j = {*p, (int)(((p->n + parts - 1) / parts + 15) / 16 * 16)};
    align_rows(&j.p);
    share(do_chunk, &j, (p->n + j.chunk - 1) / j.chunk);
    pthread_mutex_unlock(&busy);
}

static int at_most(int limit, int count)
{
    return count < limit ? count : limit;
}

#if defined(__x86_64__)
typedef struct {
    const product *p;
    const rounded_rows *x;
} rounding_job;

static void do_rounding(const void *context, int i)
{
    const rounding_job *j = context;
#if defined(HAS_TILES)
    if (j->x->by_tiles) {
        round_tile(j->p, j->x, i * ROUNDED_CHUNK);
        return;
    }
#endif
    int end = (i + 1) * ROUNDED_CHUNK;
    round_rows(j->p, j->x, i * ROUNDED_CHUNK, end < j->p->m ? end : j->p->m);
}

/* As many rows at a time as stay in a core's second cache while it takes all columns. */
static void multiply_integers(const product *p)
{
    const int step = MOST_ROUNDED / p->k / ROUNDED_CHUNK * ROUNDED_CHUNK + ROUNDED_CHUNK;
    for (int row = 0; row < p->m; row += step) {
        product part = *p;
        part.m = at_most(step, p->m - row);
        part.a += (size_t)row * (size_t)p->lda;
        part.c += (size_t)row * (size_t)p->ldc;
        const int by_tiles = instructions == 4 && part.m >= LEAST_BY_TILES(matrix_bits(p->stored));
        const rounded_rows x = new_rounded(&part, by_tiles);
        const rounding_job j = {&part, &x};
        products_share(do_rounding, &j, (part.m + ROUNDED_CHUNK - 1) / ROUNDED_CHUNK);
        part.rounded = &x;
        multiply(&part);
    }
}
#endif

static void do_other(const product *p);

/* For another library a matrix becomes one of floats, some columns at a time. */
static void do_other_widened(const product *p, int first, int end)
{
    int step = at_most(end - first, widened_columns(WIDENED_FOR_OTHER, p->k, 16));
    product part = *p;
    part.stored = NULL;
    part.ldb = p->k;
    float *wide = thread_memory(WIDE, (size_t)step * (size_t)p->k);
    part.b = wide;
    for (; first < end; first += step) {
        part.n = at_most(step, end - first);
        part.c = p->c + first;
        functions->widen(p->stored, p->k, first, part.n, wide);
        do_other(&part);
    }
}

static void do_other(const product *p)
{
    if (p->stored) {
        do_other_widened(p, 0, p->n);
        return;
    }
    other_sgemm(ROW_MAJOR, NO_TRANSPOSE, p->b_transposed ? TRANSPOSE : NO_TRANSPOSE, p->m, p->n,
                p->k, p->alpha, p->a, p->lda, p->b, p->ldb, p->beta, p->c, p->ldc);
}

static void do_other_columns(const void *context, int i)
{
    const columns_job *j = context;
    product p = j->p;
    int first = i * j->chunk;
    if (p.stored) {
        do_other_widened(&p, first, first + at_most(j->chunk, p.n - first));
        return;
    }
    p.n = at_most(j->chunk, p.n - first);
    p.b += (size_t)first * (p.b_transposed ? (size_t)p.ldb : 1);
    p.c += first;
    do_other(&p);
}

static void do_other_rows(const void *context, int i)
{
    const columns_job *j = context;
    product p = j->p;
    size_t first = (size_t)i * (size_t)j->chunk;
    p.m = at_most(j->chunk, p.m - (int)first);
    p.a += first * (size_t)p.lda;
    p.c += first * (size_t)p.ldc;
    do_other(&p);
}

void products_multiply(const product *p)
{
#if defined(__x86_64__)
    if (instructions >= 3 && p->stored && p->stored->type >= STORED_AFFINE8) {
        multiply_integers(p);
        return;
    }
#endif
    if (!other_sgemm || p->m <= max_rows) {
        multiply(p);
        return;
    }
    if (!other_is_shared) {
        pthread_mutex_lock(&other_busy);
        do_other(p);
        pthread_mutex_unlock(&other_busy);
        return;
    }
    if ((double)p->m * p->n * p->k < MIN_OTHER) {
        do_other(p);
        return;
    }
    /* The longer side in parts. Its own threads would have to wait for ours to fall asleep. */
    int by_rows = p->m > p->n && !p->stored, count = by_rows ? p->m : p->n;
    columns_job j = {*p, ((count + 2 * num_threads - 1) / (2 * num_threads) + 63) / 64 * 64};
    products_share(by_rows ? do_other_rows : do_other_columns, &j, (count + j.chunk - 1) / j.chunk);
}

EXPORTED void cblas_sgemm(int order, int transpose_a, int transpose_b, int m, int n, int k,
                          float alpha, const float *a, int lda, const float *b, int ldb,
                          float beta, float *c, int ldc)
{
    if (other_sgemm && (order != ROW_MAJOR || transpose_a != NO_TRANSPOSE)) {
        pthread_mutex_lock(&other_busy);
        other_sgemm(order, transpose_a, transpose_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
        pthread_mutex_unlock(&other_busy);
        return;
    }
    if (order == COLUMN_MAJOR) { /* the transposes are in row-major order */
        cblas_sgemm(ROW_MAJOR, transpose_b, transpose_a, n, m, k, alpha, b, ldb, a, lda, beta, c,
                    ldc);
        return;
    }
    product p = {m, n, k, lda, ldb, ldc, transpose_b != NO_TRANSPOSE, alpha, beta, a, b, c, NULL};
    float *copy = NULL;
    if (transpose_a != NO_TRANSPOSE) {
        copy = malloc(sizeof(float) * (size_t)m * (size_t)k + 1);
        if (!copy)
            abort(); /* the interface has no way to fail */
        for (int i = 0; i < m; i++)
            for (int j = 0; j < k; j++)
                copy[(size_t)i * k + j] = a[(size_t)j * lda + i];
        p.a = copy;
        p.lda = k;
    }
    products_multiply(&p);
    free(copy);
}
