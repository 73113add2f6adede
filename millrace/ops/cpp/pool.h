// A small pool of helper threads. The caller works too, and never waits for a helper that has not begun: pieces of work
// are claimed one by one, so a helper that wakes late, or that a busy machine keeps away, costs nothing. A thread begins with
// its own share of the pieces, so that jobs over the same rows find them in the same thread's cache.
#pragma once

#include <cstdint>

namespace pool {

using Piece = void (*)(void* context, int64_t index);

// Threads that take part, the caller included.
void set_threads(int count);
int threads();

// Calls piece(context, i) once for every i in [0, count), in any order, and returns when all have ended.
void run(int64_t count, void* context, Piece piece);

// The same for a function object; `worth` says whether the work is enough to involve others at all.
template <typename F>
void for_each(int64_t count, bool worth, F f) {
    if (!worth || count < 2) {
        for (int64_t i = 0; i < count; i++) f(i);
        return;
    }
    run(count, &f, [](void* context, int64_t i) { (*static_cast<F*>(context))(i); });
}

}  // namespace pool
