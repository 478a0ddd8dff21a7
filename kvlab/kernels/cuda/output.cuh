// The end of attention: partial results of a row are merged, divided by their sum, and written.
#pragma once
#include "schedule.cuh"

// The softmax of a row so far is (m, l): the sum of 2^(score - m) is l, scores in units of log2.
__device__ __forceinline__ float2 merge(float2 a, float2 b) {
  const float top = fmaxf(a.x, b.x);
  return {top, a.y * exp2_fast(a.x - top) + b.y * exp2_fast(b.x - top)};
}

__device__ __forceinline__ void add_scaled(float4& sum, float4 x, float scale) {
  sum.x += x.x * scale;
  sum.y += x.y * scale;
  sum.z += x.z * scale;
  sum.w += x.w * scale;
}

struct Output {
  void* out;                // [tokens, num_heads, HEAD_DIM], bf16, or float32 if is_float
  float* lse;               // [tokens, num_heads], natural logarithm, or null
  const float* value_mean;  // [num_kv_heads, HEAD_DIM], or null
  int is_float;

  __device__ __forceinline__ void store(int64_t row, int dim4, float4 x) const {
    const int64_t at = row * (HEAD_DIM / 4) + dim4;
    if (is_float) static_cast<float4*>(out)[at] = x;
    else static_cast<uint2*>(out)[at] = {pack_bfloat(x.x, x.y), pack_bfloat(x.z, x.w)};
  }

  __device__ __forceinline__ void write_empty(int64_t row, int dim4) const {
    store(row, dim4, {0, 0, 0, 0});
    if (lse && dim4 == 0) lse[row] = -__int_as_float(0x7f800000);
  }

  // Four dimensions of a row: the weighted sum of values, and the softmax it was weighted with.
  __device__ __forceinline__ void write(int64_t row, int kv_head, int dim4, float4 sum, float2 softmax) const {
    const bool is_nan = softmax.y != softmax.y;  // a query that is none must not look like an empty row
    if (softmax.x <= NO_SCORE && !is_nan) {  // a new token before the start of its sequence
      write_empty(row, dim4);
      return;
    }
    const float4 mean = value_mean ? reinterpret_cast<const float4*>(value_mean)[kv_head * (HEAD_DIM / 4) + dim4] : float4{0, 0, 0, 0};
    const float scale = 1 / softmax.y;
    store(row, dim4, {sum.x * scale + mean.x, sum.y * scale + mean.y, sum.z * scale + mean.z, sum.w * scale + mean.w});
    if (lse && dim4 == 0) lse[row] = (softmax.x + log2f(softmax.y)) * 0.693147181f;  // ln 2
  }
};
