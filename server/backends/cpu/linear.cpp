// Linear layers: y = activation(x Wᵀ + bias) + residual, for one token as for thousands.
//
// The weight is stored once, as panels of 32 outputs: [panel][word of the inputs][32 outputs] words, zeros where the
// outputs end. With few tokens it streams from memory once, in the order in which it is used; with many, a stretch of a
// panel stays in the L2 cache while all tokens of a chunk pass by. A gated layer has 16 outputs of the gate and the same
// 16 of the other half in each panel, so that their product needs no second pass.
//
// Sums are float32, in the order of the inputs, whatever the number of tokens: a token's result is bit for bit the same
// alone and in a batch. Where the CPU has matrix units for bfloat16 they compute all of it (amx.h), for one token too: the
// order of their sums is another one than that of the vector units.

#include <iterator>
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

constexpr int ROWS = TILE_ROWS;
// Bytes of a panel that belong to a block of the inputs.
constexpr long BLOCK = STEP * LEFT_WORDS;
// Words of the inputs that a tile of tokens goes through at once, or, where it goes through them for one part of a panel
// after the other, those that stay in the L1 cache: 64 or 16 KiB of a panel.
constexpr long STRETCH = MULTIPLIES_BF16 ? 4 * LEFT_WORDS : LEFT_WORDS;
// How far ahead of their use weights are fetched, in bytes: into the L2 cache, and from there into L1.
constexpr long FAR = BLOCK / 2, NEAR = BLOCK / 16;
// Whether a panel that streams for a single tile is fetched so far ahead: on Zen 3 it streams faster without.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr bool STREAMS_ALONE = true;
#else
constexpr bool STREAMS_ALONE = false;
#endif

// What the codes of a weight stand for: (value of the code - zero) * scale, of the group of an input.
struct Levels {
    const float* values;    // of each code
    const int16_t* groups;  // [inputs]
    long num_groups, bits, has_zeros;

    // Of 4 bits two neighbouring inputs share a byte, the former in the lower bits.
    long code_bytes(long inputs) const { return (inputs * bits + 7) / 8 * PANEL; }
    long panel_bytes(long inputs) const {
        const long bytes = code_bytes(inputs) + num_groups * PANEL * 4 * (1 + has_zeros);
        return (bytes + 63) / 64 * 64;
    }
};

struct Weight : Panels {
    const Word* panels;  // or codes, [input][32 outputs], scales and zeros, [group][32 outputs], where there are levels
    long inputs;
    const Levels* levels;  // null: the panels hold words
};

template <class E, class Out>
struct Layer {
    const Weight& weight;
    const E* x;
    long tokens;
    const E* bias;
    const E* residual;
    Out* out;
    int activation;
    Adapted adapted;

    long words() const { return (weight.inputs + PER_WORD<E> - 1) / PER_WORD<E>; }
    long left_words() const { return long(blocks_of(words())) * LEFT_STRIDE; }  // of one packed token
    Parts chunks() const { return chunks_of(tokens, left_words()); }
    const Word* panel(long index) const { return weight.panels + index * words() * PANEL; }
};

// What codes of BITS bits stand for before their zero and scale.
template <int BITS>
INLINE Floats look_up(const float* values, Ints codes) {
#if defined(__AVX512F__)
    if constexpr (BITS == 4) return (Floats)_mm512_permutexvar_ps((__m512i)codes, (__m512)load(values));
    return (Floats)_mm512_i32gather_ps((__m512i)codes, values, 4);
#elif defined(__AVX2__)
    if constexpr (BITS == 8) return (Floats)_mm256_i32gather_ps(values, (__m256i)codes, 4);
    const __m256 lower = _mm256_permutevar8x32_ps((__m256)load(values), (__m256i)codes);
    const __m256 upper = _mm256_permutevar8x32_ps((__m256)load(values + LANES), (__m256i)codes);
    return (Floats)_mm256_blendv_ps(lower, upper, (__m256)(codes << 28));
#else
    Floats found;
    for (int lane = 0; lane < LANES; lane++) found[lane] = values[codes[lane]];
    return found;
#endif
}

// An input of a panel of codes of BITS bits: its codes, [32 outputs], and its group's scales and zeros.
template <int BITS>
struct LevelInput {
    const float* values;
    const uint8_t* codes;
    int shift;
    const float *scales, *zeros;  // zeros: null where there are none

