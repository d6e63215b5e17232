// Linear layers: y = activation(x Wᵀ + bias) + residual, for one token as for thousands.
//
// The weight is stored once, as panels of 32 outputs: [panel][word of the inputs][32 outputs] words, zeros where the
// outputs end. With few tokens it streams from memory once, in the order in which it is used; with many, a block of a
// panel stays in the L1 cache while all tokens of a chunk pass by. A gated layer has 16 outputs of the gate and the same
// 16 of the other half in each panel, so that their product needs no second pass.
//
// Sums are float32, in the order of the inputs, whatever the number of tokens: a token's result is bit for bit the same
// alone and in a batch.

#include <utility>

#include "functions.h"
#include "threads.h"
#include "tile.h"

namespace {

constexpr int PANEL = 32;
constexpr int VECTORS = PANEL / LANES;
constexpr int ROWS = MAX_ROWS<VECTORS>;
// Bytes of a panel that belong to one word of the inputs, and to a block of them.
constexpr long STEP = 4 * PANEL, BLOCK = STEP * LEFT_WORDS;
// Tokens whose inputs and sums a thread keeps in its L2 cache while it goes through panels.
constexpr long CHUNK_TOKENS = 192;
// How far ahead of their use weights are fetched, in bytes: into the L2 cache, and from there into L1.
constexpr long FAR = BLOCK / 2, NEAR = BLOCK / 16;

struct Weight {
    const Word* panels;
    long inputs, outputs;  // of the layer: a gated one has half as many outputs as its weight has rows
    long is_gated;

    long panel_outputs() const { return is_gated ? PANEL / 2 : PANEL; }
    long num_panels() const { return (outputs + panel_outputs() - 1) / panel_outputs(); }
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

