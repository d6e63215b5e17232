// Functions of vectors, as exact as float32 needs, and the activations made of them.
#pragma once

#include <initializer_list>

#include "vector.h"

// To the nearest integer, ties to even: adding 1.5 * 2^23 leaves no bits for a fraction.
INLINE Floats round_even(Floats x) { return (x + 12582912.0f) - 12582912.0f; }

// e^x to within 2 units in the last place; 0 below -87, where float32 has no room, and no more than e^88.
INLINE Floats exp(Floats x) {
    const Floats limited = min(max(x, all(-87.0f)), all(88.0f));
    // Adding 1.5 * 2^23 rounds to an integer, which then stands in the lowest bits.
    const Floats shifted = limited * 1.44269504f + 12582912.0f;
    const Floats count = shifted - 12582912.0f;
    // log(2) in two parts, the first with so few bits that its product is exact.
    const Floats rest = (limited - count * 0.693145751953125f) - count * 1.42860682e-6f;
    Floats series = all(1.0f / 5040);
    for (const float term : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) series = series * rest + term;
    // Counting up the exponent multiplies by 2^count; the other bits of `shifted` are shifted out.
    const Floats power = (Floats)((Ints)series + ((Ints)shifted << 23));
    return x < all(-87.0f) ? Floats{} : power;
}

INLINE float exp(float x) { return exp(all(x))[0]; }

INLINE Floats tanh(Floats x) { return 1.0f - 2.0f / (exp(2.0f * x) + 1.0f); }

// Abramowitz and Stegun 7.1.26: within 1.5e-7.
INLINE Floats erf(Floats x) {
    const Floats size = x < Floats{} ? -x : x;
    const Floats t = 1.0f / (1.0f + 0.3275911f * size);
    Floats series = all(1.061405429f);
    for (const float term : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f}) series = series * t + term;
    const Floats value = 1.0f - series * t * exp(-size * size);
    return x < Floats{} ? -value : value;
}

// The logarithm of positive, normal numbers, to within 2 units in the last place.
INLINE Floats log(Floats x) {
    // x = 2^exponent * mantissa with the mantissa in [sqrt(1/2), sqrt(2)); log(m) is an odd series in (m - 1) / (m + 1).
    const Ints bits = (Ints)x, shifted = bits - 0x3F3504F3;
    const Floats exponent = __builtin_convertvector(shifted >> 23, Floats);
    const Floats mantissa = (Floats)((shifted & 0x007FFFFF) + 0x3F3504F3);
    const Floats ratio = (mantissa - 1.0f) / (mantissa + 1.0f), square = ratio * ratio;
    Floats series = all(1.0f / 9);
    for (const float term : {1.0f / 7, 1.0f / 5, 1.0f / 3}) series = series * square + term;
    const Floats small = 2.0f * ratio * (series * square) + exponent * 1.42860682e-6f;
    return exponent * 0.693145751953125f + (2.0f * ratio + small);
}

enum Activation { NONE, GELU, GELU_TANH, RELU, SILU, CLAMPED_SWIGLU, RELU_SQUARED, SIGMOID, NUM_ACTIVATIONS };

template <int KIND>
INLINE Floats activate(Floats x) {
    switch (KIND) {
        case GELU: return 0.5f * x * (1.0f + erf(x * 0.70710678f));
        // x * (1 + tanh(y)) / 2 = x / (1 + exp(-2 y)) with y = sqrt(2 / pi) * (x + 0.044715 x^3)
        case GELU_TANH: return x / (1.0f + exp(x * (x * x * -0.07135481f - 1.59576912f)));
        case RELU: return max(x, Floats{});
        case RELU_SQUARED: x = max(x, Floats{}); return x * x;
        case SIGMOID: return 1.0f / (1.0f + exp(-x));
        case SILU: return x / (1.0f + exp(-x));
        case CLAMPED_SWIGLU: x = min(x, all(7.0f)); return x / (1.0f + exp(-1.702f * x));
        default: return x;
    }
}

// activation(gate) * up.
template <int KIND>
INLINE Floats gated(Floats gate, Floats up) {
    if constexpr (KIND == CLAMPED_SWIGLU) up = max(min(up, all(7.0f)), all(-7.0f)) + 1.0f;
    return activate<KIND>(gate) * up;
}
