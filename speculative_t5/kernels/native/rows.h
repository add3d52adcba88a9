/* Functions of rows of floats, for one instruction set: included once for each, with these defined.
 *
 * WIDTH     floats in a vector
 * NAME(f)   f, made unique to the instruction set
 * TARGET    attribute of functions that use it
 */

typedef float NAME(vec) __attribute__((vector_size(4 * WIDTH), aligned(4)));
typedef int NAME(ints) __attribute__((vector_size(4 * WIDTH), aligned(4)));
#define VEC NAME(vec)
#define INTS NAME(ints)
#define INLINE static inline __attribute__((always_inline)) TARGET
#define LOAD(p) (*(const VEC *)(p))
#define STORE(p, v) (*(VEC *)(p) = (v))

INLINE VEC NAME(all)(float value)
{
    VEC v;
    for (int i = 0; i < WIDTH; i++)
        v[i] = value;
    return v;
}

INLINE float NAME(sum)(VEC v)
{
    float total = 0;
    for (int i = 0; i < WIDTH; i++)
        total += v[i];
    return total;
}

INLINE VEC NAME(choose)(INTS which, VEC yes, VEC no)
{
    return (VEC)(((INTS)yes & which) | ((INTS)no & ~which));
}

/* exp within 3e-7 for what is not above 88; 0 below -87: 2^n from its bits, times a polynomial. */
INLINE VEC NAME(exp)(VEC x)
{
    const VEC magic = NAME(all)(12582912.0f); /* 1.5 * 2^23: adding it rounds to a whole number */
    VEC t = x * 1.44269504f;
    t = NAME(choose)(t < -126.0f, NAME(all)(-127.0f), t);
    VEC shifted = t + magic, whole = shifted - magic, f = t - whole;
    VEC p = f * 1.54653179e-04f + 1.33952854e-03f;
    p = p * f + 9.61803993e-03f;
    p = p * f + 5.55034067e-02f;
    p = p * f + 2.40226511e-01f;
    p = p * f + 6.93147200e-01f;
    p = p * f + 1.0f;
    INTS bits = (((INTS)shifted - (INTS)magic) + 127) << 23;
    return p * (VEC)bits;
}

/* y = weight * x / sqrt(mean(x^2) + epsilon) */
static TARGET void NAME(norm)(const float *x, const float *weight, float epsilon, int count,
                              float *y)
{
    VEC squares = {0};
    float total = 0;
    int i = 0;
    for (; i + WIDTH <= count; i += WIDTH)
        squares += LOAD(x + i) * LOAD(x + i);
    for (; i < count; i++)
        total += x[i] * x[i];
    total += NAME(sum)(squares);
    float scale = 1.0f / sqrtf(total / (float)count + epsilon);
    for (i = 0; i + WIDTH <= count; i += WIDTH)
        STORE(y + i, LOAD(x + i) * scale * LOAD(weight + i));
    for (; i < count; i++)
        y[i] = x[i] * scale * weight[i];
}

/* What is in x, a multiple of WIDTH floats, becomes exp(x - max(x)); their sum is given back. */
static TARGET float NAME(exponentials)(float *x, int count)
{
    VEC most = LOAD(x);
    for (int i = WIDTH; i < count; i += WIDTH) {
        VEC v = LOAD(x + i);
        most = NAME(choose)(v > most, v, most);
    }
    float max = most[0];
    for (int i = 1; i < WIDTH; i++)
        max = most[i] > max ? most[i] : max;
    VEC total = {0};
    for (int i = 0; i < count; i += WIDTH) {
        VEC e = NAME(exp)(LOAD(x + i) - max);
        STORE(x + i, e);
        total += e;
    }
    return NAME(sum)(total);
}

/* x * sigmoid(t) for what keeps the exponential's argument in its range */
INLINE VEC NAME(swish)(VEC x, VEC t)
{
    t = NAME(choose)(t < -87.0f, NAME(all)(-87.0f), t);
    t = NAME(choose)(t > 87.0f, NAME(all)(87.0f), t);
    return x / (1.0f + NAME(exp)(-t));
}

INLINE VEC NAME(activated)(VEC x, enum layer_activation activation)
{
    switch (activation) {
    case LAYER_RELU:
        return NAME(choose)(x < 0, NAME(all)(0), x);
    case LAYER_GELU:
        for (int i = 0; i < WIDTH; i++)
            x[i] *= 0.5f * (1.0f + erff(x[i] * 0.70710678f));
        return x;
    case LAYER_GELU_NEW: /* (1 + tanh(u)) / 2 = sigmoid(2 u) */
        return NAME(swish)(x, 1.59576912f * (x + 0.044715f * x * x * x));
    default:
        return NAME(swish)(x, x);
    }
}

INLINE void NAME(activate_as)(float *x, const float *gated, int count, enum layer_activation how)
{
    int i = 0;
    for (; i + WIDTH <= count; i += WIDTH) {
        VEC v = NAME(activated)(LOAD(x + i), how);
        STORE(x + i, gated ? v * LOAD(gated + i) : v);
    }
    if (i < count) {
        VEC v = {0};
        for (int j = i; j < count; j++)
            v[j - i] = x[j];
        v = NAME(activated)(v, how);
        for (int j = i; j < count; j++)
            x[j] = gated ? v[j - i] * gated[j] : v[j - i];
    }
}

/* x becomes act(x), or act(x) * gated */
static TARGET void NAME(activate)(float *x, const float *gated, int count,
                                  enum layer_activation how)
{
    switch (how) { /* a constant for each, which takes the choice out of the loop */
    case LAYER_RELU: NAME(activate_as)(x, gated, count, LAYER_RELU); break;
    case LAYER_GELU: NAME(activate_as)(x, gated, count, LAYER_GELU); break;
    case LAYER_GELU_NEW: NAME(activate_as)(x, gated, count, LAYER_GELU_NEW); break;
    default: NAME(activate_as)(x, gated, count, LAYER_SILU);
    }
}

/* Where the greatest is, the first of equals; LAYER_NAN if all are NaN. */
static TARGET int NAME(best)(const float *x, int count)
{
    VEC most = NAME(all)(-INFINITY);
    int i = 0;
    for (; i + WIDTH <= count; i += WIDTH)
        most = NAME(choose)(LOAD(x + i) > most, LOAD(x + i), most);
    float max = -INFINITY;
    for (int j = 0; j < WIDTH; j++)
        max = most[j] > max ? most[j] : max;
    for (; i < count; i++)
        max = x[i] > max ? x[i] : max;
    for (i = 0; i < count; i++)
        if (x[i] == max)
            return i;
    return LAYER_NAN;
}

/* The sum of exp(x - max), for the greatest of x. */
static TARGET float NAME(sum_of_exponentials)(const float *x, int count, float max)
{
    VEC total = {0};
    int i = 0;
    for (; i + WIDTH <= count; i += WIDTH)
        total += NAME(exp)(LOAD(x + i) - max);
    float sum = NAME(sum)(total);
    for (; i < count; i++)
        sum += expf(x[i] - max);
    return sum;
}

static const row_functions NAME(rows) = {NAME(norm), NAME(exponentials), NAME(activate),
                                         NAME(best), NAME(sum_of_exponentials)};

#undef VEC
#undef INTS
#undef INLINE
#undef LOAD
#undef STORE
