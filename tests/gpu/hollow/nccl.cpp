// NCCL between processes on hollow GPUs: a collective ends once all ranks are in it, and who finds the others in another
// one says so and ends, where NCCL would hang or mix them.
//
// Values are those of NCCL where the host brought them in a few whole numbers, as ranks do that agree on something.
// All other values are what no kernel has written, and stay. A rank waits on the thread that asks, in a replayed graph
// too; one whose peers never come waits until its process is killed or the communicator aborted.

#include <fcntl.h>
#include <linux/futex.h>
#include <nccl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <string>
#include <vector>

#include "hollow.h"

static const int MOST_RANKS = 64;
static const ncclResult_t DONE = ncclSuccess;

// What the ranks share: a file that the first of them removes once all have come.
struct Room {
    std::atomic<uint32_t> arrived, turn;
    int devices[MOST_RANKS];
    char calls[MOST_RANKS][64];  // what each is in
    bool is_told[MOST_RANKS];
    char told[MOST_RANKS][MOST_KNOWN];
};

struct Communicator {
    Room *room;
    int rank, size;
    std::atomic<bool> is_aborted;
};
typedef Communicator *Of;
#define OF(comm) ((Of)comm)

static void wait_for_all(Of of) {
    Room &room = *of->room;
    uint32_t turn = room.turn;
    if (++room.arrived == uint32_t(of->size)) {
        room.arrived = 0;
        room.turn++;
        syscall(SYS_futex, &room.turn, FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0);
    }
    timespec patience = {0, 50000000};
    while (room.turn == turn && !of->is_aborted) syscall(SYS_futex, &room.turn, FUTEX_WAIT, turn, &patience, nullptr, 0);
}

// ------------------------------------------------------------------------------------------------------- communicators

API ncclResult_t ncclGetVersion(int *version) { return *version = NCCL_VERSION_CODE, DONE; }

API ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    static std::atomic<int> count;
    *id = {};
    snprintf(id->internal, sizeof id->internal, "/dev/shm/hollow-nccl-%d-%d", getpid(), ++count);
    return DONE;
}

API ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int size, ncclUniqueId id, int rank, ncclConfig_t *) {
    int file = open(id.internal, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (size > MOST_RANKS || file < 0 || ftruncate(file, sizeof(Room))) return ncclSystemError;
    void *place = mmap(nullptr, sizeof(Room), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (place == MAP_FAILED) return ncclSystemError;
    auto made = new Communicator{(Room *)place, rank, size};
    made->room->devices[rank] = current_device();
    wait_for_all(made);
    if (rank == 0) unlink(id.internal);
    *comm = (ncclComm_t)made;
    for (int other = 0; other < size; other++) {
        if (other == rank || made->room->devices[other] != current_device()) continue;
        refused(cudaErrorInvalidDevice, __func__, "two ranks have the same device");
        return ncclInvalidUsage;
    }
    return DONE;
}
API ncclResult_t ncclCommInitRank(ncclComm_t *comm, int size, ncclUniqueId id, int rank) {
    return ncclCommInitRankConfig(comm, size, id, rank, nullptr);
}
API ncclResult_t ncclCommInitRankScalable(ncclComm_t *comm, int size, int rank, int, ncclUniqueId *ids, ncclConfig_t *how) {
    return ncclCommInitRankConfig(comm, size, *ids, rank, how);
}
API ncclResult_t ncclCommFinalize(ncclComm_t comm) { return DONE; }
API ncclResult_t ncclCommDestroy(ncclComm_t comm) { return DONE; }
API ncclResult_t ncclCommAbort(ncclComm_t comm) { return OF(comm)->is_aborted = true, DONE; }
API ncclResult_t ncclCommCount(const ncclComm_t comm, int *count) { return *count = OF(comm)->size, DONE; }
API ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank) { return *rank = OF(comm)->rank, DONE; }
API ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) {
    return *error = OF(comm)->is_aborted ? ncclRemoteError : ncclSuccess, DONE;
}
API const char *ncclGetErrorString(ncclResult_t result) { return result ? "an error of the hollow GPU" : "no error"; }
API const char *ncclGetLastError(ncclComm_t) { return ""; }
API ncclResult_t ncclCommRegister(const ncclComm_t, void *, size_t, void **handle) { return *handle = nullptr, DONE; }
API ncclResult_t ncclCommDeregister(const ncclComm_t, void *) { return DONE; }
API ncclResult_t ncclMemAlloc(void **place, size_t size) { return cudaMalloc(place, size) ? ncclUnhandledCudaError : DONE; }
API ncclResult_t ncclMemFree(void *place) { return cudaFree(place) ? ncclUnhandledCudaError : DONE; }

