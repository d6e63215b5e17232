// A GPU that computes nothing: CUDA's runtime, driver and cuBLAS, as far as torch and Triton call them.
//
// Device memory is the host's, never touched until something is copied to it. A kernel that is launched is checked for
// the limits of its launch, and does nothing; what is copied from the device is zeros. Copies, host functions and graphs
// are carried out at once, in the order in which they are asked for. What CUDA refuses while a stream is captured is
// refused here as well, with its codes, and told on stderr; so is a copy that leaves what was allocated, and work on a
// stream of another device. There are HOLLOW_GPUS devices, one without it; `nccl.cpp` ties processes on them together.
//
// Left out: streams that run beside each other.

#include <cublasLt.h>
#include <cublas_api.h>
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <execinfo.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "hollow.h"

#define LOCK std::lock_guard<std::recursive_mutex> lock(everything)
#define REFUSE(code, why) return refused(code, __func__, why)

typedef unsigned long long Id;

static const size_t TOTAL = 150754820096;          // bytes of an H200
static const size_t CONTEXT = size_t(500) << 20;   // bytes that CUDA takes itself
static const size_t MOST_SHARED = 232448;          // bytes of a block
static const int VERSION = 13000;                  // of CUDA
static const int MOST_DEVICES = 16;

static std::recursive_mutex everything;
static thread_local Error latest = cudaSuccess;
static thread_local int current = 0;  // device

// The devices of the machine that this process sees, in its order.
static const std::vector<int> &visible() {
    static std::vector<int> found;
    if (!found.empty()) return found;
    const char *given = getenv("HOLLOW_GPUS"), *chosen = getenv("CUDA_VISIBLE_DEVICES");
    if (chosen)
        for (char *end; *chosen; chosen = *end == ',' ? end + 1 : "") found.push_back(strtol(chosen, &end, 10));
    else
        for (int device = 0; device < (given ? atoi(given) : 1) && device < MOST_DEVICES; device++) found.push_back(device);
    return found;
}

static int count_devices() { return visible().size(); }

int current_device() { return visible()[current]; }

static void trace() {
    void *frames[40];
    if (getenv("HOLLOW_TRACE")) backtrace_symbols_fd(frames, backtrace(frames, 40), 2);
}

Error refused(Error code, const char *function, const char *why) {
    latest = code;
    fprintf(stderr, "hollow GPU: %s: %s\n", function, why);
    trace();
    return code;
}

// ------------------------------------------------------------------------------------------------------------- memory

struct Allocation {
    size_t size;
    bool is_pinned;  // host memory, which a copy need not wait for
    int device;
};

static std::map<uintptr_t, Allocation> allocations;
static size_t taken[MOST_DEVICES];  // of each device

static const Allocation *find(const void *place) {
    LOCK;
    auto next = allocations.upper_bound(uintptr_t(place));
    if (next == allocations.begin()) return nullptr;
    auto &[start, found] = *--next;
    return uintptr_t(place) < start + found.size ? &found : nullptr;
}

static bool on_device(const void *place) {
    auto found = find(place);
    return found && !found->is_pinned;
}