    LevelInput(const Levels& levels, const uint8_t* panel, long inputs, long input) : values(levels.values) {
        codes = panel + (BITS == 4 ? input / 2 : input) * PANEL;
        shift = BITS == 4 ? int(input % 2 * 4) : 0;
        scales = reinterpret_cast<const float*>(panel + levels.code_bytes(inputs)) + levels.groups[input] * PANEL;
        zeros = levels.has_zeros ? scales + levels.num_groups * PANEL : nullptr;
    }

    // What it stands for, of LANES outputs from `lane` on.
    INLINE Floats at(int lane) const {
        const Ints found = load_bytes(codes + lane) >> shift;
        Floats value = look_up<BITS>(values, BITS == 4 ? found & 15 : found);
        if (zeros) value = value - load(zeros + lane);
        return value * load(scales + lane);
    }
};

// `count` words of a panel of codes, from word `start` on.
template <class E, int BITS>
void expand_levels(const Weight& weight, const uint8_t* panel, long start, long count, Word* out) {
    const long inputs = weight.inputs;
    for (long word = start; word < start + count; word++, out += PANEL) {
        const long first = word * PER_WORD<E>, last = first + PER_WORD<E> - 1;
        const LevelInput<BITS> input(*weight.levels, panel, inputs, first);
        const LevelInput<BITS> next(*weight.levels, panel, inputs, min(last, inputs - 1));
#pragma GCC unroll 8
        for (int lane = 0; lane < PANEL; lane += LANES) {
            if constexpr (PER_WORD<E> == 1)
                store(out + lane, (Words)input.at(lane));
            else
                store(out + lane, round_pair(input.at(lane), last < inputs ? next.at(lane) : Floats{}));
        }
    }
}

template <class E>
void expand(const Weight& weight, long panel, long start, long count, Word* out) {
    const uint8_t* const at = reinterpret_cast<const uint8_t*>(weight.panels) + panel * weight.levels->panel_bytes(weight.inputs);
    const auto expand_codes = weight.levels->bits == 4 ? expand_levels<E, 4> : expand_levels<E, 8>;
    expand_codes(weight, at, start, count, out);
}

// Fetches weights while others are multiplied: soon needed ones of NV vectors into L1, and LINES lines that are needed later
// into L2.
template <int NV, int LINES>
struct Fetch {
    const char *here, *ahead;
    long step;
    INLINE void operator()(int k) const {
        for (int line = 0; line < NV * LANES * 4; line += 64) __builtin_prefetch(here + NEAR + k * STEP + line, 0, 3);
        for (int line = 0; line < LINES; line++) __builtin_prefetch(ahead + k * step + line * 64, 0, 2);
    }
};

template <class E, int M, int NV, int LINES>
INLINE void multiply_blocks(Floats (&sums)[M][NV], const Word* left, Fetch<NV, LINES> fetch, int words) {
    for (; words > 0; words -= LEFT_WORDS, left += M * LEFT_STRIDE) {
        const Word* right[NV];
        for (int v = 0; v < NV; v++) right[v] = reinterpret_cast<const Word*>(fetch.here) + v * LANES;
        multiply<E, Factor<E>>(sums, left, right, PANEL, int(min(words, LEFT_WORDS)), fetch);
        fetch.here += BLOCK, fetch.ahead += LEFT_WORDS * fetch.step;
    }
}

