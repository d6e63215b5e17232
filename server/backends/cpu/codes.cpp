// Linear layers whose weights are codes of 4 or 8 bits: y = activation(x Wᵀ + bias) + residual.
//
// The inputs of each token are rounded to 8 bits as well, symmetrically, with one scale for all or for each block of them;
// products of codes are summed exactly, and each block's sum is scaled and added in float32, in the order of the blocks:
//
//     y[t, f] = sum over b of scale[f, b] * input scale[t, b] * (sum of codes[f, d] * input codes[t, d]
//                                                                - zero[f, b] * sum of input codes[t, d])
//
// So a token's result is bit for bit the same alone and in a batch, on vector units and on matrix units. A panel (panel.h)
// has its codes first, [word of the slots][32 outputs] words of four codes; of 4 bits two words share one, the former in
// the lower bits. Then come scales, [block][32], and zeros, [block][32], where they differ. Slots are inputs in the order
// of the weight's groups, filled up to whole blocks; what fills them up has the input code 0.
//
// Jacob et al. 2017, arXiv 1712.05877; for blocks, Dettmers et al. 2022, arXiv 2110.02861.

#include <optional>
#include <type_traits>
#include <utility>

#include "adapters.h"
#include "amx.h"
#include "codes.h"
#include "panel.h"
#include "threads.h"
#include "tile.h"

namespace {

// Words of a panel that stay in the L1 cache, and in L2, while the tiles of a chunk pass by.
constexpr long SHORT_STRETCH = LEFT_WORDS, LONG_STRETCH = 4 * LEFT_WORDS;
// How far ahead of their use weights are fetched, in bytes: into the L2 cache, and from there into L1.
constexpr long FAR = 64 * STEP, NEAR = 8 * STEP;
// Tokens whose sums with two vectors of a panel are in registers at once, beside the codes that they are made from.
constexpr int ROWS = MAX_ROWS<2> * 2 / 3;

struct CodeWeight : Panels {
    const uint8_t* panels;
    const int32_t* order;  // the input of each slot, -1 where there is none; null: slot i is input i
    const float* fixed;    // the scale of all inputs; null: each token's own decide
    long inputs, slots;
    long bits;         // of a code: 4 or 8
    long is_float4;    // whether codes are those of float4, whose 0 stands for RAISED
    long block;        // slots that share scales; where it is not all of them, 32, 64 or 128
    long is_by_token;  // whether all blocks of a token share its scale
    long scale_bytes;  // 1: a float32's exponent alone, 2: float16, 4: float32
    long zero;         // the code of 0; -1: each row has one for each block

    long blocks() const { return slots / block; }
    long words() const { return slots / 4; }
    // Words of inputs that are multiplied with a word of 8 bits.
    long spread() const { return bits == 8 ? sizeof(Factors<8>::Input) : sizeof(Factors<4>::Input); }
    long left_words() const { return words() * spread(); }
    long code_bytes() const { return words() * STEP * bits / 8; }
    long scales_bytes() const { return blocks() * PANEL * scale_bytes; }
    long panel_bytes() const {
        return (code_bytes() + scales_bytes() + (zero < 0 ? blocks() * PANEL : 0) + 63) / 64 * 64;
    }
    const uint8_t* panel(long index) const { return panels + index * panel_bytes(); }
    uint8_t* to(long index) const { return const_cast<uint8_t*>(panel(index)); }  // where it is filled
    // The input of a slot; -1: there is none.
    long input_of(long slot) const { return order ? order[slot] : slot < inputs ? slot : -1; }
};

template <class E, class Out>
struct Layer {
    const CodeWeight& weight;
    const E* x;
    long tokens;
    const float* scales;  // of the inputs of each token; null: they are yet to be found
    const E* bias;
    const E* residual;
    Out* out;
    int activation;
    Adapted adapted;

    long left_words() const { return long(blocks_of(weight.left_words())) * LEFT_STRIDE; }
    Parts chunks() const { return chunks_of(tokens, left_words()); }
};

// A chunk's tokens in codes: words as tile.h has them, and of each block of each token, [block][tokens], the scale and the
// sum of codes; for kinds whose sums start below 0, the bits of the word that these start from.
struct Left {
    Word* words;
    float *scales, *sums;
    long tokens;
};

// The scales and zeros of a panel.
struct Scales {
    const CodeWeight& weight;
    const uint8_t *scales, *zeros;
    Scales(const CodeWeight& weight, const uint8_t* panel)
        : weight(weight), scales(panel + weight.code_bytes()), zeros(scales + weight.scales_bytes()) {}

