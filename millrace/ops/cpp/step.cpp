// A step from the request table: `forward` computes hidden states from token ids, `draw` tokens from hidden states.
#include "stack.h"

#include <algorithm>
#include <cstring>

namespace {

// models/native_stack.py mirrors the structs below field by field.

struct ForwardStep {
    const int32_t *rows, *starts, *counts;  // [num_rows]: table row, first position, number of tokens
    const int32_t* draws;                   // [num_rows]: number of the row's last tokens whose states are needed
    const int32_t* tokens;                  // [tokens]: token ids; -1: last drawn token of the row; null: -1 for all
    const int32_t* prompts;                 // [table rows]: length of the prompt
    const int64_t* last_tokens;             // [table rows]
    const int32_t* tables;                  // [groups, table rows, table_width]: block ids
    const float* const* angles;
    void* const* kv;
    void* out;  // [states, hidden]: written
    // [states], written unless null: the table row of each state, and the position of the token to draw from it.
    int32_t *state_rows, *state_positions;
    int64_t* nanoseconds;  // or null
    int64_t num_rows, groups, table_rows, table_width, num_blocks, block_size, kv_dtype;
    const int64_t* tap_layers;  // see `Inputs`
    void* taps;
    int64_t num_taps;
    const void* states;  // [tokens, hidden], for feature drafters: the target's state one position before each token
    void* residuals;     // [states, hidden]: written unless null, the sum that the final norm is of
    const Adapters* adapters;  // null if no row of the step has one
    const int32_t* slots;      // [table rows]: slot of each row's adapter
};

struct DrawStep {
    const void* hidden;               // [states, hidden]
    const int32_t *rows, *positions;  // [states]: table row, and position of the token to draw
    const uint8_t* is_last;           // [states]: whether the token becomes its row's last token; null: all do
    const int64_t* masked;            // [num_masks]: states that may draw only some tokens
    const uint32_t* mask_bits;        // [num_masks, ceil(vocab / 32)]: 1 for tokens that may be drawn
    const float *temperature, *top_p, *min_p;  // [table rows], like top_k and seeds
    const int64_t* top_k;
    const uint64_t* seeds;
    int64_t* last_tokens;  // [table rows]
    int64_t* drawn;        // [states]
    int64_t* nanoseconds;  // or null
    int64_t num_states, num_masks;
};

// Consecutive arrays in one buffer. The caller has room for them and takes the widest types first.
class Arrays {
  public:
    explicit Arrays(void* memory) : next_(static_cast<char*>(memory)) {}

    template <typename T>
    T* take(int64_t count) {
        auto* array = reinterpret_cast<T*>(next_);
        next_ += count * sizeof(T);
        return array;
    }

  private:
    char* next_;
};

// A step's tokens and rows as the layers need them, gathered from the request table.
class Gather {
  public:
    Inputs in{};
    int64_t* ids = nullptr;  // of the tokens
    int64_t num_states = 0;

    Gather(Stack& stack, const ForwardStep& f) : stack(stack), f(f) {}

    // False if out of memory.
    bool run() {
        count();
        if (!allocate()) return false;
        int64_t token = 0, state = 0, drawing = 0;
        query_starts[0] = last_starts[0] = 0;
        for (int64_t i = 0; i < f.num_rows; i++) {
            seq_lens[i] = f.starts[i] + f.counts[i];
            for (int64_t group = 0; group < f.groups; group++) add_blocks(group, i, token);
            for (int64_t position = f.starts[i]; position < seq_lens[i]; position++)
                add_token(f.rows[i], position, token++);
            query_starts[i + 1] = token;
            if (!f.draws[i]) continue;
            for (int64_t place = token - f.draws[i]; place < token; place++) add_state(f.rows[i], place, state++);
            for (int64_t group = 0; group < f.groups && in.lasts >= 0; group++)
                copy_table(group, i, last_tables + (group * in.last_rows + drawing) * in.table_width);
            last_lens[drawing] = seq_lens[i];
            last_starts[++drawing] = state;
        }
        return true;
    }

  private:
    Stack& stack;
    const ForwardStep& f;
    // The arrays of `in`.
    int64_t *block_ids, *offsets, *positions, *last_tokens;
    int32_t *query_starts, *seq_lens, *tables, *last_starts, *last_lens, *last_tables, *slots;
    uint8_t* decodes;

