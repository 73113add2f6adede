// All layers of a step in one call: the kernels of the other files, in the order in which the Python decoder calls them,
// over buffers that stay allocated from step to step.
#include "kernels.h"
#include "linear.h"

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>

namespace {

// The structs below are mirrored, field by field, in models/native_stack.py.

struct LayerAt {
    const LinearDesc *qkv, *out, *gate_up, *down;
    const float *input_norm, *mlp_norm;
    const float *q_norm, *k_norm, *attention_out_norm, *mlp_out_norm;  // or null
    int64_t rope;                                                      // which of the step's angles; -1 for none
    int64_t window;                                                    // 0 for none
};

struct Shape {
    int64_t dtype, layers, hidden, inner, heads, kv_heads, head_dim, activation;
    float eps, scale, softcap;
};

struct Inputs {
    const int64_t* slots;  // block id * block size + offset of each token, in the cache
    const int32_t *query_starts, *seq_lens, *tables;
    const float* const* angles;   // per rope [tokens, rotary_dim]
    const int64_t* rotary_dims;   // per rope
    void* const* kv;              // per layer
    void* residual;               // [tokens, hidden]: the embedded tokens; overwritten
    void* out;                    // [tokens, hidden] after the final norm
    int64_t* nanoseconds;         // by kind of work, added to; or null
    int64_t tokens, rows, table_width, num_blocks, block_size;
};

enum Kind { QKV, PREPARE, ATTENTION, OUT, GATE_UP, GATED, DOWN, NORM, KINDS };

// Adds the time since the last mark to a kind of work.
class Watch {
  public:
    explicit Watch(int64_t* nanoseconds) : spent_(nanoseconds), last_(nanoseconds ? now() : 0) {}

    void mark(Kind kind) {
        if (!spent_) return;
        int64_t time = now();
        spent_[kind] += time - last_;
        last_ = time;
    }

  private:
    int64_t* spent_;
    int64_t last_;

    static int64_t now() {
        auto time = std::chrono::steady_clock::now().time_since_epoch();
        return std::chrono::duration_cast<std::chrono::nanoseconds>(time).count();
    }
};

struct Free {
    void operator()(void* memory) const { free(memory); }
};

// Grows to the largest step seen; what it held before is not kept.
class Buffer {
  public:
    void* of(int64_t bytes) {
        if (bytes > size_) {
            constexpr int64_t PAGE = 4096;
            size_ = (bytes + PAGE - 1) / PAGE * PAGE;
            memory_.reset();
            memory_.reset(aligned_alloc(PAGE, size_));
        }
        return memory_.get();
    }

  private:
    std::unique_ptr<void, Free> memory_;
    int64_t size_ = 0;
};

struct Stack {
    Shape s;
    std::unique_ptr<LayerAt[]> layers;
    const float* final_norm;
    Buffer hidden, qkv, attended, gate_up, inner, places;

    int item() const { return s.dtype == 0 ? 4 : 2; }

    static void multiply(const LinearDesc* layer, const void* x, void* out, int64_t rows) {
        linear(*layer, x, layer->k, out, rows);
    }

    void norm(void* x, const float* weight, int64_t rows) const {
        if (weight) millrace_norm(s.dtype, x, nullptr, weight, x, nullptr, rows, s.hidden, s.eps);
    }

    // out = norm(x + residual), and the sum replaces the residual.
    void add_norm(const void* x, void* residual, const float* weight, void* out, int64_t rows) const {
        millrace_norm(s.dtype, x, residual, weight, out, residual, rows, s.hidden, s.eps);
    }

    bool run(const Inputs& in) {
        int64_t size = in.tokens * item();
        void* x = hidden.of(size * s.hidden);
        void* projected = qkv.of(size * (s.heads + 2 * s.kv_heads) * s.head_dim);
        void* heads = attended.of(size * s.heads * s.head_dim);
        void* both = gate_up.of(size * 2 * s.inner);
        void* one = inner.of(size * s.inner);
        auto* at = static_cast<int64_t*>(places.of(2 * in.tokens * sizeof(int64_t)));
        if (!x || !projected || !heads || !both || !one || !at) return false;
        for (int64_t token = 0; token < in.tokens; token++) {
            at[token] = in.slots[token] / in.block_size;
            at[in.tokens + token] = in.slots[token] % in.block_size;
        }
        Watch watch(in.nanoseconds);
        millrace_norm(s.dtype, in.residual, nullptr, layers[0].input_norm, x, nullptr, in.tokens, s.hidden, s.eps);
        watch.mark(NORM);
        for (int64_t i = 0; i < s.layers; i++) {
            const LayerAt& layer = layers[i];
            bool last = i + 1 == s.layers;
            attend(in, i, at, x, projected, heads, watch);
            multiply(layer.out, heads, x, in.tokens);
            watch.mark(OUT);
            norm(x, layer.attention_out_norm, in.tokens);
            add_norm(x, in.residual, layer.mlp_norm, x, in.tokens);
            watch.mark(NORM);
            multiply(layer.gate_up, x, both, in.tokens);
            watch.mark(GATE_UP);
            millrace_gated(s.dtype, s.activation, both, one, in.tokens, s.inner);
            watch.mark(GATED);
            multiply(layer.down, one, x, in.tokens);
            watch.mark(DOWN);
            norm(x, layer.mlp_out_norm, in.tokens);
            add_norm(x, in.residual, last ? final_norm : layers[i + 1].input_norm, last ? in.out : x, in.tokens);
            watch.mark(NORM);
        }
        return true;
    }

    void attend(const Inputs& in, int64_t index, const int64_t* at, const void* x, void* projected, void* heads,
                Watch& watch) const {
        const LayerAt& layer = layers[index];
        int64_t stride = (s.heads + 2 * s.kv_heads) * s.head_dim;
        multiply(layer.qkv, x, projected, in.tokens);
        watch.mark(QKV);
        bool rotates = layer.rope >= 0;
        millrace_prepare_qkv(s.dtype, projected, rotates ? in.angles[layer.rope] : nullptr, layer.q_norm, layer.k_norm,
                             in.kv[index], at, at + in.tokens, in.tokens, s.heads, s.kv_heads, s.head_dim,
                             rotates ? in.rotary_dims[layer.rope] : 0, in.num_blocks, in.block_size, s.eps);
        watch.mark(PREPARE);
        millrace_attention(s.dtype, projected, stride, in.kv[index], heads, in.query_starts, in.seq_lens, in.tables,
                           in.rows, in.table_width, s.heads, s.kv_heads, s.head_dim, in.num_blocks, in.block_size,
                           layer.window, s.scale, s.softcap);
        watch.mark(ATTENTION);
    }
};

}  // namespace

extern "C" {

// A stack over weights that stay where they are for as long as it lives. Calls must not overlap.
void* millrace_stack_new(const Shape* shape, const LayerAt* layers, const float* final_norm) {
    auto* stack = new Stack{*shape, std::make_unique<LayerAt[]>(shape->layers), final_norm, {}, {}, {}, {}, {}, {}};
    memcpy(stack->layers.get(), layers, shape->layers * sizeof(LayerAt));
    return stack;
}

void millrace_stack_free(void* stack) { delete static_cast<Stack*>(stack); }

// 0, or 1 when there is no memory for its buffers.
int millrace_stack_run(void* stack, const Inputs* inputs) { return static_cast<Stack*>(stack)->run(*inputs) ? 0 : 1; }
}
