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

// The nearest integers, ties to even, from -128 to 127.
INLINE Ints nearest_codes(Floats x) {
    // Adding 1.5 * 2^23 rounds to an integer, which then stands in the lowest bits.
    return (Ints)(min(max(x, all(-128.0f)), all(127.0f)) + 12582912.0f) - 0x4B400000;
}

// The lowest bytes of all lanes, one after the other.
INLINE void store_codes(int8_t* at, Ints codes) {
#if defined(__AVX512F__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(at), _mm512_cvtepi32_epi8((__m512i)codes));
#elif defined(__aarch64__)
    const int16x4_t halves = vmovn_s32((int32x4_t)codes);
    const int8x8_t bytes = vmovn_s16(vcombine_s16(halves, halves));
    memcpy(at, &bytes, LANES);
#else
    for (int lane = 0; lane < LANES; lane++) at[lane] = int8_t(codes[lane]);
#endif
}

// LANES bytes as integers.
INLINE Ints load_bytes(const uint8_t* at) {
#if defined(__AVX512F__)
    return (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
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
#elif defined(__aarch64__)
    return (Floats)vcvt_f32_f16((float16x4_t)vld1_u16(at));
#else
    Floats values;
    for (int lane = 0; lane < LANES; lane++) values[lane] = to_float_half(at[lane]);
    return values;
#endif
}
