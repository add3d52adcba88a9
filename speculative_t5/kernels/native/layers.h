/* T5's layers over float32 arrays, a few passes' tokens at a time; matrices may have other types.
 *
 * N = batch * length positions, d = d_model, H heads of D elements, T keys. Matrices are (outputs,
 * inputs). In all layers y = x + f(norm(x)); y may be x.
 */

#ifndef LAYERS_H
#define LAYERS_H

#include <stddef.h>

#include "products.h"

#ifdef __cplusplus
extern "C" {
#endif

#define LAYERS_VERSION 7 /* of this interface */
#define LAYER_NAN (-2)   /* in place of an id whose logits are NaN, as in decoding/faults.py */

typedef struct {
    const float *x;    /* (N, d) */
    float *y;          /* (N, d) */
    const float *norm; /* (d,): the weight of RMS normalization (arXiv 1910.07467) */
    float epsilon;     /* added to the mean square */
    int batch, length, d_model;
} layer_io;

/* An element (b, h, t, i) is at data[b * batch + h * head + t * place + i]. */
typedef struct {
    float *data;
    long batch, head, place;
} layer_heads;

enum layer_kind { LAYER_ENCODER, LAYER_DECODER, LAYER_CROSS };

typedef struct {
    layer_io io;
    enum layer_kind kind;
    int num_heads, head_dim;
    matrix into; /* self-attention: (3 H D, d), queries, keys, values; cross: (H D, d) */
    matrix out;  /* (d, H D) */
    layer_heads keys, values; /* (B, H, T, D): the decoder's cache, or of the source */
    int num_keys;      /* T; in the encoder the length */
    const int *at;     /* decoder: rows' first new positions, (B,) or, with at_step 0, (1,) */
    int at_step;
    const float *bias; /* by relative position, (H, 2 * reach + 1); none in cross-attention */
    int reach;
    const float *mask; /* additive, of keys, (B, T) or NULL */
} layer_attention;

enum layer_activation { LAYER_RELU, LAYER_GELU, LAYER_GELU_NEW, LAYER_SILU };

typedef struct {
    layer_io io;
    int d_ff;
    matrix into; /* (d_ff, d), gated: (2 d_ff, d), gates first */
    matrix out;  /* (d, d_ff) */
    int gated;
    enum layer_activation activation;
} layer_feed_forward;

/* A source's keys and values for cross-attention, for all steps to come. */
typedef struct {
    const float *x; /* (N, d): what the encoder gave */
    int batch, length, d_model, num_heads, head_dim;
    matrix into;             /* (2 H D, d), keys, values */
    float *keys, *values;    /* (B, H, T, D), zeros behind the length */
    int num_keys;            /* T, at least the length */
} layer_source;

/* What comes after the last layer: logits = scale * norm(x) weight^T, or their best ids, which may
 * be judged: each is followed by the logarithm of its probability, a float. */
typedef struct {
    const float *x;    /* (N, d) */
    const float *norm; /* (d,) */
    float epsilon, scale;
    int count, d_model, num_ids;
    matrix weight;       /* (num_ids, d) */
    float *logits;       /* (N, num_ids), or NULL: */
    int *best;           /* (N,) or, if judged, (N, 2); the first of equals; LAYER_NAN */
    int judges;
} layer_head;

/* Each layer comes with how many floats of memory it works in. */
typedef struct {
    int version;
    size_t (*attend_memory)(const layer_attention *);
    int (*attend)(const layer_attention *, float *memory); /* -1: a position is not in the cache */
    size_t (*feed_forward_memory)(const layer_feed_forward *);
    void (*feed_forward)(const layer_feed_forward *, float *memory);
    size_t (*keys_values_memory)(const layer_source *);
    void (*keys_values)(const layer_source *, float *memory);
    size_t (*head_memory)(const layer_head *);
    void (*head)(const layer_head *, float *memory);
    /* y (m, n) = x (m, k) w^T */
    void (*linear)(const float *x, const matrix *w, int m, int n, int k, float *y);
    /* A row of a matrix, `count` inputs. */
    void (*row)(const matrix *, int row, int count, float *out);
} layer_functions;

const layer_functions *layers(void);

#ifdef __cplusplus
}
#endif
#endif