    INLINE Floats scale(long block, int vector) const {
        const long at = block * PANEL + vector * LANES;
        if (weight.scale_bytes == 1) return (Floats)(load_bytes(scales + at) << 23);
        if (weight.scale_bytes == 2) return load_halves(reinterpret_cast<const uint16_t*>(scales) + at);
        return load(reinterpret_cast<const float*>(scales) + at);
    }
    INLINE Ints zero(long block, int vector) const {
        if (weight.zero >= 0) return all(int32_t(weight.zero));
        return load_bytes(zeros + block * PANEL + vector * LANES);
    }
};

// A block's sum of products less the zero's share. Of at most 128 slots all numbers are integers that floats have room for,
// and vectors of floats are faster.
template <bool IS_LONG>
INLINE Floats exact(Ints products, Ints zero, float codes) {
    if constexpr (IS_LONG) return __builtin_convertvector(products - zero * int32_t(codes), Floats);
    return __builtin_convertvector(products, Floats) - __builtin_convertvector(zero, Floats) * codes;
}

// One token's inputs as floats by their slots, zeros where a slot has none.
template <class E>
class Slots {
  public:
    // room: for a float of each slot, and one vector more.
    Slots(const CodeWeight& weight, const E* x, float* room) : x_(x), inputs_(weight.inputs), ordered_(nullptr) {
        if (!weight.order) return;
        for (long slot = 0; slot < weight.slots; slot++)
            room[slot] = weight.order[slot] < 0 ? 0.0f : to_float(x[weight.order[slot]]);
        ordered_ = room;
    }
    // From `slot` on; what is behind the first `count` is not to be used.
    INLINE Floats at(long slot, long count) const {
        if (ordered_) return load_part(ordered_ + slot, count);
        return load_part(x_ + slot, min(count, inputs_ - slot));
    }

