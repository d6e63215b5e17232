// Work shared by a team of threads: units of it, taken in ranges when a thread is ready for more.
//
// The caller works too, and waits only for helpers that have begun: one that sleeps, or that the system has put aside for
// another program, is not missed. With a barrier instead, as OpenMP has it, one other busy program on the machine made a
// step of 200 parallel regions 10 times as long. Helpers that run out of work look out for more for a moment, which spans
// the gaps within a step, and then sleep.
#pragma once

#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <new>

#include "vector.h"

// Units that are not yet taken. Large ranges first, so that each thread reads long runs of memory, smaller ones later, so
// that all end together.
class Queue {
  public:
    Queue(long units, int threads, long least) : units_(units), threads_(threads), least_(least) {}

    bool is_empty() const { return __atomic_load_n(&next_, __ATOMIC_RELAXED) >= units_; }

    // The next range of units, half-open; false when there is none.
    bool take(long& first, long& stop) {
        first = __atomic_load_n(&next_, __ATOMIC_RELAXED);
        do {
            if (first >= units_) return false;
            const long share = max((units_ - first) / (2 * threads_), least_);
            stop = min(first + share, units_);
        } while (!__atomic_compare_exchange_n(&next_, &first, stop, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
        return true;
    }

  private:
    alignas(64) long next_ = 0;
    const long units_, threads_, least_;
};

class Team {
  public:
    // The process's only one. It is never destroyed: its helpers may outlive all else.
    static Team& get() {
        static Team& team = *new Team;
        return team;
    }

    // Run work(argument) here and on up to `helpers` others at once; returns when all who began have ended.
    void run(int helpers, void (*work)(void*), void* argument) {
        if (__atomic_exchange_n(&is_busy_, true, __ATOMIC_ACQUIRE)) return work(argument);  // for another caller
        recruit(helpers);
        work_ = work, argument_ = argument;
        round_ = (round_ + 1) & ROUNDS;
        __atomic_store_n(&gate_, OPEN | uint64_t(helpers) << PLACES | round_ << ROUND, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&sleepers_, __ATOMIC_SEQ_CST)) call();
        work(argument);
        wait_for_helpers();
        __atomic_store_n(&is_busy_, false, __ATOMIC_RELEASE);
    }

  private:
    // The gate's bits: how many helpers are inside, how many more may enter, whether any may, and which round it is.
    static constexpr uint64_t INSIDE = 0xFFFF, OPEN = 1ull << 32, ROUNDS = 0xFFFFFF;
    static constexpr int PLACES = 16, ROUND = 40;
    // Pauses, of about 15 nanoseconds each, before a thread sleeps: for more work, and for the last helper.
    static constexpr int LOOKOUT = 10000, PATIENCE = 2000;

    alignas(64) uint64_t gate_ = 0;
    alignas(64) uint32_t sleepers_ = 0;
    uint32_t calls_ = 0;  // what sleeping helpers wait on
    uint32_t is_caller_asleep_ = 0;
    bool is_busy_ = false;
    int recruited_ = 0;
    uint64_t round_ = 0;
    void (*work_)(void*) = nullptr;
    void* argument_ = nullptr;

    static void sleep_while(uint32_t* word, uint32_t value) {
        syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
    }
    static void wake(uint32_t* word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0); }

    void call() {
        __atomic_add_fetch(&calls_, 1, __ATOMIC_SEQ_CST);
        wake(&calls_);
    }

    void recruit(int helpers) {
        for (; recruited_ < helpers; recruited_++) {
            pthread_t thread;
            if (pthread_create(&thread, nullptr, help, this)) return;  // then with those that there are
            pthread_detach(thread);
        }
    }

    void wait_for_helpers() {
        __atomic_fetch_and(&gate_, ~OPEN, __ATOMIC_SEQ_CST);
        for (int pauses = 0; __atomic_load_n(&gate_, __ATOMIC_ACQUIRE) & INSIDE;) {
            if (pauses++ < PATIENCE) {
                rest();
                continue;
            }
            // Asleep, this thread leaves its core to the helper that is missing.
            __atomic_store_n(&is_caller_asleep_, 1, __ATOMIC_SEQ_CST);
            if (__atomic_load_n(&gate_, __ATOMIC_SEQ_CST) & INSIDE) sleep_while(&is_caller_asleep_, 1);
            __atomic_store_n(&is_caller_asleep_, 0, __ATOMIC_SEQ_CST);
        }
    }

