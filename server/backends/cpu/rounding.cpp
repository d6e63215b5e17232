// Rounds weights to 4 bits while they are loaded, as `int4_groups` (quantisation/rounding.py) does and explains. Torch's
// operators pass over each weight sixty times; here a group is in the L1 cache while all ranges are tried.
//
// A try's numbers are those of the reference bit for bit; squares are added in another order, so that where two ranges are
// equally good the other one may be taken.

#include "codes.h"
#include "functions.h"
#include "threads.h"

namespace {

constexpr int SUMS = 4;  // independent ones, so that no addition waits for the one before
constexpr long GROUP = 128;  // `INT4_GROUP`

struct Int4 {
    long inputs;
    long count;           // of ranges that are tried
    const float* shrunk;  // [count] what is left of a group's range
    const float* steps;   // [count] the same, divided by the largest code
    float least, most;    // scale, and code
};

// A group's weights as floats, filled up with zeros, which every range rounds without an error.
struct Group {
    static constexpr long STRIDE = SUMS * LANES;
    alignas(64) float x[GROUP + STRIDE];
    long filled;
    float low, high;
    bool has_all;  // no NaN and no infinity

    Group(const float* from, long count) : filled((count + STRIDE - 1) / STRIDE * STRIDE) {
        memset(x, 0, size_t(filled) * sizeof(float));
        memcpy(x, from, size_t(count) * sizeof(float));
        Floats lowest = {}, highest = {}, poison = {};
        for (long i = 0; i < filled; i += LANES) {
            const Floats value = load(x + i);
            lowest = min(lowest, value), highest = max(highest, value), poison += value - value;
        }
        low = -largest(-lowest), high = largest(highest);
        has_all = sum(poison) == 0.0f;
    }

    // sum over the vectors of f(weights), in SUMS parts.
    template <class F>
    INLINE float total(const F& f) const {
        Floats sums[SUMS] = {};
        for (long i = 0; i < filled; i += STRIDE)
#pragma GCC unroll 4
            for (int part = 0; part < SUMS; part++) sums[part] += f(load(x + i + part * LANES));
        return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
    }
};

// The codes of weights.
INLINE Floats codes_of(const Int4& how, Floats scaled) { return min(max(round_even(scaled), Floats{}), all(how.most)); }

void round_group(const Int4& how, const float* weights, long count, uint8_t* codes, float* scale_at, float* zero_at) {
    const Group group(weights, count);  // if not all of it are finite numbers, the scale is no number
    float best = __builtin_inff(), scale = __builtin_nanf(""), zero = 0.0f;
    for (long i = 0; i < how.count && group.has_all; i++) {
        const float tried = __builtin_fmaxf((group.high - group.low) * how.steps[i], how.least);
        const float shift = round_even(all(-group.low * how.shrunk[i] / tried))[0], inverse = 1.0f / tried;
        const float squares = group.total([&](Floats x) {
            const Floats scaled = x * inverse + shift, off = codes_of(how, scaled) - scaled;
            return off * off;
        });
        const float error = __builtin_sqrtf(squares) * tried;
        if (error < best) best = error, scale = tried, zero = shift;
    }
    const float inverse = 1.0f / scale;
    int8_t found[GROUP + Group::STRIDE];
    for (long i = 0; i < group.filled; i += LANES)
        store_codes(found + i, __builtin_convertvector(codes_of(how, load(group.x + i) * inverse + zero), Ints));
    memcpy(codes, found, size_t(count));
    const auto levels = [&](Floats x) { return codes_of(how, x * inverse + zero) - zero; };
    const float squares = group.total([&](Floats x) { return levels(x) * levels(x); });
    const float fitted = group.total([&](Floats x) { return x * levels(x); }) / squares;
    // Of zeros alone any scale would do.
    *scale_at = !group.has_all ? scale : squares == 0.0f ? 1.0f : fitted > how.least ? fitted : scale;
    *zero_at = zero;
}

// weight [F, D] → codes [F, D], scales and zeros [F, G].
void round_rows(const Int4* how, const float* weight, long rows, uint8_t* codes, float* scales, float* zeros, int threads) {
    const long inputs = how->inputs, groups = (inputs + GROUP - 1) / GROUP;
    on_rows(threads, rows, inputs, [&](long row) {
        for (long g = 0; g < groups; g++) {
            const long at = row * inputs + g * GROUP, to = row * groups + g;
            round_group(*how, weight + at, min(GROUP, inputs - g * GROUP), codes + at, scales + to, zeros + to);
        }
    });
}

}  // namespace

EXPORT(round_int4, round_rows)
