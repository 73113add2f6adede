// The layers of a decoder as one object: the structs that describe it and a step, and the buffers that stay allocated
// between steps. stack.cpp runs the layers; step.cpp reads the request table and draws tokens.
#pragma once

#include "kernels.h"
#include "linear/linear.h"

#include <chrono>
#include <cstdlib>
#include <memory>
#include <vector>

constexpr int64_t MAX_ROPES = 8;

// models/native_stack.py mirrors the structs below field by field.

struct LayerDesc {
    const LinearDesc *qkv, *out, *gate_up, *down;
    const float *input_norm, *mlp_norm;
    const float *q_norm, *k_norm, *key_shift, *attention_out_norm, *mlp_out_norm;  // or null
    int64_t rope;                                                      // index into the step's angles; -1: no rotation
    int64_t window;                                                    // 0: none
    int64_t group;                                                     // KV group, whose block tables it uses
};

struct Shape {
    int64_t dtype, layers, hidden, inner, heads, kv_heads, head_dim, activation, ropes;
    const int64_t* rotary_dims;  // per rope
    const LinearDesc* head;      // LM head, or null. `forward` needs it to read embeddings, `draw` to compute logits
    int64_t use_decode_kernels;  // whether decode rows use `decode` of `linear`
    float eps, scale, softcap, embedding_scale;
};

// How a feature drafter makes the input of its first layer from tokens and the target's states before them.
struct DraftDesc {
    const LinearDesc* embedding;  // rows are token embeddings
    const LinearDesc* fc;         // EAGLE: over embedding and state, joined; null for EAGLE-3, whose first layer does that
    const float* embedding_norm;  // EAGLE, or null
    const float* hidden_norm;     // EAGLE-3: of the state; the layer's input norm is that of the embedding
    int64_t has_input_norm;       // EAGLE: the first layer normalises its input
    int64_t normed_residual;      // EAGLE-3: the normalised state is the residual, not the state itself
    float embedding_scale;
};

// The matrices of adapters by linear (4 per layer, in the order of LoraKind) and slot; models/native_stack.py fills it.
struct Adapters {
    const int64_t *a, *b;   // [linears, slots]: addresses
    const int32_t* ranks;   // [linears, slots, LORA_PARTS]
    const float* scales;    // likewise
    const int64_t* sizes;   // [linears, LORA_PARTS]: outputs of each part
    int64_t slots;
};

constexpr int64_t LORA_PARTS = 3, LORA_KINDS = 4;
enum LoraKind { LORA_QKV, LORA_OUT, LORA_GATE_UP, LORA_DOWN };

// A step's tokens and rows. Arrays with an entry per KV group have the group as their first dimension.
struct Inputs {
    const int64_t *block_ids, *offsets;  // [groups, tokens], [tokens]: where keys and values are written
    const int32_t *query_starts, *seq_lens, *tables;  // tables [groups, rows, table_width]
    const int64_t* positions;                         // of each token
    const float* const* angles;                       // per rope [positions, rotary_dim]: cosines, then sines
    void* const* kv;                                  // per layer
    void* residual;                                   // [tokens, hidden]: token embeddings; overwritten
    void* out;                                        // [tokens, hidden] after the final norm
    int64_t* nanoseconds;                             // time per kind of work is added to it; or null
    int64_t tokens, rows, table_width, num_blocks, block_size, kv_dtype, groups;
    // If `lasts` >= 0: the only tokens whose output is needed, ascending, the last ones of `last_rows` rows, with the
    // query starts, lengths and block tables of those rows; `out` then has `lasts` rows. If -1: all tokens are needed.
    const int64_t* last_tokens;
    const int32_t *last_starts, *last_lens, *last_tables;
    int64_t lasts, last_rows;
    const uint8_t* decodes;  // [tokens]: whether the token comes after its row's prompt; null if none does
    // States for a drafter: `taps` [tokens, num_taps, hidden] is written with the residual after so many layers.
    const int64_t* tap_layers;  // [num_taps]
    void* taps;
    int64_t num_taps;
    const void* first_x;  // input of the first layer's QKV projection, if it is not the norm of `residual`; or null
    const Adapters* adapters;  // null if no token of the step has one
    const int32_t* slots;      // [tokens]: slot of each token's adapter; 0: the base model
};

enum Kind { QKV, PREPARE, ATTENTION, OUT, GATE_UP, GATED, DOWN, NORM, HEAD, DRAW, OTHER, KINDS };
enum Status { DONE = 0, NO_MEMORY = 1, BAD_TOKEN = 2 };

// Adds the time since the last mark to one kind of work.
class Timer {
  public:
    explicit Timer(int64_t* nanoseconds) : spent_(nanoseconds), last_(nanoseconds ? now() : 0) {}

    void mark(Kind kind) {
        if (!spent_) return;
        int64_t time = now();
        spent_[kind] += time - last_;
        last_ = time;
    }

    // Discards the time since the last mark, which was counted elsewhere.
    void skip() {
        if (spent_) last_ = now();
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

// Memory that grows to the largest step. Growing loses the content.
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

// Consecutive tokens that use the same kernels.
struct Span {
    int64_t first, count;
    bool decodes;
};

struct Stack {
    Shape s;
    std::unique_ptr<LayerDesc[]> layers;
    const float* final_norm;  // null: none
    std::unique_ptr<DraftDesc> draft;  // of a feature drafter; or null
    Buffer joined;                     // its embeddings and states
    std::vector<int32_t> kept_slots;   // of the last tokens
    Buffer hidden, qkv, attended, gate_up, inner, places, rotations, inputs, embedded, logits;
    bool split_decode;  // decode rows use other kernels than the others

    Stack(const Shape& shape, const LayerDesc* descriptions, const float* final_norm);

    int item() const { return s.dtype == 0 ? 4 : 2; }
    int64_t qkv_width() const { return (s.heads + 2 * s.kv_heads) * s.head_dim; }

    // From token embeddings to hidden states; false if out of memory.
    bool run(Inputs in);

  private:
    std::vector<Span> spans;       // of the current tokens
    std::vector<Sharing> sharing;  // of the current rows, per KV group

    const void* row_at(const void* rows, int64_t row, int64_t width) const {
        return static_cast<const char*>(rows) + row * width * item();
    }
    void* row_at(void* rows, int64_t row, int64_t width) const {
        return static_cast<char*>(rows) + row * width * item();
    }

    bool any_decode_kernel() const;
    template <typename F>
    void find_spans(int64_t tokens, F decodes);
    bool gather_angles(const Inputs& in, const float** angles);
    void find_shared(const Inputs& in);
    void keep_last(Inputs& in, void* projected);
    void tap(const Inputs& in, int64_t layer) const;
    void add_lora(const Inputs& in, int64_t layer, LoraKind kind, const void* x, int64_t k, void* out, int64_t n,
                  int64_t first, int64_t count) const;
    bool has_lora(const Inputs& in, int64_t layer, LoraKind kind) const;
    void multiply(const LinearDesc* layer, const void* x, void* out) const;
    void norm(void* x, const float* weight, int64_t rows) const;
    void add_norm(const void* x, void* residual, const float* weight, void* out, int64_t rows) const;
    void finish(const Inputs& in, const void* x) const;
    void project(const Inputs& in, int64_t index, const float* const* angles, const void* x, void* projected,
                 Timer& timer) const;
    void attend(const Inputs& in, int64_t index, const void* projected, void* heads);
    bool run_mlp(const Inputs& in, int64_t index, void* x, const Span& span, Timer& timer);
};
