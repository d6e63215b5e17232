// The gated delta rule, one token after the other: convolution, recurrence, norm and gate in one pass.
//
// A head's memory is cut into tiles of few columns, [key_dim, TILE] one behind the other, which do not depend on each
// other: a tile stays in the nearest cache while a block of tokens passes. So a prompt's tokens cost two multiplications
// and two additions for each number of a memory and no more memory traffic than the matrices, and every number is the
// same whether a token comes in a prompt, in a chunk of it, or alone. The chunked form of the paper turns most of this
// into matrix products, and sums in an order that depends on where chunks begin.
//
// Shapes: T tokens of the step, C channels, N heads, K heads of keys, d features of a key, v of a value.

#include "convolution.h"

namespace {

constexpr long TILE = 32, BLOCK = 16;  // columns of a memory, and tokens that pass a tile together
constexpr int VECTORS = TILE / LANES;

struct Delta {
    long heads, key_heads, key_dim, value_dim, taps;
    const float* conv;       // [taps, C], the latest token last
    const float* decay;      // [N]
    const float* step_bias;  // [N]
    const float* norm;       // [v]
    float eps;

    long share() const { return heads / key_heads; }
    long channels() const { return 2 * key_heads * key_dim + heads * value_dim; }
    long memory_size() const { return heads * key_dim * value_dim; }
};

// Of one sequence.
template <class E>
struct Tokens {
    const E* qkvz;  // of its first token; rows of C + N v
    const E* ba;    // rows of 2 N
    E* out;         // rows of N v
    Run run;        // its state has memories, then what the convolution remembers