    void count() {
        int64_t longest = 0, states = 0;
        for (int64_t i = 0; i < f.num_rows; i++) {
            in.tokens += f.counts[i];
            states += f.draws[i];
            in.last_rows += f.draws[i] > 0;
            longest = std::max<int64_t>(longest, f.starts[i] + f.counts[i]);
        }
        num_states = states;
        in.lasts = states == in.tokens ? -1 : states;
        in.rows = f.num_rows, in.groups = f.groups;
        in.table_width = (longest + f.block_size - 1) / f.block_size;
        in.num_blocks = f.num_blocks, in.block_size = f.block_size, in.kv_dtype = f.kv_dtype;
        in.angles = f.angles, in.kv = f.kv, in.out = f.out, in.nanoseconds = f.nanoseconds;
        in.adapters = f.adapters;
        in.tap_layers = f.tap_layers, in.taps = f.taps, in.num_taps = f.num_taps;
    }

    bool allocate() {
        int64_t table_words = in.groups * in.rows * in.table_width;
        int64_t large_words = (4 + in.groups) * in.tokens, small_words = 2 + 4 * in.rows + 2 * table_words + in.tokens;
        void* memory = stack.inputs.of(large_words * sizeof(int64_t) + small_words * sizeof(int32_t) + in.tokens);
        in.residual = stack.embedded.of(in.tokens * stack.s.hidden * stack.item());
        if (!memory || !in.residual) return false;
        Arrays arrays(memory);
        ids = arrays.take<int64_t>(in.tokens);
        in.positions = positions = arrays.take<int64_t>(in.tokens);
        in.offsets = offsets = arrays.take<int64_t>(in.tokens);
        in.last_tokens = last_tokens = arrays.take<int64_t>(in.tokens);
        in.block_ids = block_ids = arrays.take<int64_t>(in.groups * in.tokens);
        in.query_starts = query_starts = arrays.take<int32_t>(in.rows + 1);
        in.last_starts = last_starts = arrays.take<int32_t>(in.rows + 1);
        in.seq_lens = seq_lens = arrays.take<int32_t>(in.rows);
        in.last_lens = last_lens = arrays.take<int32_t>(in.rows);
        in.tables = tables = arrays.take<int32_t>(table_words);
        in.last_tables = last_tables = arrays.take<int32_t>(table_words);
        in.slots = slots = arrays.take<int32_t>(in.tokens);
        in.decodes = decodes = arrays.take<uint8_t>(in.tokens);
        return true;
    }

    const int32_t* table_of(int64_t group, int64_t i) const {
        return f.tables + (group * f.table_rows + f.rows[i]) * f.table_width;
    }

    void copy_table(int64_t group, int64_t i, int32_t* to) const {
        memcpy(to, table_of(group, i), in.table_width * sizeof(int32_t));
    }

    // Block table of row i, and blocks of its tokens, the first of which is `token`.
    void add_blocks(int64_t group, int64_t i, int64_t token) {
        const int32_t* table = table_of(group, i);
        copy_table(group, i, tables + (group * in.rows + i) * in.table_width);
        for (int64_t position = f.starts[i]; position < seq_lens[i]; position++)
            block_ids[group * in.tokens + token++] = table[position / f.block_size];
    }

    void add_token(int32_t row, int64_t position, int64_t token) {
        int32_t given = f.tokens ? f.tokens[token] : -1;
        ids[token] = given < 0 ? f.last_tokens[row] : given;
        positions[token] = position;
        offsets[token] = position % f.block_size;
        decodes[token] = position >= f.prompts[row];
        if (f.adapters) slots[token] = f.slots[row];
    }

