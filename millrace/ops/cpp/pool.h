// A small thread pool. The caller works too and never waits for a helper that has not started: tasks are claimed one by
// one, so a helper that wakes late, or is not scheduled on a busy machine, costs nothing. Each thread starts with its
// own share of the tasks, so that jobs over the same rows find them in the same thread's cache.
#pragma once

#include <cstdint>

namespace pool {

using Task = void (*)(void* context, int64_t index);

// Number of threads, the caller included.
void set_threads(int count);
int threads();

// Calls task(context, i) once for every i in [0, count), in any order, and returns when all calls have returned.
void run(int64_t count, void* context, Task task);

// The same for a function object. With `parallel` false, or a single task, the caller does all the work.
template <typename F>
void for_each(int64_t count, bool parallel, F f) {
    if (!parallel || count < 2) {
        for (int64_t i = 0; i < count; i++) f(i);
        return;
    }
    run(count, &f, [](void* context, int64_t i) { (*static_cast<F*>(context))(i); });
}

}  // namespace pool
