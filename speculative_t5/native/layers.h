/* T5's layers over float32 arrays, a few passes' tokens at a time.
 *
 * N = batch * length positions, d = d_model, H heads of D elements, T keys. Matrices are (outputs,
 * inputs) in row-major order. In all layers y = x + f(norm(x)); y may be x.
 */

#ifndef LAYERS_H
#define LAYERS_H

#ifdef __cplusplus
extern "C" {
#endif

#define LAYERS_VERSION 3 /* of this interface */

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

typedef struct {
    layer_io io;
    int num_heads, head_dim;
    const float *into; /* self-attention: (3 H D, d), queries, keys, values; cross: (H D, d) */
    const float *out;  /* (d, H D) */
    layer_heads keys, values; /* (B, H, T, D); NULL: self-attention without a cache */
    int num_keys;      /* T: of the memory for cross-attention, the capacity of a cache */
    const int *at;     /* a cache's rows' first new positions, (B,) or, with at_step 0, (1,) */
    int at_step;
    const float *bias; /* (H, 2 * reach + 1) by relative position, or NULL: cross-attention */
    int reach;
    const float *mask; /* additive, of keys, (B, T) or NULL */
} layer_attention;

enum layer_activation { LAYER_RELU, LAYER_GELU, LAYER_GELU_NEW, LAYER_SILU };

typedef struct {
    layer_io io;
    int d_ff;
    const float *into; /* (d_ff, d), gated: (2 d_ff, d), gates first */
    const float *out;  /* (d, d_ff) */
    int gated;
    enum layer_activation activation;
} layer_feed_forward;

/* A source's keys and values for cross-attention, for all steps to come. */
typedef struct {
    const float *x; /* (N, d): what the encoder gave */
    int batch, length, d_model, num_heads, head_dim;
    const float *into;       /* (2 H D, d), keys, values */
    float *keys, *values;    /* (B, H, T, D), zeros behind the length */
    int num_keys;            /* T, at least the length */
} layer_source;

/* What comes after the last layer: logits = scale * norm(x) weight^T, or their best ids. */
typedef struct {
    const float *x;    /* (N, d) */
    const float *norm; /* (d,) */
    float epsilon, scale;
    int count, d_model, num_ids;
    const float *weight; /* (num_ids, d) */
    float *logits;       /* (N, num_ids), or NULL: */
    int *best;           /* (N,), the first of equals */
} layer_head;

/* 0, or -1 where memory was not to be had. */
typedef struct {
    int version;
    int (*attend)(const layer_attention *);
    int (*feed_forward)(const layer_feed_forward *);
    int (*keys_values)(const layer_source *);
    int (*head)(const layer_head *);
} layer_functions;

const layer_functions *layers(void);

#ifdef __cplusplus
}
#endif
#endif
