/* Products and layers of odd shapes, at all instruction levels and with 1, 3 and 8 threads, two of
 * which call at the same time, against naive loops. Built with sanitizers by test_sanitizers.py:
 * every array is exactly as long as it has to be, so that an access outside of it is seen.
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

static void *room(size_t count, size_t size)
{
    if (num_arrays == MAX_ARRAYS)
        abort();
    return arrays[num_arrays++] = malloc(count * size);
}

static void free_arrays(void)
{
    while (num_arrays)
        free(arrays[--num_arrays]);
}

/* From -1 to 1. */
static float *numbers(size_t count)
{
    float *x = room(count, sizeof(float));
    for (size_t i = 0; i < count; i++) {
        state = state * 1664525 + 1013904223;
        x[i] = (float)(state >> 8) / (float)(1 << 23) - 1;
    }
    return x;
}

static void compare(const char *what, const float *found, const double *expected, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (!(fabs(found[i] - expected[i]) <= 1e-4 * (1 + fabs(expected[i])))) {
            fprintf(stderr, "%s: %g at %zu, expected %g\n", what, found[i], i, expected[i]);
            exit(3);
        }
}

/* y (m, n) = a (m, k) w^T, w being (n, k) */
static double *linear(const double *a, const float *w, int m, int n, int k)
{
    double *y = room((size_t)(m * n), sizeof(double));
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) {
            y[i * n + j] = 0;
            for (int t = 0; t < k; t++)
                y[i * n + j] += a[i * k + t] * w[j * k + t];
        }
    return y;
}

static double *normalized(const float *x, const float *weight, double epsilon, int m, int d)
{
    double *y = room((size_t)(m * d), sizeof(double));
    for (int i = 0; i < m; i++) {
        double squares = 0;
        for (int j = 0; j < d; j++)
            squares += (double)x[i * d + j] * x[i * d + j];
        for (int j = 0; j < d; j++)
            y[i * d + j] = x[i * d + j] * weight[j] / sqrt(squares / d + epsilon);
    }
    return y;
}

static void add(double *y, const float *x, int count)
{
    for (int i = 0; i < count; i++)
        y[i] += x[i];
}

/* Rows of a and c are part of wider ones, the last row not. */
static void check_product(int m, int n, int k, int transposed, float beta, int short_by)
{
    int lda = k + 3, ldb = transposed ? k : n, ldc = n + 2;
    float *a = numbers((size_t)((m - 1) * lda + k)), *b = numbers((size_t)(n * k - short_by));
    float *c = numbers((size_t)((m - 1) * ldc + n));
    float *before = numbers((size_t)((m - 1) * ldc + n));
    memcpy(before, c, sizeof(float) * (size_t)((m - 1) * ldc + n));
    product p = {m, n, k, lda, ldb, ldc, transposed, 0.5f, beta, a, b, c};
    products_multiply(&p);
    for (int i = 0; i < m; i++) {
        double *expected = room((size_t)n, sizeof(double));
        for (int j = 0; j < n; j++) {
            expected[j] = beta * before[i * ldc + j];
            for (int t = 0; t < k; t++)
                expected[j] += 0.5 * a[i * lda + t] * b[transposed ? j * k + t : t * n + j];
        }
        compare("product", c + i * ldc, expected, (size_t)n);
        for (int j = n; j < ldc && i < m - 1; j++)
            if (c[i * ldc + j] != before[i * ldc + j])
                exit(4);
    }
    free_arrays();
}

typedef struct {
    int batch, length, d_model, num_heads, head_dim, num_keys, reach;
} shape;

