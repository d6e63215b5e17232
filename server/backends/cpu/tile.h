// A tile of a matrix product, its sums held in registers: the one inner loop of linear layers and of attention.
//
// The left side is M rows of words, LEFT_STRIDE apart, so that the rows are at fixed distances from each other and do not
// fall into the same sets of a cache. The right side is vectors of words. Whatever M is, every sum is built in the same
// order: a row's result does not depend on the rows that are computed beside it.
#pragma once

#include "vector.h"

// Words of a row of the left side that lie together: 512 bytes of each, so that they stay in the L1 cache.
constexpr int LEFT_WORDS = 128;
constexpr int LEFT_STRIDE = LEFT_WORDS + 16;

// The most rows of a tile that is NV vectors wide.
template <int NV>
constexpr int MAX_ROWS = ACCUMULATORS / NV;

INLINE int blocks_of(long words) { return int((words + LEFT_WORDS - 1) / LEFT_WORDS); }

struct Nothing {
    INLINE void operator()(int) const {}
};

// Words of a left side of L that are multiplied with one of a right side of E: two where these are floats and bfloat16.
template <class E, class L>
constexpr int PARTS = PER_WORD<E> / PER_WORD<L>;

// What one of these words is multiplied with.
template <class E, class L>
INLINE Words part_of(Words right, int number) {
    if constexpr (PARTS<E, L> == 1) return right;
    return number ? right & 0xFFFF0000u : right << 16;
}

// sums[m][v] += left[m][k] * right[v][k] over k < depth. right_step: words from one vector of the right side to the next;
// beside: called with each k, to fetch what is needed later. The left side's elements are L, and its rows as much longer.
template <class E, class L = E, int M, int NV, class Beside = Nothing>
INLINE void multiply(
    Floats (&sums)[M][NV], const Word* left, const Word* const (&right)[NV], long right_step, int depth,
    const Beside& beside = {}
) {
    for (int k = 0; k < depth; k++) {
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
