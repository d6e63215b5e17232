// Products of small integers: codes of weights, which are unsigned, with codes of inputs, which are signed.
//
// A word of a panel holds four codes of 8 bits, or eight of 4. Sums are exact, so neither their order nor the instructions
// that compute them show in a result.
#pragma once

#include "vector.h"

#if defined(__AVX2__) && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)
typedef int16_t Shorts __attribute__((vector_size(4 * LANES)));
typedef uint16_t UnsignedShorts __attribute__((vector_size(4 * LANES)));

// Sums of two neighbouring products, of bytes without a sign with bytes that have one, and of 16 bits.
#if defined(__AVX512BW__)
INLINE Shorts multiply_bytes(Words a, Words b) { return (Shorts)_mm512_maddubs_epi16((__m512i)a, (__m512i)b); }
INLINE Ints multiply_shorts(Words a, Words b) { return (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b); }
#else
INLINE Shorts multiply_bytes(Words a, Words b) { return (Shorts)_mm256_maddubs_epi16((__m256i)a, (__m256i)b); }
INLINE Ints multiply_shorts(Words a, Words b) { return (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b); }
#endif

// How codes of BITS bits are multiplied: a vector of a panel becomes PARTS vectors, each for a word of inputs of its own.
template <int BITS>
struct Factors;

// Eight words' sums of pairs, of at most 2 * 15 * 128, have room in 16 bits.
template <>
struct Factors<4> {
    typedef int8_t Input;
    typedef Shorts Sums;
    static constexpr int PARTS = 2, WORDS_OF_A_SUM = 8;
    static INLINE Words part(Words codes, int number) { return codes >> 4 * number & 0x0F0F0F0Fu; }
    static INLINE Sums add(Sums sums, Words part, Word inputs) { return sums + multiply_bytes(part, all(inputs)); }
    static INLINE Ints total(Sums sums) { return multiply_shorts((Words)sums, all(0x00010001u)); }
};

// Pairs of bytes would be too large for 16 bits, so the factors have 16 bits: the first and third slot, then the others.
template <>
struct Factors<8> {
    typedef int16_t Input;
    typedef Ints Sums;
    static constexpr int PARTS = 2;
    static INLINE Words part(Words codes, int number) {
        return number ? (Words)((UnsignedShorts)codes >> 8) : codes & 0x00FF00FFu;
    }
    static INLINE Sums add(Sums sums, Words part, Word inputs) { return sums + multiply_shorts(part, all(inputs)); }
};
#else
// sum[lane] += the four products of an input's word with the weights' word of that lane.
INLINE Ints dot_codes(Ints sum, Words weights, Word inputs) {
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, (__m512i)all(inputs));
#elif defined(__AVXVNNI__)
    return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)weights, (__m256i)all(inputs));
#else
    for (int shift = 0; shift < 32; shift += 8)
        sum += (Ints)(weights >> shift & 0xFFu) * int32_t(int8_t(inputs >> shift));
    return sum;
#endif
}

// How codes of BITS bits are multiplied: a vector of a panel becomes PARTS vectors, each for a word of inputs of its own.
template <int BITS>
struct Factors {
    typedef int8_t Input;
    typedef Ints Sums;
    static constexpr int PARTS = 8 / BITS;
    static INLINE Words part(Words codes, int number) {
        return BITS == 8 ? codes : codes >> 4 * number & 0x0F0F0F0Fu;
    }
    static INLINE Sums add(Sums sums, Words part, Word inputs) { return dot_codes(sums, part, inputs); }
};
#endif

// The nearest integers, ties to even, from -128 to 127.
INLINE Ints nearest_codes(Floats x) {
    // Adding 1.5 * 2^23 rounds to an integer, which then stands in the lowest bits.
    return (Ints)(min(max(x, all(-128.0f)), all(127.0f)) + 12582912.0f) - 0x4B400000;
}

// The codes of all lanes, one after the other.
INLINE void store_codes(int8_t* at, Ints codes) {
#if defined(__AVX512F__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(at), _mm512_cvtepi32_epi8((__m512i)codes));
#elif defined(__AVX2__)
    const __m128i first = _mm256_castsi256_si128((__m256i)codes), second = _mm256_extracti128_si256((__m256i)codes, 1);
    const __m128i shorts = _mm_packs_epi32(first, second);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(at), _mm_packs_epi16(shorts, shorts));
#else
    for (int lane = 0; lane < LANES; lane++) at[lane] = int8_t(codes[lane]);
#endif
}

// The same in 16 bits, and of four codes the first and third before the others.
INLINE void store_codes(int16_t* at, Ints codes) {
    const Ints order = (iota() & ~3) | (iota() >> 1 & 1) | (iota() << 1 & 2);
    *reinterpret_cast<HalvesAt*>(at) = __builtin_convertvector((Words)__builtin_shuffle(codes, order), HalvesAt);
}

// LANES bytes as integers.
INLINE Ints load_bytes(const uint8_t* at) {
#if defined(__AVX512F__)
    return (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
#elif defined(__AVX2__)
    return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at)));
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
#elif defined(__F16C__)
    return (Floats)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
#else
    Floats values;
    for (int lane = 0; lane < LANES; lane++) values[lane] = to_float_half(at[lane]);
    return values;
#endif
}
