// Query rows as the tensor cores want them, once per segment, in shared memory.
#pragma once
#include "schedule.cuh"

// The fragments of eight steps of 16 dimensions, then per lane the sums that undo the constants in the key codes.
// A step has dimensions d, d + 4 of each lane's eight for the low nibbles and their right neighbours for the high ones, which count 16
// times too much.
constexpr int QUERY_START = HEAD_DIM / 16;   // -1024 times the sum of the row, what a score starts from
constexpr int QUERY_SUMS = QUERY_START + 1;  // sums and growths of rows g and g + 8
constexpr int QUERY_WORDS = QUERY_SUMS + 1;  // 16 bytes per lane each
constexpr int QUERY_BYTES = QUERY_WORDS * 32 * 16;
constexpr float LARGEST_QUERY = 4096;             // in fp16, far from overflow, times 16 included

// The rows g and g + 8 of a block of rows, as a lane loads them: of each 64 dimensions, 16t to 16t + 15.
struct QueryRows {
  uint4 eight[2][HEAD_DIM / 32];

  __device__ __forceinline__ void load(const uint16_t* q, int sequence, int kv_head, int first_row, int num_heads) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int local = g + 8 * half, row = first_row + local;
      const int64_t token = int64_t(sequence) * Q_LEN + row / GROUP;
      const uint16_t* from = q + (token * num_heads + kv_head * GROUP + row % GROUP) * HEAD_DIM + 16 * t;
#pragma unroll
      for (int i = 0; i < HEAD_DIM / 32; i++)
        eight[half][i] = local < BLOCK_ROWS && row < ROWS ? *reinterpret_cast<const uint4*>(from + 64 * (i / 2) + 8 * (i % 2)) : uint4{0, 0, 0, 0};
    }
  }

  // Dimension d of the i-th eight.
  __device__ __forceinline__ float at(int half, int i, int d) const {
    const uint4& v = eight[half][i];
    const uint32_t pair = d / 2 == 0 ? v.x : d / 2 == 1 ? v.y : d / 2 == 2 ? v.z : v.w;
    return d % 2 ? bfloat_high(pair) : bfloat_low(pair);
  }

  // Writes them for all warps of the block. Returns whether a row is so large that it was scaled down to fit fp16, by a power of two
  // that its scores are multiplied with again.
  __device__ __forceinline__ bool prepare(uint8_t* query, float scale_log2) const {
    uint8_t* mine = query + (threadIdx.x & 31) * 16;
    float factor[2], grow[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float most = 0;
#pragma unroll
      for (int i = 0; i < HEAD_DIM / 32; i++)
#pragma unroll
        for (int d = 0; d < 8; d++) most = fmaxf(most, fabsf(at(half, i, d)));
      most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 1));
      most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 2)) * scale_log2;
      factor[half] = scale_log2;
      grow[half] = 1;
      while (most > LARGEST_QUERY && grow[half] < 0x1p100f) {
        most *= 0.5f;
        factor[half] *= 0.5f;
        grow[half] *= 2;
      }
    }
    // Two chains each: a tensor-core product takes long before the next can add to it.
    float start[2][4] = {}, sums[2][4] = {};
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 16; step++) {
      const int i = step / 2, d = 2 * (step % 2);
      uint32_t fragment[4];
#pragma unroll
      for (int half = 0; half < 2; half++) {
        fragment[half] = pack_half(at(half, i, d) * factor[half], at(half, i, d + 4) * factor[half]);
        fragment[2 + half] = pack_half(at(half, i, d + 1) * (factor[half] / 16), at(half, i, d + 5) * (factor[half] / 16));
      }
      multiply_half(start[step % 2], fragment, 0x64006400, 0x64006400);  // times 1024
      multiply_half(sums[step % 2], fragment, 0x3C003C00, 0x4C004C00);   // times 1 and 16
      *reinterpret_cast<uint4*>(mine + step * 512) = {fragment[0], fragment[1], fragment[2], fragment[3]};
    }
#pragma unroll
    for (int j = 0; j < 4; j++) start[0][j] = -(start[0][j] + start[1][j]);
    *reinterpret_cast<float4*>(mine + QUERY_START * 512) = {start[0][0], start[0][1], start[0][2], start[0][3]};
    // Sums as scores need them; `grow` for what is multiplied with the small query.
    *reinterpret_cast<float4*>(mine + QUERY_SUMS * 512) = {(sums[0][0] + sums[1][0]) * grow[0], (sums[0][2] + sums[1][2]) * grow[1], grow[0], grow[1]};
    return grow[0] > 1 || grow[1] > 1;
  }
};
