// Runs all layers of a step in one call, or a whole step from token ids to drawn tokens: calls the other kernels in the
// order in which the Python decoder does, over buffers that stay allocated between steps.
#include "kernels.h"
#include "linear/linear.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

namespace {

constexpr int64_t MAX_ROPES = 8;

// models/native_stack.py mirrors the structs below field by field.

struct LayerDesc {
    const LinearDesc *qkv, *out, *gate_up, *down;
    const float *input_norm, *mlp_norm;
    const float *q_norm, *k_norm, *attention_out_norm, *mlp_out_norm;  // or null
    int64_t rope;                                                      // index into the step's angles; -1: no rotation
    int64_t window;                                                    // 0: none
};

struct Shape {
    int64_t dtype, layers, hidden, inner, heads, kv_heads, head_dim, activation, ropes;
    const int64_t* rotary_dims;  // per rope
    const LinearDesc* head;      // LM head, or null. A whole step needs it and also reads embeddings from it
    int64_t use_decode_kernels;       // whether decode rows use `decode` of `linear`
    float eps, scale, softcap, embedding_scale;
};

struct Inputs {
    const int64_t* slots;  // of each token in the cache: block id * block size + offset
    const int32_t *query_starts, *seq_lens, *tables;
    const int64_t* positions;    // of each token
    const float* const* angles;  // per rope [positions, rotary_dim]: cosines, then sines
    void* const* kv;             // per layer
    void* residual;              // [tokens, hidden]: token embeddings; overwritten
    void* out;                   // [tokens, hidden] after the final norm
    int64_t* nanoseconds;        // time per kind of work is added to it; or null
    int64_t tokens, rows, table_width, num_blocks, block_size, kv_dtype;
    // If `lasts` >= 0: the only tokens whose output is needed, ascending, each the last of its row, with the lengths
    // and block tables of those rows; `out` then has `lasts` rows. If -1: all tokens are needed.
    const int64_t* last_tokens;
    const int32_t *last_lens, *last_tables;
    int64_t lasts;
    const uint8_t* decodes;  // [tokens]: whether the token comes after its row's prompt; null if none does
};

// A step as the runner describes it: rows of the request table and their sampling parameters.
struct WholeStep {
    const int32_t *rows, *starts, *counts;  // [num_rows]: table row, first position, number of tokens
    const uint8_t* samples;                 // [num_rows]: whether a token is drawn
    const int32_t* tokens;                  // [tokens]: token ids; -1: last drawn token of the row; null: -1 for all
    const int32_t* tables;                  // [table rows, table_stride]: block ids
    const int32_t* prompts;                 // [table rows]: length of the prompt
    int64_t* last_tokens;                   // [table rows]
    const float *temperature, *top_p, *min_p;  // [table rows], like top_k and seeds
    const int64_t* top_k;
    const uint64_t* seeds;
    const float* const* angles;
    void* const* kv;
    int64_t* drawn;        // [rows with samples set]
    int64_t* nanoseconds;  // or null
    int64_t num_rows, table_stride, num_blocks, block_size, kv_dtype;
};

enum Kind { QKV, PREPARE, ATTENTION, OUT, GATE_UP, GATED, DOWN, NORM, HEAD, DRAW, OTHER, KINDS };

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
    const float* final_norm;
    Buffer hidden, qkv, attended, gate_up, inner, places, rotations, inputs, embedded, logits;
    bool split_decode = false;  // decode rows use other kernels than the others
    std::vector<Span> spans;  // of the current tokens

    int item() const { return s.dtype == 0 ? 4 : 2; }

    const void* row_at(const void* rows, int64_t row, int64_t width) const {
        return static_cast<const char*>(rows) + row * width * item();
    }
    void* row_at(void* rows, int64_t row, int64_t width) const { return static_cast<char*>(rows) + row * width * item(); }

    void multiply(const LinearDesc* layer, const void* x, void* out) const {
        for (const Span& span : spans)
            linear(*layer, row_at(x, span.first, layer->k), layer->k, row_at(out, span.first, layer->n), span.count, false,
                   span.decodes);
    }

    // Whether any linear has a kernel for decode rows.
    bool any_decode_kernel() const {
        for (int64_t i = 0; i < s.layers; i++)
            for (const LinearDesc* layer : {layers[i].qkv, layers[i].out, layers[i].gate_up, layers[i].down})
                if (has_decode_kernel(*layer)) return true;
        return false;
    }

    // `decodes(token)`: whether it is a decode row's.
    template <typename F>
    void find_spans(int64_t tokens, F decodes) {
        spans.clear();
        for (int64_t token = 0; token < tokens; token++) {
            if (spans.empty() || spans.back().decodes != decodes(token)) spans.push_back({token, 0, decodes(token)});
            spans.back().count++;
        }
    }