    auto convolution(const Delta& how) const {
        const auto channel_of = [qkvz = qkvz, stride = how.channels() + how.heads * how.value_dim](
                                    long token, long channel, long count
                                ) { return load_part(qkvz + token * stride + channel, count); };
        float* past = run.state + how.memory_size();
        return Convolution{how.channels(), how.taps, how.conv, nullptr, past, run.is_fresh, channel_of};
    }
};

// What a block of tokens has for one head of keys.
struct Inputs {
    float *q, *k;        // [BLOCK, d]
    float* v;            // [BLOCK, share v]
    float *kept, *beta;  // [BLOCK, share]
    float* read;         // [BLOCK, share v]
};

// out [width] = the activation of the convolution of `width` channels at one token. The activation is a loop of its own,
// so that several vectors of it are under way at once: each is a long chain.
template <class Input>
INLINE void convolve(const Convolution<Input>& convolution, long token, long channel, long width, float* out) {
    convolution.store(token, channel, width, out);
    for (long i = 0; i < width; i += LANES)
        store_part(out + i, activate<SILU>(load_part(out + i, width - i)), width - i);
}

INLINE float squares(const float* x, long width) {
    Floats total = {};
    for (long i = 0; i < width; i += LANES) {
        const Floats part = load_part(x + i, width - i);
        total = fused(part, part, total);
    }
    return sum(total);
}

INLINE void scale_to_length(float* x, long width, float length) {
    const Floats factor = all(length / __builtin_sqrtf(squares(x, width) + 1e-6f));
    for (long i = 0; i < width; i += LANES) store_part(x + i, load_part(x + i, width - i) * factor, width - i);
}

// log(1 + e^x)
INLINE Floats softplus(Floats x) { return x > all(20.0f) ? x : log(1.0f + exp(x)); }

// How much of a memory each token keeps, and how much it corrects.
template <class E>
INLINE void prepare_gates(const Delta& how, const Tokens<E>& run, long head, long first, long count, const Inputs& in) {
    const long share = how.share(), numbers = BLOCK * share;
    memset(in.kept, 0, numbers * sizeof(float));
    memset(in.beta, 0, numbers * sizeof(float));
    for (long t = 0; t < count; t++) {
        const E* ba = run.ba + (first + t) * 2 * how.heads + head * share;
        for (long j = 0; j < share; j++) {
            in.beta[t * share + j] = to_float(ba[j]);
            in.kept[t * share + j] = to_float(ba[how.heads + j]) + how.step_bias[head * share + j];
        }
    }
    for (long i = 0; i < numbers; i += LANES) {
        store(in.beta + i, 1.0f / (1.0f + exp(-load(in.beta + i))));
        store(in.kept + i, softplus(load(in.kept + i)));
    }
    for (long i = 0; i < count * share; i++) in.kept[i] *= -how.decay[head * share + i % share];
    for (long i = 0; i < numbers; i += LANES) store(in.kept + i, exp(load(in.kept + i)));
}

// Fetches what a head has of one token, which is far from what it has of the next one.
template <class E>
INLINE void fetch(const Delta& how, const Tokens<E>& run, long head, long token) {
    const long d = how.key_dim, values = how.share() * how.value_dim, keys = how.key_heads * d;
    const E* const row = run.qkvz + token * (how.channels() + how.heads * how.value_dim);
    const auto part = [](const E* from, long width) {
        for (long i = 0; i < width; i += 64 / sizeof(E)) __builtin_prefetch(from + i, 0, 2);
    };
    part(row + head * d, d);
    part(row + keys + head * d, d);
    part(row + 2 * keys + head * values, values);
    part(row + how.channels() + head * values, values);
}

template <class E>
void prepare(const Delta& how, const Tokens<E>& run, long head, long first, long count, const Inputs& in) {
    const long d = how.key_dim, values = how.share() * how.value_dim, keys = how.key_heads * d;
    const auto convolution = run.convolution(how);
    prepare_gates(how, run, head, first, count, in);
    for (long t = 0; t < count; t++) {
        fetch(how, run, head, first + t + BLOCK);
        float *q = in.q + t * d, *k = in.k + t * d;
        convolve(convolution, first + t, head * d, d, q);
        convolve(convolution, first + t, keys + head * d, d, k);
        convolve(convolution, first + t, 2 * keys + head * values, values, in.v + t * values);
        scale_to_length(q, d, 1.0f / __builtin_sqrtf(d));
        scale_to_length(k, d, 1.0f);
    }
}

using TileRow = Floats[VECTORS];

// What a tile [d, TILE] answers to a key. The tile behind it is fetched meanwhile.
INLINE void ask(const float* tile, const float* k, long d, TileRow& held) {
    for (long i = 0; i < d; i++, tile += TILE) {
        for (long line = 0; line < TILE; line += 16) __builtin_prefetch(tile + TILE * d + line, 1, 2);
        const Floats key = all(k[i]);
#pragma GCC unroll 8
        for (int j = 0; j < VECTORS; j++) held[j] = fused(key, load(tile + j * LANES), held[j]);
    }
}

// A tile takes in a token and is read by its query; where there is a `next` token, what it answers to that one's key is
// found on the same way through it.
template <bool HAS_NEXT>
INLINE void pass(
    float* tile, const float* q, const float* k, const float* next, long d, float kept, const TileRow& error,
    TileRow& found, TileRow& held
) {
    const Floats keeping = all(kept);
    for (long i = 0; i < d; i++, tile += TILE) {
        const Floats query = all(q[i]), key = all(k[i]), next_key = HAS_NEXT ? all(next[i]) : Floats{};
#pragma GCC unroll 8
        for (int j = 0; j < VECTORS; j++) {
            const Floats now = fused(key, error[j], keeping * load(tile + j * LANES));
            store(tile + j * LANES, now);
            found[j] = fused(query, now, found[j]);
            if (HAS_NEXT) held[j] = fused(next_key, now, held[j]);
        }
    }
}

// One tile takes in `count` tokens; value, read: of the first one, others `values` apart; kept, beta: `share` apart.
void recur_tile(
    float* tile, const float* q, const float* k, long d, long count, const float* value, const float* kept,
    const float* beta, float* read, long values, long share
) {
    TileRow held = {};
    ask(tile, k, d, held);
    for (long t = 0; t < count; t++, q += d, k += d, value += values, read += values, kept += share, beta += share) {
        TileRow error, found = {};
#pragma GCC unroll 8
        for (int j = 0; j < VECTORS; j++) {
            error[j] = (load(value + j * LANES) - *kept * held[j]) * *beta;
            held[j] = Floats{};
        }
        if (t + 1 < count)
            pass<true>(tile, q, k, k + d, d, *kept, error, found, held);
        else
            pass<false>(tile, q, k, k, d, *kept, error, found, held);
        for (int j = 0; j < VECTORS; j++) store(read + j * LANES, found[j]);
    }
}

void recur(const Delta& how, float* memory, long head, long count, const Inputs& in) {
    const long d = how.key_dim, share = how.share(), values = share * how.value_dim;
    for (long j = 0; j < share; j++)
        for (long column = 0; column < how.value_dim; column += TILE) {
            float* tile = memory + ((head * share + j) * how.value_dim + column) * d;
            const long at = j * how.value_dim + column;
            recur_tile(tile, in.q, in.k, d, count, in.v + at, in.kept + j, in.beta + j, in.read + at, values, share);
        }
}

template <class E>
void finish(const Delta& how, const Tokens<E>& run, long head, long first, long count, const Inputs& in) {
    const long v = how.value_dim, inner = how.heads * v, share = how.share();
    for (long t = 0; t < count; t++)
        for (long j = 0; j < share; j++) {
            const float* read = in.read + (t * share + j) * v;
            const long at = (head * share + j) * v;
            const E* gates = run.qkvz + (first + t) * (how.channels() + inner) + how.channels() + at;
            const float scale = 1.0f / __builtin_sqrtf(squares(read, v) / v + how.eps);
            for (long i = 0; i < v; i += LANES)
                store(
                    run.out + (first + t) * inner + at + i,
                    load(read + i) * scale * load(how.norm + i) * activate<SILU>(load(gates + i))
                );
        }
}

// One head of keys, and the heads of values that share it, of one sequence.
template <class E>
void advance(const Delta& how, const Tokens<E>& tokens, long head, const Inputs& in) {
    const Run& run = tokens.run;
    const long d = how.key_dim, values = how.share() * how.value_dim, keys = how.key_heads * d;
    if (run.is_fresh) memset(run.state + head * values * d, 0, values * d * sizeof(float));
    for (long first = 0; first < run.tokens; first += BLOCK) {
        const long count = min(BLOCK, run.tokens - first);
        prepare(how, tokens, head, first, count, in);
        recur(how, run.state, head, count, in);
        finish(how, tokens, head, first, count, in);
    }
    const auto convolution = tokens.convolution(how);
    convolution.remember(run.tokens, head * d, d);
    convolution.remember(run.tokens, keys + head * d, d);
    convolution.remember(run.tokens, 2 * keys + head * values, values);
}

// out [T, N v] from qkvz [T, C + N v] and ba [T, 2 N]; for the others see `States`.
template <class E>
void delta(
    const Delta* how, const E* qkvz, const E* ba, float* state, long state_stride, const int64_t* rows,
    const int64_t* positions, const int64_t* starts, E* out, long sequences, int threads
) {
    const States states = {state, state_stride, rows, positions, starts};
    const long d = how->key_dim, values = how->share() * how->value_dim, inner = how->heads * how->value_dim;
    on_threads(threads, sequences * how->key_heads, 1, [&](Queue& queue) {
        thread_local Workspace workspace;
        float* at = workspace.take<float>(BLOCK * (2 * d + 2 * values + 2 * how->share()));
        Inputs in;
        in.q = at, in.k = in.q + BLOCK * d, in.v = in.k + BLOCK * d, in.read = in.v + BLOCK * values;
        in.kept = in.read + BLOCK * values, in.beta = in.kept + BLOCK * how->share();
        for (long unit, stop; queue.take(unit, stop);)
            for (; unit < stop; unit++) {
                const Run run = states.of(unit / how->key_heads);
                const long head = unit % how->key_heads;
                E* to = out + run.first * inner;
                if (!run.tokens) continue;
                if (!run.state) {  // what fills up a batch
                    const long width = values * sizeof(E);
                    for (long t = 0; t < run.tokens; t++) memset(to + t * inner + head * values, 0, width);
                    continue;
                }
                const E* own = qkvz + run.first * (how->channels() + inner);
                advance(*how, Tokens<E>{own, ba + run.first * 2 * how->heads, to, run}, head, in);
            }
    });
}

}  // namespace

EXPORT(delta_f32, delta<float>)
EXPORT(delta_bf16, delta<Bf16>)
