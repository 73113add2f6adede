// Runs all layers of a step: calls the other kernels in the order in which the Python decoder does.
#include "stack.h"

#include <algorithm>
#include <cstring>

namespace {

void copy_row(void* rows, int64_t to, int64_t from, int64_t bytes) {
    auto* start = static_cast<char*>(rows);
    if (to != from) memcpy(start + to * bytes, start + from * bytes, bytes);
}

const int32_t* tables_of(const Inputs& in, int64_t group) { return in.tables + group * in.rows * in.table_width; }

}  // namespace

Stack::Stack(const Shape& shape, const LayerDesc* descriptions, const float* final_norm)
    : s(shape), layers(std::make_unique<LayerDesc[]>(shape.layers)), final_norm(final_norm) {
    std::copy_n(descriptions, shape.layers, layers.get());
    split_decode = shape.use_decode_kernels && any_decode_kernel();
}

// Whether any linear has a kernel for decode rows.
bool Stack::any_decode_kernel() const {
    for (int64_t i = 0; i < s.layers; i++)
        for (const LinearDesc* layer : {layers[i].qkv, layers[i].out, layers[i].gate_up, layers[i].down})
            if (has_decode_kernel(*layer)) return true;
    return false;
}

bool Stack::run(Inputs in) {
    int64_t size = in.tokens * item();
    void* x = hidden.of(size * s.hidden);
    void* projected = qkv.of(size * qkv_width());
    void* heads = attended.of(size * s.heads * s.head_dim);
    const float* angles[MAX_ROPES];
    if (!x || !projected || !heads || !gather_angles(in, angles)) return false;
    bool split = split_decode && in.decodes;
    find_spans(in.tokens, [&](int64_t token) { return split && in.decodes[token]; });
    Timer timer(in.nanoseconds);
    find_shared(in);
    timer.mark(ATTENTION);
    if (!in.first_x)
        millrace_norm(s.dtype, in.residual, nullptr, layers[0].input_norm, x, nullptr, in.tokens, s.hidden, s.eps);
    timer.mark(NORM);
    for (int64_t i = 0; i < s.layers; i++) {
        const LayerDesc& layer = layers[i];
        bool last = i + 1 == s.layers;
        tap(in, i);
        project(in, i, angles, i == 0 && in.first_x ? in.first_x : x, projected, timer);
        if (last && in.lasts >= 0) {
            if (!in.lasts) return true;
            keep_last(in, projected);
            find_spans(in.tokens, [&](int64_t i) { return split && in.decodes[in.last_tokens[i]]; });
            find_shared(in);
        }
        attend(in, i, projected, heads);
        timer.mark(ATTENTION);
        multiply(layer.out, heads, x);
        add_lora(in, i, LORA_OUT, heads, s.heads * s.head_dim, x, s.hidden, 0, in.tokens);
        timer.mark(OUT);
        norm(x, layer.attention_out_norm, in.tokens);
        add_norm(x, in.residual, layer.mlp_norm, x, in.tokens);
        timer.mark(NORM);
        for (const Span& span : spans)
            if (!run_mlp(in, i, row_at(x, span.first, s.hidden), span, timer)) return false;
        norm(x, layer.mlp_out_norm, in.tokens);
        if (last)
            finish(in, x);
        else
            add_norm(x, in.residual, layers[i + 1].input_norm, x, in.tokens);
        timer.mark(NORM);
    }
    return true;
}

// `decodes(token)`: whether it is a decode row's.
template <typename F>
void Stack::find_spans(int64_t tokens, F decodes) {
    spans.clear();
    for (int64_t token = 0; token < tokens; token++) {
        if (spans.empty() || spans.back().decodes != decodes(token)) spans.push_back({token, 0, decodes(token)});
        spans.back().count++;
    }
}