/* Attention of one head: queries, keys and values are rows of `step` numbers. */
static void attend(const layer_attention *a, const double *q, const double *k, const double *v,
                   int step, int b, int h, int at, double *out)
{
    int inner = a->num_heads * a->head_dim, size = a->head_dim;
    for (int t = 0; t < a->io.length; t++) {
        int seen = a->kind == LAYER_DECODER ? at + t + 1 : a->num_keys;
        double *weights = room((size_t)seen, sizeof(double)), most = -INFINITY, total = 0;
        for (int i = 0; i < seen; i++) {
            weights[i] = a->mask ? a->mask[b * a->num_keys + i] : 0;
            int place = i - at - t;
            place = place < -a->reach ? -a->reach : place > a->reach ? a->reach : place;
            if (a->kind != LAYER_CROSS)
                weights[i] += a->bias[h * (2 * a->reach + 1) + a->reach + place];
            for (int e = 0; e < size; e++)
                weights[i] += q[t * (a->kind == LAYER_CROSS ? inner : 3 * inner) + e] *
                              k[i * step + e];
            most = fmax(most, weights[i]);
        }
        for (int i = 0; i < seen; i++)
            total += weights[i] = exp(weights[i] - most);
        for (int e = 0; e < size; e++) {
            out[t * inner + e] = 0;
            for (int i = 0; i < seen; i++)
                out[t * inner + e] += weights[i] * v[i * step + e] / total;
        }
        free(arrays[--num_arrays]);
    }
}

static void check_attention(shape s, enum layer_kind kind, int own_places)
{
    int count = s.batch * s.length, inner = s.num_heads * s.head_dim, d = s.d_model;
    int cross = kind == LAYER_CROSS, width = cross ? inner : 3 * inner;
    int keys = kind == LAYER_ENCODER ? s.length : s.num_keys, size = s.head_dim;
    size_t held = (size_t)(s.batch * s.num_heads * keys * size);
    float *cache[2] = {numbers(held), numbers(held)};
    int *at = room((size_t)s.batch, sizeof(int));
    for (int b = 0; b < s.batch; b++)
        at[b] = kind == LAYER_DECODER ? s.num_keys - s.length - (own_places ? b : 0) : 0;
    if (kind == LAYER_DECODER) /* nobody may look at what is not there yet */
        for (size_t i = 0; i < held; i++)
            if ((int)(i / (size_t)size) % keys >= at[i / (size_t)(s.num_heads * keys * size)])
                cache[0][i] = cache[1][i] = NAN;
    long row = (long)keys * size;
    layer_attention a = {
        {numbers((size_t)(count * d)), room((size_t)(count * d), sizeof(float)),
         numbers((size_t)d), 1e-6f, s.batch, s.length, d},
        kind, s.num_heads, size, numbers((size_t)(width * d)), numbers((size_t)(d * inner)),
        {cache[0], row * s.num_heads, row, size}, {cache[1], row * s.num_heads, row, size},
        keys, at, own_places, cross ? NULL : numbers((size_t)(s.num_heads * (2 * s.reach + 1))),
        s.reach, kind == LAYER_DECODER ? NULL : numbers((size_t)(s.batch * keys))};
    if (layers()->attend(&a, room(layers()->attend_memory(&a), sizeof(float))))
        exit(5);
    double *made = linear(normalized(a.io.x, a.io.norm, 1e-6, count, d), a.into, count, width, d);
    double *out = room((size_t)(count * inner), sizeof(double));
    double *held_by[2] = {room(held, sizeof(double)), room(held, sizeof(double))};
    for (int b = 0; b < s.batch; b++)
        for (int h = 0; h < s.num_heads; h++) {
            const double *q = made + b * s.length * width + h * size;
            double *of_head[2];
            for (int i = 0; i < 2; i++) {
                size_t first = (size_t)((b * s.num_heads + h) * keys * size);
                of_head[i] = held_by[i] + first;
                for (int t = 0; t < keys * size; t++)
                    of_head[i][t] = cache[i][first + (size_t)t];
                for (int t = 0; t < s.length && !cross; t++)
                    for (int e = 0; e < size; e++)
                        of_head[i][(at[b] + t) * size + e] = q[(i + 1) * inner + t * width + e];
            }
            attend(&a, q, of_head[0], of_head[1], size, b, h, at[b],
                   out + b * s.length * inner + h * size);
        }
    double *y = linear(out, a.out, count, d, inner);
    add(y, a.io.x, count * d);
    compare("attention", a.io.y, y, (size_t)(count * d));
    free_arrays();
}