    void norm(void* x, const float* weight, int64_t rows) const {
        if (weight) millrace_norm(s.dtype, x, nullptr, weight, x, nullptr, rows, s.hidden, s.eps);
    }

    // residual += x; out = norm(residual).
    void add_norm(const void* x, void* residual, const float* weight, void* out, int64_t rows) const {
        millrace_norm(s.dtype, x, residual, weight, out, residual, rows, s.hidden, s.eps);
    }

    bool run(Inputs in) {
        int64_t size = in.tokens * item();
        void* x = hidden.of(size * s.hidden);
        void* projected = qkv.of(size * (s.heads + 2 * s.kv_heads) * s.head_dim);
        void* heads = attended.of(size * s.heads * s.head_dim);
        auto* cache_places = static_cast<int64_t*>(places.of(2 * in.tokens * sizeof(int64_t)));
        const float* angles[MAX_ROPES];
        if (!x || !projected || !heads || !cache_places || !gather_angles(in, angles)) return false;
        for (int64_t token = 0; token < in.tokens; token++) {
            cache_places[token] = in.slots[token] / in.block_size;
            cache_places[in.tokens + token] = in.slots[token] % in.block_size;
        }
        bool split = split_decode && in.decodes;
        find_spans(in.tokens, [&](int64_t token) { return split && in.decodes[token]; });
        Timer timer(in.nanoseconds);
        Sharing sharing = find_shared(in);
        timer.mark(ATTENTION);
        millrace_norm(s.dtype, in.residual, nullptr, layers[0].input_norm, x, nullptr, in.tokens, s.hidden, s.eps);
        timer.mark(NORM);
        for (int64_t i = 0; i < s.layers; i++) {
            const LayerDesc& layer = layers[i];
            bool last = i + 1 == s.layers;
            project(in, i, cache_places, angles, x, projected, timer);
            if (last && in.lasts >= 0) {
                if (!in.lasts) return true;
                if (!keep_last(in, projected)) return false;
                find_spans(in.lasts, [&](int64_t i) { return split && in.decodes[in.last_tokens[i]]; });
                sharing = find_shared(in);
            }
            attend(in, layer, in.kv[i], projected, heads, sharing);
            timer.mark(ATTENTION);
            multiply(layer.out, heads, x);
            timer.mark(OUT);
            norm(x, layer.attention_out_norm, in.tokens);
            add_norm(x, in.residual, layer.mlp_norm, x, in.tokens);
            timer.mark(NORM);
            for (const Span& span : spans)
                if (!run_mlp(layer, row_at(x, span.first, s.hidden), span, timer)) return false;
            norm(x, layer.mlp_out_norm, in.tokens);
            add_norm(x, in.residual, last ? final_norm : layers[i + 1].input_norm, last ? in.out : x, in.tokens);
            timer.mark(NORM);
        }
        return true;
    }

    // The gated MLP of one span, in place; false if out of memory.
    bool run_mlp(const LayerDesc& layer, void* x, const Span& span, Timer& timer) {
        int64_t tokens = span.count;
        void* gated = inner.of(std::max(tokens * s.inner * item(), input_tiles_bytes(*layer.down, tokens)));
        if (!gated) return false;
        if (!span.decodes && gated_linear(*layer.gate_up, s.activation, x, s.hidden, tokens, *layer.down, gated)) {
            timer.mark(GATE_UP);
            linear_from_tiles(*layer.down, gated, x, tokens);
        } else {
            void* gate_and_up = gate_up.of(tokens * 2 * s.inner * item());
            if (!gate_and_up) return false;
            linear(*layer.gate_up, x, s.hidden, gate_and_up, tokens, false, span.decodes);
            timer.mark(GATE_UP);
            millrace_gated(s.dtype, s.activation, gate_and_up, gated, tokens, s.inner);
            timer.mark(GATED);
            linear(*layer.down, gated, s.inner, x, tokens, false, span.decodes);
        }
        timer.mark(DOWN);
        return true;
    }

    // Gathers the tokens' rows of each table of angles.
    bool gather_angles(const Inputs& in, const float** angles) {
        int64_t width = 0;
        for (int64_t rope = 0; rope < s.ropes; rope++) width += s.rotary_dims[rope];
        auto* target = static_cast<float*>(rotations.of((in.tokens * width + 1) * sizeof(float)));
        if (!target) return false;
        for (int64_t rope = 0; rope < s.ropes; rope++) {
            int64_t dim = s.rotary_dims[rope];
            angles[rope] = target;
            for (int64_t token = 0; token < in.tokens; token++, target += dim)
                memcpy(target, in.angles[rope] + in.positions[token] * dim, dim * sizeof(float));
        }
        return true;
    }

