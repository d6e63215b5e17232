// What the parts of the hollow GPU tell each other.

#pragma once

#include <cuda_runtime_api.h>

#include <functional>

#define API extern "C" __attribute__((visibility("default")))

typedef cudaError_t Error;

const size_t MOST_KNOWN = 4096;  // bytes of a piece of device memory whose values are kept

// Say on stderr why CUDA would refuse a call, and with which code.
Error refused(Error code, const char *function, const char *why);

// Put work on a stream: it is done at once, or noted in the graph.
Error put(cudaStream_t stream, const char *function, std::function<void()> work, bool is_kernel = false);

int current_device();  // as the machine counts them

// Whether these bytes of the device are what this thread has just brought there.
bool was_brought(const void *place, size_t size);

// These bytes of the device are what they would be on a GPU: this thread may read them next.
void know(const void *place, size_t size);
