// Softmax attention over the paged cache, reading its blocks in place: for one query as for a prompt's thousands.
//
// The cache is [2, B, K, P = 16, H]. Inside each [16, H] the order is this kernel's own, so that nothing has to be
// transposed while attending: keys as [word of H][16 tokens], values as [word of the 16 tokens][H], where a word is one
// float32 or a pair of bfloat16. Scores of 16 keys then are one vector, and so are LANES features of an output.
//
// A cache of codes (cache.h) has a byte in place of each element, in the same order. In int8, the scales of all blocks'
// tokens stand behind all codes, in bfloat16, so that codes lie where lines of the caches begin. Codes are expanded block
// by block, next to where the product reads them, and stay as they are for all rows that look at a chunk. The scales are
// left to the scores, and to the weights of the values.
//
// Where a key's first numbers are its value (compressed keys and values), there are no stored values: those of a chunk are
// put in order from its keys, once for all rows that look at it.
//
// Keys are taken in chunks at fixed places of the context. Each chunk's softmax is computed on its own, and a row's
// chunks are folded together in their order, whoever computed them. So a row's result is bit for bit the same alone, in a
// batch, inside a prompt, and on any number of threads. Scores, weights and sums are float32; in the product with
// bfloat16 values the weights are bfloat16.
//
// Shapes: T tokens, S sequences, N heads, K kv heads, H head dim, V that of values, B blocks, R rows: the queries that share
// a kv head, W bytes that a key or value takes, with its scale.

#include <utility>

#include "cache.h"
#include "functions.h"
#include "threads.h"
#include "tile.h"

namespace {

constexpr int BLOCK_TOKENS = 16;
constexpr int KEY_VECTORS = BLOCK_TOKENS / LANES;
// Rows that go through a chunk of keys and values together while these are in the L2 cache, and rows of one tile.
constexpr int ROWS = TILE_ROWS, TILES = 4;
// Blocks of keys that are scored at once, at most.
constexpr int SCORED_BLOCKS = 4;
constexpr float NEVER = -__builtin_inff();

// Keys of a chunk: its weights are one block of a tile's left side.
template <class E>
constexpr int CHUNK = LEFT_WORDS * PER_WORD<E>;
template <class E>
constexpr int CHUNK_BLOCKS = CHUNK<E> / BLOCK_TOKENS;

INLINE int blocks_of_keys(int keys) { return (keys + BLOCK_TOKENS - 1) / BLOCK_TOKENS; }

struct Scores {
    float scale, cap;
    const float* slopes;  // [N] or null
    const float* bias;    // [N, 2 reach + 1] or null
    long reach;
    const float* sinks;  // [N] or null
    long chunk;          // a query sees keys from the last multiple of it on; 0: all
};

template <class E>
struct Step {
    const Scores& scores;
    const Cache& cache;
    const E* q;           // [T, N, H], tokens q_stride elements apart
    const uint8_t* keys;  // [B, K, 16, H]
    const uint8_t* values;
    const Bf16* key_scales;  // [B, K, 16] in int8
    const Bf16* value_scales;
    E* out;  // [T, N, V]
    const int64_t* positions;     // [T]
    const int64_t* visible;       // [T]
    const int64_t* block_tables;  // [S, table_stride]
    const int64_t* starts;        // [S + 1] or null where sequence s is token s
    long q_stride, table_stride, window;
    int sequences, heads, kv_heads, head_dim, value_dim;
    bool shares;  // whether values are the first numbers of keys

    int group() const { return heads / kv_heads; }
    // The nearest key before a query at `position` that it does not see, as a distance from it.
    long blind(long position) const {
        const long before = window ? -window : long(INT32_MIN);
        return scores.chunk ? max(before, -(position % scores.chunk) - 1) : before;
    }
    long start(long sequence) const { return starts ? starts[sequence] : sequence; }
    long words() const { return head_dim / PER_WORD<E>; }
    bool has_codes() const { return cache.kind != AS_COMPUTED; }
    // 2^shift elements of the cache take the room of one of E.
    int shift() const { return !has_codes() ? 0 : sizeof(E) == 4 ? 2 : 1; }
};

// Bytes of an element in the cache.
template <class E>
INLINE long element_bytes(int kind) { return kind == AS_COMPUTED ? long(sizeof(E)) : 1; }

// Bytes of all keys, or values, of a cache.
template <class E>
INLINE long part_bytes(int kind, long blocks, long kv_heads, long head_dim) {
    const long rows = blocks * kv_heads * BLOCK_TOKENS;
    return rows * (head_dim * element_bytes<E>(kind) + (kind == INT8 ? long(sizeof(Bf16)) : 0));
}

// Some rows of one sequence and kv head. Row r is head r % group of token r / group; neither positions nor what is visible
// go back from one token to the next.
struct Task {
    int sequence, kv_head, first_row, rows;
    long stop_key;                 // no row sees this one or a later one
    long first_chunk, stop_chunk;  // of the keys that any row sees
    long first_unit;               // number of chunks of all tasks before this one
};

// Where one row stands.
struct Place {
    long token, head, position, visible;
};

template <class E>
Place place_of(const Step<E>& step, const Task& task, int row) {
    const long token = step.start(task.sequence) + (task.first_row + row) / step.group();
    const long head = task.kv_head * step.group() + (task.first_row + row) % step.group();
    return {token, head, step.positions[token], step.visible[token]};
}

// Rows that are computed together, and the end of the keys that any of them sees.
struct Tile {
    Place places[ROWS];
    long stop_key;
};

// What is known of `rows` rows after some of their keys: the largest score, and sums weighted by exp(score - largest).
struct Partial {
    float *largest, *total, *sums;  // [rows], [rows], [rows][V]