// Go on with the sums [M][PANEL] of M tokens over a stretch of a panel. They are one of `tiles` tiles that do so one after
// the other: a single one has the panel stream from memory, each of several fetches its share of the next stretch.
template <class E, int M>
void multiply_tile(
    const Word* left, const Word* stretch, int words, float* sums_at, bool is_first, int tile, int tiles
) {
    constexpr int NV = TILE_VECTORS<M, ROWS>, GROUPS = VECTORS / NV, SIZE = PARTS<E, Factor<E>> == 1 ? 1 : M * LEFT_STRIDE * 2;
    alignas(64) float floats[SIZE];
    if constexpr (SIZE > 1) {
        for (int m = 0; m < M; m++) {
            const Bf16* const row = reinterpret_cast<const Bf16*>(left + m * LEFT_STRIDE);
            for (int i = 0; i < words * 2; i += LANES) store(floats + m * LEFT_STRIDE * 2 + i, load(row + i));
        }
        left = reinterpret_cast<const Word*>(floats);
    }
    const char* here = reinterpret_cast<const char*>(stretch);
    const long step = STEP / GROUPS / tiles;
    const char* ahead = here + (STEP + tile * GROUPS * step) * words;
    for (int group = 0; group < GROUPS; group++, here += STEP / GROUPS, ahead += step * words, sums_at += NV * LANES) {
        // Unrolled, so that the sums are nowhere but in registers.
        Floats sums[M][NV];
#pragma GCC unroll 12
        for (int m = 0; m < M; m++)
#pragma GCC unroll 8
            for (int v = 0; v < NV; v++) sums[m][v] = is_first ? Floats{} : load(sums_at + m * PANEL + v * LANES);

        if (tiles == 1)
            multiply_blocks<E>(sums, left, Fetch<NV, STREAMS_ALONE ? 0 : (NV * LANES * 4 + 63) / 64>{here, here + FAR, STEP}, words);
        else
            multiply_blocks<E>(sums, left, Fetch<NV, 1>{here, ahead, step}, words);

#pragma GCC unroll 12
        for (int m = 0; m < M; m++)
#pragma GCC unroll 8
            for (int v = 0; v < NV; v++) store(sums_at + m * PANEL + v * LANES, sums[m][v]);
    }
}

// multiply_tile<E, rows>, for 1 … ROWS rows.
template <class E, int... M>
INLINE auto multiply_tile_of(int rows, std::integer_sequence<int, M...>) {
    static constexpr decltype(&multiply_tile<E, 1>) functions[] = {multiply_tile<E, M + 1>...};
    return functions[rows - 1];
}

#if defined(__AMX_BF16__)
// `multiply_tile` of few tokens on vector units, with the sums of matrix units.
template <int M>
void multiply_few_like_amx(
    const Word* left, const Word* stretch, int words, float* sums_at, bool is_first
) {
    Floats sums[M][VECTORS];
#pragma GCC unroll 4
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) sums[m][v] = is_first ? Floats{} : load(sums_at + m * PANEL + v * LANES);
    for (; words > 0; words -= LEFT_WORDS, left += M * LEFT_STRIDE, stretch += LEFT_WORDS * PANEL) {
        const char* here = reinterpret_cast<const char*>(stretch);
        const Fetch<VECTORS, STEP / 64> fetch{here, here + FAR, STEP};
        amx::multiply_few(sums, left, stretch, PANEL, int(min(words, LEFT_WORDS)), fetch);
    }
#pragma GCC unroll 4
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) store(sums_at + m * PANEL + v * LANES, sums[m][v]);
}

// `multiply_tile` on matrix units.
void multiply_tile_amx(
    amx::Registers& registers, const Word* left, const Word* stretch, int words, float* sums, bool is_first, int tile,
    int tiles, int rows
) {
    static constexpr decltype(&multiply_few_like_amx<1>) FEW[] = {
        multiply_few_like_amx<1>, multiply_few_like_amx<2>, multiply_few_like_amx<3>, multiply_few_like_amx<4>,
    };
    static_assert(std::size(FEW) == amx::FEW);
    if (rows <= amx::FEW) return FEW[rows - 1](left, stretch, words, sums, is_first);
    const bool has_upper = rows > 16;
    const char* here = reinterpret_cast<const char*>(stretch);
    const long step = STEP / tiles;
    const char* ahead = tiles == 1 ? here + FAR : here + (STEP + tile * step) * words;
    const int whole = words / amx::DEPTH * amx::DEPTH;
    const auto at = [&](int k) { return left + (long(k) / LEFT_WORDS * rows) * LEFT_STRIDE + k % LEFT_WORDS; };
    registers.shape(rows, amx::DEPTH);
    amx::load_sums(sums, PANEL, has_upper, is_first);
    for (int k = 0; k < whole; k += amx::DEPTH) {
        for (long line = k * step; line < (k + amx::DEPTH) * step; line += 64) __builtin_prefetch(ahead + line, 0, 2);
        amx::multiply(at(k), stretch + k * PANEL, PANEL, has_upper);
    }
    amx::store_sums(sums, PANEL, has_upper);
    if (whole == words) return;
    registers.shape(rows, words - whole);
    amx::load_sums(sums, PANEL, has_upper, false);
    amx::multiply(at(whole), stretch + whole * PANEL, PANEL, has_upper);
    amx::store_sums(sums, PANEL, has_upper);
}
#endif

