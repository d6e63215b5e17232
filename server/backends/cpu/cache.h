// The KV cache in bytes: how rows of keys and values become codes, and codes become words of float32 or bfloat16 again.
//
// A code is a sign and seven bits of magnitude, whatever they stand for, so that one table of 128 entries expands any of
// them; int8 differs by that from the reference's order of bits, not by what it stands for. Every code expands exactly:
// bfloat16 has room for eight bits and for the exponents of both kinds of float8. None expands to NaN or infinity.
#pragma once

#include "functions.h"

enum Kind { AS_COMPUTED, INT8, E4M3, E5M2 };

struct Cache {
    int kind;
    float key_scale, value_scale;  // by which float8 is divided before it is stored
};

// Of a kind of float8: bits of its mantissa, what its exponent lacks to float32's, its largest number.
struct Float8 {
    int mantissa, bias;
    float largest;
};

INLINE Float8 float8_of(int kind) { return kind == E4M3 ? Float8{3, 120, 448.0f} : Float8{2, 112, 57344.0f}; }

// 2^exponent.
INLINE float power_of_two(int exponent) {
    const Word bits = Word(exponent + 127) << 23;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE Floats without_nan(Floats x) { return x == x ? x : Floats{}; }
INLINE Floats size_of(Floats x) { return (Floats)((Words)x & 0x7FFFFFFFu); }

// Codes of numbers that are already divided by their scale; a NaN becomes 0, what is too large the largest.
template <int KIND>
INLINE Words encode(Floats x) {
    const Words sign = (Words)x >> 24 & 0x80;
    Floats size = size_of(without_nan(x));
    if constexpr (KIND == INT8) {
        size = round_even(min(size, all(127.0f)));
        return sign | (Words)__builtin_convertvector(size, Ints);
    } else {
        const Float8 kind = float8_of(KIND);
        const int dropped = 23 - kind.mantissa;
        size = min(size, all(kind.largest));
        const Words bits = (Words)size;
        const Words normal = (bits + (Word(1) << (dropped - 1)) - 1 + (bits >> dropped & 1)) >> dropped;
        const Floats small = round_even(size * power_of_two(126 - kind.bias + kind.mantissa));
        const Words is_small = (Words)(size < power_of_two(kind.bias - 126));
        const Words of_small = (Words)__builtin_convertvector(small, Ints);
        return sign | (is_small & of_small) | (~is_small & (normal - (Word(kind.bias) << kind.mantissa)));
    }
}

// What codes, each in a lane, stand for.
template <int KIND>
INLINE Floats decode(Words codes) {
    const Words size = codes & 0x7F, sign = (codes & 0x80) << 24;
    const Floats number = __builtin_convertvector((Ints)size, Floats);
    if constexpr (KIND == INT8) return (Floats)((Words)number | sign);
    const Float8 kind = float8_of(KIND);
    const Words normal = (size << (23 - kind.mantissa)) + (Word(kind.bias) << 23);
    const Words small = (Words)(number * power_of_two(kind.bias - 126 - kind.mantissa));
    const Words is_small = (Words)((Ints)size < (1 << kind.mantissa));
    return (Floats)(sign | (is_small & small) | (~is_small & normal));
}

// Codes of so many elements as a vector of words has.
template <class E>
struct CodesAt;
template <>
struct CodesAt<float> {
    typedef uint8_t type __attribute__((vector_size(LANES), aligned(1), may_alias));
};
template <>
struct CodesAt<Bf16> {
    typedef uint16_t type __attribute__((vector_size(2 * LANES), aligned(1), may_alias));
};

template <class E, int KIND>
INLINE Words expand_vector(const uint8_t* codes) {
    const auto stored = *reinterpret_cast<const typename CodesAt<E>::type*>(codes);
    const Words lanes = __builtin_convertvector(stored, Words);
    if constexpr (sizeof(E) == 4) return (Words)decode<KIND>(lanes);
    const Words first = (Words)decode<KIND>(lanes & 0xFF), second = (Words)decode<KIND>(lanes >> 8);
    return first >> 16 | (second & 0xFFFF0000u);
}

#if defined(__AVX512VBMI__)
// Of bfloat16 for each magnitude, the high bytes and the low bytes.
template <int KIND>
struct Table {
    alignas(64) uint8_t high[128], low[128];
    Table() {
        for (int i = 0; i < 128; i++) {
            const Floats value = decode<KIND>(all(Word(i)));
            const Word bits = ((Words)value)[0] >> 16;
            high[i] = uint8_t(bits >> 8), low[i] = uint8_t(bits);
        }
    }
};

// 64 codes at a time. Interleaving bytes goes by 128 bits: the codes are brought into the order in which that ends well.
template <int KIND>
long expand_by_table(Word* to, const uint8_t* from, long count) {
    static const Table<KIND> table;
    const __m512i high_0 = _mm512_load_si512(table.high), high_1 = _mm512_load_si512(table.high + 64);
    const __m512i low_0 = _mm512_load_si512(table.low), low_1 = _mm512_load_si512(table.low + 64);
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), sign = _mm512_set1_epi8(char(0x80));
    long i = 0;
    for (; i + 64 <= count; i += 64, to += 32) {
        const __m512i codes = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(from + i));
        const __m512i magnitudes = _mm512_permutex2var_epi8(high_0, codes, high_1);  // looks at seven bits
        const __m512i high = _mm512_ternarylogic_epi64(magnitudes, codes, sign, 0xF8);  // magnitudes | (codes & sign)
        const __m512i low = _mm512_permutex2var_epi8(low_0, codes, low_1);
        _mm512_storeu_si512(to, _mm512_unpacklo_epi8(low, high));
        _mm512_storeu_si512(to + 16, _mm512_unpackhi_epi8(low, high));
    }
    return i;
}
#endif

template <class E, int KIND>
void expand_codes(Word* to, const uint8_t* from, long count) {
    constexpr int STEP = LANES * PER_WORD<E>;
    long i = 0;
#if defined(__AVX512VBMI__)
    if constexpr (sizeof(E) == 2) i = expand_by_table<KIND>(to, from, count);
#endif
    for (; i < count; i += STEP) store(to + i / PER_WORD<E>, expand_vector<E, KIND>(from + i));
}

// Words of `count` codes, which is a multiple of a vector's elements.
template <class E>
INLINE void expand(int kind, Word* to, const uint8_t* from, long count) {
    switch (kind) {
        case INT8: return expand_codes<E, INT8>(to, from, count);
        case E4M3: return expand_codes<E, E4M3>(to, from, count);
        default: return expand_codes<E, E5M2>(to, from, count);
    }
}
