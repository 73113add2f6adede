// All layers of a step in one call, or the whole step from token ids to drawn tokens: the kernels of the other files, in
// the order in which the Python decoder calls them, over buffers that stay allocated from step to step.
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

// The structs below are mirrored, field by field, in models/native_stack.py.

struct LayerAt {
    const LinearDesc *qkv, *out, *gate_up, *down;
    const float *input_norm, *mlp_norm;
    const float *q_norm, *k_norm, *attention_out_norm, *mlp_out_norm;  // or null
    int64_t rope;                                                      // which of the step's angles; -1 for none
    int64_t window;                                                    // 0 for none
};

struct Shape {
    int64_t dtype, layers, hidden, inner, heads, kv_heads, head_dim, activation, ropes;
    const int64_t* rotary_dims;  // per rope
    const LinearDesc* head;      // or null; a whole step needs it, as the matrix of embeddings too
    int64_t decodes_apart;       // whether rows that decode go through kernels of their own (see `linear`)
    float eps, scale, softcap, embedding_scale;
};

struct Inputs {
    const int64_t* slots;  // block id * block size + offset of each token, in the cache
    const int32_t *query_starts, *seq_lens, *tables;
    const int64_t* positions;    // of the tokens
    const float* const* angles;  // per rope [positions, rotary_dim]: cosines, then sines
    void* const* kv;             // per layer
    void* residual;              // [tokens, hidden]: the embedded tokens; overwritten
    void* out;                   // [tokens, hidden] after the final norm
    int64_t* nanoseconds;        // by kind of work, added to; or null
    int64_t tokens, rows, table_width, num_blocks, block_size, kv_dtype;
    // The only tokens whose output is wanted, in rising order, each the last of its row, and those rows' lengths and
    // tables: `out` has `lasts` rows then. -1 of them: all tokens are wanted.
    const int64_t* last_tokens;
    const int32_t *last_lens, *last_tables;
    int64_t lasts;
    const uint8_t* decodes;  // [tokens]: whether it is behind its row's prompt; null where none is
};

// A step as the runner knows it: rows of the request table and how their tokens are drawn.
struct WholeStep {
    const int32_t *rows, *starts, *counts;  // [num_rows]: row of the table, first position, tokens
    const uint8_t* samples;                 // [num_rows]: whether a token is drawn
    const int32_t* tokens;                  // [tokens]: given ids, -1 for the row's last drawn token; null: all drawn
    const int32_t* tables;                  // [table rows, table_stride]: block ids
    const int32_t* prompts;                 // [table rows]: tokens of the prompt
    int64_t* last_tokens;                   // [table rows]
    const float *temperature, *top_p, *min_p;  // [table rows], as all below
    const int64_t* top_k;
    const uint64_t* seeds;
    const float* const* angles;
    void* const* kv;
    int64_t* drawn;        // [rows that are sampled]
    int64_t* nanoseconds;  // or null
    int64_t num_rows, table_stride, num_blocks, block_size, kv_dtype;
};

enum Kind { QKV, PREPARE, ATTENTION, OUT, GATE_UP, GATED, DOWN, NORM, HEAD, DRAW, OTHER, KINDS };

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

    // Forget the time since the last mark: others have counted it.
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

// Tokens one after the other that are multiplied alike.
struct Span {
    int64_t first, count;
    bool decodes;
};

struct Stack {
    Shape s;
    std::unique_ptr<LayerAt[]> layers;
    const float* final_norm;
    Buffer hidden, qkv, attended, gate_up, inner, places, rotations, inputs, embedded, logits;
    bool splits = false;  // rows that decode from others
    std::vector<Span> spans;  // of the tokens at hand

    int item() const { return s.dtype == 0 ? 4 : 2; }

    const void* from(const void* rows, int64_t row, int64_t width) const {
        return static_cast<const char*>(rows) + row * width * item();
    }
    void* from(void* rows, int64_t row, int64_t width) const { return static_cast<char*>(rows) + row * width * item(); }

    void multiply(const LinearDesc* layer, const void* x, void* out) const {
        for (const Span& span : spans)
            linear(*layer, from(x, span.first, layer->k), layer->k, from(out, span.first, layer->n), span.count, false,
                   span.decodes);
    }

    // Whether any layer multiplies rows that decode in a way of their own.
    bool knows_kinds() const {
        for (int64_t i = 0; i < s.layers; i++)
            for (const LinearDesc* layer : {layers[i].qkv, layers[i].out, layers[i].gate_up, layers[i].down})
                if (decodes_apart(*layer)) return true;
        return false;
    }