template <class E, class Out>
void pack_tokens(const Layer<E, Out>& layer, const Parts& tiles, long first, Word* left) {
    const int blocks = blocks_of(layer.words());
    const E* from = layer.x + first * layer.weight.inputs;
    for (int tile = 0; tile < tiles.number; tile++) {
        const int rows = tiles.length(tile);
        Word* to = left + long(tiles.first(tile)) * blocks * LEFT_STRIDE;
        for (int row = 0; row < rows; row++, from += layer.weight.inputs)
            pack_left(to + row * LEFT_STRIDE, rows, from, layer.weight.inputs);
    }
}

// The outputs of a chunk's packed tokens, from token `first` on, that belong to a panel. Each tile is finished as soon as
// it is multiplied: its outputs find their way to memory while the next one is.
template <class E, class Out>
void apply_panel(
    const Layer<E, Out>& layer, const Parts& tiles, const Word* left, long first, long panel, float* sums,
    [[maybe_unused]] amx::Registers* registers
) {
    static thread_local Workspace expanded;
    const Weight& weight = layer.weight;
    const int words = int(layer.words()), blocks = blocks_of(words);
    for (int start = 0; start < words; start += STRETCH) {
        const int count = int(min(words - start, STRETCH));
        const Word* stretch;
        if (weight.levels) {
            Word* const room = expanded.take<Word>(STRETCH * PANEL);
            expand<E>(weight, panel, start, count, room);
            stretch = room;
        } else {
            stretch = layer.panel(panel) + start * PANEL;
        }
        for (int tile = 0; tile < tiles.number; tile++) {
            const int row = tiles.first(tile), rows = tiles.length(tile);
            float* const sums_at = sums + row * PANEL;
            const Word* const left_at = left + (long(row) * blocks + long(start) / LEFT_WORDS * rows) * LEFT_STRIDE;
#if defined(__AMX_BF16__)
            if (registers)
                multiply_tile_amx(*registers, left_at, stretch, count, sums_at, start == 0, tile, tiles.number, rows);
            else
#endif
                multiply_tile_of<E>(rows, std::make_integer_sequence<int, ROWS>())(
                    left_at, stretch, count, sums_at, start == 0, tile, tiles.number
                );
            if (start + count != words) continue;
            if (layer.adapted.changes) adapt_tile<E>(layer.adapted, panel, first + row, rows, sums_at);
            FINISH<Layer<E, Out>>[layer.activation](layer, panel, first + row, rows, sums_at);
        }
    }
}

// Units of work are (chunk of tokens, panel), chunks outermost.
template <class E, class Out>
void work(const Layer<E, Out>& layer, Queue& queue) {
    static thread_local Workspace left_memory, sums_memory;
    const Parts chunks = layer.chunks();
    const long panels = layer.weight.num_panels();
    Word* left = left_memory.take<Word>(chunks.longest() * layer.left_words());
    float* sums = sums_memory.take<float>(chunks.longest() * PANEL);
    const bool uses_amx = amx::USES_AMX && PER_WORD<E> == 2;
    std::optional<amx::Registers> registers;
    if (uses_amx) registers.emplace();
    int packed = -1;
    for (long unit, stop; queue.take(unit, stop);) {
        for (; unit < stop; unit++) {
            const int chunk = int(unit / panels);
            const Parts tiles(chunks.length(chunk), uses_amx ? amx::ROWS : ROWS);
            if (packed != chunk) pack_tokens(layer, tiles, chunks.first(chunk), left);
            packed = chunk;
            apply_panel(layer, tiles, left, chunks.first(chunk), unit % panels, sums, registers ? &*registers : nullptr);
        }
    }
}

