// A recorded sequence of calls, made again: what Python decided once, between the kernels of a decode step, it need not
// decide for every token. At a batch of one, Python's share of a step was 6 to 8 %.

#include "vector.h"

namespace {

struct Call {
    void (*function)(const int64_t* arguments);  // one of the exported NAME_packed
    const int64_t* arguments;
};

void replay(const Call* calls, long count) {
    for (long i = 0; i < count; i++) calls[i].function(calls[i].arguments);
}

}  // namespace

EXPORT(replay_calls, replay)
