// A gated short convolution: c * convolved(b * x), in one pass.

#include "convolution.h"

namespace {

constexpr long TILE = 256;  // channels that one thread takes at a time

struct ShortConv {
    long channels, taps;
    const float* filters;  // [taps, C], the latest token last
    const float* bias;     // [C], or null
};

// Channels `first` … `first` + `width` - 1 of one sequence: out [T, C] from bcx [T, 3 C].
template <class E>
void advance(const ShortConv& how, const Run& run, const E* bcx, E* out, long first, long width) {
    const auto product = [&](long token, long channel, long count) {
        const E* own = bcx + token * 3 * how.channels + channel;
        return load_part(own, count) * load_part(own + 2 * how.channels, count);
    };
    const Convolution convolve = {how.channels, how.taps, how.filters, how.bias, run.state, run.is_fresh, product};
    for (long t = 0; t < run.tokens; t++)
        for (long i = first; i < first + width; i += LANES) {
            const long count = first + width - i;
            const Floats c = load_part(bcx + (t * 3 + 1) * how.channels + i, count);
            store_part(out + t * how.channels + i, c * convolve(t, i, count), count);
        }
    convolve.remember(run.tokens, first, width);
}

// out [T, C] from bcx [T, 3 C]; for the others see `States`.
template <class E>
void short_conv(
    const ShortConv* how, const E* bcx, float* state, long state_stride, const int64_t* rows, const int64_t* positions,
    const int64_t* starts, E* out, long sequences, int threads
) {
    const States states = {state, state_stride, rows, positions, starts};
    const long tiles = (how->channels + TILE - 1) / TILE;
    on_threads(threads, sequences * tiles, max(THREAD_ELEMENTS / TILE / how->taps, 1L), [&](Queue& queue) {
        for (long unit, stop; queue.take(unit, stop);)
            for (; unit < stop; unit++) {
                const Run run = states.of(unit / tiles);
                const long first = unit % tiles * TILE, width = min(TILE, how->channels - first);
                E* to = out + run.first * how->channels;
                if (run.state) {
                    advance(*how, run, bcx + run.first * 3 * how->channels, to, first, width);
                    continue;
                }
                for (long t = 0; t < run.tokens; t++) memset(to + t * how->channels + first, 0, width * sizeof(E));
            }
    });
}

}  // namespace

EXPORT(short_conv_f32, short_conv<float>)
EXPORT(short_conv_bf16, short_conv<Bf16>)