    void add_state(int32_t row, int64_t token, int64_t state) {
        last_tokens[state] = token;
        if (!f.state_rows) return;
        f.state_rows[state] = row;
        f.state_positions[state] = positions[token] + 1;
    }
};

bool embed(const Stack& stack, const Inputs& in, const int64_t* ids) {
    const Shape& s = stack.s;
    if (take_rows(*s.head, in.residual, ids, in.tokens) >= 0) return false;
    if (s.embedding_scale != 1.0f) millrace_scale(s.dtype, in.residual, in.tokens * s.hidden, s.embedding_scale);
    return true;
}

// Copies rows of `width` bytes into rows twice as wide, from byte `first` on.
void place_halves(char* joined, const void* rows, int64_t count, int64_t width, int64_t first) {
    for (int64_t row = 0; row < count; row++)
        memcpy(joined + 2 * row * width + first, static_cast<const char*>(rows) + row * width, width);
}

// Residual and first input of a feature drafter's layers.
Status pair_states(Stack& stack, Inputs& in, const int64_t* ids, const void* states) {
    const Shape& s = stack.s;
    const DraftDesc& draft = *stack.draft;
    int64_t width = s.hidden * stack.item();
    auto* joined = static_cast<char*>(stack.joined.of(2 * in.tokens * width));
    if (!joined) return NO_MEMORY;
    auto norm = [&](const void* x, const float* weight) {
        if (weight) millrace_norm(s.dtype, x, nullptr, weight, in.residual, nullptr, in.tokens, s.hidden, s.eps);
    };
    if (take_rows(*draft.embedding, in.residual, ids, in.tokens) >= 0) return BAD_TOKEN;
    if (draft.embedding_scale != 1.0f) millrace_scale(s.dtype, in.residual, in.tokens * s.hidden, draft.embedding_scale);
    norm(in.residual, draft.fc ? draft.embedding_norm : stack.layers[0].input_norm);
    place_halves(joined, in.residual, in.tokens, width, 0);
    if (draft.fc) {
        place_halves(joined, states, in.tokens, width, width);
        linear(*draft.fc, joined, 2 * s.hidden, in.residual, in.tokens);
        in.first_x = draft.has_input_norm ? nullptr : in.residual;
        return DONE;
    }
    norm(states, draft.hidden_norm);
    place_halves(joined, in.residual, in.tokens, width, width);
    if (!draft.normed_residual) memcpy(in.residual, states, in.tokens * width);
    in.first_x = joined;
    return DONE;
}

Status forward(Stack& stack, const ForwardStep& f) {
    Timer timer(f.nanoseconds);
    Gather gather(stack, f);
    if (!gather.run()) return NO_MEMORY;
    if (f.states) {
        Status status = pair_states(stack, gather.in, gather.ids, f.states);
        if (status != DONE) return status;
    } else if (!embed(stack, gather.in, gather.ids)) {
        return BAD_TOKEN;
    }
    timer.mark(OTHER);
    if (!stack.run(gather.in)) return NO_MEMORY;
    if (f.residuals) memcpy(f.residuals, gather.in.residual, gather.num_states * stack.s.hidden * stack.item());
    return DONE;
}

Status draw(Stack& stack, const DrawStep& d) {
    int64_t states = d.num_states, vocab = stack.s.head->n;
    if (!states) return DONE;
    Timer timer(d.nanoseconds);
    void* memory = stack.places.of(states * (2 * sizeof(int64_t) + 3 * sizeof(float)));
    auto* scores = static_cast<float*>(stack.logits.of(states * vocab * sizeof(float)));
    if (!memory || !scores) return NO_MEMORY;
    linear(*stack.s.head, d.hidden, stack.s.hidden, scores, states, true, stack.s.use_decode_kernels);
    timer.mark(HEAD);
    millrace_mask(scores, vocab, d.masked, d.mask_bits, d.num_masks);
    Arrays columns(memory);
    auto* uniform = columns.take<double>(states);
    auto* top_k = columns.take<int64_t>(states);
    auto *temperature = columns.take<float>(states), *top_p = columns.take<float>(states),
         *min_p = columns.take<float>(states);
    for (int64_t i = 0; i < states; i++) {
        int64_t row = d.rows[i];
        temperature[i] = d.temperature[row], top_p[i] = d.top_p[row], min_p[i] = d.min_p[row];
        top_k[i] = d.top_k[row];
        uniform[i] = millrace_uniform(d.seeds[row], d.positions[i]);
    }
    millrace_draw(scores, states, vocab, temperature, top_k, top_p, min_p, uniform, d.drawn);
    for (int64_t i = 0; i < states; i++)
        if (!d.is_last || d.is_last[i]) d.last_tokens[d.rows[i]] = d.drawn[i];
    timer.mark(DRAW);
    return DONE;
}

}  // namespace

extern "C" {

// Writes the tokens' keys and values into the cache and returns hidden states after the final norm. Returns a Status.
int millrace_stack_forward(void* stack, const ForwardStep* step) { return forward(*static_cast<Stack*>(stack), *step); }

// Returns a Status.
int millrace_stack_draw(void* stack, const DrawStep* step) { return draw(*static_cast<Stack*>(stack), *step); }

// Both in one call.
int millrace_stack_step(void* stack, const ForwardStep* body, const DrawStep* head) {
    int status = millrace_stack_forward(stack, body);
    return status == DONE ? millrace_stack_draw(stack, head) : status;
}
}
