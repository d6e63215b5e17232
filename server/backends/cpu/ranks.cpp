// Sums and other exchanges of ranks that are processes of one machine, through memory that all of them see. Over a socket
// each costs half a millisecond and more, most of it in the turns of threads; here some microseconds.
//
// An exchange is a row of steps. In each step a rank puts numbers into a buffer of its own, counts itself as arrived, waits
// until all others have arrived too, and reads theirs. It has two buffers, by turns: who is in a step has left the one
// before, so nobody reads any more what the next step overwrites. Long sums take two steps: each rank sums a share of them
// up, then all read all shares. Sums are added in the order of the ranks, in float32, and rounded once, so that all ranks
// have the same numbers. A rank that waits looks out for a moment, and then sleeps, waking now and then to see whether one
// that it waits for has ended.
//
// Left out: ranks of several machines, and other numbers than float32 and bfloat16, which go through gloo.

#include <errno.h>
#include <linux/futex.h>
#include <poll.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "vector.h"

namespace {

constexpr long NAP = 20'000'000;  // nanoseconds that a rank sleeps at most before it looks for ranks that have ended
constexpr long SHORT = 16384;     // bytes up to which each rank sums all up for itself
constexpr long TIMED_OUT = -1;

// Of one rank, written by it alone but for the count of sleepers.
struct alignas(128) Place {
    uint32_t arrived;   // in how many steps
    uint32_t sleepers;  // ranks that sleep until it arrives
};

// `_Meeting` of server/ranks/shared_memory.py.
struct Meeting {
    long rank, world;
    uint8_t* memory;    // a Place of each rank, then two buffers of each
    long size;          // bytes of a buffer
    const int* alive;   // [world] descriptors that can be read once a rank has ended; -1 for this one
    long pauses;        // while it looks out
    long patience;      // nanoseconds that it waits at most
    long step;          // how many were begun
    long problem;       // 1 + a rank that has ended, or TIMED_OUT; 0: none

    Place& place(long of) const { return reinterpret_cast<Place*>(memory)[of]; }
    uint8_t* buffer(long of, long in_step) const {
        return memory + world * long(sizeof(Place)) + ((in_step & 1) * world + of) * size;
    }
};

long now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1'000'000'000 + time.tv_nsec;
}

bool has_arrived(const Place& place, uint32_t step) {
    return int32_t(__atomic_load_n(&place.arrived, __ATOMIC_SEQ_CST) - step) >= 0;
}

// Sleep until the place's rank arrives, for a nap at most.
void sleep_until(Place& place, uint32_t step) {
    __atomic_add_fetch(&place.sleepers, 1, __ATOMIC_SEQ_CST);
    const uint32_t before = __atomic_load_n(&place.arrived, __ATOMIC_SEQ_CST);
    const timespec nap = {0, NAP};
    if (int32_t(before - step) < 0) syscall(SYS_futex, &place.arrived, FUTEX_WAIT, before, &nap, nullptr, 0);
    __atomic_sub_fetch(&place.sleepers, 1, __ATOMIC_SEQ_CST);
}

// False where the rank has ended, or there is no patience left.
bool wait_for(Meeting& meeting, long rank) {
    Place& place = meeting.place(rank);
    const auto step = uint32_t(meeting.step);
    for (long pauses = 0; pauses < meeting.pauses; pauses++) {
        if (has_arrived(place, step)) return true;
        rest();
    }
    const long until = has_arrived(place, step) ? 0 : now() + meeting.patience;
    while (!has_arrived(place, step)) {
        sleep_until(place, step);
        if (has_arrived(place, step)) break;
        pollfd other = {meeting.alive[rank], POLLIN, 0};
        const bool has_ended = poll(&other, 1, 0) > 0 && other.revents & POLLIN && !has_arrived(place, step);
        if (has_ended || now() > until) {
            meeting.problem = has_ended ? rank + 1 : TIMED_OUT;
            return false;
        }
    }
    return true;
}

// This rank's buffer of the next step.
uint8_t* begin(Meeting& meeting) { return meeting.buffer(meeting.rank, ++meeting.step); }