static double activated(double x, enum layer_activation how)
{
    switch (how) {
    case LAYER_RELU: return x > 0 ? x : 0;
    case LAYER_GELU: return x * 0.5 * (1 + erf(x / sqrt(2)));
    case LAYER_GELU_NEW: return x * 0.5 * (1 + tanh(0.7978845608 * (x + 0.044715 * x * x * x)));
    default: return x / (1 + exp(-x));
    }
}

static void check_feed_forward(shape s, int d_ff, int gated, enum layer_activation how)
{
    int count = s.batch * s.length, d = s.d_model, width = gated ? 2 * d_ff : d_ff;
    layer_feed_forward f = {
        {numbers((size_t)(count * d)), room((size_t)(count * d), sizeof(float)),
         numbers((size_t)d), 1e-6f, s.batch, s.length, d},
        d_ff, numbers((size_t)(width * d)), numbers((size_t)(d * d_ff)), gated, how};
    layers()->feed_forward(&f, room(layers()->feed_forward_memory(&f), sizeof(float)));
    double *made = linear(normalized(f.io.x, f.io.norm, 1e-6, count, d), f.into, count, width, d);
    double *hidden = room((size_t)(count * d_ff), sizeof(double));
    for (int i = 0; i < count; i++)
        for (int j = 0; j < d_ff; j++)
            hidden[i * d_ff + j] = activated(made[i * width + j], how) *
                                   (gated ? made[i * width + d_ff + j] : 1);
    double *y = linear(hidden, f.out, count, d, d_ff);
    add(y, f.io.x, count * d);
    compare("feed-forward", f.io.y, y, (size_t)(count * d));
    free_arrays();
}

static void check_source(shape s)
{
    int count = s.batch * s.length, size = s.head_dim, inner = s.num_heads * size;
    int num_keys = s.length + 3;
    size_t held = (size_t)(s.batch * s.num_heads * num_keys * size);
    float *x = numbers((size_t)(count * s.d_model));
    layer_source source = {x, s.batch, s.length, s.d_model, s.num_heads, size,
                           numbers((size_t)(2 * inner * s.d_model)), numbers(held), numbers(held),
                           num_keys};
    layers()->keys_values(&source, room(layers()->keys_values_memory(&source), sizeof(float)));
    double *wide = room((size_t)(count * s.d_model), sizeof(double));
    for (int i = 0; i < count * s.d_model; i++)
        wide[i] = x[i];
    double *made = linear(wide, source.into, count, 2 * inner, s.d_model);
    for (int i = 0; i < 2; i++) {
        double *expected = room(held, sizeof(double));
        for (int j = 0; j < (int)held; j++) {
            int e = j % size, t = j / size % num_keys, h = j / size / num_keys % s.num_heads;
            int n = j / size / num_keys / s.num_heads * s.length + t;
            expected[j] = t < s.length ? made[n * 2 * inner + i * inner + h * size + e] : 0;
        }
        compare("keys and values", i ? source.values : source.keys, expected, held);
    }
    free_arrays();
}

static void check_head(shape s, int num_ids)
{
    int count = s.batch * s.length, d = s.d_model;
    layer_head h = {numbers((size_t)(count * d)), numbers((size_t)d), 1e-6f, 0.5f, count, d,
                    num_ids, numbers((size_t)(num_ids * d)), numbers((size_t)(count * num_ids)),
                    NULL};
    layers()->head(&h, room(layers()->head_memory(&h), sizeof(float)));
    double *logits = linear(normalized(h.x, h.norm, 1e-6, count, d), h.weight, count, num_ids, d);
    for (int i = 0; i < count * num_ids; i++)
        logits[i] *= 0.5;
    compare("logits", h.logits, logits, (size_t)(count * num_ids));
    const float *found = h.logits;
    h.logits = NULL;
    h.best = room((size_t)count, sizeof(int));
    layers()->head(&h, room(layers()->head_memory(&h), sizeof(float)));
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

/* Waits for another thread that does so, too. */
static void write_part(const void *context, int i)
{
    (void)context;
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
        for (int level = strcmp(what, "threads") ? 0 : 2; level < 3; level++) {
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