  private:
    const E* x_;
    long inputs_;
    const float* ordered_;
};

// A scale that is known before slots `first` … `stop` - 1 are seen; NaN where one of them is no number.
template <class E>
INLINE float scale_for(float known, const Slots<E>& slots, long first, long stop) {
    Floats poison = {};
    for (; first < stop; first += LANES) {
        const Floats x = slots.at(first, stop - first);
        poison += x - x;
    }
    return known + sum(poison);
}

// The scale that the largest magnitude in these slots decides, likewise.
template <class E>
INLINE float scale_of(const Slots<E>& slots, long first, long stop) {
    constexpr float TINY = 1e-12f, MOST = 127.0f;
    Floats most = {}, poison = {};
    for (; first < stop; first += LANES) {
        const Floats x = slots.at(first, stop - first);
        most = max(most, max(x, -x)), poison += x - x;
    }
    return (max(all(largest(most)), all(TINY))[0] + sum(poison)) / MOST;
}

// Codes of slots `first` … `stop` - 1, a multiple of 4 of them, and their sums by lanes.
template <class E, class Input>
INLINE Ints round_slots(const Slots<E>& slots, long first, long stop, float scale, Input* codes) {
    const Floats inverse = all(1.0f / scale);
    Ints total = {};
    for (; first < stop; first += LANES, codes += LANES) {
        const Ints rounded = nearest_codes(slots.at(first, stop - first) * inverse);
        total += rounded;
        if (stop - first >= LANES) {
            store_codes(codes, rounded);
        } else {
            Input rest[LANES];
            store_codes(rest, rounded);
            memcpy(codes, rest, size_t(stop - first) * sizeof(Input));
        }
    }
    return total;
}

INLINE float sum_of(Ints lanes) {
    int32_t total = 0;
    for (int lane = 0; lane < LANES; lane++) total += lanes[lane];
    return float(total);
}

// The word from which a block's sums in 16 bits start: less RAISED times the codes that each half of a word is made of.
INLINE float start_of(Ints lanes) {
    int32_t halves[2] = {};
    for (int lane = 0; lane < LANES; lane++) halves[lane % 4 / 2] += lanes[lane];
    const Word word = Word(-RAISED * halves[1]) << 16 | (Word(-RAISED * halves[0]) & 0xFFFFu);
    float bits;
    memcpy(&bits, &word, sizeof bits);
    return bits;
}

// One token of a tile of `rows`: its place in the first block of words is `to`, its number in the chunk is `token`.
template <class Input, class E, class Out>
void pack_token(const Layer<E, Out>& layer, long number, long token, Word* to, int rows, const Left& left, float* room) {
    constexpr long TOGETHER = 4 * LEFT_WORDS / sizeof(Input);  // slots whose codes lie together
    const CodeWeight& weight = layer.weight;
    const Slots<E> slots(weight, layer.x + number * weight.inputs, room);
    const float* const known = layer.scales ? layer.scales + number : weight.fixed;
    float scale = 0.0f;
    if (known)
        scale = scale_for(*known, slots, 0, weight.slots);
    else if (weight.is_by_token)
        scale = scale_of(slots, 0, weight.slots);
    for (long block = 0, slot = 0; block < weight.blocks(); block++) {
        const long end = slot + weight.block;
        if (!known && !weight.is_by_token) scale = scale_of(slots, slot, end);
        Ints codes = {};
        for (long stop; slot < end; slot = stop) {
            stop = min(end, slot / TOGETHER * TOGETHER + TOGETHER);
            Input* const at = reinterpret_cast<Input*>(to + slot / TOGETHER * rows * LEFT_STRIDE) + slot % TOGETHER;
            codes += round_slots(slots, slot, stop, scale, at);
        }
        left.scales[block * left.tokens + token] = scale;
        const bool starts_below = Factors<FLOAT4>::STARTS_BELOW && weight.is_float4;
        left.sums[block * left.tokens + token] = starts_below ? start_of(codes) : sum_of(codes);
    }
}

template <class E, class Out>
void pack_tokens(const Layer<E, Out>& layer, const Parts& tiles, long first, const Left& left) {
    static thread_local Workspace slots_memory;
    float* const room = slots_memory.take<float>(layer.weight.slots + LANES);
    const int blocks = blocks_of(layer.weight.left_words());
    const auto pack = layer.weight.bits == 8 ? pack_token<Factors<8>::Input, E, Out> : pack_token<Factors<4>::Input, E, Out>;
    for (int tile = 0; tile < tiles.number; tile++) {
        const int rows = tiles.length(tile);
        Word* to = left.words + long(tiles.first(tile)) * blocks * LEFT_STRIDE;
        for (int row = 0; row < rows; row++) {
            const long token = tiles.first(tile) + row;
            pack(layer, first + token, token, to + row * LEFT_STRIDE, rows, left, room);
        }
    }
}

// `count` words of inputs, from word `start` on, that lie together, and what of a panel they are multiplied with.
struct Stretch {
    const CodeWeight& weight;
    const Scales scales;
    const uint8_t* right;
    long start, count;
};

// Fetches what will soon be needed of NV vectors of a panel.
template <int NV>
INLINE void fetch(const uint8_t* right) {
    for (int line = 0; line < 4 * NV * LANES; line += 64) {
        __builtin_prefetch(right + NEAR + line, 0, 3);
        __builtin_prefetch(right + FAR + line, 0, 2);
    }
}

#if defined(__ARM_FEATURE_MATMUL_INT8)
// `add_words` of an even number of words with products of matrices.
template <int KIND, int M, int NV>
INLINE void add_pairs(Ints (&totals)[M][NV], const Word* left, const uint8_t* right, long count) {
    Squares<Ints, M, NV> squares(totals);
    for (long k = 0; k < count; k += 2, right += 2 * STEP / Factors<KIND>::PARTS) {
        fetch<NV>(right);
        const auto words = [&](int v) {
            const Word* const at = reinterpret_cast<const Word*>(right) + v * LANES;
            return std::pair(Factors<KIND>::part(load(at), 0), KIND == 8 ? load(at + PANEL) : Factors<KIND>::part(load(at), 1));
        };
        squares.add(left, k, words, [](uint32x4_t sum, uint32x4_t lanes, uint64x2_t rows) {
            return (uint32x4_t)vusmmlaq_s32((int32x4_t)sum, (uint8x16_t)lanes, (int8x16_t)rows);
        });
    }
    squares.store(totals);
}
#endif

// Add the products of `count` words of M tokens with those of NV vectors of a panel.
template <int KIND, int M, int NV, class Sums>
INLINE void add_words(Sums (&sums)[M][NV], const Word* left, const uint8_t* right, long count) {
    constexpr int PARTS = Factors<KIND>::PARTS;
#pragma GCC unroll 4
    for (long k = 0; k < count; k += PARTS, right += STEP) {
        fetch<NV>(right);
        Words words[NV];
#pragma GCC unroll 8
        for (int v = 0; v < NV; v++) words[v] = load(reinterpret_cast<const Word*>(right) + v * LANES);
#pragma GCC unroll 2
        for (int part = 0; part < PARTS; part++) {
            Words factors[NV];
#pragma GCC unroll 8
            for (int v = 0; v < NV; v++) factors[v] = Factors<KIND>::part(words[v], part);
#pragma GCC unroll 12
            for (int m = 0; m < M; m++)
#pragma GCC unroll 8
                for (int v = 0; v < NV; v++) {
                    sums[m][v] = Factors<KIND>::add(sums[m][v], factors[v], left[m * LEFT_STRIDE + k + part]);
                    renew(sums[m][v]);
                }
        }
    }
}

// The same, in 32 bits whatever the sums of few words have.
template <int KIND, int M, int NV>
INLINE void add_products(Ints (&totals)[M][NV], const Word* left, const uint8_t* right, long count) {
    using Sums = typename Factors<KIND>::Sums;
    if constexpr (std::is_same_v<Sums, Ints>) {
        long paired = 0;
#if defined(__ARM_FEATURE_MATMUL_INT8)
        if constexpr (M >= 4) add_pairs<KIND>(totals, left, right, paired = count / 2 * 2);
#endif
        add_words<KIND>(totals, left + paired, right + paired / Factors<KIND>::PARTS * STEP, count - paired);
    } else {
        constexpr int WORDS = Factors<KIND>::WORDS_OF_A_SUM;
        for (long k = 0; k < count; k += WORDS) {
            Sums sums[M][NV] = {};
            add_words<KIND>(sums, left + k, right + k / Factors<KIND>::PARTS * STEP, WORDS);
#pragma GCC unroll 12
            for (int m = 0; m < M; m++)
#pragma GCC unroll 8
                for (int v = 0; v < NV; v++) totals[m][v] += Factors<KIND>::total(sums[m][v]);
        }
    }
}

// Add what a block contributes to the sums of M tokens with NV vectors of a panel, of which `vector` is the first. Their
// input codes have the sums `codes` and the scales `inputs`.
// codes: null where the zero has no share in the sums.
template <bool IS_LONG, int M, int NV>
INLINE void add_scaled(
    const Ints (&totals)[M][NV], const Scales& scales, long block, int vector, const float* codes, const float* inputs,
    float* sums
) {
#pragma GCC unroll 8
    for (int v = 0; v < NV; v++) {
        const Floats scale = scales.scale(block, vector + v);
        const Ints zero = scales.zero(block, vector + v);
#pragma GCC unroll 12
        for (int m = 0; m < M; m++) {
            float* const at = sums + m * PANEL + v * LANES;
            const Floats whole =
                codes ? exact<IS_LONG>(totals[m][v], zero, codes[m]) : __builtin_convertvector(totals[m][v], Floats);
            const Floats part = whole * inputs[m];
            store(at, fused(part, scale, block ? load(at) : Floats{}));
        }
    }
}

// The same of a block of eight words whose sums start from words of their own.
template <int KIND, int M, int NV>
INLINE void add_small_block(
    const Scales& scales, const Word* left, const uint8_t* right, long block, int vector, const float* starts,
    const float* inputs, float* sums
) {
    typename Factors<KIND>::Sums pairs[M][NV];
    Ints totals[M][NV];
#pragma GCC unroll 12
    for (int m = 0; m < M; m++) {
        Word start;
        memcpy(&start, starts + m, sizeof start);
#pragma GCC unroll 8
        for (int v = 0; v < NV; v++) pairs[m][v] = (typename Factors<KIND>::Sums)all(start);
    }
    add_words<KIND>(pairs, left, right, Factors<KIND>::WORDS_OF_A_SUM);
#pragma GCC unroll 12
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int v = 0; v < NV; v++) totals[m][v] = Factors<KIND>::total(pairs[m][v]);
    add_scaled<false>(totals, scales, block, vector, nullptr, inputs, sums);
}

