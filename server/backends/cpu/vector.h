// Vectors of floats in whatever width the machine has, and the two ways in which their products are computed.
//
// Everything is written in words of 32 bits: a word is one float32, or a pair of neighbouring bfloat16. A product takes
// a word of the left side, the same for all lanes, and a vector of words of the right side, one for each lane; for
// bfloat16 that is two multiplications and two additions per lane. So every kernel is one template over the dtype.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX512F__)
#include <immintrin.h>
constexpr int LANES = 16, REGISTERS = 32;
#elif defined(__AVX2__)
#include <immintrin.h>
constexpr int LANES = 8, REGISTERS = 16;
#elif defined(__aarch64__)
#include <arm_neon.h>
constexpr int LANES = 4, REGISTERS = 32;
#else
constexpr int LANES = 4, REGISTERS = 16;
#endif

// What is left of the registers for sums when the operands of a product have their places.
constexpr int ACCUMULATORS = REGISTERS * 3 / 4;

typedef uint32_t Word;
typedef uint16_t Bf16;
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef Word Words __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
// The same where memory is read or written: at any address, whatever was stored there.
typedef float FloatsAt __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef Word WordsAt __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef Word PairsAt __attribute__((vector_size(4 * LANES), aligned(2), may_alias));
typedef uint16_t HalvesAt __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

#define INLINE inline __attribute__((always_inline))
// A function that takes its parameters from an array, each in 8 bytes.
template <auto FUNCTION>
struct Packed;
template <class... P, void (*FUNCTION)(P...)>
struct Packed<FUNCTION> {
    template <size_t... I>
    static void unpack(const int64_t* arguments, std::index_sequence<I...>) {
        FUNCTION((P)arguments[I]...);
    }
    static void call(const int64_t* arguments) { unpack(arguments, std::index_sequence_for<P...>()); }
};

// Make a function, or one instance of a template, known to the library's users: a pointer to it, called NAME, and one to
// its packed form, NAME_packed.
#define EXPORT(NAME, ...)                                                                           \
    extern "C" {                                                                                    \
    __attribute__((visibility("default"))) void (*NAME##_packed)(const int64_t*) = Packed<__VA_ARGS__>::call; \
    __attribute__((visibility("default"))) auto* NAME = __VA_ARGS__;                                \
    }

INLINE Floats load(const float* at) { return *reinterpret_cast<const FloatsAt*>(at); }
INLINE Words load(const Word* at) { return *reinterpret_cast<const WordsAt*>(at); }
INLINE void store(float* at, Floats x) { *reinterpret_cast<FloatsAt*>(at) = x; }
INLINE void store(Word* at, Words x) { *reinterpret_cast<WordsAt*>(at) = x; }
// Words of elements, wherever they begin.
INLINE Words load_words(const float* at) { return (Words)load(at); }
INLINE Words load_words(const Bf16* at) { return *reinterpret_cast<const PairsAt*>(at); }
// The same value in all lanes.
INLINE Floats all(float x) { return x - Floats{}; }
INLINE Words all(Word x) { return x - Words{}; }
INLINE Ints all(int32_t x) { return x - Ints{}; }

// Load from bfloat16 and store to it, LANES at a time.
INLINE Floats load(const Bf16* at) {
    // GCC 12 makes five instructions of the conversion below.
#if defined(__AVX512F__)
    return (Floats)((Words)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at))) << 16);
#elif defined(__AVX2__)
    return (Floats)((Words)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))) << 16);
#elif defined(__aarch64__)
    return (Floats)vshll_n_u16(vld1_u16(at), 16);  // GCC 12 takes the lanes one by one
#else
    const auto halves = *reinterpret_cast<const HalvesAt*>(at);
    return (Floats)(__builtin_convertvector(halves, Words) << 16);
#endif
}

// Rounds to nearest, ties to even; a NaN stays one.
INLINE Words round_bf16(Floats x) {
    const Words bits = (Words)x;
    const Words rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    return (x == x) ? rounded : (bits >> 16 | 0x40);
}

// Two of them, the second in the upper half of a word. NaN stays NaN but for those whose lowest bits are nearly all ones.
INLINE Words round_pair(Floats first, Floats second) {
    const auto raised = [](Words bits) { return bits + 0x7FFF + ((bits >> 16) & 1); };
    return raised((Words)first) >> 16 | (raised((Words)second) & 0xFFFF0000u);
}

INLINE void store(Bf16* at, Floats x) {
#if defined(__AVX512BF16__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), (__m256i)_mm512_cvtneps_pbh((__m512)x));
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    vst1_u16(at, (uint16x4_t)vcvt_bf16_f32((float32x4_t)x));
#else
    *reinterpret_cast<HalvesAt*>(at) = __builtin_convertvector(round_bf16(x), HalvesAt);
#endif
}

// x as E has it.
template <class E>
INLINE Floats rounded(Floats x);
template <>
INLINE Floats rounded<float>(Floats x) { return x; }
template <>
INLINE Floats rounded<Bf16>(Floats x) { return (Floats)(round_bf16(x) << 16); }

