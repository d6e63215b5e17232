// The panels in which linear layers store their weights, and what follows the product of tokens with one of them.
//
// A panel has 32 outputs. A gated layer has 16 outputs of the gate and the same 16 of the other half in each, so that
// their product needs no second pass.
#pragma once

#include "functions.h"
#include "tile.h"

constexpr int PANEL = 32;
constexpr int VECTORS = PANEL / LANES;
// Bytes of a panel that belong to one word of the inputs.
constexpr long STEP = 4 * PANEL;
// Of the inputs that a thread keeps in its L2 cache while it goes through panels; with fewer tokens than the least, all
// the weight would pass by too often.
constexpr long CHUNK_BYTES = 512 * 1024, LEAST_CHUNK = 48;

// Vectors of a panel that M tokens, of at most ROWS, are multiplied with at once: more where there are fewer tokens.
template <int M, int ROWS>
constexpr int TILE_VECTORS = M * VECTORS <= 2 * ROWS ? VECTORS : M * VECTORS <= 4 * ROWS ? VECTORS / 2 : 2;

struct Panels {
    long outputs;  // of the layer: a gated one has half as many as its weight has rows
    long is_gated;

    long panel_outputs() const { return is_gated ? PANEL / 2 : PANEL; }
    long num_panels() const { return (outputs + panel_outputs() - 1) / panel_outputs(); }
    // The row of the weight that a lane of a panel is; -1: there is none.
    long row_of(long panel, int lane) const {
        const long output = panel * panel_outputs() + lane % panel_outputs();
        return output < outputs ? output + lane / panel_outputs() * outputs : -1;
    }
};

// Tokens that pass by a panel together, of `left_words` words each.
INLINE Parts chunks_of(long tokens, long left_words) {
    return Parts(tokens, max(CHUNK_BYTES / 4 / left_words, LEAST_CHUNK));
}

// Rows ahead of the one that is written whose places in memory are fetched: they are far from each other, so that
// no processor foresees them.
constexpr long ROWS_AHEAD = 8;

// From the sums of `rows` tokens with a panel to outputs. `first` is the number of the first token.
template <int KIND, class Layer>
void finish_tile(const Layer& layer, long panel, long first, long rows, const float* sums) {
    const auto& weight = layer.weight;
    const long width = weight.outputs, column = panel * weight.panel_outputs();
    const int vectors = int(min(weight.panel_outputs(), width - column) + LANES - 1) / LANES;
    const bool has_up_bias = weight.is_gated && layer.bias;
    Floats bias[VECTORS] = {}, up_bias[VECTORS] = {};
    for (int v = 0; v < vectors; v++) {
        const long at = column + v * LANES;
        if (layer.bias) bias[v] = load_part(layer.bias + at, width - at);
        if (has_up_bias) up_bias[v] = load_part(layer.bias + width + at, width - at);
    }
    for (long row = 0; row < rows; row++, sums += PANEL) {
        const long start = (first + row) * width + column, ahead = start + min(ROWS_AHEAD, rows - 1 - row) * width;
        __builtin_prefetch(layer.out + ahead, 1);
        if (layer.residual) __builtin_prefetch(layer.residual + ahead);
        for (int v = 0; v < vectors; v++) {
            const long place = start + v * LANES, count = width - column - v * LANES;
            Floats y = load(sums + v * LANES) + bias[v];
            if (weight.is_gated)
                y = gated<KIND>(y, load(sums + PANEL / 2 + v * LANES) + up_bias[v]);
            else
                y = activate<KIND>(y);
            if (layer.residual) y += load_part(layer.residual + place, count);
            store_part(layer.out + place, y, count);
        }
    }
}

// By Activation.
template <class Layer>
constexpr decltype(&finish_tile<NONE, Layer>) FINISH[NUM_ACTIVATIONS] = {
    finish_tile<NONE, Layer>, finish_tile<GELU, Layer>, finish_tile<GELU_TANH, Layer>,
    finish_tile<RELU, Layer>, finish_tile<SILU, Layer>, finish_tile<CLAMPED_SWIGLU, Layer>,
    finish_tile<RELU_SQUARED, Layer>, finish_tile<SIGMOID, Layer>,
};
