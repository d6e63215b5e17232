// How tokens find the experts that they go to, and come back from them. Stock operators do that in a dozen steps, and wake
// a second thread for some, which a decode of few tokens waits for longer than for their work.
//
// Shapes: T tokens, E experts, k experts per token, D width of a row.

#include "functions.h"
#include "threads.h"

namespace {

// The k largest of one token's logits [E], of equal ones the first, and their shares in a softmax over all experts, or
// over the chosen ones. A NaN is chosen where nothing else is left.
void choose_of_token(const float* logits, int experts, int top_k, bool renormalise, float* weights, int32_t* chosen) {
    float last = __builtin_inff(), total = 0;
    int last_expert = -1;
    for (int slot = 0; slot < top_k; slot++) {
        int best = -1;
        for (int e = 0; e < experts; e++) {
            const bool is_left = logits[e] < last || (logits[e] == last && e > last_expert);
            if (is_left && (best < 0 || logits[e] > logits[best])) best = e;
        }
        chosen[slot] = best < 0 ? 0 : best;
        if (best >= 0) last = logits[best], last_expert = best;
        weights[slot] = exp(logits[chosen[slot]] - logits[chosen[0]]);
        total += weights[slot];
    }
    if (!renormalise) {
        total = 0;
        for (int e = 0; e < experts; e++) total += exp(logits[e] - logits[chosen[0]]);
    }
    float poison = 0;  // NaN where a logit is no finite number
    for (int e = 0; e < experts; e++) poison += logits[e] - logits[e];
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
EXPORT(sort_pairs, sort)
EXPORT(gather_rows_f32, gather_rows<float>)
EXPORT(gather_rows_bf16, gather_rows<Bf16>)
EXPORT(weigh_rows_f32, weigh_rows<float>)
EXPORT(weigh_rows_bf16, weigh_rows<Bf16>)