// x: [T, D]; bias: [rows of the weight] or null; residual: [T, F] or null; out: [T, F]. changes: of each row in which an
// adapter is, or null; rows: [T] of the tokens, and exact: [T, D] what is shrunk of them.
template <class E, class Out>
void linear(
    const Weight* weight, const E* x, long tokens, const E* bias, const E* residual, Out* out, int activation,
    const Change* changes, const int64_t* rows, const E* exact, int threads
) {
    const Adapted adapted = shrink(Table{changes, rows}, exact, tokens, weight->inputs, threads);
    const Layer<E, Out> layer{*weight, x, tokens, bias, residual, out, activation, adapted};
    on_threads(threads, weight->num_panels() * layer.chunks().number, 2, [&](Queue& queue) { work(layer, queue); });
}

// x: [T, D] sorted by expert, of which expert e owns the tokens ends[e - 1] … ends[e] - 1; biases: [experts, rows of the
// weight] or null; out: [T, F]. changes: [experts][num_rows], as of `linear`, or null; rows: [T].
template <class E>
void grouped(
    const Weight* const* experts, long count, const int32_t* ends, const E* x, const E* biases, E* out, int activation,
    const Change* changes, long num_rows, const int64_t* rows, int threads
) {
    const Adapted adapted = shrink(ExpertTable{changes, num_rows, rows, ends}, x, ends[count - 1], experts[0]->inputs, threads);
    const auto layer_of = [=](long expert) {
        const Weight& weight = *experts[expert];
        const long first = expert ? ends[expert - 1] : 0;
        const E* const bias = biases ? biases + expert * weight.outputs * (1 + weight.is_gated) : nullptr;
        return Layer<E, E>{
            weight, x + first * weight.inputs, ends[expert] - first, bias, nullptr, out + first * weight.outputs, activation,
            adapted.from(first),
        };
    };
    const auto units = [=](long expert) {
        const Layer<E, E> layer = layer_of(expert);
        return layer.tokens ? layer.weight.num_panels() * layer.chunks().number : 0;
    };
    on_parts(threads, count, units, [=](long expert, Queue& queue) { work(layer_of(expert), queue); });
}

// What computes products of float32, and of bfloat16, which is what this was compiled for, in words of up to 15 letters.
void tell_instructions(char (*answers)[16]) {
#if defined(__AVX512F__)
    constexpr const char* VECTORS = "AVX512F";
#elif defined(__AVX2__)
    constexpr const char* VECTORS = "AVX2";
#elif defined(__aarch64__)
    constexpr const char* VECTORS = "NEON";
#else
    constexpr const char* VECTORS = "plain C++";
#endif
#if defined(__AVX512BF16__)
    constexpr const char* PAIRS = "AVX512_BF16";
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    constexpr const char* PAIRS = "NEON BF16";
#else
    constexpr const char* PAIRS = VECTORS;
#endif
    strcpy(answers[0], VECTORS);
    strcpy(answers[1], amx::USES_AMX ? "AMX" : PAIRS);
}

// One panel of a weight given by rows, `stride` elements apart.
template <class E>
void pack_panel(const Weight& weight, const E* rows, long stride, long panel, Word* out) {
    const long words = (weight.inputs + PER_WORD<E> - 1) / PER_WORD<E>;
    memset(out, 0, words * STEP);
    for (int lane = 0; lane < PANEL; lane++) {
        const long number = weight.row_of(panel, lane);
        if (number < 0) continue;
        const E* row = rows + number * stride;
        for (long i = 0; i < weight.inputs; i++)
            reinterpret_cast<E*>(out + i / PER_WORD<E> * PANEL + lane)[i % PER_WORD<E>] = row[i];
    }
}

// Fill the panels from `rows`, `stride` elements apart.
template <class E>
void pack(const Weight* weight, const E* rows, long stride, int threads) {
    const long size = (weight->inputs + PER_WORD<E> - 1) / PER_WORD<E> * PANEL;
    on_threads(threads, weight->num_panels(), 1, [&](Queue& queue) {
        for (long panel, stop; queue.take(panel, stop);)
            for (; panel < stop; panel++)
                pack_panel(*weight, rows, stride, panel, const_cast<Word*>(weight->panels) + panel * size);
    });
}

