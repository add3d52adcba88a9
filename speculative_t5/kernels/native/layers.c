/* T5's attention and feed-forward layers: what 40 operations of a graph do, in one. */

#include "layers.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "products.h"

#define QUERIES 32 /* that are looked up together */
#define PAD 16     /* rows of scores are a multiple of this: of any vector */

typedef struct {
    void (*norm)(const float *x, const float *weight, float epsilon, int count, float *y);
    float (*exponentials)(float *x, int count);
    void (*activate)(float *x, const float *gated, int count, enum layer_activation how);
    int (*best)(const float *x, int count);
    float (*sum_of_exponentials)(const float *x, int count, float max);
} row_functions;

#if defined(__x86_64__)
#define WIDTH 8
#define NAME(f) f##_avx2
#define TARGET __attribute__((target("avx2,fma")))
#include "rows.h"
#undef WIDTH
#undef NAME
#undef TARGET

#define WIDTH 16
#define NAME(f) f##_avx512
#define TARGET __attribute__((target("avx512f,avx512dq,avx2,fma")))
#include "rows.h"
#undef WIDTH
#undef NAME
#undef TARGET
#endif

#define WIDTH 4
#define NAME(f) f##_plain
#define TARGET
#include "rows.h"

static const row_functions *rows(void)
{
#if defined(__x86_64__)
    if (products_level() >= 2)
        return &rows_avx512;
    if (products_level() == 1)
        return &rows_avx2;
#endif
    return &rows_plain;
}

/* y (m, n) = alpha a (m, k) w^T + beta y; rows of a are `lda` apart. */
static void multiply(const float *a, int lda, const matrix *w, int m, int n, int k, float alpha,
                     float beta, float *y)
{
    int is_plain = w->type == STORED_FLOAT32;
    product p = {m, n, k, lda, k, n, 1, alpha, beta, a, is_plain ? w->data : NULL, y,
                 is_plain ? NULL : w};
    products_multiply(&p);
}

static void linear(const float *x, const matrix *w, int m, int n, int k, float *y)
{
    multiply(x, k, w, m, n, k, 1, 0, y);
}

typedef struct {
    const layer_io *io;
    float *normed;
} norm_job;

#define NORM_ROWS 16

static void norm_part(const void *context, int i)
{
    const norm_job *j = context;
    const layer_io *io = j->io;
    const row_functions *f = rows();
    int end = (i + 1) * NORM_ROWS, count = io->batch * io->length;
    for (int row = i * NORM_ROWS; row < end && row < count; row++) {
        size_t first = (size_t)row * (size_t)io->d_model;
        f->norm(io->x + first, io->norm, io->epsilon, io->d_model, j->normed + first);
    }
}

static void normalize(const layer_io *io, float *normed)
{
    norm_job j = {io, normed};
    products_share(norm_part, &j, (io->batch * io->length + NORM_ROWS - 1) / NORM_ROWS);
}

/* norm(x) into `normed`; y begins as x. */
static void begin(const layer_io *io, float *normed)
{
    int count = io->batch * io->length;
    normalize(io, normed);
    if (io->y != io->x)
        memcpy(io->y, io->x, sizeof(float) * (size_t)count * (size_t)io->d_model);
}

typedef struct {
    const layer_attention *a;
    layer_heads queries, keys, values;
    float *out; /* (N, H D) */
    float *scores;
    long scores_step; /* of a thread */
    int blocks;       /* of queries, for each head */
} attention_job;

/* Scores of one query, at position `at`, over `count` keys: with bias and mask. */
static void add_bias(const attention_job *j, float *scores, int b, int h, int at, int count)
{
    const layer_attention *a = j->a;
    if (a->kind != LAYER_CROSS) {
        int reach = a->reach, near = at - reach, far = at + reach;
        const float *bias = a->bias + (size_t)h * (size_t)(2 * reach + 1);
        int i = 0;
        for (; i < count && i < near; i++)
            scores[i] += bias[0];
        for (const float *here = bias + reach - at; i < count && i <= far; i++)
            scores[i] += here[i];
        for (; i < count; i++)
            scores[i] += bias[2 * reach];
    }
    if (a->mask)
        for (int i = 0; i < count; i++)
            scores[i] += a->mask[(size_t)b * (size_t)a->num_keys + (size_t)i];
}