// Tell the others that the buffer is filled, and wait for theirs. False where one is missing.
bool meet(Meeting& meeting) {
    Place& own = meeting.place(meeting.rank);
    __atomic_store_n(&own.arrived, uint32_t(meeting.step), __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&own.sleepers, __ATOMIC_SEQ_CST))
        syscall(SYS_futex, &own.arrived, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
    for (long rank = 0; rank < meeting.world; rank++)
        if (rank != meeting.rank && !wait_for(meeting, rank)) return false;
    return true;
}

struct Sum {
    static INLINE Floats of(Floats a, Floats b) { return a + b; }
};
struct Largest {
    static INLINE Floats of(Floats a, Floats b) { return max(a, b); }
};

// What all ranks have in this step's buffers, put together: elements [first, stop), into `out`.
template <class E, class F>
void combine(const Meeting& meeting, long first, long stop, E* out) {
    const auto part = [&](long rank) { return reinterpret_cast<const E*>(meeting.buffer(rank, meeting.step)); };
    for (long i = first; i < stop; i += LANES) {
        const long count = min(stop - i, long(LANES));
        Floats total = load_part(part(0) + i, count);
        for (long rank = 1; rank < meeting.world; rank++) total = F::of(total, load_part(part(rank) + i, count));
        store_part(out + i - first, total, count);
    }
}

// As many elements as a buffer has room for, in place.
template <class E, class F>
bool reduce_piece(Meeting& meeting, E* data, long count) {
    const long bytes = count * long(sizeof(E));
    memcpy(begin(meeting), data, size_t(bytes));
    if (!meet(meeting)) return false;
    if (meeting.world == 2 || bytes <= SHORT) {
        combine<E, F>(meeting, 0, count, data);
        return true;
    }
    const long share = (count + meeting.world - 1) / meeting.world;
    const auto begins = [&](long rank) { return min(rank * share, count); };
    const long first = begins(meeting.rank), stop = begins(meeting.rank + 1);
    combine<E, F>(meeting, first, stop, data + first);
    memcpy(begin(meeting), data + first, size_t(stop - first) * sizeof(E));
    if (!meet(meeting)) return false;
    for (long rank = 0; rank < meeting.world; rank++)
        memcpy(data + begins(rank), meeting.buffer(rank, meeting.step), size_t(begins(rank + 1) - begins(rank)) * sizeof(E));
    return true;
}

template <class E, class F>
void reduce(Meeting* meeting, E* data, long count) {
    const long most = meeting->size / long(sizeof(E));
    for (long i = 0; i < count && !meeting->problem; i += most) reduce_piece<E, F>(*meeting, data + i, min(count - i, most));
}

// parts: where each rank's bytes go; without bytes, ranks meet and no more.
void gather_bytes(Meeting* meeting, const uint8_t* own, uint8_t* const* parts, long bytes) {
    if (meeting->problem) return;
    long i = 0;
    do {
        const long some = min(bytes - i, meeting->size);
        uint8_t* const at = begin(*meeting);
        if (some) memcpy(at, own + i, size_t(some));
        if (!meet(*meeting)) return;
        for (long rank = 0; some && rank < meeting->world; rank++)
            memcpy(parts[rank] + i, meeting->buffer(rank, meeting->step), size_t(some));
        i += some;
    } while (i < bytes);
}

// Rank 0's bytes in place of everybody's.
void broadcast_bytes(Meeting* meeting, uint8_t* data, long bytes) {
    for (long i = 0; i < bytes && !meeting->problem; i += meeting->size) {
        const size_t some = size_t(min(bytes - i, meeting->size));
        uint8_t* const own = begin(*meeting);
        if (meeting->rank == 0) memcpy(own, data + i, some);
        if (!meet(*meeting)) return;
        if (meeting->rank) memcpy(data + i, meeting->buffer(0, meeting->step), some);
    }
}

}  // namespace

EXPORT(sum_ranks_f32, reduce<float, Sum>)
EXPORT(sum_ranks_bf16, reduce<Bf16, Sum>)
EXPORT(largest_of_ranks_f32, reduce<float, Largest>)
EXPORT(gather_ranks, gather_bytes)
EXPORT(broadcast_ranks, broadcast_bytes)
