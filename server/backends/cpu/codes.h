// Products of small integers: codes of weights, which are unsigned, with codes of inputs, which are signed.
//
// A word holds four codes of 8 bits. Sums are exact in 32 bits, so neither their order nor the instructions that compute
// them show in a result.
#pragma once

#include "vector.h"

// sum[lane] += the four products of an input's word with the weights' word of that lane.
INLINE Ints dot_codes(Ints sum, Words weights, Word inputs) {
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, (__m512i)all(inputs));
#else
    for (int shift = 0; shift < 32; shift += 8)
        sum += (Ints)(weights >> shift & 0xFFu) * int32_t(int8_t(inputs >> shift));
    return sum;
#endif
}

// The nearest integers, ties to even, from -128 to 127.
INLINE Ints nearest_codes(Floats x) {
    // Adding 1.5 * 2^23 rounds to an integer, which then stands in the lowest bits.
    return (Ints)(min(max(x, all(-128.0f)), all(127.0f)) + 12582912.0f) - 0x4B400000;
}

// The lowest bytes of all lanes, one after the other.
INLINE void store_codes(int8_t* at, Ints codes) {
#if defined(__AVX512F__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(at), _mm512_cvtepi32_epi8((__m512i)codes));
#else
    for (int lane = 0; lane < LANES; lane++) at[lane] = int8_t(codes[lane]);
#endif
}

// LANES bytes as integers.
INLINE Ints load_bytes(const uint8_t* at) {
#if defined(__AVX512F__)
    return (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
#else
    Ints bytes;
    for (int lane = 0; lane < LANES; lane++) bytes[lane] = at[lane];
    return bytes;
#endif
}

// A float16 as a float.
INLINE float to_float_half(uint16_t half) {
    const Word sign = Word(half & 0x8000) << 16, rest = half & 0x7FFF;
    // Shifted into a float's place the exponent is 112 too small, for numbers that are not normal too; there are no
    // infinities among scales.
    Word bits = rest << 13;
    float value;
    memcpy(&value, &bits, 4);
    value *= 5.192296858534828e33f;  // 2^112
    memcpy(&bits, &value, 4);
    bits |= sign;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE Floats load_halves(const uint16_t* at) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
#else
    Floats values;
    for (int lane = 0; lane < LANES; lane++) values[lane] = to_float_half(at[lane]);
    return values;
#endif
}
