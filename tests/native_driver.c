/* Products and layers of odd shapes, at all instruction levels and with 1, 3 and 8 threads, two of
 * which call at the same time. Built with sanitizers by test_products.py: every array is exactly
 * as long as it has to be, so that an access outside of it is seen. That the numbers are right is
 * tested from Python (test_products.py, test_accelerate.py); here each has to be written.
 *
 * Arguments: "all"; "threads", with the widest instructions alone; "overrun", with a matrix that
 * is one float short; or "race", with parts of a job that write to the same place.
 */

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "layers.h"
#include "products.h"

void products_init(void *library, int shared, int rows, int threads, int level);

#define MAX_ARRAYS 64

static _Thread_local uint32_t state = 1;
static _Thread_local void *arrays[MAX_ARRAYS];
static _Thread_local int num_arrays;

static void *room(size_t size)
{
    if (num_arrays == MAX_ARRAYS)
        abort();
    return arrays[num_arrays++] = malloc(size);
}

static void free_arrays(void)
{
    while (num_arrays)
        free(arrays[--num_arrays]);
}

/* From -1 to 1. */
static float *numbers(int count)
{
    float *x = room(sizeof(float) * (size_t)count);
    for (int i = 0; i < count; i++) {
        state = state * 1664525 + 1013904223;
        x[i] = (float)(state >> 8) / (float)(1 << 23) - 1;
    }
    return x;
}

/* For a result, each number of which has to be written. */
static float *unknown(int count)
{
    float *x = room(sizeof(float) * (size_t)count);
    for (int i = 0; i < count; i++)
        x[i] = NAN;
    return x;
}

static void check_known(const char *what, const float *found, int count)
{
    for (int i = 0; i < count; i++)
        if (!isfinite(found[i])) {
            fprintf(stderr, "%s: %g at %d\n", what, found[i], i);
            exit(3);
        }
}

/* Rows of a and c are part of wider ones, the last row not. */
static void check_product(int m, int n, int k, int transposed, float beta, int short_by)
{
    int lda = k + 3, ldb = transposed ? k : n, ldc = n + 2, size = (m - 1) * ldc + n;
    float *a = numbers((m - 1) * lda + k), *b = numbers(n * k - short_by);
    float *c = beta ? numbers(size) : unknown(size);
    for (int i = 0; i < m - 1; i++)
        c[i * ldc + n] = c[i * ldc + n + 1] = 7;
    product p = {m, n, k, lda, ldb, ldc, transposed, 0.5f, beta, a, b, c, NULL};
    products_multiply(&p);
    check_known("product", c, size);
    for (int i = 0; i < m - 1; i++)
        if (c[i * ldc + n] != 7 || c[i * ldc + n + 1] != 7)
            exit(4);
    free_arrays();
}

static matrix plain(int count)
{
    matrix m = {numbers(count), STORED_FLOAT32, 0, STORED_FLOAT32, NULL, NULL};
    return m;
}

/* Numbers of any bits but those of infinities and NaN. */
static void *bits(size_t size)
{
    unsigned char *bytes = room(size);
    for (size_t i = 0; i < size; i++) {
        state = state * 1664525 + 1013904223;
        bytes[i] = (unsigned char)(state >> 24) & 0x3b;
    }
    return bytes;
}

/* A matrix of another type: `k` is a number of groups if it is affine, and else of inputs. */
static void check_stored(int m, int n, int k, enum stored_type type, int group)
{
    static const int sizes[] = {32, 16, 16, 8, 4};
    int is_affine = type == STORED_AFFINE8 || type == STORED_AFFINE4;
    int inputs = is_affine ? k * group : k;
    enum stored_type scale_type = (enum stored_type)(m % 3);
    size_t scales = (size_t)n * (size_t)k * (size_t)sizes[scale_type] / 8;
    matrix w = {bits((size_t)n * (size_t)inputs * (size_t)sizes[type] / 8), type, group, scale_type,
                is_affine ? bits(scales) : NULL, is_affine ? bits(scales) : NULL};
    float *y = unknown(m * n), *row = unknown(inputs);
    layers()->linear(numbers(m * inputs), &w, m, n, inputs, y);
    check_known("linear", y, m * n);
    layers()->row(&w, n - 1, inputs, row);
    check_known("row", row, inputs);
    free_arrays();
}

typedef struct {
    int batch, length, d_model, num_heads, head_dim, num_keys, reach;
} shape;

static void check_attention(shape s, enum layer_kind kind, int own_places)
{
    int count = s.batch * s.length * s.d_model, inner = s.num_heads * s.head_dim, d = s.d_model;
    int cross = kind == LAYER_CROSS, decoder = kind == LAYER_DECODER, size = s.head_dim;
    int keys = kind == LAYER_ENCODER ? s.length : s.num_keys, row = keys * size;
    int held = s.batch * s.num_heads * row;
    float *cache[2] = {numbers(held), numbers(held)};
    int *at = room(sizeof(int) * (size_t)s.batch);
    for (int b = 0; b < s.batch; b++)
        at[b] = decoder ? s.num_keys - s.length - (own_places ? b : 0) : 0;
    for (int i = 0; decoder && i < held; i++) /* nobody may look at what is not there yet */
        if (i / size % keys >= at[i / (s.num_heads * row)])
            cache[0][i] = cache[1][i] = NAN;
    layer_attention a = {
        {numbers(count), unknown(count), numbers(d), 1e-6f, s.batch, s.length, d},
        kind, s.num_heads, size, plain((cross ? inner : 3 * inner) * d), plain(d * inner),
        {cache[0], row * s.num_heads, row, size}, {cache[1], row * s.num_heads, row, size},
        keys, at, own_places, cross ? NULL : numbers(s.num_heads * (2 * s.reach + 1)),
        s.reach, decoder ? NULL : numbers(s.batch * keys)};
    if (layers()->attend(&a, room(sizeof(float) * layers()->attend_memory(&a))))
        exit(5);
    check_known("attention", a.io.y, count);
    free_arrays();
}