    static Sharing find_shared(const Inputs& in) {
        return find_sharing(in.query_starts, in.seq_lens, in.tables, in.rows, in.table_width, in.block_size);
    }

    int64_t qkv_width() const { return (s.heads + 2 * s.kv_heads) * s.head_dim; }

    // Reduces the step to the last tokens, each a row of one query.
    bool keep_last(Inputs& in, void* projected) {
        auto* starts = static_cast<int32_t*>(places.of((in.lasts + 1) * sizeof(int32_t)));
        if (!starts) return false;
        for (int64_t i = 0; i <= in.lasts; i++) starts[i] = i;
        for (int64_t i = 0; i < in.lasts; i++) {
            copy_row(projected, i, in.last_tokens[i], qkv_width() * item());
            copy_row(in.residual, i, in.last_tokens[i], s.hidden * item());
        }
        in.query_starts = starts, in.seq_lens = in.last_lens, in.tables = in.last_tables;
        in.tokens = in.rows = in.lasts;
        return true;
    }

    static void copy_row(void* rows, int64_t to, int64_t from, int64_t bytes) {
        auto* start = static_cast<char*>(rows);
        if (to != from) memcpy(start + to * bytes, start + from * bytes, bytes);
    }

    void project(const Inputs& in, int64_t index, const int64_t* cache_places, const float* const* angles, const void* x,
                 void* projected, Timer& timer) const {
        const LayerDesc& layer = layers[index];
        multiply(layer.qkv, x, projected);
        timer.mark(QKV);
        bool has_rope = layer.rope >= 0;
        millrace_prepare_qkv(s.dtype, in.kv_dtype, projected, has_rope ? angles[layer.rope] : nullptr, layer.q_norm,
                             layer.k_norm, in.kv[index], cache_places, cache_places + in.tokens, in.tokens, s.heads,
                             s.kv_heads,
                             s.head_dim, has_rope ? s.rotary_dims[layer.rope] : 0, in.num_blocks, in.block_size, s.eps);
        timer.mark(PREPARE);
    }

    void attend(const Inputs& in, const LayerDesc& layer, const void* kv, const void* projected, void* heads,
                Sharing& sharing) const {
        attend_sharing(s.dtype, in.kv_dtype, projected, qkv_width(), kv, heads, in.query_starts, in.seq_lens, in.tables,
                       in.rows, in.table_width, s.heads, s.kv_heads, s.head_dim, in.num_blocks, in.block_size,
                       layer.window, s.scale, s.softcap, sharing);
    }

    // --- a whole step ---

    // Fills `in` from the request table and returns the token ids; null if out of memory.
    const int64_t* gather(const WholeStep& w, Inputs& in) {
        int64_t longest = 0;
        in.tokens = 0;
        for (int64_t i = 0; i < w.num_rows; i++) {
            in.tokens += w.counts[i];
            longest = std::max<int64_t>(longest, w.starts[i] + w.counts[i]);
        }
        in.rows = w.num_rows;
        in.table_width = (longest + w.block_size - 1) / w.block_size;
        int64_t large_words = 3 * in.tokens + w.num_rows, small_words = 1 + w.num_rows * (3 + 2 * in.table_width);
        auto* large = static_cast<int64_t*>(
            inputs.of(large_words * sizeof(int64_t) + small_words * sizeof(int32_t) + in.tokens));
        if (!large) return nullptr;
        int64_t *ids = large, *positions = ids + in.tokens, *slots = positions + in.tokens, token = 0;
        int64_t* last_tokens = slots + in.tokens;
        auto* starts = reinterpret_cast<int32_t*>(last_tokens + w.num_rows);
        int32_t *lens = starts + w.num_rows + 1, *last_lens = lens + w.num_rows;
        int32_t *tables = last_lens + w.num_rows, *last_tables = tables + w.num_rows * in.table_width;
        auto* decodes = reinterpret_cast<uint8_t*>(last_tables + w.num_rows * in.table_width);
        in.lasts = 0;
        for (int64_t i = 0; i < w.num_rows; i++) {
            const int32_t* table = w.tables + w.rows[i] * w.table_stride;
            starts[i] = token;
            lens[i] = w.starts[i] + w.counts[i];
            memcpy(tables + i * in.table_width, table, in.table_width * sizeof(int32_t));
            for (int64_t position = w.starts[i]; position < lens[i]; position++, token++) {
                int32_t given = w.tokens ? w.tokens[token] : -1;
                ids[token] = given < 0 ? w.last_tokens[w.rows[i]] : given;
                decodes[token] = position >= w.prompts[w.rows[i]];
                positions[token] = position;
                slots[token] = table[position / w.block_size] * w.block_size + position % w.block_size;
            }
            if (!w.samples[i]) continue;
            last_tokens[in.lasts] = token - 1;
            last_lens[in.lasts] = lens[i];
            memcpy(last_tables + in.lasts++ * in.table_width, table, in.table_width * sizeof(int32_t));
        }
        starts[w.num_rows] = token;
        in.decodes = decodes;
        in.last_tokens = last_tokens, in.last_lens = last_lens, in.last_tables = last_tables;
        in.slots = slots, in.positions = positions, in.query_starts = starts, in.seq_lens = lens, in.tables = tables;
        in.angles = w.angles, in.kv = w.kv, in.nanoseconds = w.nanoseconds;
        in.num_blocks = w.num_blocks, in.block_size = w.block_size, in.kv_dtype = w.kv_dtype;
        in.residual = embedded.of(2 * in.tokens * s.hidden * item());
        in.out = static_cast<char*>(in.residual) + in.tokens * s.hidden * item();
        return in.residual ? ids : nullptr;
    }