    Partial(float* at, long rows) : largest(at), total(at + rows), sums(at + 2 * rows) {}
    Partial from(int row, long value_dim) const { return {largest + row, total + row, sums + row * value_dim}; }
    // Vectors are stored whole: behind the last row there is room for one.
    static long size(long rows, long value_dim) { return rows * (value_dim + 2) + LANES; }

  private:
    Partial(float* largest, float* total, float* sums) : largest(largest), total(total), sums(sums) {}
};

// One thread's memory, for one task at a time.
template <class E>
struct Desk {
    Tile tiles[TILES];
    Word weights[ROWS * LEFT_ROW<E>];
    float scores[ROWS * CHUNK<E>];
    const Word* keys[CHUNK<E> / LANES];
    const Word* stored_values[CHUNK_BLOCKS<E>];
    const Word* values[CHUNK_BLOCKS<E>];     // where they are stored, or copies
    const Word* next_keys[CHUNK_BLOCKS<E>];  // of the chunk that comes next
    // Of a cache of codes: those of the open chunk's blocks, and how many of these are expanded.
    const uint8_t *key_codes[CHUNK_BLOCKS<E>], *value_codes[CHUNK_BLOCKS<E>];
    int expanded_keys, expanded_values;
    bool keeps_keys;  // for the next tile; else blocks take the places of those that were scored before
    const Bf16 *stored_key_scales[CHUNK_BLOCKS<E>], *stored_value_scales[CHUNK_BLOCKS<E>];
    float key_scales[CHUNK<E>], value_scales[CHUNK<E>];
    Word *queries, *copies;  // copies: of a chunk's values, or of the last block alone
    Word* key_copies;
    float *part, *folded;

    int key_copy(int block) const { return keeps_keys ? block : block % SCORED_BLOCKS; }

    explicit Desk(const Step<E>& step) {
        static thread_local Workspace memory;
        const long rows = ROWS * TILES, size = Partial::size(rows, step.value_dim);
        const long query_words = rows * blocks_of(step.words()) * LEFT_ROW<E>;
        const long copy_words = CHUNK<E> / PER_WORD<E> * max(step.head_dim, long(LANES));
        queries = memory.take<Word>(query_words + 2 * copy_words + 2 * size);
        copies = queries + query_words;
        key_copies = copies + copy_words;
        part = reinterpret_cast<float*>(key_copies + copy_words);
        folded = part + size;
    }
};

// ---------------------------------------------------------------------------------------------- products of one tile

// Fetches memory that will be read next, at the same offsets as the memory that is being read.
template <int NV>
struct Fetch {
    const Word* ahead[NV];
    long step;
    INLINE void operator()(int k) const {
        for (int v = 0; v < NV; v++) __builtin_prefetch(ahead[v] + k * step, 0, 2);
    }
};

// scores[m][key] of M rows and NV vectors of keys. Meanwhile the values of the same keys are fetched, of which 2^shift
// elements take the room of one of E.
template <class E, int M, int NV>
void score_keys(
    const Word* left, const Word* const* keys, const Word* const* values, long words, int shift, float* scores
) {
    Floats sums[M][NV] = {};
    for (long start = 0; start < words; start += LEFT_WORDS, left += M * LEFT_ROW<E>) {
        const Word* right[NV];
        Fetch<NV> fetch{{}, BLOCK_TOKENS >> shift};
        for (int v = 0; v < NV; v++) {
            right[v] = keys[v] + start * BLOCK_TOKENS;
            fetch.ahead[v] = values[v / KEY_VECTORS] + ((start * BLOCK_TOKENS + v % KEY_VECTORS * LANES) >> shift);
        }
        multiply<E, Factor<E>>(sums, left, right, BLOCK_TOKENS, int(min(words - start, long(LEFT_WORDS))), fetch);
    }
#pragma GCC unroll 12
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int v = 0; v < NV; v++) store(scores + m * CHUNK<E> + v * LANES, sums[m][v]);
}

// sums_at[m][feature] of M rows of weights and NV vectors of the values' features, over `blocks` blocks of rows of `width`
// words. Rows are stored from first to last: where a head is shorter than a vector, each is cut by the next. Meanwhile the
// next keys are fetched.
template <class E, int M, int NV>
void weigh_values(
    const Word* left, const Word* const* values, const Word* const* next_keys, int blocks, long feature, long width,
    long value_dim, int shift, float* sums_at
) {
    constexpr int DEPTH = BLOCK_TOKENS / PER_WORD<E>;
    Floats sums[M][NV] = {};
    for (int block = 0; block < blocks; block++) {
        const Word* right[NV];
        Fetch<NV> fetch{{}, width >> shift};
        for (int v = 0; v < NV; v++) {
            right[v] = values[block] + feature + v * LANES;
            fetch.ahead[v] = next_keys[block] + ((feature + v * LANES) >> shift);
        }
        multiply<E, Factor<E>>(sums, left + block * DEPTH * PARTS<E, Factor<E>>, right, width, DEPTH, fetch);
    }
#pragma GCC unroll 12
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int v = 0; v < NV; v++) store(sums_at + m * value_dim + feature + v * LANES, sums[m][v]);
}

// Expand the open chunk's keys up to a number of blocks.
template <class E>
void expand_keys(const Step<E>& step, Desk<E>& desk, int blocks) {
    const long size = BLOCK_TOKENS * step.head_dim;
    for (; desk.expanded_keys < blocks; desk.expanded_keys++) {
        const int block = desk.expanded_keys;
        Word* to = desk.key_copies + desk.key_copy(block) * (size / PER_WORD<E>);
        expand<E>(step.cache.kind, to, desk.key_codes[block], size);
    }
}

