// vpdpbusd for processors without AVX-VNNI: what is compiled with this computes in their stead what it would do there.
#pragma once

#include <immintrin.h>

static inline __m256i emulated_dpbusd(__m256i sum, __m256i a, __m256i b) {
    int sums[8];
    unsigned char without_sign[32];
    signed char with_sign[32];
    __builtin_memcpy(sums, &sum, 32), __builtin_memcpy(without_sign, &a, 32), __builtin_memcpy(with_sign, &b, 32);
    for (int i = 0; i < 32; i++) sums[i / 4] += without_sign[i] * with_sign[i];
    __builtin_memcpy(&sum, sums, 32);
    return sum;
}

#undef _mm256_dpbusd_avx_epi32
#define _mm256_dpbusd_avx_epi32 emulated_dpbusd
#define __AVXVNNI__ 1