// Gathers the tokens' rows of each table of angles.
bool Stack::gather_angles(const Inputs& in, const float** angles) {
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

void Stack::find_shared(const Inputs& in) {
    sharing.clear();
    for (int64_t group = 0; group < in.groups; group++)
        sharing.push_back(find_sharing(in.query_starts, in.seq_lens, tables_of(in, group), in.rows, in.table_width,
                                       in.block_size));
}

// Reduces the step to the last tokens of some rows.
void Stack::keep_last(Inputs& in, void* projected) {
    for (int64_t i = 0; i < in.lasts; i++) {
        copy_row(projected, i, in.last_tokens[i], qkv_width() * item());
        copy_row(in.residual, i, in.last_tokens[i], s.hidden * item());
    }
    if (in.adapters) {
        kept_slots.resize(in.lasts);
        for (int64_t i = 0; i < in.lasts; i++) kept_slots[i] = in.slots[in.last_tokens[i]];
        in.slots = kept_slots.data();
    }
    in.query_starts = in.last_starts, in.seq_lens = in.last_lens, in.tables = in.last_tables;
    in.tokens = in.lasts, in.rows = in.last_rows;
}

// Copies the residual after `layer` layers, if a drafter reads it.
void Stack::tap(const Inputs& in, int64_t layer) const {
    int64_t bytes = s.hidden * item();
    for (int64_t i = 0; i < in.num_taps; i++) {
        if (in.tap_layers[i] != layer) continue;
        for (int64_t token = 0; token < in.tokens; token++)
            memcpy(static_cast<char*>(in.taps) + (token * in.num_taps + i) * bytes, row_at(in.residual, token, s.hidden),
                   bytes);
    }
}

// out [count, n] += what the adapters of the tokens from `first` on add for x [count, k].
void Stack::add_lora(const Inputs& in, int64_t layer, LoraKind kind, const void* x, int64_t k, void* out, int64_t n,
                     int64_t first, int64_t count) const {
    if (!in.adapters) return;
    const Adapters& own = *in.adapters;
    int64_t index = layer * LORA_KINDS + kind, at = index * own.slots;
    millrace_add_lora(s.dtype, x, k, out, n, count, in.slots + first, own.a + at, own.b + at,
                      own.ranks + at * LORA_PARTS, own.scales + at * LORA_PARTS, own.sizes + index * LORA_PARTS,
                      LORA_PARTS, k);
}

// Whether the adapter of some token changes this linear.
bool Stack::has_lora(const Inputs& in, int64_t layer, LoraKind kind) const {
    if (!in.adapters) return false;
    const int32_t* ranks = in.adapters->ranks + (layer * LORA_KINDS + kind) * in.adapters->slots * LORA_PARTS;
    for (int64_t token = 0; token < in.tokens; token++)
        for (int64_t part = 0; part < LORA_PARTS; part++)
            if (ranks[in.slots[token] * LORA_PARTS + part]) return true;
    return false;
}

void Stack::multiply(const LinearDesc* layer, const void* x, void* out) const {
    for (const Span& span : spans)
        linear(*layer, row_at(x, span.first, layer->k), layer->k, row_at(out, span.first, layer->n), span.count, false,
               span.decodes);
}

void Stack::norm(void* x, const float* weight, int64_t rows) const {
    if (weight) millrace_norm(s.dtype, x, nullptr, weight, x, nullptr, rows, s.hidden, s.eps);
}

// residual += x; out = norm(residual).
void Stack::add_norm(const void* x, void* residual, const float* weight, void* out, int64_t rows) const {
    millrace_norm(s.dtype, x, residual, weight, out, residual, rows, s.hidden, s.eps);
}

// The last layer's sum, and its norm if there is one, as the output.
void Stack::finish(const Inputs& in, const void* x) const {
    // Without a final norm the norm's result is overwritten: only the sum is needed.
    add_norm(x, in.residual, final_norm ? final_norm : layers[0].mlp_norm, in.out, in.tokens);
    if (!final_norm) memcpy(in.out, in.residual, in.tokens * s.hidden * item());
}

void Stack::project(const Inputs& in, int64_t index, const float* const* angles, const void* x, void* projected,
                    Timer& timer) const {
    const LayerDesc& layer = layers[index];
    multiply(layer.qkv, x, projected);
    add_lora(in, index, LORA_QKV, x, layer.qkv->k, projected, qkv_width(), 0, in.tokens);
    timer.mark(QKV);
    bool has_rope = layer.rope >= 0;
    millrace_prepare_qkv(s.dtype, in.kv_dtype, projected, has_rope ? angles[layer.rope] : nullptr, layer.q_norm,
                         layer.k_norm, layer.key_shift, in.kv[index], in.block_ids + layer.group * in.tokens, in.offsets, in.tokens,
                         s.heads, s.kv_heads, s.head_dim, has_rope ? s.rotary_dims[layer.rope] : 0, in.num_blocks,
                         in.block_size, s.eps);
    timer.mark(PREPARE);
}

void Stack::attend(const Inputs& in, int64_t index, const void* projected, void* heads) {
    const LayerDesc& layer = layers[index];
    attend_sharing(s.dtype, in.kv_dtype, projected, qkv_width(), in.kv[index], heads, in.query_starts, in.seq_lens,
                   tables_of(in, layer.group), in.rows, in.table_width, s.heads, s.kv_heads, s.head_dim, in.num_blocks,
                   in.block_size, layer.window, s.scale, s.softcap, sharing[layer.group]);
}

// The gated MLP of one span, in place; false if out of memory.
bool Stack::run_mlp(const Inputs& in, int64_t index, void* x, const Span& span, Timer& timer) {
    const LayerDesc& layer = layers[index];
    int64_t tokens = span.count;
    bool has_adapters = has_lora(in, index, LORA_GATE_UP) || has_lora(in, index, LORA_DOWN);
    void* gated = inner.of(std::max(tokens * s.inner * item(), input_tiles_bytes(*layer.down, tokens)));
    if (!gated) return false;
    if (!has_adapters && !span.decodes && gated_linear(*layer.gate_up, s.activation, x, s.hidden, tokens, *layer.down, gated)) {
        timer.mark(GATE_UP);
        linear_from_tiles(*layer.down, gated, x, tokens);
    } else {
        void* gate_and_up = gate_up.of(tokens * 2 * s.inner * item());
        if (!gate_and_up) return false;
        linear(*layer.gate_up, x, s.hidden, gate_and_up, tokens, false, span.decodes);
        if (has_adapters)
            add_lora(in, index, LORA_GATE_UP, x, s.hidden, gate_and_up, 2 * s.inner, span.first, tokens);
        timer.mark(GATE_UP);
        millrace_gated(s.dtype, s.activation, gate_and_up, gated, tokens, s.inner);
        timer.mark(GATED);
        linear(*layer.down, gated, s.inner, x, tokens, false, span.decodes);
        if (has_adapters) add_lora(in, index, LORA_DOWN, gated, s.inner, x, s.hidden, span.first, tokens);
    }
    timer.mark(DOWN);
    return true;
}

extern "C" {

// The weights must stay at their addresses as long as the stack exists. Calls must not overlap.
void* millrace_stack_new(const Shape* shape, const LayerDesc* layers, const float* final_norm) {
    return new Stack(*shape, layers, final_norm);
}

// Makes it a feature drafter's: `forward` then needs states.
void millrace_stack_set_draft(void* stack, const DraftDesc* draft) {
    static_cast<Stack*>(stack)->draft = std::make_unique<DraftDesc>(*draft);
}

void millrace_stack_free(void* stack) { delete static_cast<Stack*>(stack); }

int millrace_stack_run(void* stack, const Inputs* inputs) {
    return static_cast<Stack*>(stack)->run(*inputs) ? DONE : NO_MEMORY;
}
}