static void *untouched(size_t size, int access) {
    void *place = mmap(nullptr, size ? size : 1, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return place == MAP_FAILED ? nullptr : place;
}

static bool has_room(size_t size) { return taken[current] + size + CONTEXT + (size_t(100) << 20) <= TOTAL; }

// What the host brought to the device last, in a few bytes, and what a collective made of that: until a kernel is launched.
struct Region {
    uintptr_t place = 0;
    size_t size = 0;

    bool has(const void *other, size_t length) const {
        return uintptr_t(other) >= place && uintptr_t(other) + length <= place + size;
    }
};
static thread_local Region brought, known;

bool was_brought(const void *place, size_t size) { return brought.has(place, size); }
void know(const void *place, size_t size) { known = {uintptr_t(place), size}; }

static void copy(void *to, const void *from, size_t size) {
    bool is_from = on_device(from), is_to = on_device(to);
    if (is_from && !is_to && !known.has(from, size)) memset(to, 0, size);  // nothing was computed
    else if (size) memmove(to, from, size);
    if (is_to && !is_from && size <= MOST_KNOWN) brought = {uintptr_t(to), size};
}

static void fill(void *place, int value, size_t size) {
    const size_t large = size_t(64) << 20;  // of which zeros would be written only to be zeros
    if (value || size < large) memset(place, value, size);
}

static Error check_copy(const char *function, const void *to, const void *from, size_t size, cudaMemcpyKind kind) {
    if (!size) return cudaSuccess;
    auto lasts = [size](const void *place) { return on_device(place) && find((const char *)place + size - 1); };
    bool writes = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    bool reads = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    if ((writes && !lasts(to)) || (reads && !lasts(from)))
        return refused(cudaErrorInvalidValue, function, "a copy leaves what was allocated on the device");
    return cudaSuccess;
}

// ------------------------------------------------------------------------------------------------ streams and captures

struct Graph {
    std::vector<std::function<void()>> work;
    size_t num_kernels = 0;
};

struct Stream;

struct Capture {
    Id id;
    cudaStream_t origin;
    int mode;
    pid_t thread;
    Graph *graph = new Graph;
    bool is_invalid = false;
    std::set<Stream *> streams;
};

struct Stream {
    int device = current;
    Capture *capture = nullptr;
    bool is_ahead = false;  // of what events say of it
};

struct Event {
    int device = current;
    bool is_recorded = false, has_time = true;
    timespec time;
    Id capture = 0;
};

static std::map<Id, Capture *> captures;
static Stream legacies[MOST_DEVICES];
static thread_local int mode = cudaStreamCaptureModeGlobal;
static pid_t process = 0;  // that opened the device

static Stream *named(cudaStream_t stream) {
    bool is_legacy = !stream || stream == cudaStreamLegacy || stream == cudaStreamPerThread;
    if (!is_legacy) return (Stream *)stream;
    legacies[current].device = current;
    return &legacies[current];
}

static bool is_legacy(const Stream *stream) { return stream >= legacies && stream < legacies + MOST_DEVICES; }

static Error open() {
    if (!process) process = getpid();
    if (process != getpid()) return refused(cudaErrorInitializationError, "open", "CUDA was opened before a fork");
    return cudaSuccess;
}

// Each device whose work a process does takes CONTEXT there: ranks of a server have one each.
static void use() {
    static std::set<int> used;
    LOCK;
    if (!used.insert(current).second || used.size() == 1) return;
    fprintf(stderr, "hollow GPU: process %d uses device %d too, of %zu\n", getpid(), current, used.size());
    trace();
}

// For what CUDA refuses while another stream is captured, unless its mode or this thread's allows it.
static Error outside_captures(const char *function) {
    LOCK;
    if (Error code = open()) return code;
    for (auto &[id, capture] : captures) {
        bool is_mine = capture->thread == gettid();
        bool is_global = capture->mode == cudaStreamCaptureModeGlobal && mode == cudaStreamCaptureModeGlobal;
        if (mode == cudaStreamCaptureModeRelaxed || capture->mode == cudaStreamCaptureModeRelaxed) continue;
        if (!is_mine && !is_global) continue;
        capture->is_invalid = true;
        return refused(cudaErrorStreamCaptureUnsupported, function, "is not permitted while a stream is captured");
    }
    return cudaSuccess;
}

// Put work on a stream: it is done at once, or noted in the graph.
Error put(cudaStream_t stream, const char *function, std::function<void()> work, bool is_kernel) {
    Stream *on = named(stream);
    use();
    {
        LOCK;
        if (is_legacy(on) && !captures.empty()) {
            captures.begin()->second->is_invalid = true;
            return refused(cudaErrorStreamCaptureImplicit, function, "is on the legacy stream while another is captured");
        }
        if (is_kernel && on->device != current)
            return refused(cudaErrorInvalidResourceHandle, function, "is launched on a stream of another device");
        if (on->capture && on->capture->is_invalid)
            return refused(cudaErrorStreamCaptureInvalidated, function, "is in a capture that has failed");
        if (on->capture) {
            on->is_ahead = true;
            on->capture->graph->num_kernels += is_kernel;
            if (work) on->capture->graph->work.push_back(work);
            return cudaSuccess;
        }
    }
    if (work) work();  // which may wait for other processes
    return cudaSuccess;
}

API Error cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned, int) {
    *stream = (cudaStream_t) new Stream;
    return open();
}
API Error cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
API Error cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
API Error cudaStreamGetPriority(cudaStream_t, int *priority) { return *priority = 0, cudaSuccess; }
API Error cudaStreamQuery(cudaStream_t) { return outside_captures(__func__); }
API Error cudaDeviceSynchronize() { return outside_captures(__func__); }

API Error cudaStreamSynchronize(cudaStream_t stream) {
    if (auto capture = named(stream)->capture) {
        capture->is_invalid = true;
        REFUSE(cudaErrorStreamCaptureUnsupported, "waits for a stream that is captured");
    }
    return outside_captures(__func__);
}

API Error cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *other) {
    std::swap(*(int *)other, mode);
    return cudaSuccess;
}

API Error cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status) {
    LOCK;
    auto capture = named(stream)->capture;
    *status = !capture              ? cudaStreamCaptureStatusNone
              : capture->is_invalid ? cudaStreamCaptureStatusInvalidated
                                    : cudaStreamCaptureStatusActive;
    if (is_legacy(named(stream)) && !captures.empty())
        REFUSE(cudaErrorStreamCaptureImplicit, "asks for the legacy stream while another is captured");
    return cudaSuccess;
}

API Error cudaStreamGetCaptureInfo(
    cudaStream_t stream, cudaStreamCaptureStatus *status, Id *id, cudaGraph_t *graph, const cudaGraphNode_t **nodes,
    const cudaGraphEdgeData **edges, size_t *count
) {
    LOCK;
    if (nodes) *nodes = nullptr;
    if (edges) *edges = nullptr;
    if (count) *count = 0;
    if (auto capture = named(stream)->capture) {
        if (id) *id = capture->id;
        if (graph) *graph = (cudaGraph_t)capture->graph;
    }
    return cudaStreamIsCapturing(stream, status);
}

API Error cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode how) {
    LOCK;
    static Id latest_id = 0;
    Stream *origin = named(stream);
    if (is_legacy(origin)) REFUSE(cudaErrorStreamCaptureUnsupported, "the legacy stream is never captured");
    if (origin->capture) REFUSE(cudaErrorIllegalState, "the stream is captured already");
    origin->capture = new Capture{++latest_id, stream, how, gettid()};
    origin->capture->streams.insert(origin);
    captures[latest_id] = origin->capture;
    return cudaSuccess;
}