// Vectors of keys that are scored at once: the fewer rows, the more, so that enough sums are under way.
constexpr int key_vectors(int rows) { return rows <= MAX_ROWS<4> ? 4 : 2; }

template <class E, int... M>
INLINE auto score_keys_of(int rows, std::integer_sequence<int, M...>) {
    static constexpr decltype(&score_keys<E, 1, 4>) functions[] = {score_keys<E, M + 1, key_vectors(M + 1)>...};
    return functions[rows - 1];
}

template <class E, int NV, int... M>
INLINE auto weigh_values_of(int rows, std::integer_sequence<int, M...>) {
    static constexpr decltype(&weigh_values<E, 1, NV>) functions[] = {weigh_values<E, M + 1, NV>...};
    return functions[rows - 1];
}

template <class E>
void score_tile(
    const Step<E>& step, Desk<E>& desk, const Word* left, int rows, int blocks, float* scores
) {
    const int width = key_vectors(rows), vectors = blocks * KEY_VECTORS;
    const auto function = score_keys_of<E>(rows, std::make_integer_sequence<int, ROWS>());
    for (int v = 0; v < vectors; v += width) {
        if (step.has_codes()) expand_keys(step, desk, (v + width + KEY_VECTORS - 1) / KEY_VECTORS);
        function(left, desk.keys + v, desk.stored_values + v / KEY_VECTORS, step.words(), step.shift(), scores + v * LANES);
    }
}

// Words of a row of values: shorter heads are copied to rows of one vector.
INLINE long value_width(long value_dim) { return max(value_dim, long(LANES)); }

template <class E, int NV>
void weigh_tile(const Step<E>& step, const Desk<E>& desk, int rows, int blocks, float* sums) {
    const auto function = weigh_values_of<E, NV>(rows, std::make_integer_sequence<int, MAX_ROWS<NV == 1 ? 2 : NV>>());
    // The last vectors may overlap those before them: they end where the head ends, and are computed twice.
    const long value_dim = step.value_dim, width = value_width(value_dim);
    for (long feature = 0; feature < value_dim; feature += NV * LANES)
        function(
            desk.weights, desk.values, desk.next_keys, blocks, min(feature, width - NV * LANES), width, value_dim,
            step.shift(), sums
        );
}

template <class E>
void weigh_tile(const Step<E>& step, const Desk<E>& desk, int rows, int blocks, float* sums) {
    const long value_dim = step.value_dim;
    if (value_dim % (4 * LANES) == 0 && rows <= MAX_ROWS<4>) return weigh_tile<E, 4>(step, desk, rows, blocks, sums);
    if (value_dim >= 2 * LANES) return weigh_tile<E, 2>(step, desk, rows, blocks, sums);
    weigh_tile<E, 1>(step, desk, rows, blocks, sums);
}

// ------------------------------------------------------------------------------------------------ softmax of one row

INLINE Floats gather(const float* bias, long reach, Ints distance) {
    Floats values;
    for (int i = 0; i < LANES; i++) values[i] = bias[max(min(long(distance[i]), reach), -reach) + reach];
    return values;
}

// Scale, cap, bias and mask a row's raw scores of `count` keys from `first_key` on, in place; returns the largest.
// key_scales: null where the keys have none of their own.
template <class E>
float finish_scores(
    const Step<E>& step, const Place& place, long first_key, int count, const float* key_scales, float* scores
) {
    const Scores how = step.scores;
    const float scale = how.scale * step.cache.key_scale;
    const float slope = how.slopes ? how.slopes[place.head] : 0.0f;
    const float* bias = how.bias ? how.bias + place.head * (2 * how.reach + 1) : nullptr;
    const Ints stop = all(int32_t(place.visible - place.position));
    const Ints start = all(int32_t(step.blind(place.position)));
    Floats best = all(NEVER);
    for (int i = 0; i < count; i += LANES) {
        const Ints distance = all(int32_t(first_key + i - place.position)) + iota();
        Floats score = load(scores + i) * scale;
        if (key_scales) score *= load(key_scales + i);
        if (how.cap) score = tanh(score / how.cap) * how.cap;
        if (slope) score += __builtin_convertvector(distance, Floats) * slope;
        if (bias) score += gather(bias, how.reach, distance);
        score = (distance >= stop) | (distance <= start) ? all(NEVER) : score;
        store(scores + i, score);
        best = max(best, score);
    }
    return largest(best);
}

// The weights of a row's `count` keys relative to the largest score; returns their sum. value_scales: what the weights
// are multiplied by where they meet the values; null: nothing.
template <class E>
float weigh(const float* scores, int count, float best, const float* value_scales, Factor<E>* weights) {
    const float base = best == NEVER ? 0.0f : best;  // no key is visible: every weight is 0
    Floats total = {};
    for (int i = 0; i < count; i += LANES) {
        const Floats weight = exp(load(scores + i) - base);
        // What was never written has any scale, even NaN.
        const Floats stored = value_scales ? (weight > Floats{} ? weight * load(value_scales + i) : Floats{}) : weight;
        store(weights + i, rounded<E>(stored));
        total += weight;
    }
    return sum(total);
}