    long words() const { return (weight.inputs + PER_WORD<E> - 1) / PER_WORD<E>; }
    const Word* panel(long index) const { return weight.panels + index * words() * PANEL; }
};

// Fetches the weights that will be needed while those before them are multiplied. `here` is a block of a panel.
struct FetchStream {
    const char *here, *ahead;
    long step;
    INLINE void operator()(int k) const {
        for (int line = 0; line < 128; line += 64) {
            __builtin_prefetch(here + NEAR + k * STEP + line, 0, 3);
            __builtin_prefetch(ahead + k * step + line, 0, 2);
        }
    }
};

struct FetchBlock {
    const char* ahead;
    long step;
    INLINE void operator()(int k) const {
        for (int line = 0; line < 128; line += 64) __builtin_prefetch(ahead + k * step + line, 0, 3);
    }
};

// M tokens times a block of a panel. It is one of `tiles` that do so one after the other, and fetches its share of what
// comes next; with several, the block is in the L1 cache already and the next one should get there.
template <class E, int M>
void multiply_block(const Word* left, const Word* block, int depth, float* sums_at, bool is_first, int tile, int tiles) {
    Floats sums[M][VECTORS] = {};
    if (!is_first)
        for (int i = 0; i < M * VECTORS; i++) sums[i / VECTORS][i % VECTORS] = load(sums_at + i * LANES);

    const Word* right[VECTORS];
    for (int v = 0; v < VECTORS; v++) right[v] = block + v * LANES;
    const char* here = reinterpret_cast<const char*>(block);
    const long step = STEP / tiles;
    const char* ahead = here + (tiles == 1 ? FAR : BLOCK) + tile * step * LEFT_WORDS;
    if (tiles < 3)
        multiply<E>(sums, left, right, PANEL, depth, FetchStream{here, ahead, step});
    else
        multiply<E>(sums, left, right, PANEL, depth, FetchBlock{ahead, step});

    for (int i = 0; i < M * VECTORS; i++) store(sums_at + i * LANES, sums[i / VECTORS][i % VECTORS]);
}

// multiply_block<E, rows>, for 1 … ROWS rows.
template <class E, int... M>
INLINE auto multiply_block_of(int rows, std::integer_sequence<int, M...>) {
    static constexpr decltype(&multiply_block<E, 1>) functions[] = {multiply_block<E, M + 1>...};
    return functions[rows - 1];
}

// The sums [rows of all tiles][PANEL] of packed tokens with one panel.
template <class E>
void multiply_panel(const Parts& tiles, const Word* left, const Word* panel, long words, float* sums) {
    const int blocks = blocks_of(words);
    for (int block = 0; block < blocks; block++) {
        const int depth = int(min(words - block * LEFT_WORDS, long(LEFT_WORDS)));
        for (int tile = 0; tile < tiles.number; tile++) {
            const int first = tiles.first(tile), rows = tiles.length(tile);
            multiply_block_of<E>(rows, std::make_integer_sequence<int, ROWS>())(
                left + (long(first) * blocks + long(block) * rows) * LEFT_STRIDE, panel + block * (BLOCK / 4), depth,
                sums + first * PANEL, block == 0, tile, tiles.number
            );
        }
    }
}

// From a panel's sums to outputs, for `rows` tokens from `first` on.
template <int KIND, class E, class Out>
void finish_panel(const Layer<E, Out>& layer, long panel, long first, long rows, const float* sums) {
    const Weight& weight = layer.weight;
    const int vectors = int(weight.panel_outputs()) / LANES;
    for (int v = 0; v < vectors; v++) {
        const long column = panel * weight.panel_outputs() + v * LANES, count = weight.outputs - column;
        if (count <= 0) return;
        const Floats bias = layer.bias ? load_part(layer.bias + column, count) : Floats{};
        const bool has_up_bias = weight.is_gated && layer.bias;
        const Floats up_bias = has_up_bias ? load_part(layer.bias + weight.outputs + column, count) : Floats{};
        for (long row = 0; row < rows; row++) {
            const float* at = sums + row * PANEL + v * LANES;
            const long place = (first + row) * weight.outputs + column;
            Floats y = activate<KIND>(load(at) + bias);
            if (weight.is_gated) y *= load(at + PANEL / 2) + up_bias;
            if (layer.residual) y += load_part(layer.residual + place, count);
            store_part(layer.out + place, y, count);
        }
    }
}

// By Activation.
template <class E, class Out>
constexpr decltype(&finish_panel<NONE, E, Out>) FINISH[] = {
    finish_panel<NONE, E, Out>, finish_panel<GELU, E, Out>, finish_panel<GELU_TANH, E, Out>,
    finish_panel<RELU, E, Out>, finish_panel<SILU, E, Out>,
};

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

// Units of work are (chunk of tokens, panel), chunks outermost.
template <class E, class Out>
void work(const Layer<E, Out>& layer, Queue& queue) {
    static thread_local Workspace left_memory, sums_memory;
    const Parts chunks(layer.tokens, CHUNK_TOKENS);
    const long words = layer.words(), panels = layer.weight.num_panels(), blocks = blocks_of(words);
    Word* left = left_memory.take<Word>(chunks.longest() * blocks * LEFT_STRIDE);
    float* sums = sums_memory.take<float>(chunks.longest() * PANEL);
    int packed = -1;
    for (long unit, stop; queue.take(unit, stop);) {
        for (; unit < stop; unit++) {
            const int chunk = int(unit / panels);
            const long panel = unit % panels, first = chunks.first(chunk);
            const Parts tiles(chunks.length(chunk), ROWS);
            if (packed != chunk) pack_tokens(layer, tiles, first, left);
            packed = chunk;
            multiply_panel<E>(tiles, left, layer.panel(panel), words, sums);
            FINISH<E, Out>[layer.activation](layer, panel, first, chunks.length(chunk), sums);
        }
    }
}

// x: [T, D]; bias: [rows of the weight] or null; residual: [T, F] or null; out: [T, F].
template <class E, class Out>
void linear(
    const Weight* weight, const E* x, long tokens, const E* bias, const E* residual, Out* out, int activation, int threads
) {
    const Layer<E, Out> layer{*weight, x, tokens, bias, residual, out, activation};
    const long units = weight->num_panels() * Parts(tokens, CHUNK_TOKENS).number;
    on_threads(threads, units, 2, [&](Queue& queue) { work(layer, queue); });
}

// One panel of a weight given by rows, `stride` elements apart.
template <class E>
void pack_panel(const Weight& weight, const E* rows, long stride, long panel, Word* out) {
    const long words = (weight.inputs + PER_WORD<E> - 1) / PER_WORD<E>;
    const int width = int(weight.panel_outputs());
    memset(out, 0, words * STEP);
    for (int lane = 0; lane < PANEL; lane++) {
        const long output = panel * width + lane % width;
        if (output >= weight.outputs) continue;
        const E* row = rows + (output + lane / width * weight.outputs) * stride;
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
EXPORT(linear_f32, linear<float, float>)
EXPORT(linear_bf16, linear<Bf16, Bf16>)
EXPORT(linear_bf16_to_f32, linear<Bf16, float>)