API Error cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    LOCK;
    *graph = nullptr;
    Capture *capture = named(stream)->capture;
    if (!capture) REFUSE(cudaErrorIllegalState, "the stream is not captured");
    Error code = capture->origin == stream ? cudaSuccess : cudaErrorStreamCaptureUnmatched;
    for (Stream *one : capture->streams) {
        if (one != named(stream) && one->is_ahead) code = cudaErrorStreamCaptureUnjoined;
        one->capture = nullptr;
    }
    captures.erase(capture->id);
    if (capture->is_invalid) code = cudaErrorStreamCaptureInvalidated;
    if (code) REFUSE(code, "the capture has failed");
    *graph = (cudaGraph_t)capture->graph;
    return cudaSuccess;
}

API Error cudaGraphInstantiateWithFlags(cudaGraphExec_t *made, cudaGraph_t graph, Id) {
    *made = (cudaGraphExec_t)graph;
    return cudaSuccess;
}
API Error cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
    return put(stream, __func__, [=] {
        for (auto &work : ((Graph *)graph)->work) work();
    });
}
API Error cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
API Error cudaGraphExecDestroy(cudaGraphExec_t) { return outside_captures(__func__); }
API Error cudaGraphDebugDotPrint(cudaGraph_t, const char *, unsigned) { return cudaSuccess; }
API Error cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *, size_t *count) {
    *count = ((Graph *)graph)->num_kernels + ((Graph *)graph)->work.size();
    return cudaSuccess;
}
API Error cudaGraphNodeGetDependencies(cudaGraphNode_t, cudaGraphNode_t *, cudaGraphEdgeData *, size_t *count) {
    return *count = 0, cudaSuccess;
}

// ------------------------------------------------------------------------------------------------------------- events

API Error cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    auto made = new Event;
    made->has_time = !(flags & cudaEventDisableTiming);
    *event = (cudaEvent_t)made;
    return open();
}
API Error cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
API Error cudaEventDestroy(cudaEvent_t event) { return delete (Event *)event, cudaSuccess; }

API Error cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    LOCK;
    auto recorded = (Event *)event;
    auto on = named(stream);
    if (on->device != recorded->device) REFUSE(cudaErrorInvalidResourceHandle, "records an event of another device");
    recorded->is_recorded = true;
    recorded->capture = on->capture ? on->capture->id : 0;
    on->is_ahead = false;
    clock_gettime(CLOCK_MONOTONIC, &recorded->time);
    return on->capture ? cudaSuccess : put(stream, __func__, nullptr);
}
API Error cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
    return cudaEventRecord(event, stream);
}

static Error ask(cudaEvent_t event, const char *function) {
    LOCK;
    Id id = ((Event *)event)->capture;
    if (!id) return outside_captures(function);
    if (captures.count(id)) captures[id]->is_invalid = true;
    return refused(cudaErrorCapturedEvent, function, "asks for an event that was captured");
}
API Error cudaEventQuery(cudaEvent_t event) { return ask(event, __func__); }
API Error cudaEventSynchronize(cudaEvent_t event) { return ask(event, __func__); }

API Error cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
    auto from = (Event *)start, to = (Event *)end;
    if (!from->is_recorded || !to->is_recorded || !from->has_time || !to->has_time)
        REFUSE(cudaErrorInvalidResourceHandle, "an event has no time");
    *milliseconds = (to->time.tv_sec - from->time.tv_sec) * 1e3 + (to->time.tv_nsec - from->time.tv_nsec) * 1e-6;
    return cudaSuccess;
}

API Error cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    LOCK;
    auto on = named(stream);
    auto awaited = (Event *)event;
    auto of = captures.count(awaited->capture) ? captures[awaited->capture] : nullptr;
    if (!awaited->is_recorded || (!of && !on->capture)) return cudaSuccess;
    if (!of) {
        on->capture->is_invalid = true;
        REFUSE(cudaErrorStreamCaptureIsolation, "a captured stream waits for an event from outside");
    }
    if (is_legacy(on) || (on->capture && on->capture != of)) {
        of->is_invalid = true;
        REFUSE(cudaErrorStreamCaptureMerge, "a stream that is not of a capture waits for an event that is");
    }
    on->capture = of;
    on->is_ahead = true;
    of->streams.insert(on);
    return cudaSuccess;
}

API Error cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *with) {
    return put(stream, __func__, [=] { function(with); });
}
API Error cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void *with, unsigned) {
    return put(stream, __func__, [=] { function(stream, cudaSuccess, with); });
}

// ---------------------------------------------------------------------------------------------------- memory, as asked