static void check_feed_forward(shape s, int d_ff, int gated, enum layer_activation how)
{
    int count = s.batch * s.length * s.d_model, d = s.d_model;
    layer_feed_forward f = {
        {numbers(count), unknown(count), numbers(d), 1e-6f, s.batch, s.length, d},
        d_ff, plain((gated ? 2 : 1) * d_ff * d), plain(d * d_ff), gated, how};
    layers()->feed_forward(&f, room(sizeof(float) * layers()->feed_forward_memory(&f)));
    check_known("feed-forward", f.io.y, count);
    free_arrays();
}

static void check_source(shape s)
{
    int inner = s.num_heads * s.head_dim, num_keys = s.length + 3;
    int held = s.batch * inner * num_keys;
    layer_source source = {numbers(s.batch * s.length * s.d_model), s.batch, s.length, s.d_model,
                           s.num_heads, s.head_dim, plain(2 * inner * s.d_model),
                           unknown(held), unknown(held), num_keys};
    layers()->keys_values(&source, room(sizeof(float) * layers()->keys_values_memory(&source)));
    check_known("keys", source.keys, held);
    check_known("values", source.values, held);
    free_arrays();
}

static void check_head(shape s, int num_ids)
{
    int count = s.batch * s.length, d = s.d_model;
    layer_head h = {numbers(count * d), numbers(d), 1e-6f, 0.5f, count, d,
                    num_ids, plain(num_ids * d), unknown(count * num_ids), NULL};
    layers()->head(&h, room(sizeof(float) * layers()->head_memory(&h)));
    check_known("logits", h.logits, count * num_ids);
    const float *found = h.logits;
    h.logits = NULL;
    h.best = room(sizeof(int) * (size_t)count);
    layers()->head(&h, room(sizeof(float) * layers()->head_memory(&h)));
    for (int i = 0; i < count; i++)
        for (int j = 0; j < num_ids; j++)
            if (found[i * num_ids + j] > found[i * num_ids + h.best[i]])
                exit(6);
    free_arrays();
}

static void check_all(void)
{
    static const int rows[] = {1, 2, 5, 6, 7, 13}, sides[][2] = {{1, 1}, {3, 7}, {17, 33},
                                                                {70, 15}, {200, 130}};
    static const shape shapes[] = {{1, 1, 5, 1, 3, 4, 2}, {2, 3, 24, 3, 10, 17, 8},
                                   {3, 7, 33, 2, 16, 33, 5}, {1, 35, 20, 3, 5, 40, 16}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        for (size_t j = 0; j < sizeof sides / sizeof *sides; j++)
            for (int transposed = 0; transposed < 2; transposed++)
                check_product(rows[i], sides[j][0], sides[j][1], transposed, (float)(i % 2), 0);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        for (int j = 0; j < 3; j++) {
            check_stored(rows[i], sides[j + 1][0], sides[j + 1][1], STORED_FLOAT16, 0);
            check_stored(rows[i], sides[j + 1][0], sides[j + 1][1], STORED_BFLOAT16, 0);
            check_stored(rows[i], 5 + 8 * j, j + 1, STORED_AFFINE8, 32 << j);
            check_stored(rows[i], 5 + 8 * j, j + 1, STORED_AFFINE4, 32 << j);
        }
    for (int m = 30; m < 33; m++) { /* of each type of scales, as many as are read together */
        check_stored(m, 37, 9, STORED_AFFINE8, 64);
        check_stored(m, 37, 9, STORED_AFFINE4, 32);
    }
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        shape s = shapes[i];
        check_attention(s, LAYER_ENCODER, 0);
        check_attention(s, LAYER_CROSS, 0);
        check_attention(s, LAYER_DECODER, 0);
        check_attention(s, LAYER_DECODER, 1);
        for (int how = LAYER_RELU; how <= LAYER_SILU; how++)
            check_feed_forward(s, 19 + 30 * (int)i, how % 2, (enum layer_activation)how);
        check_source(s);
        check_head(s, 37 + (int)i * 100);
    }
}

static void *check_in_thread(void *seed)
{
    state = (uint32_t)(uintptr_t)seed;
    check_all();
    return NULL;
}

static volatile int written; /* or the compiler would leave the writing out */
static atomic_int begun;

/* Writes once before and once after the other thread does: the sanitizer may miss two writes at
 * the same moment. */
static void write_part(const void *context, int i)
{
    (void)context;
    written = i;
    atomic_fetch_add_explicit(&begun, 1, memory_order_relaxed);
    while (atomic_load_explicit(&begun, memory_order_relaxed) < 2)
        ;
    written = i;
}

int main(int argc, char **argv)
{
    const char *what = argc > 1 ? argv[1] : "all";
    static const int threads[] = {1, 3, 8}; /* never fewer: those that are there stay */
    for (int i = 0; i < 3; i++)
        for (int level = strcmp(what, "threads") ? 0 : 4; level <= 4; level++) {
            products_init(NULL, 0, 1 << 20, threads[i], level);
            if (!strcmp(what, "overrun")) {
                check_product(5, 17, 33, 1, 0, 1);
                continue;
            }
            if (!strcmp(what, "race")) {
                if (threads[i] > 1)
                    products_share(write_part, NULL, 2);
                continue;
            }
            pthread_t other;
            if (pthread_create(&other, NULL, check_in_thread, (void *)2))
                abort();
            check_in_thread((void *)1);
            pthread_join(other, NULL);
        }
    puts("right");
    return 0;
}