// Add what is known from later keys.
void fold(const Partial& into, const Partial& part, long rows, long value_dim) {
    for (long row = 0; row < rows; row++) {
        if (part.largest[row] == NEVER) continue;
        const float best = into.largest[row] > part.largest[row] ? into.largest[row] : part.largest[row];
        const float kept = exp(into.largest[row] - best), added = exp(part.largest[row] - best);
        into.largest[row] = best;
        into.total[row] = into.total[row] * kept + part.total[row] * added;
        float* sums = into.sums + row * value_dim;
        for (long i = 0; i < value_dim; i++) sums[i] = sums[i] * kept + part.sums[row * value_dim + i] * added;
    }
}

void clear(const Partial& partial, long rows, long value_dim) {
    for (long row = 0; row < rows; row++) partial.largest[row] = NEVER, partial.total[row] = 0;
    memset(partial.sums, 0, rows * value_dim * sizeof(float));
}

// ---------------------------------------------------------------------------------------------- tasks and their chunks

// Put a task's queries on the desk.
template <class E>
void prepare(const Step<E>& step, const Task& task, Desk<E>& desk) {
    const int blocks = blocks_of(step.words());
    const Parts parts(task.rows, ROWS);
    for (int t = 0; t < parts.number; t++) {
        Tile& tile = desk.tiles[t];
        Word* left = desk.queries + parts.first(t) * blocks * LEFT_ROW<E>;
        for (int row = 0; row < parts.length(t); row++, left += LEFT_ROW<E>) {
            const Place place = tile.places[row] = place_of(step, task, parts.first(t) + row);
            const E* query = step.q + place.token * step.q_stride + place.head * step.head_dim;
            pack_factors(left, parts.length(t), query, step.head_dim);
            tile.stop_key = place.visible;
        }
    }
}

// Turn a square of words: row i, lane j becomes row j, lane i.
INLINE void transpose(Words (&rows)[LANES]) {
#pragma GCC unroll 4
    for (int width = LANES / 2; width; width /= 2) {
        // Of two rows that are `width` apart: the lanes of both whose number lacks that bit, and those that have it.
        const Ints has = (iota() & width) != 0;
        const Ints lacking = iota() + (has & (LANES - width)), having = lacking + width;
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) {
            if (i & width) continue;
            const Words first = rows[i], second = rows[i + width];
            rows[i] = __builtin_shuffle(first, second, lacking);
            rows[i + width] = __builtin_shuffle(first, second, having);
        }
    }
}

// The first tokens of a block of values, zeros behind them: memory that was never written may hold NaN, which would
// survive a weight of 0.
template <class E>
void copy_values(Word* to, const Word* from, long tokens, long head_dim) {
    const long width = value_width(head_dim);
    memset(to, 0, BLOCK_TOKENS / PER_WORD<E> * width * sizeof(Word));
    for (; tokens > 0; tokens -= PER_WORD<E>, to += width, from += head_dim)
        for (long i = 0; i < head_dim; i++) to[i] = tokens < PER_WORD<E> ? from[i] & 0xFFFF : from[i];
}

// Values of a block, LANES words of keys at a time, from the words of keys `first` to `first` + LANES.
template <class E>
INLINE void share_square(Word* to, const Word* keys, long first, long tokens, long width) {
    for (long begin = 0; begin < BLOCK_TOKENS; begin += LANES) {
        Words square[LANES];
        for (int i = 0; i < LANES; i++) square[i] = load(keys + (first + i) * BLOCK_TOKENS + begin);
        transpose(square);
        for (long i = tokens > begin ? tokens - begin : 0; i < LANES; i++) square[i] = Words{};
        if constexpr (PER_WORD<E> == 1) {
            for (int i = 0; i < LANES; i++) store(to + (begin + i) * width + first, square[i]);
        } else {
            const Ints low = (iota() >> 1) + ((iota() & 1) * LANES), high = low + LANES / 2;
            for (int i = 0; i < LANES; i += 2) {
                const Words even = (square[i] & 0xFFFFu) | square[i + 1] << 16;
                const Words odd = square[i] >> 16 | (square[i + 1] & 0xFFFF0000u);
                Word* at = to + (begin + i) / 2 * width + 2 * first;
                store(at, __builtin_shuffle(even, odd, low));
                store(at + LANES, __builtin_shuffle(even, odd, high));
            }
        }
    }
}

// Values of a block from its keys, of the first `tokens` tokens, zeros behind them.
template <class E>
void share_keys(Word* to, const Word* keys, long tokens, long value_dim) {
    constexpr int W = PER_WORD<E>;
    const long width = value_width(value_dim), words = value_dim / W;
    if (words >= LANES) {
        for (long first = 0; first < words; first += LANES)
            share_square<E>(to, keys, min(first, words - LANES), tokens, width);
        return;
    }
    const E* from = reinterpret_cast<const E*>(keys);
    E* values = reinterpret_cast<E*>(to);
    memset(to, 0, BLOCK_TOKENS / W * width * sizeof(Word));
    for (long token = 0; token < tokens; token++)
        for (long i = 0; i < value_dim; i++)
            values[(token / W * width + i) * W + token % W] = from[(i / W * BLOCK_TOKENS + token) * W + i % W];
}

// Where a chunk's blocks are: body(block, which of all heads' blocks), the last one again for those that are missing.
template <class E, class Body>
INLINE void each_block(const Step<E>& step, const Task& task, long chunk, const Body& body) {
    const int64_t* table = step.block_tables + task.sequence * step.table_stride;
    const long first = chunk * CHUNK_BLOCKS<E>, last = (task.stop_key - 1) / BLOCK_TOKENS;
    for (int block = 0; block < CHUNK_BLOCKS<E>; block++)
        body(block, table[min(first + block, last)] * step.kv_heads + task.kv_head);
}

