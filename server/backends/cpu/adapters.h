// What adapters make of the products of linear layers, each token's of its own: LoRA (Hu et al. 2021, arXiv 2106.09685) for
// tokens of many adapters at once, as SGMV has it (Chen et al. 2023, arXiv 2310.18547).
//
// First the inputs of the tokens that have adapters are shrunk: products with `down`, one for each rank, or the inputs
// themselves. Then, when a tile is multiplied with a panel of the weight and its sums are in the L1 cache, its tokens' are
// scaled and expanded: sums * gain + shrunk * up + bias. What follows is done to all tokens alike, and nothing at all is
// done to the sums of a token without an adapter.
//
// Everything is summed in float32, by rank and by input, whatever tokens are beside: a token's result is bit for bit the
// same alone and in a batch.
#pragma once

#include <algorithm>

#include "panel.h"
#include "threads.h"

// Ranks that are multiplied with an input at once, and bytes of a rank that lie together.
constexpr int GROUP = 8;
constexpr long LINE = 64;
// Outputs that have ranks of their own: of a gated layer's panel 16 belong to the gate, and 16 to the other half.
constexpr int HALF = PANEL / 2, HALF_VECTORS = HALF / LANES;
// Tokens that are shrunk with a group while it stays in the L1 cache, and of these the ones whose sums are in registers at
// once; and those that are expanded at once.
constexpr int TOGETHER = 12, SHRUNK_ROWS = ACCUMULATORS / GROUP;
constexpr int EXPANDED_ROWS = REGISTERS == 16 ? 2 : 24 / VECTORS < 4 ? 24 / VECTORS : 4;

constexpr int LINE_WORDS = LINE / 4;
template <class E>
constexpr int LINE_ELEMENTS = LINE / sizeof(E);

// The ranks of half a panel, as words of `up`, from the first to the last that is not zero there.
struct Span {
    int32_t first, words;  // its first rank, a multiple of those in a word
    int64_t at;            // word of `up`
};

// What one adapter makes of a linear layer. Its ranks are those of `down`, zeros behind them up to a multiple of GROUP, and
// then the inputs, filled up to a multiple of GROUP, as often as there are copies.
struct Change {
    const Word* down;  // [ranks / GROUP][line of the inputs][GROUP] lines of 64 bytes
    long ranks, copies;
    const float* scales;  // [ranks + copies]
    const Span* spans;    // [panel][2]; null: there is no change
    const Word* up;       // [word][16 outputs] of each half
    const float *gain, *bias;  // [panel][32], or null

    static long padded(long inputs) { return (inputs + GROUP - 1) / GROUP * GROUP; }
    long shrunk(long inputs) const { return ranks + copies * padded(inputs); }
};

// The changes of a layer by the rows in which adapters are, and the row of each token.
struct Table {
    const Change* changes;
    const int64_t* rows;
    const Change* of(long token) const {
        const Change* const change = changes + rows[token];
        return rows[token] && change->spans ? change : nullptr;
    }
};

// The same of a layer of each expert, of tokens that are sorted by expert and asked for in their order.
struct ExpertTable {
    const Change* changes;  // [experts][num_rows]
    long num_rows;
    const int64_t* rows;
    const int32_t* ends;  // behind the last token of each expert
    long expert = 0;
    const Change* of(long token) {
        while (token >= ends[expert]) expert++;
        return Table{changes + expert * num_rows, rows}.of(token);
    }
};

// What tokens are adapted with, which each has of its own.
struct Adapted {
    const Change* const* changes = nullptr;  // [T], null where a token has none; or null: no token has one
    float* const* shrunk = nullptr;          // [T] the token's shrunk inputs
    Adapted from(long token) const { return changes ? Adapted{changes + token, shrunk + token} : Adapted{}; }
};

// ------------------------------------------------------------------------------------------------------------- shrinking

// Add the products of a line of M tokens' inputs, which begin at `x`, with a group of ranks.
template <class E, int M, class Input>
INLINE void add_line(Floats (&sums)[M][GROUP], const Word* down, const Input (&x)[M]) {
#pragma GCC unroll 4
    for (int v = 0; v < LINE_WORDS; v += LANES) {
        Words left[M];
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) left[m] = load_words(x[m] + v * PER_WORD<E>);
#pragma GCC unroll 8
        for (int j = 0; j < GROUP; j++) {
            const Words right = load(down + j * LINE_WORDS + v);
#pragma GCC unroll 4
            for (int m = 0; m < M; m++) sums[m][j] = dot_lanes<E>(sums[m][j], left[m], right);
        }
    }
}