    bool enter(uint64_t& seen) {
        uint64_t gate = __atomic_load_n(&gate_, __ATOMIC_ACQUIRE);
        const uint64_t round = gate >> ROUND;
        if (!(gate & OPEN) || round == seen || !(gate >> PLACES & 0xFFFF)) return false;
        const uint64_t entered = gate + 1 - (1ull << PLACES);
        if (!__atomic_compare_exchange_n(&gate_, &gate, entered, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) return false;
        seen = round;
        return true;
    }

    void leave() {
        const uint64_t gate = __atomic_sub_fetch(&gate_, 1, __ATOMIC_SEQ_CST);
        if (gate & (OPEN | INSIDE) || !__atomic_load_n(&is_caller_asleep_, __ATOMIC_SEQ_CST)) return;
        __atomic_store_n(&is_caller_asleep_, 0, __ATOMIC_SEQ_CST);
        wake(&is_caller_asleep_);
    }

    void await_work(uint64_t& seen) {
        for (int pauses = 0; !enter(seen);) {
            if (pauses++ < LOOKOUT) {
                rest();
                continue;
            }
            __atomic_add_fetch(&sleepers_, 1, __ATOMIC_SEQ_CST);
            const uint32_t before = __atomic_load_n(&calls_, __ATOMIC_SEQ_CST);
            const bool is_in = enter(seen);
            if (!is_in) sleep_while(&calls_, before);
            __atomic_sub_fetch(&sleepers_, 1, __ATOMIC_SEQ_CST);
            if (is_in) return;
            pauses = 0;
        }
    }

    static void* help(void* team_at) {
        Team& team = *static_cast<Team*>(team_at);
        for (uint64_t seen = ~0ull;;) {
            team.await_work(seen);
            team.work_(team.argument_);
            team.leave();
        }
    }
};

// Run body() on `threads` threads at once.
template <class Body>
inline void on_team(int threads, const Body& body) {
    if (threads == 1) return body();
    Team::get().run(threads - 1, [](void* at) { (*static_cast<const Body*>(at))(); }, const_cast<Body*>(&body));
}

// Run body(queue) on `threads` threads, or on fewer where that leaves none with less than `least` units.
template <class Body>
inline void on_threads(int threads, long units, long least, const Body& body) {
    threads = int(max(min(long(threads), units / least), 1L));
    Queue queue(units, threads, least);
    on_team(threads, [&] { body(queue); });
}

// Memory of one thread that is used again at its next call.
class Workspace {
  public:
    ~Workspace() { __builtin_free(memory_); }
    template <class T>
    T* take(size_t count) {
        const size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
        if (bytes > size_) {
            __builtin_free(memory_);
            memory_ = __builtin_aligned_alloc(64, size_ = bytes);
        }
        return static_cast<T*>(memory_);
    }

  private:
    void* memory_ = nullptr;
    size_t size_ = 0;
};

// Run body(part, queue) for each of the parts, which have units(part) units. A thread that finds none left in one goes on
// with the next one: there is no wait between them.
template <class Units, class Body>
inline void on_parts(int threads, long parts, const Units& units, const Body& body) {
    static thread_local Workspace memory;
    Queue* const queues = memory.take<Queue>(parts);
    for (long part = 0; part < parts; part++) new (queues + part) Queue(units(part), threads, 1);
    on_team(threads, [=] {
        for (long part = 0; part < parts; part++)
            if (!queues[part].is_empty()) body(part, queues[part]);
    });
}

// Elements that are worth a second thread: waking it takes as long as going through so many.
constexpr long THREAD_ELEMENTS = 16384;

// Run body(row) for rows of `width` elements.
template <class Body>
void on_rows(int threads, long rows, long width, const Body& body) {
    on_threads(threads, rows, max(THREAD_ELEMENTS / width, 1L), [&](Queue& queue) {
        for (long row, stop; queue.take(row, stop);)
            for (; row < stop; row++) body(row);
    });
}