API Error cudaMalloc(void **place, size_t size) {
    LOCK;
    if (Error code = outside_captures(__func__)) return code;
    if (!has_room(size)) return latest = cudaErrorMemoryAllocation;
    use();
    *place = untouched(size, PROT_READ | PROT_WRITE);
    allocations[uintptr_t(*place)] = {size ? size : 1, false, current};
    taken[current] += size;
    return cudaSuccess;
}
API Error cudaHostAlloc(void **place, size_t size, unsigned) {
    LOCK;
    if (Error code = outside_captures(__func__)) return code;
    *place = untouched(size, PROT_READ | PROT_WRITE);
    allocations[uintptr_t(*place)] = {size ? size : 1, true};
    return cudaSuccess;
}
API Error cudaFree(void *place) {
    LOCK;
    if (!place) return cudaSuccess;
    if (Error code = outside_captures(__func__)) return code;
    auto found = allocations.find(uintptr_t(place));
    if (found == allocations.end()) REFUSE(cudaErrorInvalidValue, "frees what was not allocated");
    taken[found->second.device] -= found->second.is_pinned ? 0 : found->second.size;
    munmap(place, found->second.size);
    allocations.erase(found);
    return cudaSuccess;
}
API Error cudaFreeHost(void *place) { return cudaFree(place); }
API Error cudaHostRegister(void *place, size_t size, unsigned) {
    LOCK;
    allocations[uintptr_t(place)] = {size, true};
    return outside_captures(__func__);
}
API Error cudaHostUnregister(void *place) {
    LOCK;
    return allocations.erase(uintptr_t(place)), cudaSuccess;
}
API Error cudaMemGetInfo(size_t *free, size_t *total) {
    return *total = TOTAL, *free = TOTAL - CONTEXT - taken[current], cudaSuccess;
}

API Error cudaMemcpyAsync(void *to, const void *from, size_t size, cudaMemcpyKind kind, cudaStream_t stream) {
    if (Error code = check_copy(__func__, to, from, size, kind)) return code;
    auto capture = named(stream)->capture;
    bool is_within = kind == cudaMemcpyDeviceToDevice;
    if (size && capture && !is_within && !find(kind == cudaMemcpyHostToDevice ? from : to)) {
        capture->is_invalid = true;
        REFUSE(cudaErrorStreamCaptureUnsupported, "copies pageable memory while its stream is captured");
    }
    return put(stream, __func__, [=] { copy(to, from, size); });
}
API Error cudaMemcpy(void *to, const void *from, size_t size, cudaMemcpyKind kind) {
    if (Error code = check_copy(__func__, to, from, size, kind)) return code;
    if (Error code = outside_captures(__func__)) return code;
    return put(nullptr, __func__, [=] { copy(to, from, size); });
}
API Error cudaMemcpy2DAsync(
    void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height, cudaMemcpyKind kind,
    cudaStream_t stream
) {
    if (Error code = check_copy(__func__, to, from, height ? width : 0, kind)) return code;
    return put(stream, __func__, [=] {
        for (size_t row = 0; row < height; row++)
            copy((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
    });
}
API Error cudaMemcpyPeerAsync(void *to, int, const void *from, int, size_t size, cudaStream_t stream) {
    return put(stream, __func__, [=] { copy(to, from, size); });
}
API Error cudaMemcpyToSymbol(const void *, const void *, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }
API Error cudaMemsetAsync(void *place, int value, size_t size, cudaStream_t stream) {
    if (size && !on_device(place)) REFUSE(cudaErrorInvalidValue, "fills what is not on the device");
    return put(stream, __func__, [=] { fill(place, value, size); });
}
API Error cudaMemset(void *place, int value, size_t size) {
    if (Error code = outside_captures(__func__)) return code;
    return cudaMemsetAsync(place, value, size, nullptr);
}
API Error cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *place) {
    *attributes = {};
    attributes->device = -2;
    attributes->type = cudaMemoryTypeUnregistered;
    if (auto found = find(place)) {
        attributes->device = found->device;
        attributes->type = found->is_pinned ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
        attributes->devicePointer = (void *)place;
        attributes->hostPointer = found->is_pinned ? (void *)place : nullptr;
    }
    return cudaSuccess;
}

// -------------------------------------------------------------------------------------------------------------- device

static int attribute(int which) {
    static const std::map<int, int> values = {
        {cudaDevAttrMaxThreadsPerBlock, 1024}, {cudaDevAttrMaxBlockDimX, 1024}, {cudaDevAttrMaxBlockDimY, 1024},
        {cudaDevAttrMaxBlockDimZ, 64}, {cudaDevAttrMaxGridDimX, 2147483647}, {cudaDevAttrMaxGridDimY, 65535},
        {cudaDevAttrMaxGridDimZ, 65535}, {cudaDevAttrMaxSharedMemoryPerBlock, 49152},
        {cudaDevAttrMaxSharedMemoryPerBlockOptin, int(MOST_SHARED)},
        {cudaDevAttrMaxSharedMemoryPerMultiprocessor, 233472}, {cudaDevAttrReservedSharedMemoryPerBlock, 1024},
        {cudaDevAttrWarpSize, 32}, {cudaDevAttrMaxRegistersPerBlock, 65536},
        {cudaDevAttrMaxRegistersPerMultiprocessor, 65536}, {cudaDevAttrClockRate, 1980000},
        {cudaDevAttrMemoryClockRate, 3201000}, {cudaDevAttrGlobalMemoryBusWidth, 6144},
        {cudaDevAttrMultiProcessorCount, 132}, {cudaDevAttrL2CacheSize, 62914560},
        {cudaDevAttrMaxThreadsPerMultiProcessor, 2048}, {cudaDevAttrMaxBlocksPerMultiprocessor, 32},
        {cudaDevAttrComputeCapabilityMajor, 9}, {cudaDevAttrPciBusId, 10}, {cudaDevAttrConcurrentKernels, 1},
        {cudaDevAttrUnifiedAddressing, 1}, {cudaDevAttrCanMapHostMemory, 1}, {cudaDevAttrCooperativeLaunch, 1},
        {cudaDevAttrMemoryPoolsSupported, 1}, {cudaDevAttrManagedMemory, 1}, {cudaDevAttrStreamPrioritiesSupported, 1},
        {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 1},
    };
    auto found = values.find(which);
    return found == values.end() ? 0 : found->second;
}

API Error cudaGetDeviceProperties(cudaDeviceProp *of, int device) {
    if (device < 0 || device >= count_devices()) REFUSE(cudaErrorInvalidDevice, "there is no such device");
    *of = {};
    of->uuid.bytes[0] = char(visible()[device]);
    of->pciBusID = 10 + visible()[device];
    strcpy(of->name, "NVIDIA H200 (hollow)");
    of->totalGlobalMem = TOTAL;
    of->major = 9;
    of->sharedMemPerBlock = 49152;
    of->sharedMemPerBlockOptin = MOST_SHARED;
    of->sharedMemPerMultiprocessor = 233472;
    of->reservedSharedMemPerBlock = 1024;
    of->regsPerBlock = of->regsPerMultiprocessor = 65536;
    of->warpSize = 32;
    of->maxThreadsPerBlock = of->maxThreadsDim[0] = of->maxThreadsDim[1] = 1024;
    of->maxThreadsDim[2] = 64;
    of->maxGridSize[0] = 2147483647;
    of->maxGridSize[1] = of->maxGridSize[2] = 65535;
    of->totalConstMem = 65536;
    of->textureAlignment = 512;
    of->multiProcessorCount = 132;
    of->maxThreadsPerMultiProcessor = 2048;
    of->maxBlocksPerMultiProcessor = 32;
    of->memoryBusWidth = 6144;
    of->l2CacheSize = 62914560;
    of->asyncEngineCount = 3;
    of->canMapHostMemory = of->concurrentKernels = of->ECCEnabled = of->unifiedAddressing = 1;
    of->managedMemory = of->cooperativeLaunch = of->memoryPoolsSupported = 1;
    return cudaSuccess;
}
API Error cudaDeviceGetAttribute(int *value, cudaDeviceAttr which, int) { return *value = attribute(which), cudaSuccess; }
API Error cudaGetDeviceCount(int *count) { return *count = count_devices(), cudaSuccess; }
API Error cudaGetDevice(int *device) { return *device = current, cudaSuccess; }
API Error cudaSetDevice(int device) {
    if (device < 0 || device >= count_devices()) REFUSE(cudaErrorInvalidDevice, "there is no such device");
    current = device;
    return open();
}
API Error cudaDriverGetVersion(int *version) { return *version = VERSION, cudaSuccess; }
API Error cudaRuntimeGetVersion(int *version) { return *version = VERSION, cudaSuccess; }
API Error cudaDeviceCanAccessPeer(int *can, int device, int peer) { return *can = device != peer, cudaSuccess; }
API Error cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
API Error cudaDeviceGetPCIBusId(char *text, int size, int device) {
    return snprintf(text, size, "0000:%02x:00.0", 10 + visible()[device]), cudaSuccess;
}
API Error cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return cudaSuccess;
}
API Error cudaGetLastError() {
    Error code = latest;
    latest = cudaSuccess;
    return code;
}
API Error cudaPeekAtLastError() { return latest; }
API const char *cudaGetErrorName(Error) { return "an error of the hollow GPU"; }
API const char *cudaGetErrorString(Error code) {
    static thread_local char text[64];
    snprintf(text, sizeof text, code ? "error %d of the hollow GPU" : "no error", code);
    return text;
}
API Error cudaProfilerStart() { return cudaSuccess; }
API Error cudaProfilerStop() { return cudaSuccess; }