// Go on with the sums [M][PANEL] of a tile of M tokens, of which `first` is the first in the chunk, over a stretch of a
// panel. Of a weight with one block alone they are integers until its end.
template <int KIND, int M>
void multiply_tile(const Stretch& stretch, const Left& left, long first, float* sums) {
    constexpr int NV = TILE_VECTORS<M, ROWS>;
    const CodeWeight& weight = stretch.weight;
    const long start = stretch.start, count = stretch.count;
    const Word* const words = left.words + (first * blocks_of(weight.left_words()) + start / LEFT_WORDS * M) * LEFT_STRIDE;
    constexpr bool STARTS_BELOW = Factors<KIND>::STARTS_BELOW;
    const bool is_long = weight.blocks() == 1 && !STARTS_BELOW;
    const long block_words = is_long ? count : weight.block / 4 * weight.spread();
    for (long k = 0; k < count; k += block_words) {
        const long block = (start + k) / block_words, place = block * left.tokens + first;
        const uint8_t* const right = stretch.right + k / Factors<KIND>::PARTS * STEP;
        for (int vector = 0; vector < VECTORS; vector += NV) {
            float* const at = sums + vector * LANES;
            if constexpr (STARTS_BELOW) {
                add_small_block<KIND, M, NV>(
                    stretch.scales, words + k, right + vector * LANES * 4, block, vector, left.sums + place,
                    left.scales + place, at
                );
                continue;
            }
            Ints totals[M][NV] = {};
            if (is_long && start)
#pragma GCC unroll 12
                for (int m = 0; m < M; m++)
#pragma GCC unroll 8
                    for (int v = 0; v < NV; v++) totals[m][v] = (Ints)load(at + m * PANEL + v * LANES);
            add_products<KIND>(totals, words + k, right + vector * LANES * 4, block_words);
            if (!is_long) {
                add_scaled<false>(
                    totals, stretch.scales, block, vector, left.sums + place, left.scales + place, at
                );
            } else if (start + count == weight.left_words()) {
                add_scaled<true>(totals, stretch.scales, 0, vector, left.sums + first, left.scales + first, at);
            } else {
#pragma GCC unroll 12
                for (int m = 0; m < M; m++)
#pragma GCC unroll 8
                    for (int v = 0; v < NV; v++) store(at + m * PANEL + v * LANES, (Floats)totals[m][v]);
            }
        }
    }
}

// multiply_tile<KIND, rows>, for 1 … ROWS rows.
template <int KIND, int... M>
INLINE auto multiply_tile_of(int rows, std::integer_sequence<int, M...>) {
    static constexpr decltype(&multiply_tile<KIND, 1>) functions[] = {multiply_tile<KIND, M + 1>...};
    return functions[rows - 1];
}

// The sums [tokens][PANEL] of a chunk's tiles with a panel, on vector units.
template <int KIND>
void multiply_on_vectors(const CodeWeight& weight, const uint8_t* panel, const Left& left, const Parts& tiles, float* sums) {
    for (long start = 0; start < weight.left_words(); start += LEFT_WORDS) {
        const uint8_t* const right = panel + start / Factors<KIND>::PARTS * STEP;
        const Stretch stretch{weight, Scales(weight, panel), right, start, min(weight.left_words() - start, LEFT_WORDS)};
        for (int tile = 0; tile < tiles.number; tile++) {
            const int first = tiles.first(tile);
            const auto multiply = multiply_tile_of<KIND>(tiles.length(tile), std::make_integer_sequence<int, ROWS>());
            multiply(stretch, left, first, sums + first * PANEL);
        }
    }
}

#if defined(__AMX_INT8__) && defined(__AMX_BF16__)
constexpr bool HAS_TILES = true;

// Words of codes of 8 bits from `count` words of a kind that has 4.
template <int KIND>
void expand(const uint8_t* codes, long count, Word* out) {
    for (long k = 0; k < count; k += 2, codes += STEP, out += 2 * PANEL) {
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) {
            const Words words = load(reinterpret_cast<const Word*>(codes) + v * LANES);
            store(out + v * LANES, Factors<KIND>::part(words, 0));
            store(out + PANEL + v * LANES, Factors<KIND>::part(words, 1));
        }
    }
}

// What a tile fetches for later while it is multiplied: its share of as many words of the panel as it goes through.
struct Ahead {
    const uint8_t* codes;
    long word_bytes;
    INLINE void fetch(long first, long words) const {
        for (long line = first * word_bytes; line < (first + words) * word_bytes; line += 64)
            __builtin_prefetch(codes + line, 0, 2);
    }
};

