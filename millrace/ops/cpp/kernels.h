// Kernels that other C++ files call. Python calls the same functions; each is described where it is defined.
#pragma once

#include "attention/attention_sharing.h"

#include <cstdint>

extern "C" {

void millrace_norm(int dtype, const void* x, const void* residual, const float* weight, void* out, void* total,
                   int64_t rows, int64_t dim, float eps);

void millrace_gated(int dtype, int kind, const void* gate_up, void* out, int64_t rows, int64_t inner);

void millrace_prepare_qkv(int dtype, int kv_dtype, void* qkv, const float* step_angles, const float* q_norm,
                          const float* k_norm, const float* key_shift, void* kv, const int64_t* block_ids,
                          const int64_t* offsets, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t rotary_dim,
                          int64_t num_blocks, int64_t block_size, float eps);

void millrace_attention(int dtype, int kv_dtype, const void* queries, int64_t query_stride, const void* kv,
                        void* out, const int32_t* query_starts, const int32_t* seq_lens, const int32_t* tables,
                        int64_t num_rows, int64_t table_width, int64_t heads, int64_t kv_heads, int64_t head_dim,
                        int64_t num_blocks, int64_t block_size, int64_t window, float scale, float softcap,
                        const float* sinks);

void millrace_add_lora(int dtype, const void* x, int64_t x_stride, void* out, int64_t out_stride, int64_t tokens,
                       const int32_t* slots, const int64_t* a, const int64_t* b, const int32_t* ranks,
                       const float* scales, const int64_t* sizes, int64_t parts, int64_t k);

void millrace_scale(int dtype, void* x, int64_t count, float by);

void millrace_draw(const float* logits, int64_t rows, int64_t vocab, const float* temperature, const int64_t* top_k,
                   const float* top_p, const float* min_p, const double* uniform, int64_t* tokens);

void millrace_mask(float* logits, int64_t vocab, const int64_t* index, const uint32_t* bits, int64_t count);

double millrace_uniform(uint64_t seed, uint64_t position);
}

// millrace_attention with a precomputed `sharing`, which is the same for all layers of a step.
void attend_sharing(int dtype, int kv_dtype, const void* queries, int64_t query_stride, const void* kv,
                    void* out, const int32_t* query_starts, const int32_t* seq_lens, const int32_t* tables,
                    int64_t num_rows, int64_t table_width, int64_t heads, int64_t kv_heads, int64_t head_dim,
                    int64_t num_blocks, int64_t block_size, int64_t window, float scale, float softcap,
                    Sharing& sharing, const float* sinks = nullptr);