// The products of M tokens with a group of ranks.
template <class E, int M>
void shrink_tile(const Word* down, const E* const* from, long inputs, const float* scales, float* const* out, long place) {
    constexpr int ELEMENTS = LINE_ELEMENTS<E>;
    Floats sums[M][GROUP] = {};
    const E* x[M];
    for (int m = 0; m < M; m++) x[m] = from[m];
    const long rest = inputs % ELEMENTS;
    for (const Word* const stop = down + inputs / ELEMENTS * GROUP * LINE_WORDS; down < stop; down += GROUP * LINE_WORDS) {
        add_line<E>(sums, down, x);
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) x[m] += ELEMENTS;
    }
    if (rest) {
        E last[M][ELEMENTS] = {};
        for (int m = 0; m < M; m++) memcpy(last[m], x[m], size_t(rest) * sizeof(E));
        add_line<E>(sums, down, last);
    }
#pragma GCC unroll 4
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int j = 0; j < GROUP; j++) out[m][place + j] = scales[place + j] * sum(sums[m][j]);
}

// shrink_tile<E, rows>, for 1 … SHRUNK_ROWS rows.
template <class E, int... M>
INLINE auto shrink_tile_of(int rows, std::integer_sequence<int, M...>) {
    static constexpr decltype(&shrink_tile<E, 1>) functions[] = {shrink_tile<E, M + 1>...};
    return functions[rows - 1];
}

// Tokens that have one change and are shrunk together.
struct Block {
    const Change* change;
    const int32_t* tokens;
    int count;
    long end;  // behind its units, which are groups of ranks and copies

    long units() const { return change->ranks / GROUP + change->copies; }
};

template <class E>
void copy_inputs(const E* x, long inputs, float scale, float* out) {
    for (long i = 0; i < inputs; i++) out[i] = scale * to_float(x[i]);
    for (long i = inputs; i < Change::padded(inputs); i++) out[i] = 0.0f;
}

// One unit of a block.
template <class E>
void shrink_block(const Block& block, long unit, const E* x, long inputs, float* const* shrunk) {
    const Change& change = *block.change;
    const long copy = unit - change.ranks / GROUP, lines = (inputs + LINE_ELEMENTS<E> - 1) / LINE_ELEMENTS<E>;
    const Word* const down = change.down + unit * lines * GROUP * LINE_WORDS;
    for (int i = 0, rows; i < block.count; i += rows) {
        rows = copy < 0 ? int(min(block.count - i, SHRUNK_ROWS)) : 1;
        const E* from[SHRUNK_ROWS];
        float* to[SHRUNK_ROWS];
        for (int row = 0; row < rows; row++) {
            const int32_t token = block.tokens[i + row];
            from[row] = x + token * inputs, to[row] = shrunk[token];
        }
        const auto shrink_rows = shrink_tile_of<E>(rows, std::make_integer_sequence<int, SHRUNK_ROWS>());
        if (copy < 0)
            shrink_rows(down, from, inputs, change.scales, to, unit * GROUP);
        else
            copy_inputs(*from, inputs, change.scales[change.ranks + copy], *to + change.ranks + copy * Change::padded(inputs));
    }
}

// Neighbouring tokens that have one change.
struct Run {
    const Change* change;
    int32_t first, stop;
};

// All tokens that have a change, those that have the same behind each other, and the blocks of them; returns how many.
INLINE long arrange(Run* runs, long count, int32_t* tokens, Block* blocks) {
    std::sort(runs, runs + count, [](const Run& a, const Run& b) {
        return a.change != b.change ? a.change < b.change : a.first < b.first;
    });
    long number = 0;
    for (const Run* run = runs; run < runs + count; run++)
        for (int32_t token = run->first; token < run->stop; token++, tokens++) {
            *tokens = token;
            if (number && blocks[number - 1].change == run->change && blocks[number - 1].count < TOGETHER)
                blocks[number - 1].count++;
            else
                blocks[number++] = {run->change, tokens, 1, 0};
        }
    for (long block = 0, end = 0; block < number; block++) blocks[block].end = end += blocks[block].units();
    return number;
}