// Add the products of `words` words of a tile of tokens, `at(k)` being where they lie, to the sums in the registers.
template <class At>
INLINE void multiply_words(
    amx::Registers& registers, const At& at, const Word* right, long words, int rows, const Ahead& ahead, long first
) {
    registers.shape(rows, int(min(words, long(amx::DEPTH))));
    for (long k = 0; k < words; k += amx::DEPTH) {
        ahead.fetch(first + k, min(words - k, amx::DEPTH));
        amx::multiply_codes(at(k), right + k * PANEL, PANEL, rows > 16);
    }
}

// Add what a block contributes to the sums of a tile.
template <bool IS_LONG>
void add_scaled(
    const Scales& scales, const Left& left, long block, long first, int rows, const int32_t* products, float* sums
) {
    const float *const codes = left.sums + block * left.tokens + first;
    const float* const inputs = left.scales + block * left.tokens + first;
    for (int v = 0; v < VECTORS; v++) {
        const Floats scale = scales.scale(block, v);
        const Ints zero = scales.zero(block, v);
        for (int row = 0; row < rows; row++) {
            const Ints total = (Ints)load(reinterpret_cast<const Word*>(products) + row * PANEL + v * LANES);
            float* const at = sums + row * PANEL + v * LANES;
            const Floats part = exact<IS_LONG>(total, zero, codes[row]) * inputs[row];
            store(at, fused(part, scale, block ? load(at) : Floats{}));
        }
    }
}

// Blocks `block` … `stop` - 1 of a tile, whose codes of 8 bits begin at `right`. A block's products are scaled while the
// next one's are computed.
void multiply_short_blocks(
    amx::Registers& registers, const CodeWeight& weight, const Scales& scales, const Left& left, long first, int rows,
    const Word* right, long block, long stop, const Ahead& ahead, float* sums
) {
    alignas(64) int32_t products[2][amx::ROWS * PANEL];
    const long block_words = weight.block / 4;
    const Word* const words = left.words + first * blocks_of(weight.words()) * LEFT_STRIDE;
    for (const long begin = block; block < stop; block++, right += block_words * PANEL) {
        amx::load_sums(nullptr, PANEL, rows > 16, true);
        const auto at = [&](long k) {
            k += block * block_words;
            return words + k / LEFT_WORDS * rows * LEFT_STRIDE + k % LEFT_WORDS;
        };
        multiply_words(registers, at, right, block_words, rows, ahead, (block - begin) * block_words);
        if (block > begin) add_scaled<false>(scales, left, block - 1, first, rows, products[(block - 1) % 2], sums);
        amx::store_sums(reinterpret_cast<float*>(products[block % 2]), PANEL, rows > 16);
    }
    add_scaled<false>(scales, left, stop - 1, first, rows, products[(stop - 1) % 2], sums);
}

// Go on with the exact sums of a tile over `count` words of its one block, from word `start` on.
void multiply_long_block(
    amx::Registers& registers, const CodeWeight& weight, const Left& left, long first, int rows, const Word* right,
    long start, long count, const Ahead& ahead, int32_t* products
) {
    const Word* const words = left.words + first * blocks_of(weight.words()) * LEFT_STRIDE;
    float* const sums = reinterpret_cast<float*>(products);
    const long whole = count / amx::DEPTH * amx::DEPTH;
    const auto at_from = [&](long begin) {
        return [=](long k) {
            k += begin;
            return words + k / LEFT_WORDS * rows * LEFT_STRIDE + k % LEFT_WORDS;
        };
    };
    bool is_first = start == 0;
    if (whole) {
        registers.shape(rows, amx::DEPTH);
        amx::load_sums(sums, PANEL, rows > 16, is_first);
        multiply_words(registers, at_from(start), right, whole, rows, ahead, 0);
        amx::store_sums(sums, PANEL, rows > 16);
        is_first = false;
    }
    if (whole == count) return;
    registers.shape(rows, int(count - whole));
    amx::load_sums(sums, PANEL, rows > 16, is_first);
    multiply_words(registers, at_from(start + whole), right + whole * PANEL, count - whole, rows, ahead, whole);
    amx::store_sums(sums, PANEL, rows > 16);
}

// The sums [tokens][PANEL] of a chunk's tiles with a panel, on matrix units.
void multiply_chunk(
    amx::Registers& registers, const CodeWeight& weight, const uint8_t* panel, const Left& left, const Parts& tiles,
    float* sums
) {
    alignas(64) Word expanded[SHORT_STRETCH * PANEL];
    const Scales scales(weight, panel);
    const bool is_long = weight.blocks() == 1 && weight.bits == 8;
    const long stretch = is_long ? LONG_STRETCH : SHORT_STRETCH, block_words = weight.block / 4;
    for (long start = 0; start < weight.words(); start += stretch) {
        const long count = min(weight.words() - start, stretch);
        const uint8_t* const codes = panel + start * STEP * weight.bits / 8;
        const Word* right = reinterpret_cast<const Word*>(codes);
        if (weight.bits == 4) (weight.is_float4 ? expand<FLOAT4> : expand<4>)(codes, count, expanded), right = expanded;
        for (int tile = 0; tile < tiles.number; tile++) {
            const long first = tiles.first(tile);
            const int rows = tiles.length(tile);
            float* const at = sums + first * PANEL;
            const long word_bytes = STEP * weight.bits / 8, share = word_bytes / tiles.number;
            const Ahead ahead{codes + (word_bytes + tile * share) * count, share};
            if (!is_long) {
                const long block = start / block_words, stop = (start + count) / block_words;
                registers.shape(rows, int(min(block_words, long(amx::DEPTH))));
                multiply_short_blocks(registers, weight, scales, left, first, rows, right, block, stop, ahead, at);
                continue;
            }
            int32_t* const products = reinterpret_cast<int32_t*>(at);
            multiply_long_block(registers, weight, left, first, rows, right, start, count, ahead, products);
            if (start + count == weight.words()) add_scaled<true>(scales, left, 0, first, rows, products, at);
        }
    }
}
#else
constexpr bool HAS_TILES = false;
#endif

