// What is done to each row of activations between the products: norms with the sum before them, gated products,
// rotations. One pass each over data that is in the cache; at a batch of one the stock operators' start costs more than
// all of this.
//
// Shapes: T tokens, D width of a row, H head dim, r rotated features of a head.

#include "functions.h"
#include "threads.h"

namespace {

// body(i, count) for every vector of a row: its first element, and how many elements there are from it on.
template <class Body>
INLINE void each_vector(long width, const Body& body) {
    for (long i = 0; i < width; i += LANES) body(i, width - i);
}

struct Norm {
    const float* weight;  // [D]
    const float* bias;    // [D] or null
    long width;
    float eps;
    int is_centred;  // LayerNorm: zero mean; else RMSNorm
};

// The mean of f(element) over a row.
template <class E, class F>
INLINE float mean_of(const E* x, long width, const F& f) {
    Floats total = {};
    const long whole = width / LANES * LANES;
    for (long i = 0; i < whole; i += LANES) total += f(load(x + i));
    float rest = 0;
    for (long i = whole; i < width; i++) rest += f(all(to_float(x[i])))[0];
    return (sum(total) + rest) / width;
}

// out = x + addend + bias, rounded once; bias may be null.
template <class E>
INLINE void add(E* out, const E* x, const E* addend, const E* bias, long width) {
    each_vector(width, [&](long i, long count) {
        Floats value = load_part(x + i, count) + load_part(addend + i, count);
        if (bias) value += load_part(bias + i, count);
        store_part(out + i, value, count);
    });
}

// out = the norm of x, rounded; or where there is a base, base + that, rounded too. out may be x.
template <class E>
void normalise(const Norm& norm, const E* x, const E* base, E* out) {
    const float mean = norm.is_centred ? mean_of(x, norm.width, [](Floats v) { return v; }) : 0.0f;
    const float variance = mean_of(x, norm.width, [&](Floats v) { return (v - mean) * (v - mean); });
    const float scale = 1.0f / __builtin_sqrtf(variance + norm.eps);
    each_vector(norm.width, [&](long i, long count) {
        Floats value = (load_part(x + i, count) - mean) * scale * load_part(norm.weight + i, count);
        if (norm.bias) value += load_part(norm.bias + i, count);
        if (base) value = load_part(base + i, count) + rounded<E>(value);
        store_part(out + i, value, count);
    });
}

// sum = x + the norm of what waits to be added.
template <class E>
void add_normed(const Norm& norm, const E* x, const E* addend, const E* bias, E* sum) {
    if (bias) {
        add<E>(sum, addend, bias, nullptr, norm.width);
        addend = sum;
    }
    normalise(norm, addend, x, sum);
}

// out [T, D]: the norm of x [T, D]; or, where there is an addend [T, D], of x + addend + bias [D], which goes to sums
// [T, D]. bias may be null, and so may be addend_norm, by which addend + bias is normalised first.
template <class E>
void norm(
    const Norm* how, const E* x, const Norm* addend_norm, const E* addend, const E* bias, E* sums, E* out, long tokens,
    int threads
) {
    const long width = how->width;
    on_rows(threads, tokens, width, [&](long row) {
        const E* from = x + row * width;
        if (addend) {
            E* const sum = sums + row * width;
            if (addend_norm)
                add_normed(*addend_norm, from, addend + row * width, bias, sum);
            else
                add(sum, from, addend + row * width, bias, width);
            from = sum;
        }
        normalise<E>(*how, from, nullptr, out + row * width);
    });
}

// The queries and keys of heads [T, queries + 2 * kv_heads, H], each head alone, in place.
template <class E>
void norm_heads(
    const Norm* of_queries, const Norm* of_keys, E* heads, long tokens, long queries, long kv_heads, int threads
) {
    const long width = of_queries->width, count = queries + 2 * kv_heads;
    on_rows(threads, tokens, (queries + kv_heads) * width, [&](long token) {
        E* head = heads + token * count * width;
        for (long n = 0; n < queries + kv_heads; n++, head += width)
            normalise<E>(n < queries ? *of_queries : *of_keys, head, nullptr, head);
    });
}

template <int KIND, class E>
void gate_rows(const E* x, E* out, long tokens, long width, int threads) {
    on_rows(threads, tokens, width, [&](long row) {
        const E* gates = x + row * 2 * width;
        each_vector(width, [&](long i, long count) {
            const Floats y = gated<KIND>(load_part(gates + i, count), load_part(gates + width + i, count));
            store_part(out + row * width + i, y, count);
        });
    });
}

// By Activation.
template <class E>
constexpr decltype(&gate_rows<NONE, E>) GATES[NUM_ACTIVATIONS] = {
    gate_rows<NONE, E>, gate_rows<GELU, E>, gate_rows<GELU_TANH, E>,      gate_rows<RELU, E>,
    gate_rows<SILU, E>, gate_rows<CLAMPED_SWIGLU, E>, gate_rows<RELU_SQUARED, E>, gate_rows<SIGMOID, E>,
};

// out [T, F] = activation(x[:, :F]) * x[:, F:], x [T, 2 F].
template <class E>
void gate(const E* x, E* out, long tokens, long width, int activation, int threads) {
    GATES<E>[activation](x, out, tokens, width, threads);
}

// The first 2 * half features of a head, turned in place: features i and i + half are a pair.
template <class E>
INLINE void rotate_halves(E* head, const float* cos, const float* sin, long half) {
    each_vector(half, [&](long i, long count) {
        const Floats a = load_part(head + i, count), b = load_part(head + half + i, count);
        const Floats c = load_part(cos + i, count), s = load_part(sin + i, count);
        store_part(head + i, a * c - b * s, count);
        store_part(head + half + i, b * c + a * s, count);
    });
}

// The same where features 2 i and 2 i + 1 are a pair.
template <class E>
INLINE void rotate_pairs(E* head, const float* cos, const float* sin, long half) {
    for (long i = 0; i < half; i++) {
        const float a = to_float(head[2 * i]), b = to_float(head[2 * i + 1]);
        head[2 * i] = from_float<E>(a * cos[i] - b * sin[i]);
        head[2 * i + 1] = from_float<E>(b * cos[i] + a * sin[i]);
    }
}

// x [T, heads, H], tokens x_stride elements apart, in place; cos, sin: [T, half].
template <class E>
void rotate(
    E* x, long x_stride, const float* cos, const float* sin, long tokens, long heads, long head_dim, long half,
    int is_interleaved, int threads
) {
    on_rows(threads, tokens, heads * head_dim, [&](long token) {
        for (long head = 0; head < heads; head++) {
            E* at = x + token * x_stride + head * head_dim;
            if (is_interleaved)
                rotate_pairs(at, cos + token * half, sin + token * half, half);
            else
                rotate_halves(at, cos + token * half, sin + token * half, half);
        }
    });
}

}  // namespace

EXPORT(norm_f32, norm<float>)
EXPORT(norm_bf16, norm<Bf16>)
EXPORT(norm_heads_f32, norm_heads<float>)
EXPORT(norm_heads_bf16, norm_heads<Bf16>)
EXPORT(gate_f32, gate<float>)
EXPORT(gate_bf16, gate<Bf16>)
EXPORT(rotate_f32, rotate<float>)
EXPORT(rotate_bf16, rotate<Bf16>)
