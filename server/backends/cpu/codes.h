// Products of small integers: codes of weights, which are unsigned, with codes of inputs, which are signed.
//
// A word of a panel holds four codes of 8 bits, or eight of 4. Those of float4 (E2M1) stand for 0, 1/2, 1, 3/2, 2, 3, 4
// and 6 with either sign: what is multiplied is twice that, raised so that it has no sign. Sums are exact, so neither their order nor the instructions
// that compute them show in a result.
#pragma once

#include "vector.h"

constexpr int RAISED = 12;
alignas(16) constexpr uint8_t FLOAT4_FACTORS[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// What is multiplied of float4, of codes that fill a byte each.
INLINE Words look_up_float4(Words codes) {
#if defined(__AVX512BW__)
    const __m128i table = _mm_load_si128(reinterpret_cast<const __m128i*>(FLOAT4_FACTORS));
    return (Words)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), (__m512i)codes);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    const __m128i table = _mm_load_si128(reinterpret_cast<const __m128i*>(FLOAT4_FACTORS));
    return (Words)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), (__m256i)codes);
#elif defined(__aarch64__)
    return (Words)vqtbl1q_u8(vld1q_u8(FLOAT4_FACTORS), (uint8x16_t)codes);
#else
    uint8_t bytes[sizeof(Words)];
    memcpy(bytes, &codes, sizeof codes);
    for (uint8_t& byte : bytes) byte = FLOAT4_FACTORS[byte];
    memcpy(&codes, bytes, sizeof codes);
    return codes;
#endif
}

// Kinds of codes: their bits, or float4, which are 4.
constexpr int FLOAT4 = 3;

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

// How codes of a kind are multiplied: a vector of a panel becomes PARTS vectors, each for a word of inputs of its own.
template <int KIND>
struct Factors;

// Eight words' sums of pairs, of at most 2 * 15 * 128, have room in 16 bits.
template <>
struct Factors<4> {
    static constexpr bool STARTS_BELOW = false;
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
    static constexpr bool STARTS_BELOW = false;
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
#elif defined(__ARM_FEATURE_MATMUL_INT8)
    return (Ints)vusdotq_lane_s32((int32x4_t)sum, (uint8x16_t)weights, (int8x8_t)vcreate_u64(inputs), 0);
#elif defined(__ARM_FEATURE_DOTPROD)
    // Both sides are signed: 128 less of each weight, and then 128 times the inputs.
    const int8x8_t lane = (int8x8_t)vcreate_u64(inputs);
    const int32x4_t less = vdotq_lane_s32(int32x4_t{}, vdupq_n_s8(-128), lane, 0);
    return (Ints)vdotq_lane_s32(vsubq_s32((int32x4_t)sum, less), (int8x16_t)(weights ^ 0x80808080u), lane, 0);
#elif defined(__aarch64__)
    const int16x8_t four = vmovl_s8((int8x8_t)vdup_n_u32(inputs));
    const uint16x8_t low = vmovl_u8(vget_low_u8((uint8x16_t)weights)), high = vmovl_high_u8((uint8x16_t)weights);
    const auto pairs = [&](uint16x8_t codes) {
        const int32x4_t first = vmull_s16(vget_low_s16((int16x8_t)codes), vget_low_s16(four));
        return vpaddq_s32(first, vmull_high_s16((int16x8_t)codes, four));
    };
    return sum + (Ints)vpaddq_s32(pairs(low), pairs(high));
#else
    for (int shift = 0; shift < 32; shift += 8)
        sum += (Ints)(weights >> shift & 0xFFu) * int32_t(int8_t(inputs >> shift));
    return sum;
#endif
}

// The same where no code of a weight is above 127.
INLINE Ints dot_small_codes(Ints sum, Words weights, Word inputs) {
#if defined(__ARM_FEATURE_DOTPROD)
    return (Ints)vdotq_lane_s32((int32x4_t)sum, (int8x16_t)weights, (int8x8_t)vcreate_u64(inputs), 0);
#else
    return dot_codes(sum, weights, inputs);
#endif
}

// How codes of a kind are multiplied: a vector of a panel becomes PARTS vectors, each for a word of inputs of its own.
template <int BITS>
struct Factors {
    static constexpr bool STARTS_BELOW = false;
    typedef int8_t Input;
    typedef Ints Sums;
    static constexpr int PARTS = 8 / BITS;
    static INLINE Words part(Words codes, int number) {
        return BITS == 8 ? codes : codes >> 4 * number & 0x0F0F0F0Fu;
    }
    static INLINE Sums add(Sums sums, Words part, Word inputs) {
        return BITS == 8 ? dot_codes(sums, part, inputs) : dot_small_codes(sums, part, inputs);
    }
};
#endif

// In 16 bits, a block's sums start so far below 0 as raising factors adds to them: eight words' sums of pairs of products
// that are not raised, of at most 2 * 12 * 128, have room there, and what overflows on the way comes back.
template <>
struct Factors<FLOAT4> : Factors<4> {
#if defined(__AVX2__) && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)
    static constexpr bool STARTS_BELOW = true;
#endif
    static INLINE Words part(Words codes, int number) { return look_up_float4(Factors<4>::part(codes, number)); }
};

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
#elif defined(__aarch64__)
    const int16x4_t halves = vmovn_s32((int32x4_t)codes);
    const int8x8_t bytes = vmovn_s16(vcombine_s16(halves, halves));
    memcpy(at, &bytes, LANES);
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
#elif defined(__aarch64__)
    Word bytes;
    memcpy(&bytes, at, LANES);
    return (Ints)vmovl_u16(vget_low_u16(vmovl_u8((uint8x8_t)vcreate_u64(bytes))));
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
#elif defined(__aarch64__)
    return (Floats)vcvt_f32_f16((float16x4_t)vld1_u16(at));
#else
    Floats values;
    for (int lane = 0; lane < LANES; lane++) values[lane] = to_float_half(at[lane]);
    return values;
#endif
}