// The outputs of a chunk's packed tokens, from token `first` on, that belong to a panel.
template <class E, class Out>
void apply_panel(
    const Layer<E, Out>& layer, const Parts& tiles, const Left& left, long first, long panel, float* sums,
    [[maybe_unused]] amx::Registers* registers
) {
    const CodeWeight& weight = layer.weight;
    const uint8_t* const at = weight.panel(panel);
#if defined(__AMX_INT8__) && defined(__AMX_BF16__)
    if (registers) multiply_chunk(*registers, weight, at, left, tiles, sums);
#endif
    const auto on_vectors = weight.is_float4 ? multiply_on_vectors<FLOAT4> : multiply_on_vectors<4>;
    if (!registers) (weight.bits == 8 ? multiply_on_vectors<8> : on_vectors)(weight, at, left, tiles, sums);
    for (int tile = 0; tile < tiles.number; tile++) {
        const int row = tiles.first(tile), rows = tiles.length(tile);
        if (layer.adapted.changes) adapt_tile<E>(layer.adapted, panel, first + row, rows, sums + row * PANEL);
        FINISH<Layer<E, Out>>[layer.activation](layer, panel, first + row, rows, sums + row * PANEL);
    }
}

// Units of work are (chunk of tokens, panel), chunks outermost.
template <class E, class Out>
void work(const Layer<E, Out>& layer, Queue& queue) {
    static thread_local Workspace left_memory, scales_memory, sums_memory;
    const Parts chunks = layer.chunks();
    const long panels = layer.weight.num_panels(), longest = chunks.longest(), blocks = layer.weight.blocks();
    float* const scales = scales_memory.take<float>(2 * longest * blocks);
    Left left{left_memory.take<Word>(longest * layer.left_words()), scales, scales + longest * blocks, longest};
    float* const sums = sums_memory.take<float>(longest * PANEL);
    const bool uses_amx = HAS_TILES && amx::USES_AMX;
    std::optional<amx::Registers> state;
    if (uses_amx) state.emplace();
    int packed = -1;
    for (long unit, stop; queue.take(unit, stop);) {
        for (; unit < stop; unit++) {
            const int chunk = int(unit / panels), tokens = chunks.length(chunk);
            amx::Registers* const registers = uses_amx && tokens > ROWS ? &*state : nullptr;
            const Parts tiles(tokens, registers ? amx::ROWS : ROWS);
            if (packed != chunk) pack_tokens(layer, tiles, chunks.first(chunk), left);
            packed = chunk;
            apply_panel(layer, tiles, left, chunks.first(chunk), unit % panels, sums, registers);
        }
    }
}

// x: [T, D]; scales: [T] of the inputs, or null; bias: [rows of the weight] or null; residual: [T, F] or null; out: [T, F].
// changes: of each row in which an adapter is, or null; rows: [T] of the tokens, and exact: [T, D] what is shrunk of them.
template <class E, class Out>
void linear(
    const CodeWeight* weight, const E* x, long tokens, const float* scales, const E* bias, const E* residual, Out* out,
    int activation, const Change* changes, const int64_t* rows, const E* exact, int threads
) {
    const Adapted adapted = shrink(Table{changes, rows}, exact, tokens, weight->inputs, threads);
    const Layer<E, Out> layer{*weight, x, tokens, scales, bias, residual, out, activation, adapted};
    on_threads(threads, weight->num_panels() * layer.chunks().number, 2, [&](Queue& queue) { work(layer, queue); });
}

// x: [T, D] sorted by expert, of which expert e owns the tokens ends[e - 1] … ends[e] - 1; biases: [experts, rows of the
// weight] or null; out: [T, F]. changes: [experts][num_rows], as of `linear`, or null; rows: [T].
template <class E>
void grouped(
    const CodeWeight* const* experts, long count, const int32_t* ends, const E* x, const E* biases, E* out, int activation,
    const Change* changes, long num_rows, const int64_t* rows, int threads
) {
    const Adapted adapted = shrink(ExpertTable{changes, num_rows, rows, ends}, x, ends[count - 1], experts[0]->inputs, threads);
    const auto layer_of = [=](long expert) {
        const CodeWeight& weight = *experts[expert];
        const long first = expert ? ends[expert - 1] : 0;
        const E* const bias = biases ? biases + expert * weight.outputs * (1 + weight.is_gated) : nullptr;
        return Layer<E, E>{
            weight, x + first * weight.inputs, ends[expert] - first, nullptr, bias, nullptr, out + first * weight.outputs, activation,
            adapted.from(first),
        };
    };
    const auto units = [=](long expert) {
        const Layer<E, E> layer = layer_of(expert);
        return layer.tokens ? layer.weight.num_panels() * layer.chunks().number : 0;
    };
    on_parts(threads, count, units, [=](long expert, Queue& queue) { work(layer_of(expert), queue); });
}