    // `decodes` of a token, by its number.
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

    // out = norm(x + residual), and the sum replaces the residual.
    void add_norm(const void* x, void* residual, const float* weight, void* out, int64_t rows) const {
        millrace_norm(s.dtype, x, residual, weight, out, residual, rows, s.hidden, s.eps);
    }

    bool run(Inputs in) {
        int64_t size = in.tokens * item();
        void* x = hidden.of(size * s.hidden);
        void* projected = qkv.of(size * (s.heads + 2 * s.kv_heads) * s.head_dim);
        void* heads = attended.of(size * s.heads * s.head_dim);
        auto* at = static_cast<int64_t*>(places.of(2 * in.tokens * sizeof(int64_t)));
        const float* angles[MAX_ROPES];
        if (!x || !projected || !heads || !at || !find_angles(in, angles)) return false;
        for (int64_t token = 0; token < in.tokens; token++) {
            at[token] = in.slots[token] / in.block_size;
            at[in.tokens + token] = in.slots[token] % in.block_size;
        }
        bool split = splits && in.decodes;
        find_spans(in.tokens, [&](int64_t token) { return split && in.decodes[token]; });
        Watch watch(in.nanoseconds);
        Sharing sharing = shared_by(in);
        watch.mark(ATTENTION);
        millrace_norm(s.dtype, in.residual, nullptr, layers[0].input_norm, x, nullptr, in.tokens, s.hidden, s.eps);
        watch.mark(NORM);
        for (int64_t i = 0; i < s.layers; i++) {
            const LayerAt& layer = layers[i];
            bool last = i + 1 == s.layers;
            project(in, i, at, angles, x, projected, watch);
            if (last && in.lasts >= 0) {
                if (!in.lasts) return true;
                if (!keep_last(in, projected)) return false;
                find_spans(in.lasts, [&](int64_t i) { return split && in.decodes[in.last_tokens[i]]; });
                sharing = shared_by(in);
            }
            attend(in, layer, in.kv[i], projected, heads, sharing);
            watch.mark(ATTENTION);
            multiply(layer.out, heads, x);
            watch.mark(OUT);
            norm(x, layer.attention_out_norm, in.tokens);
            add_norm(x, in.residual, layer.mlp_norm, x, in.tokens);
            watch.mark(NORM);
            for (const Span& span : spans)
                if (!mlp(layer, from(x, span.first, s.hidden), span, watch)) return false;
            norm(x, layer.mlp_out_norm, in.tokens);
            add_norm(x, in.residual, last ? final_norm : layers[i + 1].input_norm, last ? in.out : x, in.tokens);
            watch.mark(NORM);
        }
        return true;
    }

    // The gated MLP of one span's x, in its place; false when there is no memory.
    bool mlp(const LayerAt& layer, void* x, const Span& span, Watch& watch) {
        int64_t tokens = span.count;
        void* one = inner.of(std::max(tokens * s.inner * item(), laid_out_bytes(*layer.down, tokens)));
        if (!one) return false;
        if (!span.decodes && gated_linear(*layer.gate_up, s.activation, x, s.hidden, tokens, *layer.down, one)) {
            watch.mark(GATE_UP);
            linear_laid_out(*layer.down, one, x, tokens);
        } else {
            void* both = gate_up.of(tokens * 2 * s.inner * item());
            if (!both) return false;
            linear(*layer.gate_up, x, s.hidden, both, tokens, false, span.decodes);
            watch.mark(GATE_UP);
            millrace_gated(s.dtype, s.activation, both, one, tokens, s.inner);
            watch.mark(GATED);
            linear(*layer.down, one, s.inner, x, tokens, false, span.decodes);
        }
        watch.mark(DOWN);
        return true;
    }

