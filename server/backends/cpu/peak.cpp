// How many operations a second the machine can do: products of what is in registers already, in as many sums as the
// latency of one asks for, as kernels do them, and nothing is read or written meanwhile. For measuring alone.
//
// Operations count as in a matrix product: a multiplication and an addition of each pair of numbers.

#include <time.h>

#include <type_traits>

#include "amx.h"
#include "codes.h"
#include "threads.h"

namespace {

constexpr long ROUNDS = 4096;  // of a unit of work: some tens of microseconds

// Do product(sum, left, right) ROUNDS times on each of ACCUMULATORS sums; returns how often that is.
template <class Sum, class Left, class Right, class Product>
INLINE long repeat(Left left, Right right, const Product& product) {
    Sum sums[ACCUMULATORS] = {};
    renew(left);  // GCC 12 writes a constant vector of bfloat16 as one of float16
    for (long round = 0; round < ROUNDS; round++) {
#pragma GCC unroll 32
        for (int i = 0; i < ACCUMULATORS; i++) {
            renew(right);
            sums[i] = product(sums[i], left, right);
        }
    }
#pragma GCC unroll 32
    for (int i = 0; i < ACCUMULATORS; i++) renew(sums[i]);
    return ROUNDS * ACCUMULATORS;
}

// Each returns how many operations it has done.

long multiply_floats() {
    return 2 * LANES * repeat<Floats>(all(1.5f), all(0.75f), [](Floats sum, Floats a, Floats b) { return fused(a, b, sum); });
}

long multiply_halves() {
#if defined(__AVX512FP16__)
    return 64 * repeat<__m512h>(_mm512_set1_ph(1.5f), _mm512_set1_ph(0.75f), [](__m512h sum, __m512h a, __m512h b) {
        return _mm512_fmadd_ph(a, b, sum);
    });
#elif defined(__ARM_FEATURE_FP16_VECTOR_ARITHMETIC)
    return 16 * repeat<float16x8_t>(vdupq_n_f16(1.5f), vdupq_n_f16(0.75f), [](float16x8_t sum, float16x8_t a, float16x8_t b) {
        return vfmaq_f16(sum, a, b);
    });
#else
    return multiply_floats();  // expanded once for many products, that is what they cost
#endif
}

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__)
constexpr long TILE_ROUNDS = ROUNDS / 16;

// product(): of two registers of the left side with two of the right. `operations`: of one such register's product.
template <class Product>
INLINE long repeat_tiles(long operations, const Product& product) {
    Word ones[16 * 16];  // not zeros: over those a machine may keep a higher clock
    for (Word& pair : ones) pair = 0x3F803F80;
    amx::Registers registers;
    registers.shape(amx::ROWS, amx::DEPTH);
    amx::load_sums(nullptr, amx::WIDTH, true, true);
    amx::memory_is_read(ones);
    _tile_loadd(4, ones, 64);
    _tile_loadd(5, ones, 64);
    _tile_loadd(6, ones, 64);
    _tile_loadd(7, ones, 64);
    for (long round = 0; round < TILE_ROUNDS; round++) product();
    return TILE_ROUNDS * 4 * operations;
}

long multiply_tiles() {
    return repeat_tiles(2 * 16 * 16 * 32, [] {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    });
}

long multiply_code_tiles() {
#if defined(__AMX_INT8__)
    return repeat_tiles(2 * 16 * 16 * 64, [] {
        _tile_dpbsud(0, 4, 6);
        _tile_dpbsud(1, 4, 7);
        _tile_dpbsud(2, 5, 6);
        _tile_dpbsud(3, 5, 7);
    });
#else
    return 0;
#endif
}
#else
long multiply_tiles() { return 0; }
long multiply_code_tiles() { return 0; }
#endif

long multiply_bf16() {
    if (amx::USES_AMX) return multiply_tiles();
#if defined(__AVX512BF16__)
    return 4 * LANES * repeat<Floats>(all(0x3FC03FC0u), all(0x3F403F40u), [](Floats sum, Words a, Words b) {
        return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
    });
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    return 8 * LANES * repeat<Floats>(all(0x3FC03FC0u), all(0x3F403F40u), [](Floats sum, Words a, Words b) {
        return (Floats)vbfmmlaq_f32((float32x4_t)sum, (bfloat16x8_t)a, (bfloat16x8_t)b);
    });
#else
    return multiply_floats();
#endif
}