// Run body(first, stop) on ranges of panels, of which `together` neighbours are never torn apart.
template <class Body>
void for_panels(const CodeWeight& weight, long together, int threads, const Body& body) {
    const long units = (weight.num_panels() + together - 1) / together;
    on_threads(threads, units, 1, [&](Queue& queue) {
        for (long unit, stop; queue.take(unit, stop);)
            body(unit * together, min(stop * together, weight.num_panels()));
    });
}

// Fill the panels, which are zeros, with codes [rows, slots].
void fill_codes(const CodeWeight* weight, const uint8_t* codes, int threads) {
    const long words = weight->words();
    for_panels(*weight, 1, threads, [=](long panel, long stop) {
        for (; panel < stop; panel++) {
            for (int lane = 0; lane < PANEL; lane++) {
                const long row = weight->row_of(panel, lane);
                if (row < 0) continue;
                const uint8_t* const of_row = codes + row * weight->slots;
                uint8_t* const to = weight->to(panel) + lane * 4;
                for (long word = 0; weight->bits == 8 && word < words; word++)
                    memcpy(to + word * STEP, of_row + word * 4, 4);
                for (long word = 0; weight->bits != 8 && word < words; word += 2) {
                    Word low, high = 0;
                    memcpy(&low, of_row + word * 4, 4);
                    if (word + 1 < words) memcpy(&high, of_row + word * 4 + 4, 4);
                    low |= high << 4;
                    memcpy(to + word / 2 * STEP, &low, 4);
                }
            }
        }
    });
}

// Codes of some rows as a checkpoint packs them (`PackedCodes` of packing.py): in words of rows, which belong to inputs.
struct PackedCodes {
    const Word* words;
    const int32_t* places;  // in its word, of each of the neighbours that share one
    long row_words;
    long bits;           // of a code: 2, 4 or 8
    long along_outputs;  // whether the neighbours are outputs
    long first, rows;    // which rows of the weight these are

    int word_bits() const { return 5 - __builtin_ctzl(bits); }  // the binary logarithm of how many codes a word has
};

// Where the lanes of a panel have their codes in a row of words.
struct PackedLanes {
    Ints at[VECTORS] = {};  // behind the vector's `base`
    Words shift[VECTORS] = {}, mask[VECTORS] = {};  // a lane without a row that is packed has the mask 0
    long base[VECTORS];
    bool is_used[VECTORS], is_near = true;  // whether the words of each vector that is used are found with one load
    bool is_any = false;

    PackedLanes() = default;
    PackedLanes(const CodeWeight& weight, const PackedCodes& packed, long panel) {
        for (int v = 0; v < VECTORS; v++) find(weight, packed, panel, v);
    }

    void find(const CodeWeight& weight, const PackedCodes& packed, long panel, int v) {
        const long word_bits = packed.along_outputs ? packed.word_bits() : 0, rest = (1l << word_bits) - 1;
        long rows[LANES], least = packed.rows, most = -1;
        for (int lane = 0; lane < LANES; lane++) {
            const long row = weight.row_of(panel, v * LANES + lane) - packed.first;
            rows[lane] = row < packed.rows ? max(row, -1) : -1;
            if (rows[lane] >= 0) least = min(least, row), most = max(most, row);
        }
        is_used[v] = most >= 0;
        if (!is_used[v]) return;
        is_any = true;
        base[v] = max(min(least >> word_bits, packed.row_words - LANES), 0);  // no load goes beyond a row
        is_near &= packed.row_words >= LANES && (most >> word_bits) - base[v] < LANES;
        for (int lane = 0; lane < LANES; lane++) {
            if (rows[lane] < 0) continue;
            at[v][lane] = int32_t((rows[lane] >> word_bits) - base[v]);
            shift[v][lane] = packed.along_outputs ? Word(packed.places[rows[lane] & rest] * packed.bits) : 0;
            mask[v][lane] = (1u << packed.bits) - 1;
        }
    }

    // The codes of an input, OR-ed into the words of a panel, shifted by `place` bits.
    template <bool IS_NEAR>
    INLINE void add(const PackedCodes& packed, long input, int place, Words (&words)[VECTORS]) const {
        const int word_bits = packed.along_outputs ? 0 : packed.word_bits();
        const Word* const row = packed.words + (input >> word_bits) * packed.row_words;
        const long number = input & ((1l << word_bits) - 1);
        const Word of_input = packed.along_outputs ? 0 : Word(packed.places[number] * packed.bits);
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) {
            if (!is_used[v]) continue;
            const Word* const from = row + base[v];
            const Words found = IS_NEAR ? __builtin_shuffle(load(from), (Words)at[v]) : gather(from, at[v]);
            words[v] |= (found >> (shift[v] + of_input) & mask[v]) << place;
        }
    }
};