    // The tokens' rows of each table of angles, one after the other.
    bool find_angles(const Inputs& in, const float** angles) {
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

    static Sharing shared_by(const Inputs& in) {
        return find_sharing(in.query_starts, in.seq_lens, in.tables, in.rows, in.table_width, in.block_size);
    }

    int64_t qkv_width() const { return (s.heads + 2 * s.kv_heads) * s.head_dim; }

    // From here on the step has the last tokens alone, each a row of one query.
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

    void project(const Inputs& in, int64_t index, const int64_t* at, const float* const* angles, const void* x,
                 void* projected, Watch& watch) const {
        const LayerAt& layer = layers[index];
        multiply(layer.qkv, x, projected);
        watch.mark(QKV);
        bool rotates = layer.rope >= 0;
        millrace_prepare_qkv(s.dtype, in.kv_dtype, projected, rotates ? angles[layer.rope] : nullptr, layer.q_norm,
                             layer.k_norm, in.kv[index], at, at + in.tokens, in.tokens, s.heads, s.kv_heads,
                             s.head_dim, rotates ? s.rotary_dims[layer.rope] : 0, in.num_blocks, in.block_size, s.eps);
        watch.mark(PREPARE);
    }

    void attend(const Inputs& in, const LayerAt& layer, const void* kv, const void* projected, void* heads,
                Sharing& sharing) const {
        attend_sharing(s.dtype, in.kv_dtype, projected, qkv_width(), kv, heads, in.query_starts, in.seq_lens, in.tables,
                       in.rows, in.table_width, s.heads, s.kv_heads, s.head_dim, in.num_blocks, in.block_size,
                       layer.window, s.scale, s.softcap, sharing);
    }

    // --- a whole step ---

    // What the layers need to know, gathered from the request table, and the tokens' ids; null when there is no memory.
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

    int draw_tokens(const WholeStep& w, const Inputs& in, Watch& watch) {
        int64_t due = 0, vocab = s.head->n;
        auto* columns = static_cast<double*>(places.of(w.num_rows * 6 * sizeof(double)));
        if (!columns) return NO_MEMORY;
        double* uniform = columns;
        auto* top_k = reinterpret_cast<int64_t*>(uniform + w.num_rows);
        auto *temperature = reinterpret_cast<float*>(top_k + w.num_rows), *top_p = temperature + w.num_rows,
             *min_p = top_p + w.num_rows;
        for (int64_t i = 0; i < w.num_rows; i++) {
            if (!w.samples[i]) continue;
            int64_t row = w.rows[i];
            temperature[due] = w.temperature[row], top_p[due] = w.top_p[row], min_p[due] = w.min_p[row];
            top_k[due] = w.top_k[row];
            uniform[due++] = millrace_uniform(w.seeds[row], in.seq_lens[i]);
        }
        if (!due) return 0;
        void* scores = logits.of(due * vocab * sizeof(float));
        if (!scores) return NO_MEMORY;
        linear(*s.head, in.out, s.hidden, scores, due, true, s.decodes_apart);
        watch.mark(HEAD);
        millrace_draw(static_cast<float*>(scores), due, vocab, temperature, top_k, top_p, min_p, uniform, w.drawn);
        for (int64_t i = 0, at = 0; i < w.num_rows; i++)
            if (w.samples[i]) w.last_tokens[w.rows[i]] = w.drawn[at++];
        watch.mark(DRAW);
        return 0;
    }

    int step(const WholeStep& w) {
        Watch watch(w.nanoseconds);
        Inputs in{};
        const int64_t* ids = gather(w, in);
        if (!ids) return NO_MEMORY;
        if (!embed(in, ids)) return BAD_TOKEN;
        watch.mark(OTHER);
        if (!run(in)) return NO_MEMORY;
        watch.skip();
        return draw_tokens(w, in, watch);
    }

    enum { NO_MEMORY = 1, BAD_TOKEN = 2 };
};

}  // namespace

extern "C" {

// A stack over weights that stay where they are for as long as it lives. Calls must not overlap.
void* millrace_stack_new(const Shape* shape, const LayerAt* layers, const float* final_norm) {
    auto* stack = new Stack{*shape, std::make_unique<LayerAt[]>(shape->layers), final_norm};
    memcpy(stack->layers.get(), layers, shape->layers * sizeof(LayerAt));
    stack->splits = shape->decodes_apart && stack->knows_kinds();
    return stack;
}

void millrace_stack_free(void* stack) { delete static_cast<Stack*>(stack); }

// 0, or 1 when there is no memory for its buffers.
int millrace_stack_run(void* stack, const Inputs* inputs) { return static_cast<Stack*>(stack)->run(*inputs) ? 0 : 1; }

// Ids to drawn tokens. 0; 1 as above; 2 when an id is outside the vocabulary.
int millrace_stack_step(void* stack, const WholeStep* step) { return static_cast<Stack*>(stack)->step(*step); }
}
