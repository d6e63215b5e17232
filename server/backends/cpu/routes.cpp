// How tokens find the experts that they go to, and come back from them. Stock operators do that in a dozen steps, and wake
// a second thread for some, which a decode of few tokens waits for longer than for their work.
//
// Shapes: T tokens, E experts, k experts per token, D width of a row.

#include <initializer_list>

#include "functions.h"
#include "threads.h"

namespace {

// The numbers of the `count` largest of values, in their order, of equal ones the first. A NaN is chosen where nothing else
// is left.
void pick_largest(const float* values, int size, int count, int32_t* chosen) {
    float last = __builtin_inff();
    int last_index = -1;
    for (int slot = 0; slot < count; slot++) {
        int best = -1;
        for (int i = 0; i < size; i++) {
            const bool is_left = values[i] < last || (values[i] == last && i > last_index);
            if (is_left && (best < 0 || values[i] > values[best])) best = i;
        }
        chosen[slot] = best < 0 ? 0 : best;
        if (best >= 0) last = values[best], last_index = best;
    }
}

// NaN where a logit is no finite number, or else 0.
float poison_of(const float* logits, int experts) {
    float poison = 0;
    for (int e = 0; e < experts; e++) poison += logits[e] - logits[e];
    return poison;
}

// The k largest of one token's logits [E] and their shares in a softmax over all experts, or over the chosen ones.
void choose_of_token(const float* logits, int experts, int top_k, bool renormalise, float* weights, int32_t* chosen) {
    pick_largest(logits, experts, top_k, chosen);
    float total = 0;
    for (int slot = 0; slot < top_k; slot++) {
        weights[slot] = exp(logits[chosen[slot]] - logits[chosen[0]]);
        total += weights[slot];
    }
    if (!renormalise) {
        total = 0;
        for (int e = 0; e < experts; e++) total += exp(logits[e] - logits[chosen[0]]);
    }
    const float poison = poison_of(logits, experts);
    for (int slot = 0; slot < top_k; slot++) weights[slot] = weights[slot] / total + poison;
}

// logits: [T, E]; weights, chosen: [T, k].
void choose(
    const float* logits, long tokens, int experts, int top_k, int renormalise, float* weights, int32_t* chosen,
    int threads
) {
    on_rows(threads, tokens, long(experts) * top_k, [&](long token) {
        choose_of_token(
            logits + token * experts, experts, top_k, renormalise, weights + token * top_k, chosen + token * top_k
        );
    });
}

// How experts are chosen by sigmoids of their logits.
struct SigmoidRule {
    long experts, top_k, renormalise, num_groups, top_groups;
    const float* bias;  // [E], added for choosing alone, or null
    float scale;
};

// In doubles and rounded once, as the reference has it: what differs in the last bit of a double is the same float32 but
// for one number in hundreds of millions.
float sigmoid(float x) {
    const double limited = x > 700 ? -700 : x < -700 ? 700 : -double(x);  // the exponent of e
    const double count = __builtin_rint(limited * 1.4426950408889634);
    const double rest = (limited - count * 0.693147180369123816490) - count * 1.90821492927058770002e-10;
    double series = 1.0 / 6227020800;
    for (const double term : {1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720,
                              1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1.0, 1.0})
        series = series * rest + term;
    const int64_t bits = (1023 + int64_t(count)) << 52;
    double power;
    memcpy(&power, &bits, sizeof power);
    return x == x ? float(1 / (1 + series * power)) : x;
}

// Leaves of wanted [E] what is in the best groups, which are those whose two best experts have the largest sums.
void keep_best_groups(const SigmoidRule& rule, float* wanted, float* sums, int32_t* best) {
    const long size = rule.experts / rule.num_groups;
    for (long group = 0; group < rule.num_groups; group++) {
        int32_t two[2];
        pick_largest(wanted + group * size, int(size), 2, two);
        sums[group] = wanted[group * size + two[0]] + wanted[group * size + two[1]];
    }
    pick_largest(sums, int(rule.num_groups), int(rule.top_groups), best);
    for (long group = 0; group < rule.num_groups; group++) {
        bool is_kept = false;
        for (long slot = 0; slot < rule.top_groups; slot++) is_kept |= best[slot] == group;
        for (long e = group * size; !is_kept && e < (group + 1) * size; e++) wanted[e] = -__builtin_inff();
    }
}

// room: for 2 E numbers and two for each group.
void choose_by_sigmoid_of_token(const SigmoidRule& rule, const float* logits, float* room, float* weights, int32_t* chosen) {
    float *const scores = room, *const wanted = scores + rule.experts, *const sums = wanted + rule.experts;
    for (long e = 0; e < rule.experts; e++) {
        scores[e] = sigmoid(logits[e]);
        wanted[e] = rule.bias ? scores[e] + rule.bias[e] : scores[e];
    }
    if (rule.top_groups < rule.num_groups)
        keep_best_groups(rule, wanted, sums, reinterpret_cast<int32_t*>(sums + rule.num_groups));
    pick_largest(wanted, int(rule.experts), int(rule.top_k), chosen);
    float total = 0;
    for (long slot = 0; slot < rule.top_k; slot++) total += scores[chosen[slot]];
    const float divisor = rule.renormalise ? total + 1e-20f : 1.0f, poison = poison_of(logits, int(rule.experts));
    for (long slot = 0; slot < rule.top_k; slot++) weights[slot] = scores[chosen[slot]] / divisor * rule.scale + poison;
}

// logits: [T, E]; weights, chosen: [T, k].
void choose_by_sigmoid(
    const SigmoidRule* rule, const float* logits, long tokens, float* weights, int32_t* chosen, int threads
) {
    on_rows(threads, tokens, rule->experts * (rule->top_k + 16), [&](long token) {
        static thread_local Workspace memory;
        float* const room = memory.take<float>(2 * (rule->experts + rule->num_groups));
        const long at = token * rule->top_k;
        choose_by_sigmoid_of_token(*rule, logits + token * rule->experts, room, weights + at, chosen + at);
    });
}

// Pairs of a token and an expert, chosen [T, k], sorted by expert: the token of each [T * k], the place of each pair
// [T, k], and the end of each expert's [E].
void sort(
    const int32_t* chosen, long tokens, int experts, int top_k, int32_t* sorted_tokens, int32_t* places, int32_t* ends
) {
    memset(ends, 0, experts * sizeof(int32_t));
    for (long pair = 0; pair < tokens * top_k; pair++) ends[chosen[pair]]++;
    int32_t first = 0;
    for (int e = 0; e < experts; e++) {
        const int32_t count = ends[e];
        ends[e] = first;  // the place of its next pair, until all are placed
        first += count;
    }
    for (long pair = 0; pair < tokens * top_k; pair++) {
        places[pair] = ends[chosen[pair]]++;
        sorted_tokens[places[pair]] = int32_t(pair / top_k);
    }
}

// out [rows, D]: rows `from` [rows] of x.
template <class E>
void gather_rows(const E* x, const int32_t* from, E* out, long rows, long width, int threads) {
    on_rows(threads, rows, width, [&](long row) { memcpy(out + row * width, x + from[row] * width, width * sizeof(E)); });
}

// out [T, D]: the weighted sum of each token's rows of y [T * k, D], rounded once. weights, places: [T, k].
template <class E>
void weigh_rows(
    const E* y, const float* weights, const int32_t* places, E* out, long tokens, int top_k, long width, int threads
) {
    on_rows(threads, tokens, width * top_k, [&](long token) {
        const int32_t* const place = places + token * top_k;
        for (long i = 0; i < width; i += LANES) {
            Floats total = {};
            for (int slot = 0; slot < top_k; slot++)
                total += load_part(y + place[slot] * width + i, width - i) * weights[token * top_k + slot];
            store_part(out + token * width + i, total, width - i);
        }
    });
}

}  // namespace

EXPORT(choose_experts, choose)
EXPORT(choose_experts_by_sigmoid, choose_by_sigmoid)
EXPORT(sort_pairs, sort)
EXPORT(gather_rows_f32, gather_rows<float>)
EXPORT(gather_rows_bf16, gather_rows<Bf16>)
EXPORT(weigh_rows_f32, weigh_rows<float>)
EXPORT(weigh_rows_bf16, weigh_rows<Bf16>)