    bool embed(const Inputs& in, const int64_t* ids) const {
        if (take_rows(*s.head, in.residual, ids, in.tokens) >= 0) return false;
        if (s.embedding_scale != 1.0f)
            millrace_scale(s.dtype, in.residual, in.tokens * s.hidden, s.embedding_scale);
        return true;
    }

    int draw_tokens(const WholeStep& w, const Inputs& in, Timer& timer) {
        int64_t num_drawn = 0, vocab = s.head->n;
        auto* columns = static_cast<double*>(places.of(w.num_rows * 6 * sizeof(double)));
        if (!columns) return NO_MEMORY;
        double* uniform = columns;
        auto* top_k = reinterpret_cast<int64_t*>(uniform + w.num_rows);
        auto *temperature = reinterpret_cast<float*>(top_k + w.num_rows), *top_p = temperature + w.num_rows,
             *min_p = top_p + w.num_rows;
        for (int64_t i = 0; i < w.num_rows; i++) {
            if (!w.samples[i]) continue;
            int64_t row = w.rows[i];
            temperature[num_drawn] = w.temperature[row], top_p[num_drawn] = w.top_p[row], min_p[num_drawn] = w.min_p[row];
            top_k[num_drawn] = w.top_k[row];
            uniform[num_drawn++] = millrace_uniform(w.seeds[row], in.seq_lens[i]);
        }
        if (!num_drawn) return 0;
        void* scores = logits.of(num_drawn * vocab * sizeof(float));
        if (!scores) return NO_MEMORY;
        linear(*s.head, in.out, s.hidden, scores, num_drawn, true, s.use_decode_kernels);
        timer.mark(HEAD);
        millrace_draw(static_cast<float*>(scores), num_drawn, vocab, temperature, top_k, top_p, min_p, uniform, w.drawn);
        for (int64_t i = 0, at = 0; i < w.num_rows; i++)
            if (w.samples[i]) w.last_tokens[w.rows[i]] = w.drawn[at++];
        timer.mark(DRAW);
        return 0;
    }

    int step(const WholeStep& w) {
        Timer timer(w.nanoseconds);
        Inputs in{};
        const int64_t* ids = gather(w, in);
        if (!ids) return NO_MEMORY;
        if (!embed(in, ids)) return BAD_TOKEN;
        timer.mark(OTHER);
        if (!run(in)) return NO_MEMORY;
        timer.skip();
        return draw_tokens(w, in, timer);
    }

    enum { NO_MEMORY = 1, BAD_TOKEN = 2 };
};

}  // namespace

extern "C" {

// The weights must stay at their addresses as long as the stack exists. Calls must not overlap.
void* millrace_stack_new(const Shape* shape, const LayerDesc* layers, const float* final_norm) {
    auto* stack = new Stack{*shape, std::make_unique<LayerDesc[]>(shape->layers), final_norm};
    memcpy(stack->layers.get(), layers, shape->layers * sizeof(LayerDesc));
    stack->split_decode = shape->use_decode_kernels && stack->any_decode_kernel();
    return stack;
}

void millrace_stack_free(void* stack) { delete static_cast<Stack*>(stack); }

// Returns 0, or 1 if out of memory.
int millrace_stack_run(void* stack, const Inputs* inputs) { return static_cast<Stack*>(stack)->run(*inputs) ? 0 : 1; }

// From token ids to drawn tokens. Returns 0, 1 if out of memory, 2 if an id is outside the vocabulary.
int millrace_stack_step(void* stack, const WholeStep* step) { return static_cast<Stack*>(stack)->step(*step); }
}
