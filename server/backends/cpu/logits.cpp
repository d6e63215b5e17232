// What a step wants to know of its logits: the best tokens of each row, the log of the sum of all exponentials, and the
// winner of an exponential race. One pass over each row, in segments that stay in the L1 cache; nothing is sorted, and
// nothing of the vocabulary's size is written.
//
// Shapes: R rows, V vocabulary, n best tokens wanted of each row, at least 1.

#include "functions.h"
#include "threads.h"

namespace {

constexpr long SEGMENT = 8192;
constexpr float NEVER = -__builtin_inff();

// The best `n` of what was offered, best first; of equals those that were offered first.
struct Best {
    float* values;
    int64_t* ids;
    long n;

    void clear() const {
        for (long i = 0; i < n; i++) values[i] = NEVER, ids[i] = i;
    }
    float worst() const { return values[n - 1]; }
    void offer(float value, int64_t id) const {
        if (!(value > worst())) return;
        long place = n - 1;
        for (; place && value > values[place - 1]; place--) values[place] = values[place - 1], ids[place] = ids[place - 1];
        values[place] = value, ids[place] = id;
    }
};

bool any(Ints mask) {
#if defined(__AVX512F__)
    // In place of a test of every lane.
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask);
#elif defined(__aarch64__)
    return vmaxvq_u32((uint32x4_t)mask);
#else
    int32_t found = 0;
    for (int i = 0; i < LANES; i++) found |= mask[i];
    return found;
#endif
}

void offer_segment(const Best& best, const float* row, long first, long count) {
    for (long i = first; i < first + count; i += LANES) {
        const long here = min(first + count - i, long(LANES));
        if (here == LANES && !any(load(row + i) > best.worst())) continue;
        for (long lane = 0; lane < here; lane++) best.offer(row[i + lane], i + lane);
    }
}

// The sum of exp(logit - largest) over a segment. 0 where all are -inf.
float sum_exponentials(const float* at, long count, float largest) {
    if (largest == NEVER) return 0;
    Floats total = {};
    const long whole = count / LANES * LANES;
    for (long i = 0; i < whole; i += LANES) total += exp(load(at + i) - largest);
    float rest = 0;
    for (long i = whole; i < count; i++) rest += exp(at[i] - largest);
    return sum(total) + rest;
}

struct Logits {
    const float* values;
    long stride, rows, vocabulary;

    long segments() const { return (vocabulary + SEGMENT - 1) / SEGMENT; }
    const float* row(long index) const { return values + index * stride; }
};

// Run body(row, first token, count, index of the segment) for every segment of every row.
template <class Body>
void on_segments(const Logits& logits, int threads, const Body& body) {
    on_threads(threads, logits.rows * logits.segments(), 2, [&](Queue& queue) {
        for (long unit, stop; queue.take(unit, stop);) {
            for (; unit < stop; unit++) {
                const long first = unit % logits.segments() * SEGMENT;
                body(unit / logits.segments(), first, min(logits.vocabulary - first, SEGMENT), unit);
            }
        }
    });
}

// For each row of logits [R, V], rows `stride` elements apart: the n best tokens, best and ids [R, n], and the log of the
// sum of the exponentials of all, log_totals [R].
void summarise(
    const float* logits_at, long stride, long rows, long vocabulary, long n, float* best, int64_t* ids, float* log_totals,
    int threads
) {
    static thread_local Workspace value_memory, id_memory;
    const Logits logits{logits_at, stride, rows, vocabulary};
    const long segments = logits.segments(), units = rows * segments;
    float* values = value_memory.take<float>(units * (n + 1));
    float* totals = values + units * n;
    int64_t* places = id_memory.take<int64_t>(units * n);
    on_segments(logits, threads, [&](long row, long first, long count, long unit) {
        const Best mine{values + unit * n, places + unit * n, n};
        mine.clear();
        offer_segment(mine, logits.row(row), first, count);
        totals[unit] = sum_exponentials(logits.row(row) + first, count, mine.values[0]);
    });
    for (long row = 0; row < rows; row++) {
        const Best all{best + row * n, ids + row * n, n};
        all.clear();
        for (long i = row * segments * n; i < (row + 1) * segments * n; i++) all.offer(values[i], places[i]);
        float total = 0;
        for (long unit = row * segments; unit < (row + 1) * segments; unit++)
            if (totals[unit]) total += totals[unit] * exp(values[unit * n] - all.values[0]);
        log_totals[row] = all.values[0] + __builtin_logf(total);
    }
}

// ---------------------------------------------------------------------------------------------- the exponential race

// Of integers with the type's number of bits: a bijection with full avalanche (Ellis's lowbias32 constants).
template <class T>
INLINE T mix(T x) {
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
}

// The logarithm of Exp(1) noise, a pure function of (seed, position, token).
INLINE Floats log_noise(Words tokens, Word key) {
    const Words bits = mix(mix(tokens * 0x9E3779B9u ^ key) ^ mix(key + 1));
    // A u that is rounded to 1 would make the noise infinite, and who alone is left could lose to those that are removed.
    const Floats uniform = min((__builtin_convertvector(bits, Floats) + 0.5f) * 0x1p-32f, all(1.0f - 0x1p-24f));
    // log(1 - u) by way of the rounded 1 - u, and what the rounding took away.
    const Floats remaining = 1.0f - uniform;
    return log(-(log(remaining) + ((1.0f - remaining) - uniform) / remaining));
}

struct Winner {
    float score;
    int64_t id;
};

Winner race_segment(const float* row, long first, long count, long first_id, Word key) {
    Winner winner{NEVER, first};
    for (long i = first; i < first + count; i += LANES) {
        const long here = min(first + count - i, long(LANES));
        const Floats logits = here == LANES ? load(row + i) : load_part(row + i, here);
        if (!any(logits > NEVER)) continue;  // a warper removed all of them
        const Floats scores = logits - log_noise((Words)(all(int32_t(first_id + i)) + iota()), key);
        if (!any(scores > winner.score)) continue;
        for (long lane = 0; lane < here; lane++)
            if (scores[lane] > winner.score) winner = {scores[lane], i + lane};
    }
    return winner;
}

// The column of each row with the largest logit - log(noise). seed_low, seed_high, positions, ids: [R]; first_id: the token
// of column 0.
void race(
    const float* logits_at, long stride, long rows, long vocabulary, long first_id, const int64_t* seed_low, const int64_t* seed_high,
    const int64_t* positions, int64_t* ids, int threads
) {
    static thread_local Workspace memory;
    const Logits logits{logits_at, stride, rows, vocabulary};
    Winner* winners = memory.take<Winner>(rows * logits.segments());
    on_segments(logits, threads, [&](long row, long first, long count, long unit) {
        const Word key = mix(Word(seed_low[row]) ^ mix(Word(seed_high[row]) ^ mix(Word(positions[row]))));
        winners[unit] = race_segment(logits.row(row), first, count, first_id, key);
    });
    for (long row = 0; row < rows; row++) {
        Winner best{NEVER, 0};
        for (long unit = row * logits.segments(); unit < (row + 1) * logits.segments(); unit++)
            if (winners[unit].score > best.score) best = winners[unit];
        ids[row] = best.id;
    }
}

}  // namespace

EXPORT(summarise_logits, summarise)
EXPORT(race_logits, race)