// Point the desk at a chunk, of which nothing is expanded yet.
template <class E>
void open_chunk(const Step<E>& step, const Task& task, long chunk, Desk<E>& desk) {
    const long size = BLOCK_TOKENS * step.head_dim * element_bytes<E>(step.cache.kind);
    desk.expanded_keys = desk.expanded_values = 0;
    desk.keeps_keys = task.rows > ROWS || step.shares;
    each_block(step, task, chunk, [&](int block, long index) {
        const uint8_t *keys = step.keys + index * size, *values = step.values + index * size;
        const Word* words = reinterpret_cast<const Word*>(keys);
        if (step.has_codes()) words = desk.key_copies + desk.key_copy(block) * BLOCK_TOKENS * step.words();
        for (int v = 0; v < KEY_VECTORS; v++) desk.keys[block * KEY_VECTORS + v] = words + v * LANES;
        desk.stored_values[block] = reinterpret_cast<const Word*>(values);
        desk.key_codes[block] = keys, desk.value_codes[block] = values;
        if (step.cache.kind != INT8) return;
        desk.stored_key_scales[block] = step.key_scales + index * BLOCK_TOKENS;
        desk.stored_value_scales[block] = step.value_scales + index * BLOCK_TOKENS;
        __builtin_prefetch(desk.stored_value_scales[block], 0, 2);
    });
}

// Say which chunk comes after the one that will be opened.
template <class E>
void expect_chunk(const Step<E>& step, const Task& task, long chunk, Desk<E>& desk) {
    const long size = BLOCK_TOKENS * step.head_dim * element_bytes<E>(step.cache.kind);
    each_block(step, task, chunk, [&](int block, long index) {
        desk.next_keys[block] = reinterpret_cast<const Word*>(step.keys + index * size);
        if (step.cache.kind == INT8) __builtin_prefetch(step.key_scales + index * BLOCK_TOKENS, 0, 2);
    });
}

// The values of the open chunk's first `keys` keys, zeros behind them: where they are stored, or copies.
template <class E>
void take_values(Desk<E>& desk, int keys, long head_dim) {
    for (int block = 0; block < blocks_of_keys(keys); block++) {
        const int tokens = int(min(keys - block * BLOCK_TOKENS, BLOCK_TOKENS));
        desk.values[block] = desk.stored_values[block];
        if (tokens == BLOCK_TOKENS && head_dim >= LANES) continue;
        Word* copy = desk.copies + block * (BLOCK_TOKENS / PER_WORD<E>) * value_width(head_dim);
        copy_values<E>(copy, desk.stored_values[block], tokens, head_dim);
        desk.values[block] = copy;
    }
}

// Make the values of the open chunk's first `keys` keys of these, as far as they are not yet: of a block that is not full,
// again for rows that see more of it.
template <class E>
void share_values(const Step<E>& step, Desk<E>& desk, int keys) {
    const long size = BLOCK_TOKENS / PER_WORD<E> * value_width(step.value_dim);
    for (int block = desk.expanded_values; block < blocks_of_keys(keys); block++) {
        const int tokens = int(min(keys - block * BLOCK_TOKENS, BLOCK_TOKENS));
        Word* copy = desk.copies + block * size;
        desk.values[block] = copy;
        share_keys<E>(copy, desk.keys[block * KEY_VECTORS], tokens, step.value_dim);
        if (tokens == BLOCK_TOKENS) desk.expanded_values = block + 1;
    }
}

// Expand the values of the open chunk's first `keys` keys, as far as they are not yet.
// Nothing is put in place of what was never written: no code stands for NaN, and its weight is 0.
template <class E>
void expand_values(const Step<E>& step, Desk<E>& desk, int keys) {
    const long size = BLOCK_TOKENS * step.head_dim, copy_size = BLOCK_TOKENS / PER_WORD<E> * value_width(step.head_dim);
    for (; desk.expanded_values < blocks_of_keys(keys); desk.expanded_values++) {
        const int block = desk.expanded_values;
        Word* copy = desk.copies + block * copy_size;
        desk.values[block] = copy;
        if (step.head_dim >= LANES) {
            expand<E>(step.cache.kind, copy, desk.value_codes[block], size);
        } else {
            Word narrow[BLOCK_TOKENS * LANES];
            expand<E>(step.cache.kind, narrow, desk.value_codes[block], size);
            copy_values<E>(copy, narrow, BLOCK_TOKENS, step.head_dim);
        }
    }
}

// Load the scales of the open chunk's first blocks.
template <class E>
void load_scales(Desk<E>& desk, int blocks) {
    for (int block = 0; block < blocks; block++) {
        for (int i = 0; i < BLOCK_TOKENS; i += LANES) {
            const int at = block * BLOCK_TOKENS + i;
            store(desk.key_scales + at, load(desk.stored_key_scales[block] + i));
            store(desk.value_scales + at, load(desk.stored_value_scales[block] + i));
        }
    }
}

