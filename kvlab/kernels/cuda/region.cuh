// Where the bytes of a region lie (32 tokens of one head): kvlab/kernels/layout.py says the same for tensors.
// Token T = 8j + 2t + e of the region, dimension d of HEAD_DIM. A nibble is named by its byte and, in it, d & 1.
#pragma once
#include "hopper.cuh"

constexpr int REGION_TOKENS = 32;
constexpr int KEY_BYTES = REGION_TOKENS * HEAD_DIM / 2;  // codes of the keys, then as many of the values
constexpr int METADATA_AT = 2 * KEY_BYTES;               // then four rows of 32 fp16 numbers
constexpr int METADATA_ROW = 2 * REGION_TOKENS;
constexpr int REGION_BYTES = METADATA_AT + 4 * METADATA_ROW;
enum Metadata { KEY_SCALE, KEY_OFFSET, VALUE_SCALE, VALUE_OFFSET };

// The halfword with dimensions d .. d + 3 (d a multiple of 4) of a token's key.
__device__ __forceinline__ int key_at(int token, int d) { return (d >> 6) * 1024 + token * 32 + ((d & 63) >> 1); }
// The same of its value.
__device__ __forceinline__ int value_at(int token, int d) {
  const int j = token >> 3, t = (token >> 1) & 3, e = token & 1;
  return KEY_BYTES + j * (4 * HEAD_DIM) + ((d >> 2) & 7) * (HEAD_DIM / 2) + t * (HEAD_DIM / 8) + (d >> 5) * 4 + e * 2;
}
__device__ __forceinline__ int metadata_at(Metadata row, int token) {
  const int j = token >> 3, t = (token >> 1) & 3, e = token & 1;
  return METADATA_AT + row * METADATA_ROW + 2 * (8 * t + 2 * j + e);
}

// A paged cache: [num_blocks, num_kv_heads, regions_per_block] regions, blocks and heads at any stride (bytes).
struct Cache {
  uint8_t* base;
  int64_t block_stride, head_stride;
  int regions_per_block;
};