/* How many keys there are up to the last that is not masked: those behind it add zeros. */
static int real_keys(const layer_attention *a, int b)
{
    int count = a->num_keys;
    if (a->mask) {
        const float *mask = a->mask + (size_t)b * (size_t)count;
        while (count > 1 && mask[count - 1] == -INFINITY)
            count--;
    }
    return count;
}

/* Some queries of one head of one row. */
static void attend_part(const void *context, int part)
{
    const attention_job *j = context;
    const layer_attention *a = j->a;
    const row_functions *f = rows();
    int block = part % j->blocks, h = part / j->blocks % a->num_heads;
    int b = part / j->blocks / a->num_heads, size = a->head_dim, inner = a->num_heads * size;
    int first = block * QUERIES, count = a->io.length - first;
    if (count > QUERIES)
        count = QUERIES;
    int is_decoder = a->kind == LAYER_DECODER, at = is_decoder ? a->at[b * a->at_step] : 0;
    int num_keys = is_decoder ? at + a->io.length : real_keys(a, b); /* others are not there yet */
    int stride = (num_keys + PAD - 1) / PAD * PAD;
    float *scores = j->scores + j->scores_step * products_thread();
    const float *q = j->queries.data + b * j->queries.batch + h * j->queries.head +
                     first * j->queries.place;
    const float *k = j->keys.data + b * j->keys.batch + h * j->keys.head;
    const float *v = j->values.data + b * j->values.batch + h * j->values.head;
    float *out = j->out + ((size_t)b * (size_t)a->io.length + (size_t)first) * (size_t)inner +
                 (size_t)(h * size);

    product dots = {count, num_keys, size, (int)j->queries.place, (int)j->keys.place, stride, 1,
                    1.0f, 0.0f, q, k, scores, NULL};
    products_alone(&dots);
    float totals[QUERIES];
    for (int i = 0; i < count; i++) {
        float *row = scores + (size_t)i * (size_t)stride;
        int seen = is_decoder ? at + first + i + 1 : num_keys;
        add_bias(j, row, b, h, at + first + i, seen);
        for (int t = seen; t < stride; t++)
            row[t] = -INFINITY;
        totals[i] = f->exponentials(row, stride);
    }
    product sums = {count, size, num_keys, stride, (int)j->values.place, inner, 0,
                    1.0f, 0.0f, scores, v, out, NULL};
    products_alone(&sums);
    for (int i = 0; i < count; i++)
        for (int t = 0; t < size; t++)
            out[(size_t)i * (size_t)inner + (size_t)t] /= totals[i];
}

static layer_heads heads_of(float *data, const layer_attention *a, int stride)
{
    layer_heads heads = {data, (long)a->io.length * stride, a->head_dim, stride};
    return heads;
}

/* The new keys or values, where they belong in the cache. */
static void write_heads(const layer_attention *a, const layer_heads *cache, const layer_heads *new)
{
    for (int b = 0; b < a->io.batch; b++)
        for (int h = 0; h < a->num_heads; h++)
            for (int t = 0; t < a->io.length; t++)
                memcpy(cache->data + b * cache->batch + h * cache->head +
                           (a->at[b * a->at_step] + t) * cache->place,
                       new->data + b * new->batch + h * new->head + t * new->place,
                       sizeof(float) * (size_t)a->head_dim);
}

static size_t rounded(size_t count)
{
    return (count + PAD - 1) / PAD * PAD;
}

/* The next part of the memory that a layer works in; only parts that are asked for are counted. */
typedef struct {
    float *memory; /* NULL: only count */
    size_t taken;
} workspace;

static workspace workspace_in(float *memory)
{
    workspace w = {memory, 0};
    if (memory) /* vectors of it are not to straddle cache lines */
        w.memory = (float *)(((uintptr_t)memory + 63) / 64 * 64);
    return w;
}