// What `rows` rows of a tile find in the `keys` first keys of the open chunk.
template <class E>
void attend_tile(
    const Step<E>& step, Desk<E>& desk, const Tile& tile, const Word* left, int rows, long first_key, int keys,
    const Partial& part
) {
    const int blocks = blocks_of_keys(keys);
    const bool has_scales = step.cache.kind == INT8;
    const float* key_scales = has_scales ? desk.key_scales : nullptr;
    const float* value_scales = has_scales ? desk.value_scales : nullptr;
    score_tile(step, desk, left, rows, blocks, desk.scores);
    if (has_scales) load_scales(desk, blocks);
    for (int row = 0; row < rows; row++) {
        float* scores = desk.scores + row * CHUNK<E>;
        Factor<E>* weights = reinterpret_cast<Factor<E>*>(desk.weights + row * LEFT_ROW<E>);
        part.largest[row] = finish_scores(step, tile.places[row], first_key, blocks * BLOCK_TOKENS, key_scales, scores);
        part.total[row] = weigh<E>(scores, blocks * BLOCK_TOKENS, part.largest[row], value_scales, weights);
    }
    if (step.shares)
        share_values(step, desk, keys);
    else if (step.has_codes())
        expand_values(step, desk, keys);
    else
        take_values(desk, keys, step.head_dim);
    weigh_tile(step, desk, rows, blocks, part.sums);
}

// What the rows of the prepared task find in one chunk.
template <class E>
void attend_chunk(const Step<E>& step, const Task& task, Desk<E>& desk, long chunk, const Partial& part) {
    const Parts parts(task.rows, ROWS);
    const long first_key = chunk * CHUNK<E>;
    const auto keys_of = [&](int t) { return int(min(desk.tiles[t].stop_key - first_key, long(CHUNK<E>))); };
    open_chunk(step, task, chunk, desk);
    for (int t = 0; t < parts.number; t++) {
        const int first = parts.first(t), rows = parts.length(t), keys = keys_of(t);
        const Partial mine = part.from(first, step.value_dim);
        const Word* left = desk.queries + first * blocks_of(step.words()) * LEFT_ROW<E>;
        if (keys > 0)
            attend_tile(step, desk, desk.tiles[t], left, rows, first_key, keys, mine);
        else
            clear(mine, rows, step.value_dim);
    }
}

template <class E>
void finish(const Step<E>& step, const Task& task, const Partial& folded) {
    for (int row = 0; row < task.rows; row++) {
        const Place place = place_of(step, task, row);
        E* out = step.out + (place.token * step.heads + place.head) * step.value_dim;
        const float* sums = folded.sums + row * step.value_dim;
        float total = folded.total[row];
        if (step.scores.sinks && total > 0) total += exp(step.scores.sinks[place.head] - folded.largest[row]);
        const float scale = total > 0 ? step.cache.value_scale / total : 0.0f;
        for (long i = 0; i < step.value_dim; i += LANES)
            store_part(out + i, load_part(sums + i, step.value_dim - i) * scale, step.value_dim - i);
    }
}

// Tasks one after the other, their chunks folded as they come.
template <class E>
void attend_tasks(const Step<E>& step, const Task* tasks, Queue& queue) {
    Desk<E> desk(step);
    for (long index, stop; queue.take(index, stop);) {
        for (; index < stop; index++) {
            const Task& task = tasks[index];
            const Partial part(desk.part, task.rows), folded(desk.folded, task.rows);
            prepare(step, task, desk);
            for (long chunk = task.first_chunk; chunk < task.stop_chunk; chunk++) {
                const bool is_last = chunk + 1 == task.stop_chunk;
                const Task& next = is_last && index + 1 < stop ? tasks[index + 1] : task;
                expect_chunk(step, next, is_last ? next.first_chunk : chunk + 1, desk);
                const bool is_first = chunk == task.first_chunk;
                attend_chunk(step, task, desk, chunk, is_first ? folded : part);
                if (!is_first) fold(folded, part, task.rows, step.value_dim);
            }
            finish(step, task, folded);
        }
    }
}

// Where there are fewer tasks than threads: first all chunks of all tasks, then each task's chunks are folded.
template <class E>
void attend_units(const Step<E>& step, const Task* tasks, float* parts, long size, Queue& queue) {
    Desk<E> desk(step);
    const Task* prepared = nullptr;
    const Task* task = tasks;
    for (long unit, stop; queue.take(unit, stop);) {
        for (; unit < stop; unit++) {
            while (unit >= task->first_unit + task->stop_chunk - task->first_chunk) task++;
            if (prepared != task) prepare(step, *task, desk);
            prepared = task;
            const long chunk = task->first_chunk + unit - task->first_unit;
            expect_chunk(step, *task, min(chunk + 1, task->stop_chunk - 1), desk);
            attend_chunk(step, *task, desk, chunk, Partial(parts + unit * size, task->rows));
        }
    }
}

template <class E>
void fold_units(const Step<E>& step, const Task* tasks, float* parts, long size, Queue& queue) {
    for (long index, stop; queue.take(index, stop);) {
        for (; index < stop; index++) {
            const Task& task = tasks[index];
            const Partial folded(parts + task.first_unit * size, task.rows);
            for (long i = 1; i < task.stop_chunk - task.first_chunk; i++)
                fold(folded, Partial(parts + (task.first_unit + i) * size, task.rows), task.rows, step.value_dim);
            finish(step, task, folded);
        }
    }
}

template <class E>
Task task_of(const Step<E>& step, int sequence, int kv_head, int first_row, int rows, long first_unit) {
    Task task{sequence, kv_head, first_row, rows, 0, 0, 0, first_unit};
    const Place first = place_of(step, task, 0), last = place_of(step, task, rows - 1);
    task.first_chunk = max(first.position + step.blind(first.position) + 1, 0L) / CHUNK<E>;
    task.stop_key = last.visible;
    task.stop_chunk = max((task.stop_key + CHUNK<E> - 1) / CHUNK<E>, task.first_chunk + 1);
    return task;
}