template <int BITS>
long multiply_codes() {
    using Codes = Factors<BITS>;
    if (const long done = amx::USES_AMX ? multiply_code_tiles() : 0) return done;
#if defined(__ARM_FEATURE_MATMUL_INT8)
    return 16 * LANES * repeat<Ints>(all(0x01020304u), all(0x04030201u), [](Ints sum, Words a, Words b) {
        return (Ints)vusmmlaq_s32((int32x4_t)sum, (uint8x16_t)a, (int8x16_t)b);
    });
#endif
    constexpr int PRODUCTS = 4 / sizeof(typename Codes::Input);  // of a word
    const Word inputs = 0x01020304;
    const Words part = all(0x04030201u);
    if constexpr (std::is_same_v<typename Codes::Sums, Ints>) {
        return 2 * PRODUCTS * LANES * repeat<Ints>(inputs, part, [](Ints sum, Word a, Words b) { return Codes::add(sum, b, a); });
    } else {
        constexpr int WORDS = Codes::WORDS_OF_A_SUM;
        return 2 * PRODUCTS * WORDS * LANES * repeat<Ints>(inputs, part, [](Ints sum, Word a, Words& b) {
            typename Codes::Sums sums = {};
#pragma GCC unroll 8
            for (int word = 0; word < WORDS; word++) {
                renew(b);
                sums = Codes::add(sums, b, a);
            }
            return sum + Codes::total(sums);
        });
    }
}

// Threads that multiply at the same time: each waits until all have come. Nothing is shared out among them, unlike with a
// `Team`, and none is left out: where another program has a core, this takes longer, and does not pass for the machine's best.
struct Meeting {
    long (*work)();
    long units;
    int threads, come = 0, left = 0;
    int64_t operations = 0, began = 0, ended = 0;

    static int64_t now() {
        timespec time;
        clock_gettime(CLOCK_MONOTONIC, &time);
        return time.tv_sec * 1000000000l + time.tv_nsec;
    }

    void take_part() {
        const bool is_last = __atomic_add_fetch(&come, 1, __ATOMIC_SEQ_CST) == threads;
        if (is_last) __atomic_store_n(&began, now(), __ATOMIC_SEQ_CST);
        while (!__atomic_load_n(&began, __ATOMIC_SEQ_CST)) rest();
        int64_t mine = 0;
        for (long unit = 0; unit < units; unit++) mine += work();
        __atomic_add_fetch(&operations, mine, __ATOMIC_SEQ_CST);
        if (__atomic_add_fetch(&left, 1, __ATOMIC_SEQ_CST) == threads) ended = now();
    }

    static void* join(void* at) {
        static_cast<Meeting*>(at)->take_part();
        return nullptr;
    }
};

// Do `units` such stretches of work on each of `threads` threads. found: how many operations those were, and the
// nanoseconds that they took from when all had come; zeros where the system has not so many threads.
template <long (*WORK)()>
void measure(long units, int64_t* found, int threads) {
    static thread_local Workspace memory;
    pthread_t* const helpers = memory.take<pthread_t>(size_t(threads));
    Meeting meeting{WORK, units, threads};
    int recruited = 0;
    while (recruited < threads - 1 && !pthread_create(&helpers[recruited], nullptr, Meeting::join, &meeting)) recruited++;
    const bool is_whole = recruited == threads - 1;
    if (is_whole) meeting.take_part();
    else __atomic_store_n(&meeting.began, 1, __ATOMIC_SEQ_CST);
    for (int helper = 0; helper < recruited; helper++) pthread_join(helpers[helper], nullptr);
    found[0] = is_whole ? meeting.operations : 0;
    found[1] = is_whole ? meeting.ended - meeting.began : 0;
}

}  // namespace

EXPORT(peak_f32, measure<multiply_floats>)
EXPORT(peak_f16, measure<multiply_halves>)
EXPORT(peak_bf16, measure<multiply_bf16>)
EXPORT(peak_int8, measure<multiply_codes<8>>)
EXPORT(peak_int4, measure<multiply_codes<4>>)