// Shrinks the inputs x [T, D] of tokens, for the calling thread's next product alone: the memory is used again.
template <class E, class Table>
Adapted shrink(Table table, const E* x, long tokens, long inputs, int threads) {
    static thread_local Workspace changes_memory, runs_memory, floats_memory, places_memory, order_memory, blocks_memory;
    if (!table.changes) return {};
    const Change** const changes = changes_memory.take<const Change*>(tokens);
    Run* const runs = runs_memory.take<Run>(tokens);
    long size = 0, num_runs = 0, num_adapted = 0;
    for (long token = 0; token < tokens; token++) {
        const Change* const change = changes[token] = table.of(token);
        if (!change) continue;
        size += change->shrunk(inputs), num_adapted++;
        if (token && change == changes[token - 1])
            runs[num_runs - 1].stop++;
        else
            runs[num_runs++] = {change, int32_t(token), int32_t(token + 1)};
    }
    if (!num_adapted) return {};
    float** const shrunk = places_memory.take<float*>(tokens);
    float* place = floats_memory.take<float>(size);
    for (long token = 0; token < tokens; token++)
        if (changes[token]) shrunk[token] = place, place += changes[token]->shrunk(inputs);
    Block* const blocks = blocks_memory.take<Block>(num_adapted);
    const long num_blocks = arrange(runs, num_runs, order_memory.take<int32_t>(num_adapted), blocks);
    on_threads(threads, blocks[num_blocks - 1].end, 1, [=](Queue& queue) {
        const Block* block = blocks;
        for (long unit, stop; queue.take(unit, stop);)
            for (; unit < stop; unit++) {
                while (unit >= block->end) block++;
                shrink_block(*block, unit - (block->end - block->units()), x, inputs, shrunk);
            }
    });
    return {changes, shrunk};
}

// ------------------------------------------------------------------------------------------------------------- expanding

// The sums of M tokens that have one change, with one half of a panel, or both where they have the same ranks. Of all halves
// the first is number `half`.
template <class E, int M, int HALVES>
INLINE void expand_halves(const Change& change, long half, float* const* shrunk, float* sums) {
    constexpr int NV = HALVES * HALF_VECTORS;
    const Span span = change.spans[half];
    Floats y[M][NV];
#pragma GCC unroll 4
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int v = 0; v < NV; v++) {
            y[m][v] = load(sums + m * PANEL + v * LANES);
            if (change.gain) y[m][v] *= load(change.gain + half * HALF + v * LANES);
            renew(y[m][v]);  // or else products are rounded in one kernel, and not in another
        }
    const Word* up = change.up + span.at;
    const long other = span.words * HALF;  // words from a half to the next
    for (long k = span.first, stop = k + span.words * PER_WORD<E>; k < stop; up += HALF) {
        Words right[NV];
#pragma GCC unroll 8
        for (int v = 0; v < NV; v++) right[v] = load(up + v / HALF_VECTORS * other + v % HALF_VECTORS * LANES);
#pragma GCC unroll 2
        for (int part = 0; part < PARTS<E, float>; part++, k++) {
            Word left[M];
            for (int m = 0; m < M; m++) memcpy(left + m, shrunk[m] + k, sizeof(Word));
#pragma GCC unroll 8
            for (int v = 0; v < NV; v++)
#pragma GCC unroll 4
                for (int m = 0; m < M; m++) y[m][v] = dot<float>(y[m][v], left[m], part_of<E, float>(right[v], part));
        }
    }
#pragma GCC unroll 4
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int v = 0; v < NV; v++) {
            if (change.bias) y[m][v] += load(change.bias + half * HALF + v * LANES);
            store(sums + m * PANEL + v * LANES, y[m][v]);
        }
}

template <class E, int M>
void expand_panel(const Change& change, long panel, float* const* shrunk, float* sums) {
    const Span *const spans = change.spans + panel * 2;
    if (spans[0].first == spans[1].first && spans[0].words == spans[1].words)
        return expand_halves<E, M, 2>(change, panel * 2, shrunk, sums);
    expand_halves<E, M, 1>(change, panel * 2, shrunk, sums);
    expand_halves<E, M, 1>(change, panel * 2 + 1, shrunk, sums + HALF);
}

// expand_panel<E, rows>, for 1 … EXPANDED_ROWS rows.
template <class E, int... M>
INLINE auto expand_panel_of(long rows, std::integer_sequence<int, M...>) {
    static constexpr decltype(&expand_panel<E, 1>) functions[] = {expand_panel<E, M + 1>...};
    return functions[rows - 1];
}

// The sums [rows][PANEL] of tokens with a panel become those that their adapters make of them. `first` is the number of the
// first token.
template <class E>
void adapt_tile(const Adapted& adapted, long panel, long first, long rows, float* sums) {
    const Change* const* const changes = adapted.changes + first;
    for (long row = 0, count; row < rows; row += count) {
        const Change* const change = changes[row];
        for (count = 1; count < EXPANDED_ROWS && row + count < rows && changes[row + count] == change;) count++;
        if (!change) continue;
        const auto expand = expand_panel_of<E>(count, std::make_integer_sequence<int, EXPANDED_ROWS>());
        expand(*change, panel, adapted.shrunk + first + row, sums + row * PANEL);
    }
}
