// What some of torch's operators do element by element: copies, sums, differences and products. Small ones take torch 30 to
// 100 µs between two products with weights, whose bytes have driven its code out of the caches; here they take 1 to 5.
// Results are torch's bit for bit, but for which NaN a NaN is: what is bfloat16 is computed in float32, and rounded once.

#include <type_traits>

#include "vector.h"

namespace {

constexpr int DIMS = 4;

enum Kind { COPY, ADD, SUBTRACT, MULTIPLY };

// An operation on tensors of this shape. Strides are in elements, and 0 where the same element is read again.
struct Elementwise {
    long kind;
    long shape[DIMS];
    long out[DIMS], a[DIMS], b[DIMS];
    double number;  // in b's place, where that is null
};

template <int KIND, class T>
INLINE T combined(T a, T b) {
    switch (KIND) {
        case ADD: return a + b;
        case SUBTRACT: return a - b;
        case MULTIPLY: return a * b;
        default: return a;
    }
}

// What elements are computed as.
template <class E>
struct Computed {
    typedef float Type;
    static INLINE float from(E x) { return to_float(x); }
};
template <>
struct Computed<int64_t> {
    typedef int64_t Type;
    static INLINE int64_t from(int64_t x) { return x; }
};

template <class Out, class T>
INLINE Out converted(T x) {
    if constexpr (std::is_same_v<T, Out>) return x;
    else return from_float<Out>(x);
}

template <int KIND, class E, class Out>
void along_one_dim(const Elementwise& how, const E* a, const E* b, Out* out) {
    using C = Computed<E>;
    const long count = how.shape[DIMS - 1], to = how.out[DIMS - 1], at = how.a[DIMS - 1], by = how.b[DIMS - 1];
    const auto number = typename C::Type(how.number);
    long i = 0;
    if constexpr (KIND == COPY && std::is_same_v<E, Out>) {
        for (; i < count; i++) out[i * to] = a[i * at];
        return;
    }
    if constexpr (!std::is_same_v<E, int64_t>) {
        if (to == 1 && at == 1 && (!b || by <= 1))
            for (; i + LANES <= count; i += LANES) {
                const Floats second = !b ? all(number) : by ? load(b + i) : all(C::from(*b));
                store(out + i, combined<KIND>(load(a + i), second));
            }
    }
    for (; i < count; i++)
        out[i * to] = converted<Out>(combined<KIND>(C::from(a[i * at]), b ? C::from(b[i * by]) : number));
}

template <int KIND, class E, class Out>
void compute(const Elementwise& how, const E* a, const E* b, Out* out) {
    const long* const n = how.shape;
    for (long i = 0; i < n[0]; i++)
        for (long j = 0; j < n[1]; j++)
            for (long k = 0; k < n[2]; k++) {
                const auto place = [=](const long* strides) { return i * strides[0] + j * strides[1] + k * strides[2]; };
                along_one_dim<KIND>(how, a + place(how.a), b ? b + place(how.b) : nullptr, out + place(how.out));
            }
}

// b: of the operations with two tensors; else null.
template <class E, class Out>
void elementwise(const Elementwise* how, const E* a, const E* b, Out* out) {
    if constexpr (std::is_same_v<E, Out>) {
        if (how->kind == ADD) return compute<ADD>(*how, a, b, out);
        if (how->kind == SUBTRACT) return compute<SUBTRACT>(*how, a, b, out);
        if (how->kind == MULTIPLY) return compute<MULTIPLY>(*how, a, b, out);
    }
    compute<COPY, E, Out>(*how, a, nullptr, out);
}

}  // namespace

EXPORT(elementwise_f32, elementwise<float, float>)
EXPORT(elementwise_bf16, elementwise<Bf16, Bf16>)
EXPORT(elementwise_i64, elementwise<int64_t, int64_t>)
EXPORT(elementwise_f32_to_bf16, elementwise<float, Bf16>)
EXPORT(elementwise_bf16_to_f32, elementwise<Bf16, float>)