// All tasks of the step, a sequence's together; returns how many.
template <class E>
long list_tasks(const Step<E>& step, Workspace& memory, Task*& tasks) {
    const auto parts_of = [&](int s) { return Parts((step.start(s + 1) - step.start(s)) * step.group(), ROWS * TILES); };
    long count = 0, units = 0;
    for (int s = 0; s < step.sequences; s++) count += step.kv_heads * parts_of(s).number;
    tasks = memory.take<Task>(count);
    Task* task = tasks;
    for (int s = 0; s < step.sequences; s++) {
        const Parts parts = parts_of(s);
        for (int head = 0; head < step.kv_heads; head++) {
            for (int part = 0; part < parts.number; part++, task++) {
                *task = task_of(step, s, head, parts.first(part), parts.length(part), units);
                units += task->stop_chunk - task->first_chunk;
            }
        }
    }
    return count;
}

template <class E>
void attend_step(const Step<E>& step, int threads) {
    static thread_local Workspace task_memory, part_memory;
    Task* tasks;
    const long count = list_tasks(step, task_memory, tasks);
    if (!count) return;
    const long units = tasks[count - 1].first_unit + tasks[count - 1].stop_chunk - tasks[count - 1].first_chunk;
    if (threads == 1 || count >= 4 * threads || units == count)
        return on_threads(threads, count, 1, [&](Queue& queue) { attend_tasks(step, tasks, queue); });
    const long size = Partial::size(ROWS * TILES, step.value_dim);
    float* parts = part_memory.take<float>(units * size);
    on_threads(threads, units, 1, [&](Queue& queue) { attend_units(step, tasks, parts, size, queue); });
    on_threads(threads, count, 1, [&](Queue& queue) { fold_units(step, tasks, parts, size, queue); });
}

// See Step for the shapes; kv is [2, B, K, 16, W], or [1, …] where values are the first `rank` numbers of keys.
template <class E>
void attend(
    const Scores* scores, const Cache* cache, const E* q, long q_stride, const uint8_t* kv, long blocks, E* out,
    const int64_t* positions, const int64_t* visible, const int64_t* block_tables, long table_stride,
    const int64_t* starts, int sequences, int heads, int kv_heads, int head_dim, int rank, long window, int threads
) {
    const uint8_t* values = rank ? kv : kv + part_bytes<E>(cache->kind, blocks, kv_heads, head_dim);
    const long scales_at = blocks * kv_heads * BLOCK_TOKENS * head_dim;  // in int8
    attend_step(
        Step<E>{
            *scores, *cache, q, kv, values, reinterpret_cast<const Bf16*>(kv + scales_at),
            reinterpret_cast<const Bf16*>(values + scales_at), out, positions, visible, block_tables, starts, q_stride, table_stride, window,
            sequences, heads, kv_heads, head_dim, rank ? rank : head_dim, rank > 0},
        threads
    );
}

// -------------------------------------------------------------------------------------------------------- the cache

// Keys [H] of `count` tokens, `stride` elements apart, to a block's keys from one place on: squares of words, and what is
// left token by token.
template <class E>
INLINE void write_keys(Word* to, const E* keys, long stride, long count, long words) {
    const auto at = [&](long token, long word) { return reinterpret_cast<const Word*>(keys + token * stride) + word; };
    long token = 0;
    for (; token + LANES <= count && words >= LANES; token += LANES) {
        for (long start = 0; start < words; start += LANES) {
            const long first = min(start, words - LANES);
            Words square[LANES];
            for (int i = 0; i < LANES; i++) square[i] = load(at(token + i, first));
            transpose(square);
            for (int i = 0; i < LANES; i++) store(to + (first + i) * BLOCK_TOKENS + token, square[i]);
        }
    }
    for (; token < count; token++)
        for (long word = 0; word < words; word++) memcpy(to + word * BLOCK_TOKENS + token, at(token, word), sizeof(Word));
}

// The values [H] of one token, to its halves of words, or of two that share their words. The other halves of one token's
// words are left alone: they may be another thread's.
template <class E>
INLINE void write_value(E* to, const E* value, long head_dim) {
    for (long i = 0; i < head_dim; i++) to[i * PER_WORD<E>] = value[i];
}

INLINE void write_pair(Bf16* to, const Bf16* first, const Bf16* second, long head_dim) {
    long i = 0;
    for (; i + LANES <= head_dim; i += LANES)
        store(reinterpret_cast<Word*>(to + 2 * i), (Words)load(second + i) | (Words)load(first + i) >> 16);
    for (; i < head_dim; i++) to[2 * i] = first[i], to[2 * i + 1] = second[i];
}

// Values likewise, to a block's values from place `place` on.
template <class E>
INLINE void write_values(E* to, const E* values, long stride, long count, long place, long head_dim) {
    constexpr int W = PER_WORD<E>;
    for (const long stop = place + count; place < stop; place++, values += stride) {
        E* words = to + place / W * W * head_dim;
        if constexpr (W == 2) {
            if (place % 2 == 0 && place + 1 < stop) {
                write_pair(words, values, values + stride, head_dim);
                place++, values += stride;
                continue;
            }
        }
        write_value(words + place % W, values, head_dim);
    }
}

// Tokens whose slots follow each other in one block.
struct Run {
    long first, count, block, place;
};

// The run that starts with a token; none, of no tokens, where the token belongs to one that starts before it, or nowhere.
INLINE Run run_from(const int64_t* slots, long tokens, long first) {
    const auto follows = [&](long token) {
        return token && token < tokens && slots[token] == slots[token - 1] + 1 && slots[token] % BLOCK_TOKENS;
    };
    Run run{first, 0, slots[first] / BLOCK_TOKENS, slots[first] % BLOCK_TOKENS};
    if (slots[first] < 0 || follows(first)) return run;
    do run.count++;
    while (follows(first + run.count));
    return run;
}

