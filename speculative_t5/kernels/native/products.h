/* Products of few rows, and the threads that share them. */

#ifndef PRODUCTS_H
#define PRODUCTS_H

#ifdef __cplusplus
extern "C" {
#endif

/* Seen from outside; all else is hidden, as two copies of the library must not call each other. */
#define EXPORTED __attribute__((visibility("default")))

enum stored_type { STORED_FLOAT32, STORED_FLOAT16, STORED_BFLOAT16, STORED_AFFINE8, STORED_AFFINE4 };

/* A matrix (outputs, inputs) in row-major order. Of 8 or 4 bits, it is as MLX packs it: a number is
 * q * scale + bias, of those of its group. */
typedef struct {
    const void *data; /* numbers of 4 bits: the lower half of a byte comes first */
    enum stored_type type;
    int group;                   /* affine: 32, 64 or 128 inputs */
    enum stored_type scale_type; /* affine: not affine itself */
    const void *scales, *biases; /* affine: (outputs, inputs / group) */
} matrix;

typedef struct rounded_rows rounded_rows;

/* c (m, n) = alpha a (m, k) b + beta c; b is (k, n), or (n, k) if transposed. */
typedef struct {
    int m, n, k, lda, ldb, ldc, b_transposed;
    float alpha, beta;
    const float *a, *b;
    float *c;
    const matrix *stored; /* b, if it is not float32; it is transposed */
    const rounded_rows *rounded; /* a, where b is multiplied by integers */
} product;

/* One of a job's parts, by its number. */
typedef void (*part)(const void *job, int i);

/* Do parts 0 to count - 1 of a job, by all threads; by the caller alone if they are busy. */
void products_share(part f, const void *job, int count);

/* The number of threads, and which of them this is: 0 is whoever called. */
int products_threads(void);
int products_thread(void);

/* Instructions to use: 4 is AVX-512 with AMX, 3 with VNNI, 2 without, 1 AVX2, 0 neither. */
int products_level(void);

/* A row of a matrix as floats, `count` inputs. */
void products_row(const matrix *b, int row, int count, float *out);

/* A product by all threads. */
void products_multiply(const product *p);

/* A product by the caller alone. */
void products_alone(const product *p);

#ifdef __cplusplus
}
#endif
#endif