// ------------------------------------------------------------------------------------------------------------- kernels

static Error launch(const char *name, dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
    brought = known = {};
    bool is_possible = grid.x && grid.y && grid.z && grid.x <= 2147483647u && grid.y <= 65535 && grid.z <= 65535 &&
                       block.x && block.x * block.y * block.z <= 1024 && shared <= MOST_SHARED;
    if (is_possible) return put(stream, name, nullptr, true);
    fprintf(stderr, "hollow GPU: %u x %u x %u of %u x %u x %u, %zu bytes\n", grid.x, grid.y, grid.z, block.x, block.y,
            block.z, shared);
    return refused(cudaErrorInvalidConfiguration, name, "is launched beyond a limit");
}

static thread_local struct {
    dim3 grid, block;
    size_t shared;
    cudaStream_t stream;
} pushed;

API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
    pushed = {grid, block, shared, stream};
    return 0;
}
API Error __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = pushed.grid, *block = pushed.block, *shared = pushed.shared, *(cudaStream_t *)stream = pushed.stream;
    return cudaSuccess;
}
API Error cudaLaunchKernel(const void *, dim3 grid, dim3 block, void **, size_t shared, cudaStream_t stream) {
    return launch(__func__, grid, block, shared, stream);
}
API Error __cudaLaunchKernel(cudaKernel_t, dim3 grid, dim3 block, void **, size_t shared, cudaStream_t stream) {
    return launch(__func__, grid, block, shared, stream);
}
API Error cudaLaunchCooperativeKernel(const void *, dim3 grid, dim3 block, void **, size_t shared, cudaStream_t stream) {
    return launch(__func__, grid, block, shared, stream);
}
API Error cudaLaunchKernelExC(const cudaLaunchConfig_t *how, const void *, void **) {
    return launch(__func__, how->gridDim, how->blockDim, how->dynamicSmemBytes, how->stream);
}
API Error __cudaGetKernel(cudaKernel_t *kernel, const void *function) { return *kernel = (cudaKernel_t)function, cudaSuccess; }
API Error cudaGetSymbolAddress(void **place, const void *) {
    static void *symbols = untouched(1 << 20, PROT_READ | PROT_WRITE);
    return *place = symbols, cudaSuccess;
}
API void **__cudaRegisterFatBinary(void *) {
    static void *handle[4];
    return handle;
}
API void __cudaRegisterFatBinaryEnd(void **) {}
API void __cudaUnregisterFatBinary(void **) {}
API void __cudaRegisterFunction(void **, const char *, char *, const char *, int, void *, void *, void *, void *, int *) {}
API void __cudaRegisterVar(void **, char *, char *, const char *, int, size_t, int, int) {}
API char __cudaInitModule(void **) { return 1; }
API Error cudaFuncGetAttributes(cudaFuncAttributes *of, const void *) {
    *of = {};
    of->maxThreadsPerBlock = 1024;
    of->numRegs = 64;
    of->ptxVersion = of->binaryVersion = 90;
    of->maxDynamicSharedSizeBytes = MOST_SHARED;
    return cudaSuccess;
}
API Error cudaFuncSetAttribute(const void *, cudaFuncAttribute, int) { return cudaSuccess; }
API Error cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, const void *, int threads, size_t, unsigned) {
    return *count = 2048 / (threads ? threads : 1), cudaSuccess;
}
API Error cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *count, const void *function, int threads, size_t shared) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(count, function, threads, shared, 0);
}

