#include "pool.h"

#include <pthread.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>

namespace pool {
namespace {

// How long an idle helper spins before it sleeps; longer than the gap between two calls of a step.
constexpr auto SPIN_TIME = std::chrono::microseconds(100);
constexpr int SPINS_PER_CHECK = 64;
constexpr int SPINS_FOR_HELPERS = 4096;
constexpr int64_t MAX_SHARES = 64;

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Threads sleep on a futex, never in a loop of sched_yield: beside other busy processes, every yield gives up a whole
// time slice, and a thread that yields a few times is not run again for a long time. std::atomic::wait yields too.
void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
#if defined(__linux__)
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
#else
    word.wait(value);
#endif
}

void wake_sleepers(std::atomic<uint32_t>& word) {
#if defined(__linux__)
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, 1 << 30, nullptr, nullptr, 0);
#else
    word.notify_all();
#endif
}

struct Pool {
    // The current job. Written only while it is closed and no helper is inside.
    int64_t count = 0;
    void* context = nullptr;
    Task task = nullptr;

    // Each thread's own consecutive tasks; all shares have the same size, up to rounding.
    struct alignas(64) Share {
        std::atomic<int64_t> next{0};
        int64_t end = 0;
    };
    Share shares[MAX_SHARES];
    int64_t num_shares = 1;
    // Job number << 17 | open << 16 | number of helpers inside. A helper enters only an open job; the caller closes the
    // job before it waits for the helpers inside.
    alignas(64) std::atomic<uint64_t> state{0};
    alignas(64) std::atomic<uint32_t> wake_counter{0};  // increases with every job; sleeping helpers wait on it
    std::atomic<int> num_sleeping{0};                   // helpers that sleep or are about to
    alignas(64) std::atomic<uint32_t> num_left{0};      // increases when a helper leaves a job; the caller waits on it
    std::atomic<bool> caller_sleeps{false};
    std::atomic<int> num_helpers{0};
    std::atomic<int> num_wanted{0};
    std::mutex in_use;

    static constexpr uint64_t OPEN = 1 << 16, INSIDE = OPEN - 1, NUMBER = ~((OPEN << 1) - 1);

    // First the thread's own share, which is the same part of every job, then the shares of others.
    void work(int64_t participant) {
        for (int64_t offset = 0; offset < num_shares; offset++) {
            Share& share = shares[(participant + offset) % num_shares];
            while (share.next.load(std::memory_order_relaxed) < share.end) {
                int64_t i = share.next.fetch_add(1);
                if (i < share.end) task(context, i);
            }
        }
    }

    void assign_shares() {
        num_shares = std::min<int64_t>(num_wanted.load() + 1, MAX_SHARES);
        for (int64_t i = 0; i < num_shares; i++) {
            shares[i].end = count * (i + 1) / num_shares;
            shares[i].next.store(count * i / num_shares);
        }
    }

    bool enter(uint64_t& last) {
        uint64_t now = state.load(std::memory_order_acquire);
        while ((now & OPEN) && (now & NUMBER) != last) {
            if (state.compare_exchange_weak(now, now + 1, std::memory_order_acq_rel)) {
                last = now & NUMBER;
                return true;
            }
        }
        return false;
    }

    // Waits for a job that this helper has not entered: spins for a while, then sleeps.
    void wait_for_job(uint64_t& last) {
        auto until = std::chrono::steady_clock::now() + SPIN_TIME;
        while (true) {
            uint32_t seen = wake_counter.load();
            for (int spin = 0; spin < SPINS_PER_CHECK; spin++) {
                if (enter(last)) return;
                pause();
            }
            if (std::chrono::steady_clock::now() < until) continue;
            num_sleeping.fetch_add(1);
            sleep_while(wake_counter, seen);
            num_sleeping.fetch_sub(1);
            until = std::chrono::steady_clock::now() + SPIN_TIME;
        }
    }

    void run_helper(int index) {
        uint64_t last = 0;
        while (true) {
            wait_for_job(last);
            if (index < num_wanted.load()) work(index + 1);
            leave();
        }
    }

    void leave() {
        state.fetch_sub(1);
        num_left.fetch_add(1);
        if (caller_sleeps.load()) wake_sleepers(num_left);
    }

    // Waits until no helper is inside: spins for a while, then sleeps. A helper may have lost its core inside a task.
    void wait_for_helpers() {
        for (int spin = 0; spin < SPINS_FOR_HELPERS; spin++) {
            if (!(state.load(std::memory_order_acquire) & INSIDE)) return;
            pause();
        }
        caller_sleeps.store(true);
        while (true) {
            uint32_t seen = num_left.load();
            if (!(state.load() & INSIDE)) break;
            sleep_while(num_left, seen);
        }
        caller_sleeps.store(false);
    }

    void start_helpers() {
        while (num_helpers.load() < num_wanted.load()) {
            int index = num_helpers.fetch_add(1);
            std::thread([this, index] { run_helper(index); }).detach();
        }
    }

    void run(int64_t new_count, void* new_context, Task new_task) {
        start_helpers();
        count = new_count;
        context = new_context;
        task = new_task;
        assign_shares();
        uint64_t number = (state.load() & NUMBER) + (OPEN << 1);
        state.store(number | OPEN, std::memory_order_release);
        wake_counter.fetch_add(1);
        if (num_sleeping.load()) wake_sleepers(wake_counter);
        work(0);
        state.fetch_and(~OPEN, std::memory_order_acq_rel);
        wait_for_helpers();
    }
};

// Never destroyed: helpers may be sleeping in it when the process exits. A forked child has no helpers and gets a new
// one.
Pool* instance = new Pool;

void reset_in_child() {
    int num_wanted = instance->num_wanted.load();
    instance = new Pool;
    instance->num_wanted = num_wanted;
}

const int registered = pthread_atfork(nullptr, nullptr, reset_in_child);

}  // namespace

void set_threads(int count) {
    (void)registered;
    instance->num_wanted = count > 1 ? count - 1 : 0;
}

int threads() { return instance->num_wanted.load() + 1; }

void run(int64_t count, void* context, Task task) {
    // A concurrent second caller does its work alone.
    std::unique_lock<std::mutex> lock(instance->in_use, std::try_to_lock);
    if (!lock.owns_lock() || instance->num_wanted.load() == 0) {
        for (int64_t i = 0; i < count; i++) task(context, i);
        return;
    }
    instance->run(count, context, task);
}

}  // namespace pool

extern "C" {

void millrace_set_threads(int count) { pool::set_threads(count); }
}