// One panel of codes [rows, inputs], scales and zeros [rows, groups]; zeros: null where there are none.
void pack_levels_panel(
    const Weight& weight, const uint8_t* codes, const float* scales, const float* zeros, long panel, uint8_t* out
) {
    const Levels& levels = *weight.levels;
    memset(out, 0, size_t(levels.panel_bytes(weight.inputs)));
    float* const scales_at = reinterpret_cast<float*>(out + levels.code_bytes(weight.inputs));
    for (int lane = 0; lane < PANEL; lane++) {
        const long row = weight.row_of(panel, lane);
        if (row < 0) continue;
        for (long i = 0; i < weight.inputs; i++) {
            const uint8_t code = codes[row * weight.inputs + i];
            if (levels.bits == 8)
                out[i * PANEL + lane] = code;
            else
                out[i / 2 * PANEL + lane] |= uint8_t(code << (i % 2 * 4));
        }
        for (long group = 0; group < levels.num_groups; group++) {
            scales_at[group * PANEL + lane] = scales[row * levels.num_groups + group];
            if (zeros) scales_at[(levels.num_groups + group) * PANEL + lane] = zeros[row * levels.num_groups + group];
        }
    }
}

// Fill the panels of a weight with levels.
void fill_levels(const Weight* weight, const uint8_t* codes, const float* scales, const float* zeros, int threads) {
    const long size = weight->levels->panel_bytes(weight->inputs);
    uint8_t* const panels = reinterpret_cast<uint8_t*>(const_cast<Word*>(weight->panels));
    on_threads(threads, weight->num_panels(), 1, [&](Queue& queue) {
        for (long panel, stop; queue.take(panel, stop);)
            for (; panel < stop; panel++) pack_levels_panel(*weight, codes, scales, zeros, panel, panels + panel * size);
    });
}

// out [count, inputs]: what rows `ids` of a weight with levels stand for; not of a gated one.
template <class E>
void unpack_levels(const Weight* weight, const int64_t* ids, long count, E* out, int threads) {
    const Levels& levels = *weight->levels;
    on_threads(threads, count, 4, [&](Queue& queue) {
        for (long row, stop; queue.take(row, stop);) {
            for (; row < stop; row++) {
                const uint8_t* const panel = reinterpret_cast<const uint8_t*>(weight->panels) +
                                             ids[row] / PANEL * levels.panel_bytes(weight->inputs);
                const int lane = int(ids[row] % PANEL);
                for (long i = 0; i < weight->inputs; i++) {
                    const Floats values = levels.bits == 4
                                              ? LevelInput<4>(levels, panel, weight->inputs, i).at(lane / LANES * LANES)
                                              : LevelInput<8>(levels, panel, weight->inputs, i).at(lane / LANES * LANES);
                    out[row * weight->inputs + i] = from_float<E>(values[lane % LANES]);
                }
            }
        }
    });
}

// out [count, inputs]: rows `ids` of the weight as they were before it was packed; not of a gated one.
template <class E>
void unpack(const Weight* weight, const int64_t* ids, long count, E* out, int threads) {
    const long inputs = weight->inputs, words = (inputs + PER_WORD<E> - 1) / PER_WORD<E>;
    on_threads(threads, count, 4, [&](Queue& queue) {
        for (long row, stop; queue.take(row, stop);) {
            for (; row < stop; row++) {
                const Word* from = weight->panels + ids[row] / PANEL * words * PANEL + ids[row] % PANEL;
                for (long i = 0; i < inputs; i++)
                    out[row * inputs + i] = reinterpret_cast<const E*>(from + i / PER_WORD<E> * PANEL)[i % PER_WORD<E>];
            }
        }
    });
}

}  // namespace

EXPORT(unpack_f32, unpack<float>)
EXPORT(unpack_bf16, unpack<Bf16>)
EXPORT(pack_f32, pack<float>)
EXPORT(pack_bf16, pack<Bf16>)
EXPORT(pack_levels, fill_levels)
EXPORT(unpack_levels_f32, unpack_levels<float>)
EXPORT(unpack_levels_bf16, unpack_levels<Bf16>)
EXPORT(instructions, tell_instructions)
EXPORT(grouped_f32, grouped<float>)
EXPORT(grouped_bf16, grouped<Bf16>)
EXPORT(linear_f32, linear<float, float>)
EXPORT(linear_bf16, linear<Bf16, Bf16>)
EXPORT(linear_bf16_to_f32, linear<Bf16, float>)