// -------------------------------------------------------------------------------------------------------------- driver

static CUresult as_driver(Error code) { return CUresult(code); }  // codes of what happens here are the same

API CUresult cuInit(unsigned) { return as_driver(open()); }
API CUresult cuDeviceGet(CUdevice *device, int number) { return *device = number, CUDA_SUCCESS; }
API CUresult cuDeviceGetCount(int *count) { return *count = count_devices(), CUDA_SUCCESS; }
API CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute which, CUdevice) {
    return *value = attribute(which), CUDA_SUCCESS;
}
// A context is its device's legacy stream.
static thread_local std::vector<int> earlier;  // current devices
API CUresult cuCtxGetCurrent(CUcontext *context) { return *context = (CUcontext)&legacies[current], CUDA_SUCCESS; }
API CUresult cuCtxSetCurrent(CUcontext context) {
    if (context) current = (Stream *)context - legacies;
    return CUDA_SUCCESS;
}
API CUresult cuCtxPushCurrent_v2(CUcontext context) { return earlier.push_back(current), cuCtxSetCurrent(context); }
API CUresult cuCtxPopCurrent_v2(CUcontext *context) {
    if (context) cuCtxGetCurrent(context);
    if (!earlier.empty()) current = earlier.back(), earlier.pop_back();
    return CUDA_SUCCESS;
}
API CUresult cuCtxGetLimit(size_t *value, CUlimit) { return *value = 1024, CUDA_SUCCESS; }
API CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }
API CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    return *context = (CUcontext)&legacies[device], CUDA_SUCCESS;
}
API CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned *flags, int *is_active) {
    return *flags = 0, *is_active = process == getpid(), CUDA_SUCCESS;
}
API CUresult cuGetErrorString(CUresult code, const char **text) {
    return *text = cudaGetErrorString(Error(code)), CUDA_SUCCESS;
}
API CUresult cuGetErrorName(CUresult code, const char **text) { return cuGetErrorString(code, text); }
API CUresult cuModuleLoadData(CUmodule *module, const void *) {
    *module = (CUmodule)&legacies[current];
    return as_driver(outside_captures(__func__));
}
API CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
API CUresult cuModuleGetFunction(CUfunction *function, CUmodule, const char *name) {
    return *function = (CUfunction)strdup(name), CUDA_SUCCESS;
}
API CUresult cuFuncGetAttribute(int *value, CUfunction_attribute which, CUfunction) {
    *value = which == CU_FUNC_ATTRIBUTE_NUM_REGS ? 100 : which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
    return CUDA_SUCCESS;
}
API CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
API CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
API CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction, const CUlaunchConfig *) { return *count = 66, CUDA_SUCCESS; }
API CUresult cuLaunchKernelEx(const CUlaunchConfig *how, CUfunction function, void **, void **) {
    dim3 grid(how->gridDimX, how->gridDimY, how->gridDimZ), block(how->blockDimX, how->blockDimY, how->blockDimZ);
    return as_driver(launch((char *)function, grid, block, how->sharedMemBytes, how->hStream));
}
API CUresult cuTensorMapEncodeTiled(
    CUtensorMap *map, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
    const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill
) {
    return *map = {}, CUDA_SUCCESS;
}
API CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void *with) {
    return as_driver(put(stream, __func__, [=] { function(with); }));
}
API CUresult cuPointerGetAttribute(void *value, CUpointer_attribute which, CUdeviceptr place) {
    auto found = find((void *)place);
    if (!found) return CUDA_ERROR_INVALID_VALUE;  // by which Triton knows a tensor of the host
    if (which == CU_POINTER_ATTRIBUTE_MEMORY_TYPE)
        *(int *)value = found->is_pinned ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
    else *(CUdeviceptr *)value = which == CU_POINTER_ATTRIBUTE_DEVICE_POINTER ? place : 0;
    return CUDA_SUCCESS;
}