// Keys and values of `count` tokens, `stride` elements apart, to their places in a block as they were computed.
template <class E>
struct WriteAsComputed {
    static constexpr int kind = AS_COMPUTED;
    INLINE void operator()(
        uint8_t* keys, uint8_t* values, Bf16*, Bf16*, const E* key, const E* value, const Run& run
    ) const {
        write_keys(reinterpret_cast<Word*>(keys) + run.place, key, k_stride, run.count, head_dim / PER_WORD<E>);
        if (!value) return;
        write_values(reinterpret_cast<E*>(values), value, v_stride, run.count, run.place, head_dim);
    }
    long k_stride, v_stride, head_dim;
};

constexpr float MOST = 0x1p127f;  // larger numbers are taken for it, so that what is read stays finite

// A row's codes, element i at to[index(i)]; returns the scale of a row in int8, which has one of its own.
template <class E, int KIND, class Index>
INLINE Bf16 write_row(uint8_t* to, const E* row, long head_dim, float divisor, const Index& index) {
    Bf16 scale = 0;
    if constexpr (KIND == INT8) {
        Floats best = {};
        for (long i = 0; i < head_dim; i += LANES)
            best = max(best, size_of(without_nan(load_part(row + i, head_dim - i))));
        scale = from_float<Bf16>(largest(min(best, all(MOST))) / 127.0f);
        divisor = max(all(to_float(scale)), all(1.17549435e-38f))[0];
    }
    for (long i = 0; i < head_dim; i += LANES) {
        const Words codes = encode<KIND>(load_part(row + i, head_dim - i) / divisor);
        const long count = min(head_dim - i, long(LANES));
        for (int lane = 0; lane < count; lane++) to[index(i + lane)] = uint8_t(codes[lane]);
    }
    return scale;
}

template <class E, int KIND>
struct WriteCodes {
    static constexpr int kind = KIND;
    INLINE void operator()(
        uint8_t* keys, uint8_t* values, Bf16* key_scales, Bf16* value_scales, const E* key, const E* value, const Run& run
    ) const {
        constexpr int W = PER_WORD<E>;
        for (long i = 0; i < run.count; i++, key += k_stride) {
            const long token = run.place + i;
            const Bf16 key_scale = write_row<E, KIND>(keys, key, head_dim, cache.key_scale, [&](long feature) {
                return (feature / W * BLOCK_TOKENS + token) * W + feature % W;
            });
            if (KIND == INT8) key_scales[token] = key_scale;
            if (!value) continue;
            const Bf16 value_scale = write_row<E, KIND>(values, value, head_dim, cache.value_scale, [&](long feature) {
                return (token / W * head_dim + feature) * W + token % W;
            });
            if (KIND == INT8) value_scales[token] = value_scale;
            value += v_stride;
        }
    }
    long k_stride, v_stride, head_dim;
    const Cache& cache;
};

// Put k and v [T, K, H] into their slots [T] of kv [2, B, K, 16, W], or k alone, where v is null; a slot below 0 is nowhere. A run is written by the
// thread that takes its first token.
template <class E, class Write>
void write_runs(
    const Write& write_run, uint8_t* kv, long blocks, const E* k, const E* v, const int64_t* slots, long tokens,
    int kv_heads, int threads
) {
    const long head_dim = write_run.head_dim, size = BLOCK_TOKENS * head_dim * element_bytes<E>(Write::kind);
    uint8_t* const values = kv + part_bytes<E>(Write::kind, blocks, kv_heads, head_dim);
    Bf16* const key_scales = reinterpret_cast<Bf16*>(kv + blocks * kv_heads * size);
    Bf16* const value_scales = reinterpret_cast<Bf16*>(values + blocks * kv_heads * size);
    on_threads(threads, tokens, 4, [&](Queue& queue) {
        for (long token, stop; queue.take(token, stop);) {
            for (; token < stop; token++) {
                const Run run = run_from(slots, tokens, token);
                for (int head = 0; run.count && head < kv_heads; head++) {
                    const long index = run.block * kv_heads + head, scales_at = index * BLOCK_TOKENS;
                    const E* key = k + token * write_run.k_stride + head * head_dim;
                    const E* value = v ? v + token * write_run.v_stride + head * head_dim : nullptr;
                    write_run(
                        kv + index * size, values + index * size, key_scales + scales_at, value_scales + scales_at, key,
                        value, run
                    );
                }
            }
        }
    });
}

template <class E>
void write(
    const Cache* cache, uint8_t* kv, long blocks, const E* k, const E* v, long k_stride, long v_stride,
    const int64_t* slots, long tokens, int kv_heads, int head_dim, int threads
) {
    const auto with = [&](const auto& write_run) {
        write_runs(write_run, kv, blocks, k, v, slots, tokens, kv_heads, threads);
    };
    switch (cache->kind) {
        case INT8: return with(WriteCodes<E, INT8>{k_stride, v_stride, head_dim, *cache});
        case E4M3: return with(WriteCodes<E, E4M3>{k_stride, v_stride, head_dim, *cache});
        case E5M2: return with(WriteCodes<E, E5M2>{k_stride, v_stride, head_dim, *cache});
        default: return with(WriteAsComputed<E>{k_stride, v_stride, head_dim});
    }
}

}  // namespace

EXPORT(attend_f32, attend<float>)
EXPORT(attend_bf16, attend<Bf16>)
EXPORT(write_f32, write<float>)
EXPORT(write_bf16, write<Bf16>)