// Fill the slots `first` … `stop` - 1 of a panel with what is packed of its rows. Codes in panels have BITS bits.
template <int BITS, bool IS_NEAR>
void pack_slots(
    const CodeWeight& weight, const PackedCodes& packed, const PackedLanes& lanes, long panel, long first, long stop
) {
    constexpr int TOGETHER = 32 / BITS;  // slots that share a word of a lane
    Word* to = reinterpret_cast<Word*>(weight.to(panel) + first / TOGETHER * STEP);
    for (; first < stop; first += TOGETHER, to += PANEL) {
        Words words[VECTORS] = {};
        for (int k = 0; k < TOGETHER && first + k < stop; k++) {
            const long input = weight.input_of(first + k);
            if (input >= 0) lanes.add<IS_NEAR>(packed, input, k % 4 * 8 + k / 4 * BITS, words);
        }
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++)
            if (lanes.is_used[v]) store(to + v * LANES, load(to + v * LANES) | words[v]);
    }
}

// Fill the panels, which are zeros where these rows are, with codes that are still packed. Inputs' words are far from each
// other, so that of each some lines are read at a time, which belong to neighbouring panels.
void fill_words(const CodeWeight* weight, const PackedCodes* packed, int threads) {
    constexpr long NEIGHBOURS = 32, PIECE = 128;
    for_panels(*weight, NEIGHBOURS, threads, [=](long begin, long end) {
        PackedLanes lanes[NEIGHBOURS];
        for (; begin < end; begin += NEIGHBOURS) {
            const long count = min(NEIGHBOURS, end - begin);
            for (long i = 0; i < count; i++) lanes[i] = PackedLanes(*weight, *packed, begin + i);
            for (long slot = 0; slot < weight->slots; slot += PIECE)
                for (long i = 0; i < count; i++) {
                    if (!lanes[i].is_any) continue;
                    const auto near = weight->bits == 8 ? pack_slots<8, true> : pack_slots<4, true>;
                    const auto far = weight->bits == 8 ? pack_slots<8, false> : pack_slots<4, false>;
                    const long stop = min(slot + PIECE, weight->slots);
                    (lanes[i].is_near ? near : far)(*weight, *packed, lanes[i], begin + i, slot, stop);
                }
        }
    });
}

// Fill in scales and zeros [rows, blocks]. A scale is a bit pattern of scale_bytes; zeros: null where all are weight->zero.
void fill_scales(const CodeWeight* weight, const uint8_t* scales, const uint8_t* zeros, int threads) {
    const long blocks = weight->blocks(), size = weight->scale_bytes;
    for_panels(*weight, 1, threads, [=](long panel, long stop) {
        for (; panel < stop; panel++) {
            uint8_t *const scales_at = weight->to(panel) + weight->code_bytes();
            uint8_t *const zeros_at = scales_at + weight->scales_bytes();
            for (int lane = 0; lane < PANEL; lane++) {
                const long row = weight->row_of(panel, lane);
                for (long block = 0; row >= 0 && block < blocks; block++) {
                    const long from = row * blocks + block, to = block * PANEL + lane;
                    memcpy(scales_at + to * size, scales + from * size, size_t(size));
                    if (weight->zero < 0) zeros_at[to] = zeros[from];
                }
            }
        }
    });
}

constexpr long AHEAD = 24;  // words

// What the four slots from `slot` on of a row stand for, at their inputs' places.
template <class E>
INLINE void unpack_word(
    const CodeWeight& weight, const uint8_t* panel, int lane, long slot, float scale, int zero, E* out
) {
    const long word = slot / 4;
    const uint8_t* const codes = panel + (weight.bits == 8 ? word : word / 2) * STEP + lane * 4;
    const int shift = weight.bits == 8 ? 0 : int(word % 2 * 4), mask = weight.bits == 8 ? 255 : 15;
    __builtin_prefetch(codes + AHEAD * STEP);  // a row's words are as far apart as no processor expects
    for (int i = 0; i < 4; i++) {
        const long input = weight.order ? weight.order[slot + i] : slot + i;
        if (input < 0 || input >= weight.inputs) continue;
        const int code = codes[i] >> shift & mask;
        out[input] = from_float<E>(float((weight.is_float4 ? FLOAT4_FACTORS[code] : code) - zero) * scale);
    }
}

// out [count, inputs]: what rows `ids` of the weight stand for; of one that is not gated.
template <class E>
void unpack(const CodeWeight* weight, const int64_t* ids, long count, E* out, int threads) {
    on_threads(threads, count, 4, [&](Queue& queue) {
        for (long row, stop; queue.take(row, stop);) {
            for (; row < stop; row++) {
                const uint8_t* const panel = weight->panel(ids[row] / PANEL);
                const Scales scales(*weight, panel);
                const int lane = int(ids[row] % PANEL), vector = lane / LANES;
                for (long first = 0, block = 0; first < weight->slots; first += weight->block, block++) {
                    const float scale = scales.scale(block, vector)[lane % LANES];
                    const int zero = scales.zero(block, vector)[lane % LANES];
                    for (long slot = first; slot < first + weight->block; slot += 4)  // slots are whole blocks
                        unpack_word(*weight, panel, lane, slot, scale, zero, out + row * weight->inputs);
                }
            }
        }
    });
}

}  // namespace

EXPORT(pack_codes, fill_codes)
EXPORT(pack_words, fill_words)
EXPORT(pack_scales, fill_scales)
EXPORT(unpack_codes_f32, unpack<float>)
EXPORT(unpack_codes_bf16, unpack<Bf16>)
EXPORT(grouped_codes_f32, grouped<float>)
EXPORT(grouped_codes_bf16, grouped<Bf16>)
EXPORT(linear_codes_f32, linear<float, float>)
EXPORT(linear_codes_bf16, linear<Bf16, Bf16>)
EXPORT(linear_codes_bf16_to_f32, linear<Bf16, float>)