// Memory that torch maps into ranges of addresses, for segments that grow; behind a file, other processes map it too.
struct Piece {
    size_t size;
    int device, file;
};
static std::map<Id, Piece> pieces;

static Id add_piece(size_t size, int file) {
    static Id latest_piece = 0;
    pieces[++latest_piece] = {size, current, file};
    return latest_piece;
}

API CUresult cuMemGetAllocationGranularity(size_t *size, const CUmemAllocationProp *, CUmemAllocationGranularity_flags) {
    return *size = 2 << 20, CUDA_SUCCESS;
}
API CUresult cuMemAddressReserve(CUdeviceptr *place, size_t size, size_t, CUdeviceptr, Id) {
    *place = (CUdeviceptr)untouched(size, PROT_NONE);
    return *place ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
API CUresult cuMemAddressFree(CUdeviceptr place, size_t size) { return munmap((void *)place, size), CUDA_SUCCESS; }
API CUresult cuMemCreate(CUmemGenericAllocationHandle *piece, size_t size, const CUmemAllocationProp *of, Id) {
    LOCK;
    if (!has_room(size)) return CUDA_ERROR_OUT_OF_MEMORY;
    bool is_shared = of->requestedHandleTypes & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    int file = is_shared ? memfd_create("hollow", MFD_CLOEXEC) : -1;
    if (is_shared && ftruncate(file, size)) return CUDA_ERROR_OUT_OF_MEMORY;
    *piece = add_piece(size, file);
    taken[current] += size;
    return CUDA_SUCCESS;
}
API CUresult cuMemExportToShareableHandle(void *handle, CUmemGenericAllocationHandle piece, CUmemAllocationHandleType, Id) {
    LOCK;
    if (pieces[piece].file < 0) return CUDA_ERROR_INVALID_VALUE;
    return *(int *)handle = fcntl(pieces[piece].file, F_DUPFD_CLOEXEC, 0), CUDA_SUCCESS;
}
API CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *piece, void *handle, CUmemAllocationHandleType) {
    LOCK;
    struct stat of;
    int file = fcntl(int(intptr_t(handle)), F_DUPFD_CLOEXEC, 0);
    if (file < 0 || fstat(file, &of)) return CUDA_ERROR_INVALID_VALUE;
    return *piece = add_piece(of.st_size, file), CUDA_SUCCESS;
}
API CUresult cuMemRelease(CUmemGenericAllocationHandle piece) {
    LOCK;
    auto [size, device, file] = pieces[piece];
    taken[device] -= size < taken[device] ? size : taken[device];
    if (file >= 0) close(file);
    return pieces.erase(piece), CUDA_SUCCESS;
}
API CUresult cuMemMap(CUdeviceptr place, size_t size, size_t, CUmemGenericAllocationHandle piece, Id) {
    LOCK;
    auto [whole, device, file] = pieces[piece];
    allocations[place] = {size, false, device};
    const int access = PROT_READ | PROT_WRITE;
    if (file < 0) return mprotect((void *)place, size, access) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
    bool is_there = mmap((void *)place, size, access, MAP_SHARED | MAP_FIXED, file, 0) != MAP_FAILED;
    return is_there ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
API CUresult cuMemUnmap(CUdeviceptr place, size_t size) {
    LOCK;
    for (auto at = allocations.lower_bound(place); at != allocations.end() && at->first < place + size;)
        at = allocations.erase(at);
    const int anew = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    return mmap((void *)place, size, PROT_NONE, anew, -1, 0) == MAP_FAILED ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
API CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc *, size_t) { return CUDA_SUCCESS; }

// What torch only looks up.
#define ABSENT(name)                         \
    API CUresult absent_##name() asm(#name); \
    CUresult absent_##name() { return CUDA_ERROR_NOT_SUPPORTED; }
ABSENT(cuMulticastCreate)
ABSENT(cuMemGetAllocationPropertiesFromHandle) ABSENT(cuMemRetainAllocationHandle) ABSENT(cuMulticastAddDevice)
ABSENT(cuMulticastBindMem) ABSENT(cuMulticastUnbind) ABSENT(cuGreenCtxCreate) ABSENT(cuGreenCtxDestroy)
ABSENT(cuGreenCtxStreamCreate) ABSENT(cuCtxFromGreenCtx) ABSENT(cuDevResourceGenerateDesc)
ABSENT(cuDevSmResourceSplitByCount) ABSENT(cuDeviceGetDevResource)
ABSENT(cuMemsetD32Async) ABSENT(cuStreamWriteValue32) ABSENT(cuLaunchCooperativeKernel)

// NVML, which torch's allocator asks for processes on the device when it has no more memory.
ABSENT(nvmlDeviceGetNvLinkRemoteDeviceType)
ABSENT(nvmlDeviceGetNvLinkRemotePciInfo_v2) ABSENT(nvmlSystemGetCudaDriverVersion_v2)
API int nvmlInit_v2() { return 0; }
API int nvmlDeviceGetGpuFabricInfoV(void *, void *) { return 0; }
API int nvmlDeviceGetHandleByPciBusId_v2(const char *, void **device) { return *device = &legacies[0], 0; }
API int nvmlDeviceGetComputeRunningProcesses(void *, unsigned *count, void *) { return *count = 0, 0; }

API Error cudaGetDriverEntryPointByVersion(
    const char *name, void **found, unsigned, Id, cudaDriverEntryPointQueryResult *result
) {
    *found = dlsym(RTLD_DEFAULT, (std::string(name) + "_v2").c_str());
    if (!*found) *found = dlsym(RTLD_DEFAULT, name);
    if (result) *result = *found ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}

// -------------------------------------------------------------------------------------------------------------- cuBLAS

struct Library {
    cudaStream_t stream = nullptr;
    cublasMath_t math = CUBLAS_DEFAULT_MATH;
    cublasPointerMode_t pointers = CUBLAS_POINTER_MODE_HOST;
};
typedef cublasStatus_t Status;
typedef cublasOperation_t Turned;
typedef cudaDataType Type;
static const Status DONE = CUBLAS_STATUS_SUCCESS;

static Status multiply(cudaStream_t stream, const char *function, const void *a, const void *b, const void *c) {
    if (!on_device(a) || !on_device(b) || !on_device(c))
        return refused(cudaErrorInvalidValue, function, "a matrix is not on the device"), CUBLAS_STATUS_EXECUTION_FAILED;
    brought = known = {};
    return put(stream, function, nullptr, true) ? CUBLAS_STATUS_EXECUTION_FAILED : DONE;
}
#define OF(handle) ((Library *)handle)
#define PRODUCT multiply(OF(handle)->stream, __func__, a, b, c)

API Status cublasCreate_v2(cublasHandle_t *handle) {
    *handle = (cublasHandle_t) new Library;
    return outside_captures(__func__) ? CUBLAS_STATUS_NOT_INITIALIZED : DONE;
}
API Status cublasDestroy_v2(cublasHandle_t) { return DONE; }
API Status cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream) { return OF(handle)->stream = stream, DONE; }
API Status cublasSetWorkspace_v2(cublasHandle_t, void *, size_t) { return DONE; }
API Status cublasGetMathMode(cublasHandle_t handle, cublasMath_t *math) { return *math = OF(handle)->math, DONE; }
API Status cublasSetMathMode(cublasHandle_t handle, cublasMath_t math) { return OF(handle)->math = math, DONE; }
API Status cublasGetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t *of) { return *of = OF(handle)->pointers, DONE; }
API Status cublasSetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t of) { return OF(handle)->pointers = of, DONE; }
API Status cublasGemmEx(
    cublasHandle_t handle, Turned, Turned, int, int, int, const void *, const void *a, Type, int, const void *b, Type,
    int, const void *, void *c, Type, int, cublasComputeType_t, cublasGemmAlgo_t
) {
    return PRODUCT;
}
API Status cublasGemmStridedBatchedEx(
    cublasHandle_t handle, Turned, Turned, int, int, int, const void *, const void *a, Type, int, long long,
    const void *b, Type, int, long long, const void *, void *c, Type, int, long long, int, cublasComputeType_t,
    cublasGemmAlgo_t
) {
    return PRODUCT;
}
API Status cublasSgemm_v2(
    cublasHandle_t handle, Turned, Turned, int, int, int, const float *, const float *a, int, const float *b, int,
    const float *, float *c, int
) {
    return PRODUCT;
}
API Status cublasSgemmStridedBatched(
    cublasHandle_t handle, Turned, Turned, int, int, int, const float *, const float *a, int, long long, const float *b,
    int, long long, const float *, float *c, int, long long, int
) {
    return PRODUCT;
}
API Status cublasSgemv_v2(
    cublasHandle_t handle, Turned, int, int, const float *, const float *a, int, const float *b, int, const float *,
    float *c, int
) {
    return PRODUCT;
}