static float *take(workspace *w, size_t rows, size_t columns)
{
    float *part = w->memory ? w->memory + w->taken : NULL;
    w->taken += rounded(rows * columns);
    return part;
}

static size_t counted(const workspace *w)
{
    return w->taken + PAD;
}

typedef struct {
    float *normed, *made, *out, *scores;
    size_t scores_step;
    int count, inner, width; /* of x's rows, of the heads together, of what is made of x */
} attention_space;

static attention_space attention_space_in(workspace *w, const layer_attention *a)
{
    attention_space s;
    s.count = a->io.batch * a->io.length;
    s.inner = a->num_heads * a->head_dim;
    s.width = a->kind == LAYER_CROSS ? s.inner : 3 * s.inner;
    s.scores_step = rounded((size_t)a->num_keys) * QUERIES;
    s.normed = take(w, (size_t)s.count, (size_t)a->io.d_model);
    s.made = take(w, (size_t)s.count, (size_t)s.width);
    s.out = take(w, (size_t)s.count, (size_t)s.inner);
    s.scores = take(w, (size_t)products_threads(), s.scores_step);
    return s;
}

static size_t attend_memory(const layer_attention *a)
{
    workspace w = workspace_in(NULL);
    attention_space_in(&w, a);
    return counted(&w);
}

static int attend(const layer_attention *a, float *memory)
{
    workspace w = workspace_in(memory);
    attention_space s = attention_space_in(&w, a);
    int blocks = (a->io.length + QUERIES - 1) / QUERIES;
    if (a->kind == LAYER_DECODER)
        for (int b = 0; b < a->io.batch; b++) {
            int at = a->at[b * a->at_step];
            if (at < 0 || at > a->num_keys - a->io.length)
                return -1;
        }
    begin(&a->io, s.normed);
    linear(s.normed, &a->into, s.count, s.width, a->io.d_model, s.made);
    attention_job j = {a, heads_of(s.made, a, s.width), a->keys, a->values, s.out, s.scores,
                       (long)s.scores_step, blocks};
    if (a->kind != LAYER_CROSS) {
        layer_heads keys = heads_of(s.made + s.inner, a, s.width);
        layer_heads values = heads_of(s.made + 2 * s.inner, a, s.width);
        if (a->kind == LAYER_DECODER) {
            write_heads(a, &a->keys, &keys);
            write_heads(a, &a->values, &values);
        } else {
            j.keys = keys;
            j.values = values;
        }
    }
    products_share(attend_part, &j, a->io.batch * a->num_heads * blocks);
    multiply(s.out, s.inner, &a->out, s.count, a->io.d_model, s.inner, 1, 1, a->io.y);
    return 0;
}

typedef struct {
    const layer_feed_forward *f;
    float *hidden;
} activation_job;

#define ACTIVATION_ROWS 4

static void activation_part(const void *context, int i)
{
    const activation_job *j = context;
    const layer_feed_forward *f = j->f;
    int end = (i + 1) * ACTIVATION_ROWS, count = f->io.batch * f->io.length;
    size_t width = (size_t)f->d_ff * (f->gated ? 2 : 1);
    for (int row = i * ACTIVATION_ROWS; row < end && row < count; row++) {
        float *x = j->hidden + (size_t)row * width;
        rows()->activate(x, f->gated ? x + f->d_ff : NULL, f->d_ff, f->activation);
    }
}

typedef struct {
    float *normed, *hidden;
    int count, width;
} feed_forward_space;

static feed_forward_space feed_forward_space_in(workspace *w, const layer_feed_forward *f)
{
    feed_forward_space s;
    s.count = f->io.batch * f->io.length;
    s.width = f->d_ff * (f->gated ? 2 : 1);
    s.normed = take(w, (size_t)s.count, (size_t)f->io.d_model);
    s.hidden = take(w, (size_t)s.count, (size_t)s.width);
    return s;
}

static size_t feed_forward_memory(const layer_feed_forward *f)
{
    workspace w = workspace_in(NULL);
    feed_forward_space_in(&w, f);
    return counted(&w);
}

