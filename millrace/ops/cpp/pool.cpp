#include "pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>

namespace pool {
namespace {

// How long a helper stays awake for the next job before it sleeps: the gap between two calls of one step is shorter.
constexpr auto AWAKE = std::chrono::microseconds(100);
constexpr int SPINS_PER_LOOK = 64;
constexpr int64_t MOST_SHARES = 64;

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

struct Team {
    // The job. Written only while it is closed and no helper is inside.
    int64_t count = 0;
    void* context = nullptr;
    Piece piece = nullptr;

    // Each participant's own pieces, one after the other; all have as many, but for the rounding.
    struct alignas(64) Share {
        std::atomic<int64_t> next{0};
        int64_t end = 0;
    };
    Share shares[MOST_SHARES];
    int64_t num_shares = 1;
    // Number of the job << 17 | open << 16 | helpers inside. A helper enters only an open job; the caller closes it
    // before it waits for those inside.
    alignas(64) std::atomic<uint64_t> state{0};
    alignas(64) std::atomic<uint32_t> bell{0};  // changes with every job; sleepers wait on it
    std::atomic<int> helpers{0};
    std::atomic<int> wanted{0};
    std::mutex in_use;

    static constexpr uint64_t OPEN = 1 << 16, INSIDE = OPEN - 1, NUMBER = ~((OPEN << 1) - 1);

    // One's own pieces first, which are the same part of the whole in one job and the next, then those of others.
    void work(int64_t participant) {
        for (int64_t turn = 0; turn < num_shares; turn++) {
            Share& share = shares[(participant + turn) % num_shares];
            while (share.next.load(std::memory_order_relaxed) < share.end) {
                int64_t i = share.next.fetch_add(1);
                if (i < share.end) piece(context, i);
            }
        }
    }

    void share_out() {
        num_shares = std::min<int64_t>(wanted.load() + 1, MOST_SHARES);
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

    // Wait for a job that this helper has not seen: awake for a while, then asleep.
    void await(uint64_t& last) {
        auto until = std::chrono::steady_clock::now() + AWAKE;
        while (true) {
            uint32_t rung = bell.load();
            for (int spin = 0; spin < SPINS_PER_LOOK; spin++) {
                if (enter(last)) return;
                pause();
            }
            if (std::chrono::steady_clock::now() < until) continue;
            bell.wait(rung);
            until = std::chrono::steady_clock::now() + AWAKE;
        }
    }

    void help(int index) {
        uint64_t last = 0;
        while (true) {
            await(last);
            if (index < wanted.load()) work(index + 1);
            state.fetch_sub(1, std::memory_order_acq_rel);
        }
    }

    void hire() {
        while (helpers.load() < wanted.load()) {
            int index = helpers.fetch_add(1);
            std::thread([this, index] { help(index); }).detach();
        }
    }

    void run(int64_t new_count, void* new_context, Piece new_piece) {
        hire();
        count = new_count;
        context = new_context;
        piece = new_piece;
        share_out();
        uint64_t number = (state.load() & NUMBER) + (OPEN << 1);
        state.store(number | OPEN, std::memory_order_release);
        bell.fetch_add(1);
        bell.notify_all();
        work(0);
        state.fetch_and(~OPEN, std::memory_order_acq_rel);
        for (int spin = 0; state.load(std::memory_order_acquire) & INSIDE; spin++)
            spin < 4096 ? pause() : std::this_thread::yield();
    }
};

// Never destroyed: helpers may be asleep in it when the process ends. A forked child has no helpers and gets its own.
Team* team = new Team;

void renew() {
    int wanted = team->wanted.load();
    team = new Team;
    team->wanted = wanted;
}

const int registered = pthread_atfork(nullptr, nullptr, renew);

}  // namespace

void set_threads(int count) {
    (void)registered;
    team->wanted = count > 1 ? count - 1 : 0;
}

int threads() { return team->wanted.load() + 1; }

void run(int64_t count, void* context, Piece piece) {
    // A second caller at the same time does its work alone.
    std::unique_lock<std::mutex> lock(team->in_use, std::try_to_lock);
    if (!lock.owns_lock() || team->wanted.load() == 0) {
        for (int64_t i = 0; i < count; i++) piece(context, i);
        return;
    }
    team->run(count, context, piece);
}

}  // namespace pool

extern "C" {

void millrace_set_threads(int count) { pool::set_threads(count); }
}
