/* Metal's address spaces and functions, as far as our kernels use them, for clang to check types.
 *
 * In interpreter.h address spaces are nothing; here they are those of clang, so that a pointer of
 * one that goes where another is wanted is an error, as it is in Metal. Nothing is run.
 */

#pragma once

#include <stddef.h>
#include <stdint.h>

#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2)))
#define threadgroup static __attribute__((address_space(3)))
#define thread

typedef unsigned int uint;
typedef unsigned short ushort;
typedef _Float16 half;
typedef _Float16 float16_t;
typedef double bfloat16_t; /* a type of its own is all that is needed */
struct uint3 {
    uint x, y, z;
};

namespace metal {
template <typename T> struct numeric_limits {
    static constexpr T infinity() { return (T)__builtin_inff(); }
};
enum class mem_flags { mem_none, mem_device, mem_threadgroup };
void threadgroup_barrier(mem_flags);
float fma(float, float, float);
half fma(half, half, half);
float rsqrt(float);
half rsqrt(half);
float exp(float);
half exp(half);
float tanh(float);
half tanh(half);
float simd_sum(float);
int simd_sum(int);
uint simd_sum(uint);
half simd_sum(half);
/* An argument that fits several of these equally well is an error, as it is in Metal. */
int min(int, int);
uint min(uint, uint);
float min(float, float);
half min(half, half);
int max(int, int);
uint max(uint, uint);
float max(float, float);
half max(half, half);
template <typename T> T length(T);
template <typename T, int COLUMNS, int ROWS> struct matrix;
} // namespace metal

using namespace metal;