static void feed_forward(const layer_feed_forward *f, float *memory)
{
    workspace w = workspace_in(memory);
    feed_forward_space s = feed_forward_space_in(&w, f);
    begin(&f->io, s.normed);
    linear(s.normed, &f->into, s.count, s.width, f->io.d_model, s.hidden);
    activation_job j = {f, s.hidden};
    products_share(activation_part, &j, (s.count + ACTIVATION_ROWS - 1) / ACTIVATION_ROWS);
    multiply(s.hidden, s.width, &f->out, s.count, f->io.d_model, f->d_ff, 1, 1, f->io.y);
}

typedef struct {
    const layer_source *s;
    const float *made; /* (N, 2 H D) */
} source_job;

/* One head of one row. */
static void source_part(const void *context, int i)
{
    const source_job *j = context;
    const layer_source *s = j->s;
    int h = i % s->num_heads, b = i / s->num_heads;
    size_t size = (size_t)s->head_dim, inner = (size_t)s->num_heads * size;
    size_t num_keys = (size_t)s->num_keys, length = (size_t)s->length;
    for (int part = 0; part < 2; part++) {
        const float *from = j->made + (size_t)b * length * 2 * inner + (size_t)part * inner +
                            (size_t)h * size;
        float *to = (part ? s->values : s->keys) + (size_t)i * num_keys * size;
        for (size_t t = 0; t < length; t++)
            memcpy(to + t * size, from + t * 2 * inner, sizeof(float) * size);
        memset(to + length * size, 0, sizeof(float) * (num_keys - length) * size);
    }
}

static size_t keys_values_memory(const layer_source *s)
{
    return (size_t)s->batch * (size_t)s->length * 2 * (size_t)s->num_heads * (size_t)s->head_dim;
}

static void keys_values(const layer_source *s, float *memory)
{
    int count = s->batch * s->length, width = 2 * s->num_heads * s->head_dim;
    linear(s->x, &s->into, count, width, s->d_model, memory);
    source_job j = {s, memory};
    products_share(source_part, &j, s->batch * s->num_heads);
}

typedef struct {
    const float *logits;
    int num_ids, judges, *best;
} best_job;

static void best_part(const void *context, int i)
{
    const best_job *j = context;
    const float *logits = j->logits + (size_t)i * (size_t)j->num_ids;
    int *found = j->best + (size_t)i * (j->judges ? 2 : 1);
    found[0] = rows()->best(logits, j->num_ids);
    if (!j->judges)
        return;
    float logprob = NAN;
    if (found[0] != LAYER_NAN)
        logprob = -logf(rows()->sum_of_exponentials(logits, j->num_ids, logits[found[0]]));
    memcpy(found + 1, &logprob, sizeof logprob);
}

typedef struct {
    float *normed, *logits;
} head_space;

static head_space head_space_in(workspace *w, const layer_head *h)
{
    head_space s;
    s.normed = take(w, (size_t)h->count, (size_t)h->d_model);
    s.logits = h->logits ? h->logits : take(w, (size_t)h->count, (size_t)h->num_ids);
    return s;
}

static size_t head_memory(const layer_head *h)
{
    workspace w = workspace_in(NULL);
    head_space_in(&w, h);
    return counted(&w);
}

static void head(const layer_head *h, float *memory)
{
    workspace w = workspace_in(memory);
    head_space s = head_space_in(&w, h);
    layer_io io = {h->x, NULL, h->norm, h->epsilon, 1, h->count, h->d_model};
    normalize(&io, s.normed);
    multiply(s.normed, h->d_model, &h->weight, h->count, h->num_ids, h->d_model, h->scale, 0,
             s.logits);
    if (!h->logits) {
        best_job j = {s.logits, h->num_ids, h->judges, h->best};
        products_share(best_part, &j, h->count);
    }
}

EXPORTED const layer_functions *layers(void)
{
    static const layer_functions functions = {
        LAYERS_VERSION, attend_memory, attend, feed_forward_memory, feed_forward,
        keys_values_memory, keys_values, head_memory, head, linear, products_row};
    return &functions;
}
