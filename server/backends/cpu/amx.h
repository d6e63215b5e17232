// Tiles of a matrix product of bfloat16 by the matrix units of Intel's CPUs (AMX), from the same layouts as `tile.h`.
//
// A tile register holds 16 rows of 64 bytes. The left side's rows are tokens, 16 words of each; the right side's are words
// of the inputs, 16 outputs of each, which is how a panel of a weight lies in memory. With 32 tokens and a panel of 32
// outputs all eight registers are in use: four of sums, two of either side. Every sum is built in the order of the inputs,
// whatever the number of tokens. For up to four tokens, which wait for memory alone, vector units read the weights up to a
// tenth faster; they then add in the very order in which a tile does (`multiply_few`), so that results are the same.
//
// The system grants the registers' state to a process that asks for it; `USES_AMX` says whether it did.
#pragma once

#include "tile.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

namespace amx {

constexpr int ROWS = 32;   // tokens of a tile of tokens: two registers
constexpr int DEPTH = 16;  // words of the inputs in a register
constexpr int WIDTH = 16;  // outputs in a register of the right side, and of sums

inline bool request() {
    constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

const bool USES_AMX = request();

// Tells the compiler that memory is read and written here: GCC's macros for tiles do not say so themselves.
INLINE void memory_is_read(const void* at) { asm volatile("" : : "r"(at) : "memory"); }

// The shapes of the eight registers: 0 to 3 are sums, 4 and 5 the left side, 6 and 7 the right.
struct Shapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    void set(int index, int row_count, int words) { rows[index] = uint8_t(row_count), row_bytes[index] = uint16_t(4 * words); }
};

// What a thread's registers are shaped for. Other libraries shape them too, so nothing is known before `reset`.
class Registers {
  public:
    // Tiles take numbers too small to be normal for 0, so vectors beside them have to.
    Registers() : control_(_mm_getcsr()) { _mm_setcsr(control_ | FLUSH_TO_ZERO | DENORMALS_ARE_ZERO); }
    ~Registers() {
        if (tokens_) _tile_release();
        _mm_setcsr(control_);
    }

    // For `tokens` tokens and `depth` words. Clears all registers if the shape is another one than before.
    INLINE void shape(int tokens, int depth) {
        if (tokens == tokens_ && depth == depth_) return;
        tokens_ = tokens, depth_ = depth;
        const int lower = tokens < 16 ? tokens : 16, upper = tokens - lower;
        Shapes shapes;
        for (int side = 0; side < 2; side++) {
            shapes.set(side, lower, WIDTH), shapes.set(4, lower, depth), shapes.set(6 + side, depth, WIDTH);
            if (upper) shapes.set(2 + side, upper, WIDTH), shapes.set(5, upper, depth);
        }
        memory_is_read(&shapes);
        _tile_loadconfig(&shapes);
    }

  private:
    static constexpr unsigned FLUSH_TO_ZERO = 0x8000, DENORMALS_ARE_ZERO = 0x0040;
    const unsigned control_;
    int tokens_ = 0, depth_ = 0;
};

// sums[tokens][stride floats] into the registers, or zeros, and back.
INLINE void load_sums(const float* sums, int stride, bool has_upper, bool is_first) {
    memory_is_read(sums);
    if (is_first) {
        _tile_zero(0);
        _tile_zero(1);
        if (!has_upper) return;
        _tile_zero(2);
        _tile_zero(3);
        return;
    }
    _tile_loadd(0, sums, 4 * stride);
    _tile_loadd(1, sums + WIDTH, 4 * stride);
    if (!has_upper) return;
    _tile_loadd(2, sums + 16 * stride, 4 * stride);
    _tile_loadd(3, sums + 16 * stride + WIDTH, 4 * stride);
}

INLINE void store_sums(float* sums, int stride, bool has_upper) {
    _tile_stored(0, sums, 4 * stride);
    _tile_stored(1, sums + WIDTH, 4 * stride);
    if (has_upper) {
        _tile_stored(2, sums + 16 * stride, 4 * stride);
        _tile_stored(3, sums + 16 * stride + WIDTH, 4 * stride);
    }
    memory_is_read(sums);
}

// Add the products of DEPTH words, or of as many as the registers are shaped for.
INLINE void multiply(const Word* left, const Word* right, int right_stride, bool has_upper) {
    _tile_loadd(6, right, 4 * right_stride);
    _tile_loadd(4, left, 4 * LEFT_STRIDE);
    _tile_loadd(7, right + WIDTH, 4 * right_stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (!has_upper) return;
    _tile_loadd(5, left + 16 * LEFT_STRIDE, 4 * LEFT_STRIDE);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
}

#if defined(__AMX_INT8__)
// The same for words of four codes of 8 bits, those of the left side signed, those of the right not; sums are integers.
INLINE void multiply_codes(const Word* left, const Word* right, int right_stride, bool has_upper) {
    _tile_loadd(6, right, 4 * right_stride);
    _tile_loadd(4, left, 4 * LEFT_STRIDE);
    _tile_loadd(7, right + WIDTH, 4 * right_stride);
    _tile_dpbsud(0, 4, 6);
    _tile_dpbsud(1, 4, 7);
    if (!has_upper) return;
    _tile_loadd(5, left + 16 * LEFT_STRIDE, 4 * LEFT_STRIDE);
    _tile_dpbsud(2, 5, 6);
    _tile_dpbsud(3, 5, 7);
}
#endif

// Tokens for which vector units are faster.
constexpr int FEW = 4;

// sums[m] += left[m] * right over `words` words, as tiles would. A tile adds the products of the low halves of DEPTH words,
// apart from them those of the high halves, then one to the other, and that to the sum. beside: called with each word.
template <int M, int VECTORS, class Beside>
INLINE void multiply_few(
    Floats (&sums)[M][VECTORS], const Word* left, const Word* right, int right_stride, int words, const Beside& beside
) {
    for (int first = 0; first < words; first += DEPTH) {
        Floats low[M][VECTORS] = {}, high[M][VECTORS] = {};
        const int stop = first + DEPTH < words ? first + DEPTH : words;
        for (int k = first; k < stop; k++) {
            beside(k);
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; v++) {
                const Words pairs = load(right + k * right_stride + v * LANES);
#pragma GCC unroll 4
                for (int m = 0; m < M; m++) {
                    const Word pair = left[m * LEFT_STRIDE + k];
                    const __m512 below = (__m512)all(pair << 16), above = (__m512)all(pair & 0xFFFF0000u);
                    low[m][v] = (Floats)_mm512_fmadd_ps(below, (__m512)(pairs << 16), (__m512)low[m][v]);
                    high[m][v] = (Floats)_mm512_fmadd_ps(above, (__m512)(pairs & 0xFFFF0000u), (__m512)high[m][v]);
                }
            }
        }
#pragma GCC unroll 4
        for (int m = 0; m < M; m++)
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; v++) sums[m][v] += low[m][v] + high[m][v];
    }
}

}  // namespace amx
#else
namespace amx {
constexpr int ROWS = 1, FEW = 0;
constexpr bool USES_AMX = false;
struct Registers {};
}  // namespace amx
#endif