INLINE float to_float(float x) { return x; }
INLINE float to_float(Bf16 x) {
    const Word bits = Word(x) << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

template <class E>
INLINE E from_float(float x);
template <>
INLINE float from_float<float>(float x) { return x; }
template <>
INLINE Bf16 from_float<Bf16>(float x) {
    Word bits;
    memcpy(&bits, &x, 4);
    return x == x ? Bf16((bits + 0x7FFF + (bits >> 16 & 1)) >> 16) : Bf16(bits >> 16 | 0x40);
}

// Elements in a word.
template <class E>
constexpr int PER_WORD = 4 / sizeof(E);

// sum + left * right in every lane.
template <class E>
INLINE Floats dot(Floats sum, Word left, Words right);
template <>
INLINE Floats dot<float>(Floats sum, Word left, Words right) {
#if defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
    // Of 16 registers GCC 12 wastes some otherwise: it copies sums, and keeps the last of them in memory.
    asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"((Floats)all(left)), "x"((Floats)right));
    return sum;
#elif defined(__aarch64__)
    return (Floats)vfmaq_lane_f32((float32x4_t)sum, (float32x4_t)right, (float32x2_t)vcreate_u64(left), 0);
#else
    return sum + (Floats)all(left) * (Floats)right;
#endif
}
template <>
INLINE Floats dot<Bf16>(Floats sum, Word left, Words right) {
#if defined(__AVX512BF16__)
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)all(left), (__m512bh)right);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    // Adds the sum of both products, each sum rounded to odd: no less exact than what is below.
    return (Floats)vbfdotq_lane_f32((float32x4_t)sum, (bfloat16x8_t)right, (bfloat16x4_t)vcreate_u64(left), 0);
#elif defined(__aarch64__)
    const float32x4_t pair = (float32x4_t)vshll_n_u16((uint16x4_t)vcreate_u64(left), 16);
    sum = (Floats)vfmaq_laneq_f32((float32x4_t)sum, (float32x4_t)(right << 16), pair, 0);
    return (Floats)vfmaq_laneq_f32((float32x4_t)sum, (float32x4_t)(right & 0xFFFF0000u), pair, 1);
#else
    sum += (Floats)all(left << 16) * (Floats)(right << 16);
    return sum + (Floats)all(left & 0xFFFF0000u) * (Floats)(right & 0xFFFF0000u);
#endif
}

// a * b + c, rounded once where the machine can: the same wherever it is written, which the compiler's own choice is not.
INLINE Floats fused(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

// sum + left * right in every lane, of words.
template <class E>
INLINE Floats dot_lanes(Floats sum, Words left, Words right);
template <>
INLINE Floats dot_lanes<float>(Floats sum, Words left, Words right) {
#if defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
    asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"((Floats)left), "x"((Floats)right));  // as in `dot`
    return sum;
#else
    return fused((Floats)left, (Floats)right, sum);
#endif
}
template <>
INLINE Floats dot_lanes<Bf16>(Floats sum, Words left, Words right) {
#if defined(__AVX512BF16__)
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)left, (__m512bh)right);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    return (Floats)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)left, (bfloat16x8_t)right);
#else
    sum = dot_lanes<float>(sum, left << 16, right << 16);
    return dot_lanes<float>(sum, left & 0xFFFF0000u, right & 0xFFFF0000u);
#endif
}

#if defined(__x86_64__)
#define IN_REGISTER "+v"
#elif defined(__aarch64__)
#define IN_REGISTER "+w"
#else
#define IN_REGISTER "+m"
#endif

// Has the compiler take a vector for another one from here on. So it computes a product again in each round, and leaves
// sums in the order and in the registers that they were given: it would rather delay additions, and run out of registers.
template <class T>
INLINE void renew(T& vector) {
    asm volatile("" : IN_REGISTER(vector));
}

// A moment's rest for a thread that looks at memory until it changes.
INLINE void rest() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb");
#endif
}

// b where either is a NaN.
#if defined(__AVX512F__)
INLINE Floats max(Floats a, Floats b) { return (Floats)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE Floats min(Floats a, Floats b) { return (Floats)_mm512_min_ps((__m512)a, (__m512)b); }
#elif defined(__AVX2__)
INLINE Floats max(Floats a, Floats b) { return (Floats)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE Floats min(Floats a, Floats b) { return (Floats)_mm256_min_ps((__m256)a, (__m256)b); }
#else
INLINE Floats max(Floats a, Floats b) { return a > b ? a : b; }
INLINE Floats min(Floats a, Floats b) { return a < b ? a : b; }
#endif
INLINE long max(long a, long b) { return a > b ? a : b; }
INLINE long min(long a, long b) { return a < b ? a : b; }

// Unrolled, as are loops over what it is used for: or else the compiler has it put together lane by lane.
INLINE Ints iota() {
    Ints lanes;
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) lanes[i] = i;
    return lanes;
}

// The words at `places` behind an address.
INLINE Words gather(const Word* at, Ints places) {
#if defined(__AVX512F__)
    return (Words)_mm512_i32gather_epi32((__m512i)places, at, 4);
#elif defined(__AVX2__)
    return (Words)_mm256_i32gather_epi32(reinterpret_cast<const int*>(at), (__m256i)places, 4);
#else
    Words words;
    for (int lane = 0; lane < LANES; lane++) words[lane] = at[places[lane]];
    return words;
#endif
}

// The lanes of a vector joined by `join`, in pairs, then in pairs of pairs.
template <class Join>
INLINE float reduce(Floats x, const Join& join) {
#pragma GCC unroll 4
    for (int width = LANES / 2; width; width /= 2) x = join(x, __builtin_shuffle(x, iota() ^ width));
    return x[0];
}

INLINE float sum(Floats x) {
    return reduce(x, [](Floats a, Floats b) { return a + b; });
}

INLINE float largest(Floats x) {
    return reduce(x, [](Floats a, Floats b) { return max(a, b); });
}

// The first `count` elements at an address, zeros behind them. Memory behind them is not touched.
template <class E>
INLINE Floats load_part(const E* at, long count) {
    if (count >= LANES) return load(at);
    E elements[LANES] = {};
    for (long i = 0; i < count; i++) elements[i] = at[i];
    return load(elements);
}

template <class E>
INLINE void store_part(E* at, Floats x, long count) {
    if (count >= LANES) return store(at, x);
    E elements[LANES];
    store(elements, x);
    for (long i = 0; i < count; i++) at[i] = elements[i];
}
