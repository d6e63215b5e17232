// A tile of a matrix product, its sums held in registers: the one inner loop of linear layers and of attention.
//
// The left side is M rows of words, LEFT_STRIDE apart, so that the rows are at fixed distances from each other and do not
// fall into the same sets of a cache. The right side is vectors of words. Whatever M is, every sum is built in the same
// order: a row's result does not depend on the rows that are computed beside it.
#pragma once

#include <type_traits>

#include "vector.h"

// Words of a row of the left side that lie together: 512 bytes of each, so that they stay in the L1 cache.
constexpr int LEFT_WORDS = 128;
constexpr int LEFT_STRIDE = LEFT_WORDS + 16;

// The most rows of a tile that is NV vectors wide.
template <int NV>
constexpr int MAX_ROWS = ACCUMULATORS / NV;
// Rows whose sums with two vectors are in registers at once, beside these, a word of the left side and two more.
constexpr int TILE_ROWS = MAX_ROWS<2> < (REGISTERS - 5) / 2 ? MAX_ROWS<2> : (REGISTERS - 5) / 2;

INLINE int blocks_of(long words) { return int((words + LEFT_WORDS - 1) / LEFT_WORDS); }

struct Nothing {
    INLINE void operator()(int) const {}
};

// Words of a left side of L that are multiplied with one of a right side of E: two where these are floats and bfloat16.
template <class E, class L>
constexpr int PARTS = PER_WORD<E> / PER_WORD<L>;

#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
constexpr bool MULTIPLIES_BF16 = true;
#else
constexpr bool MULTIPLIES_BF16 = false;
#endif
// What a left side is multiplied as. A tile's elements become floats once, and not for each product.
template <class E>
using Factor = std::conditional_t<MULTIPLIES_BF16, E, float>;

// Words between the rows of a left side of such.
template <class E>
constexpr int LEFT_ROW = LEFT_STRIDE * PARTS<E, Factor<E>>;

// What one of these words is multiplied with.
template <class E, class L>
INLINE Words part_of(Words right, int number) {
    if constexpr (PARTS<E, L> == 1) return right;
    return number ? right & 0xFFFF0000u : right << 16;
}

// Has the compiler load operands no sooner than here: for aarch64, GCC 12 loads many first, and is short of registers then.
INLINE void one_by_one() {
#if defined(__aarch64__)
    asm volatile("" : : : "memory");
#endif
}

#if defined(__aarch64__)
// Sums of M rows and NV vectors as instructions for products of matrices have them: in squares of two lanes and two rows.
// An odd last row is its own neighbour.
template <class Sums, int M, int NV>
struct Squares {
    static constexpr int PAIRS = (M + 1) / 2;
    uint32x4_t at[PAIRS][2 * NV];

    static constexpr int other(int pair) { return 2 * pair + 1 < M ? 2 * pair + 1 : 2 * pair; }

    INLINE explicit Squares(const Sums (&sums)[M][NV]) {
#pragma GCC unroll 6
        for (int p = 0; p < PAIRS; p++)
#pragma GCC unroll 8
            for (int v = 0; v < NV; v++) {
                const uint32x4_t first = (uint32x4_t)sums[2 * p][v], second = (uint32x4_t)sums[other(p)][v];
                at[p][2 * v] = vzip1q_u32(first, second);
                at[p][2 * v + 1] = vzip2q_u32(first, second);
            }
    }

    INLINE void store(Sums (&sums)[M][NV]) const {
#pragma GCC unroll 6
        for (int p = 0; p < PAIRS; p++)
#pragma GCC unroll 8
            for (int v = 0; v < NV; v++) {
                sums[other(p)][v] = (Sums)vuzp2q_u32(at[p][2 * v], at[p][2 * v + 1]);
                sums[2 * p][v] = (Sums)vuzp1q_u32(at[p][2 * v], at[p][2 * v + 1]);
            }
    }

    // Add the products of two words of each row, k and k + 1, with two of each lane: product(sum, lanes, rows) of four by
    // four. words(v): what the lanes of vector v have, the first word and the second.
    template <class Lanes, class Product>
    INLINE void add(const Word* left, long k, const Lanes& words, const Product& product) {
        uint64x2_t rows[PAIRS];
#pragma GCC unroll 6
        for (int p = 0; p < PAIRS; p++) rows[p] = vcombine_u64(row(left, 2 * p, k), row(left, other(p), k));
#pragma GCC unroll 8
        for (int v = 0; v < NV; v++) {
            one_by_one();
            const auto [first, second] = words(v);
            const uint32x4_t lanes[] = {
                vzip1q_u32((uint32x4_t)first, (uint32x4_t)second), vzip2q_u32((uint32x4_t)first, (uint32x4_t)second)
            };
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++)
#pragma GCC unroll 6
                for (int p = 0; p < PAIRS; p++) at[p][2 * v + half] = product(at[p][2 * v + half], lanes[half], rows[p]);
        }
    }

  private:
    INLINE static uint64x1_t row(const Word* left, int m, long k) { return (uint64x1_t)vld1_u32(left + m * LEFT_STRIDE + k); }
};
#endif

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
// Whether rows go in pairs through `multiply`.
template <class E, int M, int NV>
constexpr bool IN_PAIRS = PER_WORD<E> == 2 && M >= 4 && (M + 1) / 2 * 2 * NV <= ACCUMULATORS;
// Whether so few words, as the compiler knows, are not worth bringing the sums into squares and back.
INLINE bool is_short(int depth) { return __builtin_constant_p(depth) && depth < 16; }