// --------------------------------------------------------------------------------------------------------- collectives

static size_t bytes_of(ncclDataType_t type) {
    static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return sizes[type];
}

// What each rank gives is with all of them while `use` runs; its argument: whether all of it was brought. call: the
// operation, which is the same on all ranks.
template <typename Use>
static void exchange(Of of, const std::string &call, const void *given, size_t size, Use use) {
    Room &room = *of->room;
    snprintf(room.calls[of->rank], sizeof room.calls[0], "%s of %zu bytes", call.c_str(), size);
    bool is_small = size <= MOST_KNOWN;
    room.is_told[of->rank] = is_small && was_brought(given, size);
    if (is_small) memcpy(room.told[of->rank], given, size);
    wait_for_all(of);
    for (int rank = 0; rank < of->size && !of->is_aborted; rank++) {
        if (!strcmp(room.calls[rank], room.calls[of->rank])) continue;
        fprintf(stderr, "hollow GPU: rank %d is in %s, rank %d in %s\n", of->rank, room.calls[of->rank], rank, room.calls[rank]);
        abort();
    }
    bool is_told = is_small;
    for (int rank = 0; rank < of->size; rank++) is_told = is_told && room.is_told[rank];
    use(is_told);
    wait_for_all(of);
}

template <typename Number>
static void reduce(Of of, Number *result, size_t count, ncclRedOp_t how) {
    for (size_t i = 0; i < count; i++) {
        Number found = ((Number *)of->room->told[0])[i];
        for (int rank = 1; rank < of->size; rank++) {
            Number other = ((Number *)of->room->told[rank])[i];
            found = how == ncclSum ? found + other : how == ncclMin ? std::min(found, other) : std::max(found, other);
        }
        result[i] = found;
    }
}

static ncclResult_t group(cudaStream_t stream, const char *function, std::function<void()> work) {
    return put(stream, function, work, true) ? ncclUnhandledCudaError : DONE;
}

API ncclResult_t ncclGroupStart() { return DONE; }
API ncclResult_t ncclGroupEnd() { return DONE; }

API ncclResult_t ncclAllReduce(
    const void *given, void *result, size_t count, ncclDataType_t type, ncclRedOp_t how, ncclComm_t comm,
    cudaStream_t stream
) {
    size_t size = count * bytes_of(type);
    std::string call = "reduction " + std::to_string(how) + " of type " + std::to_string(type);
    return group(stream, __func__, [=] {
        exchange(OF(comm), call, given, size, [=](bool is_told) {
            if (given != result) memmove(result, given, size);
            if (!is_told) return;
            if (type == ncclInt64) reduce(OF(comm), (int64_t *)result, count, how);
            else if (type == ncclInt32) reduce(OF(comm), (int32_t *)result, count, how);
            else if (type == ncclUint8) reduce(OF(comm), (uint8_t *)result, count, how);
            else return;
            know(result, size);
        });
    });
}
API ncclResult_t ncclAllGather(
    const void *given, void *result, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream
) {
    size_t size = count * bytes_of(type);
    return group(stream, __func__, [=] {
        exchange(OF(comm), "a gathering", given, size, [=](bool is_told) {
            if (!is_told) return;
            for (int rank = 0; rank < OF(comm)->size; rank++) memcpy((char *)result + rank * size, OF(comm)->room->told[rank], size);
            know(result, OF(comm)->size * size);
        });
    });
}
API ncclResult_t ncclBroadcast(
    const void *given, void *result, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream
) {
    size_t size = count * bytes_of(type);
    return group(stream, __func__, [=] {
        exchange(OF(comm), "a broadcast of " + std::to_string(root), given, size, [=](bool) {
            bool is_told = size <= MOST_KNOWN && OF(comm)->room->is_told[root];
            if (!is_told) return;
            memcpy(result, OF(comm)->room->told[root], size);
            know(result, size);
        });
    });
}
API ncclResult_t ncclBcast(void *place, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
    return ncclBroadcast(place, place, count, type, root, comm, stream);
}
