/* Random numbers by counting: every draw is a hash of where it is made, so that any order, and NumPy, gets the same.
 *
 * Reads   a key (of a seed, a batch, a hop and a kind of edge), a place and the number of the draw.
 * Writes  nothing.
 * Never   libm, a fused multiply-add or a state: keys.py has the same in NumPy, bit for bit.
 */

#ifndef OUTLIVE_DRAWING_H
#define OUTLIVE_DRAWING_H

#include <float.h>
#include <stdint.h>
#include <string.h>

#if defined(FLT_EVAL_METHOD) && FLT_EVAL_METHOD != 0
#error "doubles are computed with more than their own precision here: NumPy would draw otherwise"
#endif

#define STEP UINT64_C(0x9E3779B97F4A7C15)

static inline uint64_t mix(uint64_t value)
{
    value = (value ^ (value >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    value = (value ^ (value >> 27)) * UINT64_C(0x94D049BB133111EB);
    return value ^ (value >> 31);
}

/* From a key to that of a place in it, and from there to a draw. */
static inline uint64_t drawn(uint64_t key, int64_t number)
{
    return mix(key + STEP * ((uint64_t)number + 1));
}

/* An integer in [0, bound): the upper half of the product, for bounds below 2**32. */
static inline uint64_t below(uint64_t draw, uint64_t bound)
{
    return ((draw >> 32) * bound + (((draw & UINT64_C(0xFFFFFFFF)) * bound) >> 32)) >> 32;
}

/* In [0, 1). */
static inline double unit(uint64_t draw)
{
    return (double)(int64_t)(draw >> 11) * 0x1p-53;
}

/* -log of a number in (0, 1]: an exponential variate. 2 artanh(s) for the fraction, and the exponent's share. */
static inline double exponential(uint64_t draw)
{
    double value = (double)(int64_t)((draw >> 11) + 1) * 0x1p-53;
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    int64_t exponent = (int64_t)(bits >> 52) - 1023;
    bits = (bits & UINT64_C(0x000FFFFFFFFFFFFF)) | UINT64_C(0x3FF0000000000000);
    double fraction;
    memcpy(&fraction, &bits, sizeof fraction);
    if (fraction > 1.4142135623730951) {
        fraction = fraction * 0.5;
        exponent += 1;
    }
    double s = (fraction - 1.0) / (fraction + 1.0);
    double z = s * s;
    double sum = 1.0 / 21.0;
    sum = sum * z + 1.0 / 19.0;
    sum = sum * z + 1.0 / 17.0;
    sum = sum * z + 1.0 / 15.0;
    sum = sum * z + 1.0 / 13.0;
    sum = sum * z + 1.0 / 11.0;
    sum = sum * z + 1.0 / 9.0;
    sum = sum * z + 1.0 / 7.0;
    sum = sum * z + 1.0 / 5.0;
    sum = sum * z + 1.0 / 3.0;
    sum = sum * z + 1.0;
    return -((double)exponent * 0.6931471805599453 + (s + s) * sum);
}

/* 1 - u for the number u whose -log `exponential` is: what -log(u) is at least. */
static inline double missing(uint64_t draw)
{
    return (double)((INT64_C(1) << 53) - 1 - (int64_t)(draw >> 11)) * 0x1p-53;
}

#endif