// `multiply` of an even number of words with products of matrices. They add one word's products after the other's, as
// `dot` does: sums are the same.
template <int M, int NV, class Beside>
INLINE void multiply_pairs(
    Floats (&sums)[M][NV], const Word* left, const Word* const (&right)[NV], long right_step, int depth, const Beside& beside
) {
    Squares<Floats, M, NV> squares(sums);
    for (int k = 0; k < depth; k += 2) {
        beside(k), beside(k + 1);
        const auto words = [&](int v) {
            return std::pair(load(right[v] + k * right_step), load(right[v] + (k + 1) * right_step));
        };
        squares.add(left, k, words, [](uint32x4_t sum, uint32x4_t lanes, uint64x2_t rows) {
            return (uint32x4_t)vbfmmlaq_f32((float32x4_t)sum, (bfloat16x8_t)lanes, (bfloat16x8_t)rows);
        });
    }
    squares.store(sums);
}
#endif

// sums[m][v] += left[m][k] * right[v][k] over k < depth. right_step: words from one vector of the right side to the next;
// beside: called with each k, to fetch what is needed later. The left side's elements are L, and its rows as much longer.
template <class E, class L = E, int M, int NV, class Beside = Nothing>
INLINE void multiply(
    Floats (&sums)[M][NV], const Word* left, const Word* const (&right)[NV], long right_step, int depth,
    const Beside& beside = {}
) {
    int k = 0;
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    if constexpr (IN_PAIRS<E, M, NV>)
        if (!is_short(depth)) multiply_pairs(sums, left, right, right_step, k = depth / 2 * 2, beside);
#endif
    for (; k < depth; k++) {
        beside(k);
        Words vectors[NV];
#pragma GCC unroll 8
        for (int v = 0; v < NV; v++) vectors[v] = load(right[v] + k * right_step);
#pragma GCC unroll 2
        for (int part = 0; part < PARTS<E, L>; part++) {
            Words parts[NV];
#pragma GCC unroll 8
            for (int v = 0; v < NV; v++) parts[v] = part_of<E, L>(vectors[v], part);
#pragma GCC unroll 12
            for (int m = 0; m < M; m++) {
                one_by_one();
                const Word word = left[(m * LEFT_STRIDE + k) * PARTS<E, L> + part];
#pragma GCC unroll 8
                for (int v = 0; v < NV; v++) sums[m][v] = dot<L>(sums[m][v], word, parts[v]);
            }
        }
    }
}

// Copy one row of `width` elements into a tile's left side, [blocks_of(words)][rows][LEFT_STRIDE]; `left` is its place in
// the first block.
template <class E>
INLINE void pack_left(Word* left, int rows, const E* from, long width) {
    constexpr long most = LEFT_WORDS * PER_WORD<E>;
    for (; width > 0; left += rows * LEFT_STRIDE, from += most, width -= most) {
        const long count = min(width, most);
        if (count % PER_WORD<E>) left[count / PER_WORD<E>] = 0;  // what shares a word with the last element
        memcpy(left, from, count * sizeof(E));
    }
}

// The same of what is multiplied: LEFT_ROW words of each row.
template <class E>
INLINE void pack_factors(Word* left, int rows, const E* from, long width) {
    if constexpr (LEFT_ROW<E> == LEFT_STRIDE) return pack_left(left, rows, from, width);
    constexpr long most = LEFT_WORDS * PER_WORD<E>;
    for (; width > 0; left += rows * LEFT_ROW<E>, from += most, width -= most) {
        float* const to = reinterpret_cast<float*>(left);
        for (long i = 0; i < min(width, most); i++) to[i] = to_float(from[i]);
    }
}

// `count` things in as few parts of at most `most` as possible, all of nearly the same size.
struct Parts {
    int number, size, longer;
    Parts(long count, long most) : number(int((count + most - 1) / most)), size(0), longer(0) {
        if (number) size = int(count / number), longer = int(count % number);
    }
    int first(int part) const { return part * size + (part < longer ? part : longer); }
    int length(int part) const { return size + (part < longer); }
    int longest() const { return length(0); }
};
