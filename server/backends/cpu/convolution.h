// What recurrences share: where a step's sequences are, and causal convolutions over few tokens.
#pragma once

#include "functions.h"
#include "threads.h"

// A sequence's tokens in a step, and its state.
struct Run {
    long first, tokens;  // of the step
    float* state;        // null: nobody's, of what fills up a batch
    bool is_fresh;       // it starts from zeros
};

// A sequence's state is row rows[s] of `state`, rows `stride` apart, and row 0 nobody's.
struct States {
    float* state;
    long stride;
    const int64_t *rows, *positions;
    const int64_t* starts;  // [sequences + 1], or null where sequence s has token s alone

    Run of(long s) const {
        const long first = starts ? starts[s] : s, last = starts ? starts[s + 1] : s + 1;
        const bool is_fresh = first < last && positions[first] == 0;
        return {first, last - first, rows[s] ? state + rows[s] * stride : nullptr, is_fresh};
    }
};

// Of one run, channel by channel. input(token, channel, count): LANES numbers of a token, `count` of them real.
template <class Input>
struct Convolution {
    long channels, taps;
    const float* filters;  // [taps, C], the latest token last
    const float* bias;     // [C], or null
    float* past;           // [taps - 1, C]: what the tokens before the run had, the oldest first
    bool is_fresh;         // zeros instead
    Input input;

    // What token `at` had, which may be before the run.
    INLINE Floats seen(long at, long channel, long count) const {
        if (at >= 0) return input(at, channel, count);
        return is_fresh ? Floats{} : load_part(past + (taps - 1 + at) * channels + channel, count);
    }

    INLINE Floats operator()(long token, long channel, long count) const {
        Floats total = bias ? load_part(bias + channel, count) : Floats{};
        for (long tap = 0; tap < taps; tap++) {
            const Floats weight = load_part(filters + tap * channels + channel, count);
            total = fused(seen(token - (taps - 1 - tap), channel, count), weight, total);
        }
        return total;
    }

    // out [width] at one token, a tap at a time: so several vectors' sums are under way at once.
    INLINE void store(long token, long channel, long width, float* out) const {
        for (long i = 0; i < width; i += LANES)
            store_part(out + i, bias ? load_part(bias + channel + i, width - i) : Floats{}, width - i);
        for (long tap = 0; tap < taps; tap++)
            for (long i = 0; i < width; i += LANES) {
                const Floats weight = load_part(filters + tap * channels + channel + i, width - i);
                const Floats of_tap = seen(token - (taps - 1 - tap), channel + i, width - i);
                store_part(out + i, fused(of_tap, weight, load_part(out + i, width - i)), width - i);
            }
    }

    // The last tokens of a run are what the next one's convolution begins with.
    void remember(long tokens, long channel, long width) const {
        for (long row = 0; row < taps - 1; row++)
            for (long i = 0; i < width; i += LANES) {
                const long at = tokens - (taps - 1) + row;  // of a row behind this one, where it is before the run
                store_part(past + row * channels + channel + i, seen(at, channel + i, width - i), width - i);
            }
    }
};

template <class Input>
Convolution(long, long, const float*, const float*, float*, bool, Input) -> Convolution<Input>;