#define MADE(type) (*made = (type)calloc(1, 64), DONE)
#define GONE (free(made), DONE)
API Status cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *made, cublasComputeType_t, Type) { return MADE(cublasLtMatmulDesc_t); }
API Status cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t made) { return GONE; }
API Status cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t, cublasLtMatmulDescAttributes_t, const void *, size_t) { return DONE; }
API Status cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *made) { return MADE(cublasLtMatmulPreference_t); }
API Status cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t made) { return GONE; }
API Status cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t, const void *, size_t) { return DONE; }
API Status cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *made, Type, uint64_t, uint64_t, int64_t) { return MADE(cublasLtMatrixLayout_t); }
API Status cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t made) { return GONE; }
API Status cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t, cublasLtMatrixLayoutAttribute_t, const void *, size_t) { return DONE; }
API Status cublasLtMatmulAlgoGetHeuristic(
    cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
    cublasLtMatrixLayout_t, cublasLtMatmulPreference_t, int, cublasLtMatmulHeuristicResult_t *found, int *count
) {
    return *found = {}, *count = 1, DONE;
}
API Status cublasLtMatmul(
    cublasLtHandle_t, cublasLtMatmulDesc_t, const void *, const void *a, cublasLtMatrixLayout_t, const void *b,
    cublasLtMatrixLayout_t, const void *, const void *, cublasLtMatrixLayout_t, void *c, cublasLtMatrixLayout_t,
    const cublasLtMatmulAlgo_t *, void *, size_t, cudaStream_t stream
) {
    return multiply(stream, __func__, a, b, c);
}
