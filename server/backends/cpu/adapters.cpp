// Puts what adapters change of a linear layer in the order in which kernels read it (`Change` of adapters.h).

#include "adapters.h"

namespace {

// Of a change, scale * ((x @ downᵀ) @ upᵀ), added to some outputs; `LowRank` of the protocol.
template <class E>
struct Part {
    const E *down, *up;  // [ranks, inputs], or null, where the ranks are a copy of the inputs; [outputs, ranks]
    long first, outputs; // rows of the weight
    long first_rank, ranks;
};

// The rows of the weight that half a panel has: `count` from `first` on.
struct Rows {
    long first, count = 0;
    Rows(const Panels& panels, long half) : first(panels.row_of(half / 2, int(half % 2 * HALF))) {
        if (first >= 0) count = min(panels.outputs - first % panels.outputs, long(HALF));
    }
};

// Find the span [panel][2] of each half, and of all how many words of `up` they have.
template <class E>
void lay_out(const Panels* panels, const Part<E>* parts, long count, Span* spans, int64_t* words) {
    *words = 0;
    for (long half = 0; half < 2 * panels->num_panels(); half++) {
        const Rows rows(*panels, half);
        long first = INT32_MAX, stop = 0;
        for (const Part<E>* part = parts; part < parts + count; part++) {
            if (rows.first >= part->first + part->outputs || part->first >= rows.first + rows.count) continue;
            first = min(first, part->first_rank), stop = max(stop, part->first_rank + part->ranks);
        }
        first = stop ? first / PER_WORD<E> * PER_WORD<E> : 0;
        const long found = (stop - first + PER_WORD<E> - 1) / PER_WORD<E>;
        spans[half] = {int32_t(first), int32_t(found), *words * HALF};
        *words += found;
    }
}

template <class E>
void fill_down(const Part<E>& part, long inputs, E* down) {
    const long lines = (inputs + LINE_ELEMENTS<E> - 1) / LINE_ELEMENTS<E>;
    for (long rank = 0; rank < part.ranks; rank++) {
        const long number = part.first_rank + rank;
        E* const to = down + (number / GROUP * lines * GROUP + number % GROUP) * LINE_ELEMENTS<E>;
        for (long line = 0; line < lines; line++) {
            const long at = line * LINE_ELEMENTS<E>, count = min(inputs - at, long(LINE_ELEMENTS<E>));
            memcpy(to + line * GROUP * LINE_ELEMENTS<E>, part.down + rank * inputs + at, size_t(count) * sizeof(E));
        }
    }
}

template <class E>
void fill_half(const Part<E>& part, const Rows& rows, const Span& span, Word* up) {
    E* const to = reinterpret_cast<E*>(up + span.at);
    const long begin = max(part.first, rows.first), end = min(part.first + part.outputs, rows.first + rows.count);
    for (long row = begin; row < end; row++) {
        const E* const from = part.up + (row - part.first) * part.ranks;
        for (long rank = 0, k = part.first_rank - span.first; rank < part.ranks; rank++, k++)
            to[(k / PER_WORD<E> * HALF + row - rows.first) * PER_WORD<E> + k % PER_WORD<E>] = from[rank];
    }
}

// Fill a change's `down` and `up`, which are zeros, from its parts.
template <class E>
void fill(const Panels* panels, long inputs, const Part<E>* parts, long count, const Change* change) {
    for (const Part<E>* part = parts; part < parts + count; part++)
        if (part->down) fill_down(*part, inputs, reinterpret_cast<E*>(const_cast<Word*>(change->down)));
    for (long half = 0; half < 2 * panels->num_panels(); half++)
        for (const Part<E>* part = parts; part < parts + count; part++)
            fill_half(*part, Rows(*panels, half), change->spans[half], const_cast<Word*>(change->up));
}

}  // namespace

EXPORT(lay_out_change_f32, lay_out<float>)
EXPORT(lay_out_change_bf16, lay_out<Bf16>)
EXPORT(fill_change_f32, fill<float>)
EXPORT(fill_change_bf16, fill<Bf16>)
