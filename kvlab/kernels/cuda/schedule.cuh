// How decode attention is cut into work: shared by the kernel that plans a step, the one that attends and the one that combines.
//
// All regions of all segments, a segment being a KV head of a sequence, form one line, cut into equal shares. A share may cover many
// short segments or a part of a long one. With more query rows per KV head than a tensor-core tile has, several thread blocks, one per
// block of rows, work on the same share at the same time: what one of them reads, the others find in L2.
#pragma once
#include "region.cuh"

constexpr int WARPS = 4;                                          // independent workers of a thread block
constexpr int TILE_ROWS = 16;                                     // of a tensor-core product
constexpr int ROWS = GROUP * Q_LEN;                               // query rows that read the same KV head
constexpr int ROW_BLOCKS = (ROWS + TILE_ROWS - 1) / TILE_ROWS;
constexpr int BLOCK_ROWS = (ROWS + ROW_BLOCKS - 1) / ROW_BLOCKS;  // the last block may have fewer

struct __align__(16) Share {
  int sequence;  // the first one
  int offset;    // region in it, counted over KV heads and regions
  int regions;   // how many to do; 0 or less: none
  int seq_len;   // of the first sequence, in tokens
};

// The shares that hold a part of a segment; last < first where the sequence is empty.
struct __align__(8) Splits {
  int first, last;
};

// A share and a segment that it has a part of meet in exactly one place of the partial results: along the line one of the two grows by
// one at each step.
__device__ __forceinline__ int64_t partial_row(int share, int segment, int row_block, int row) {
  return (int64_t(share + segment) * ROW_BLOCKS + row_block) * BLOCK_ROWS + row;
}

__device__ __forceinline__ int regions_of(int seq_len) { return (seq_len + REGION_TOKENS - 1) / REGION_TOKENS; }

// No score is lower: a row that has seen nothing still has a finite maximum.
constexpr float NO_SCORE = -1e30f;
