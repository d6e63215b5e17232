// Mamba-2, one token after the other, as in delta.cpp: the convolution of all channels, the recurrence, norm and gate.
//
// A head's memory is cut into tiles of few columns, [key_dim, TILE] one behind the other. A tile stays in the nearest
// cache while all tokens of a run pass, so that every number is the same however a sequence is divided into steps.
//
// Shapes: T tokens of the step, C channels, N heads, G groups of keys and queries, P numbers of a head, d of a key.

#include "convolution.h"

namespace {

constexpr long TILE = 32;      // columns of a memory
constexpr long CHANNELS = 256;  // that one thread convolves at a time
constexpr int VECTORS = TILE / LANES;

enum NormKind { NO_NORM, BEHIND, BEFORE };

struct Mamba {
    long heads, groups, head_dim, key_dim, taps, norm_kind;
    const float* conv;       // [taps, C], the latest token last
    const float* conv_bias;  // [C], or null
    const float* decay;      // [N]
    const float* step_bias;  // [N]
    const float* skip;       // [N]
    const float* norm;       // [N P]
    float eps, gate_scale, step_scale, least_step, most_step;

    long inner() const { return heads * head_dim; }
    long channels() const { return inner() + 2 * groups * key_dim; }
    long width() const { return inner() + channels() + heads; }
    long memory_size() const { return inner() * key_dim; }
};

// mixed [T, C] = the activation of the convolution, of `width` channels of one run.
template <class E>
void convolve(const Mamba& how, const Run& run, const E* zxbcdt, float* mixed, long first, long width) {
    const auto channel_of = [&](long token, long channel, long count) {
        return load_part(zxbcdt + token * how.width() + how.inner() + channel, count);
    };
    float* past = run.state + how.memory_size();
    const Convolution convolution = {how.channels(), how.taps, how.conv, how.conv_bias, past, run.is_fresh, channel_of};
    for (long t = 0; t < run.tokens; t++)
        for (long i = first; i < first + width; i += LANES) {
            const long count = first + width - i;
            store_part(mixed + t * how.channels() + i, activate<SILU>(convolution(t, i, count)), count);
        }
    convolution.remember(run.tokens, first, width);
}

// log(1 + e^x)
INLINE float softplus(float x) { return x > 20.0f ? x : log(all(1.0f + exp(x)))[0]; }

// One tile [d, TILE] fades, takes in value [TILE] under a key, and is read by a query into found [TILE].
INLINE void pass(float* tile, const float* k, const float* q, long d, const Floats* value, float kept, Floats* found) {
    Floats read[2][VECTORS] = {};
    for (long i = 0; i < d; i++)
#pragma GCC unroll 8
        for (int j = 0; j < VECTORS; j++) {
            float* at = tile + i * TILE + j * LANES;
            const Floats now = fused(all(k[i]), value[j], kept * load(at));
            store(at, now);
            read[i & 1][j] = fused(all(q[i]), now, read[i & 1][j]);
        }
    for (int j = 0; j < VECTORS; j++) found[j] = read[0][j] + read[1][j];
}

// All tokens of a run pass one tile of one head: read [T, N P].
template <class E>
void recur(const Mamba& how, const Run& run, const E* zxbcdt, const float* mixed, float* read, long head, long column) {
    const long d = how.key_dim, at = head * how.head_dim + column, group = head / (how.heads / how.groups);
    float* tile = run.state + at * d;
    if (run.is_fresh) memset(tile, 0, TILE * d * sizeof(float));
    for (long t = 0; t < run.tokens; t++) {
        const float *x = mixed + t * how.channels() + at, *k = mixed + t * how.channels() + how.inner() + group * d;
        const float raw = to_float(zxbcdt[t * how.width() + how.inner() + how.channels() + head]);
        const float soft = softplus(raw * how.step_scale + how.step_bias[head]);
        const float step = soft < how.least_step ? how.least_step : soft > how.most_step ? how.most_step : soft;
        Floats value[VECTORS], found[VECTORS];
        for (int j = 0; j < VECTORS; j++) value[j] = load(x + j * LANES) * step;
        pass(tile, k, k + how.groups * d, d, value, exp(-how.decay[head] * step), found);
        for (int j = 0; j < VECTORS; j++)
            store(read + t * how.inner() + at + j * LANES, fused(all(how.skip[head]), load(x + j * LANES), found[j]));
    }
}

// out [N P / G] = what one group has read for one token, normalised and gated.
template <class E>
void finish(const Mamba& how, const float* read, const E* gates, const float* norm, E* out, long width) {
    const auto gate_at = [&](long i) { return activate<SILU>(load(gates + i) * how.gate_scale); };
    Floats squares = {};
    for (long i = 0; i < width && how.norm_kind != NO_NORM; i += LANES) {
        const Floats y = how.norm_kind == BEHIND ? load(read + i) * gate_at(i) : load(read + i);
        squares = fused(y, y, squares);
    }
    const float scale = how.norm_kind == NO_NORM ? 1.0f : 1.0f / __builtin_sqrtf(sum(squares) / width + how.eps);
    for (long i = 0; i < width; i += LANES) store(out + i, load(read + i) * gate_at(i) * scale * load(norm + i));
}

// out [T, N P] from zxbcdt [T, 2 N P + 2 G d + N], by way of mixed [T, C] and read [T, N P]; where out is null, what
// has been read is all. For the others see `States`.
template <class E>
void mamba(
    const Mamba* how, const E* zxbcdt, float* state, long state_stride, const int64_t* rows, const int64_t* positions,
    const int64_t* starts, float* mixed, float* read, E* out, long sequences, int threads
) {
    const States states = {state, state_stride, rows, positions, starts};
    const long inner = how->inner(), channels = how->channels(), width = how->width();
    const long pieces = (channels + CHANNELS - 1) / CHANNELS, tiles = inner / TILE;
    on_threads(threads, sequences * pieces, max(THREAD_ELEMENTS / CHANNELS / how->taps, 1L), [&](Queue& queue) {
        for (long unit, stop; queue.take(unit, stop);)
            for (; unit < stop; unit++) {
                const Run run = states.of(unit / pieces);
                const long first = unit % pieces * CHANNELS, count = min(CHANNELS, channels - first);
                if (run.state) convolve(*how, run, zxbcdt + run.first * width, mixed + run.first * channels, first, count);
            }
    });
    on_threads(threads, sequences * tiles, 1, [&](Queue& queue) {
        for (long unit, stop; queue.take(unit, stop);)
            for (; unit < stop; unit++) {
                const Run run = states.of(unit / tiles);
                const long at = unit % tiles * TILE;
                float* to = read + run.first * inner;
                if (run.state)
                    recur(
                        *how, run, zxbcdt + run.first * width, mixed + run.first * channels, to, at / how->head_dim,
                        at % how->head_dim
                    );
                else  // what fills up a batch
                    for (long t = 0; t < run.tokens; t++) memset(to + t * inner + at, 0, TILE * sizeof(float));
            }
    });
    if (!out) return;
    const long tokens = starts ? starts[sequences] : sequences, of_group = inner / how->groups;
    on_rows(threads, tokens * how->groups, of_group, [&](long row) {
        const long token = row / how->groups, at = row % how->groups * of_group;
        finish(*how, read + token * inner + at, zxbcdt + token * width + at, how->norm + at, out + token * inner + at, of_group);
    });
}

}  // namespace

EXPORT(mamba_f32, mamba<float>)
EXPORT(mamba_bf16, mamba<Bf16>)
