// Combines the partial results of the segments that more than one thread block worked on, and writes the rows of empty sequences.
#include "schedule.cuh"
#include "output.cuh"

// PARTS thread blocks share a row of the output, each with 128 / PARTS of its dimensions: few rows with many parts need them.
template <int PARTS, int THREADS>
__device__ __forceinline__ void combine(const float* partial, const float2* partial_softmax, const Splits* splits, Output output,
                                        int num_heads, int num_kv_heads) {
  constexpr int LANES = HEAD_DIM / 4 / PARTS;  // one holds four dimensions
  constexpr int GROUPS = THREADS / LANES;      // each takes every GROUPS-th split
  constexpr int AHEAD = 8;                     // loads in flight per thread
  __shared__ float2 softmax_of_warp[THREADS / 32];
  __shared__ float4 sum_of_group[GROUPS][LANES];
  const int row = blockIdx.x / PARTS, part = blockIdx.x % PARTS;
  const int token = row / num_heads, head = row % num_heads, kv_head = head / GROUP;
  const int query_row = token % Q_LEN * GROUP + head % GROUP, row_block = query_row / BLOCK_ROWS;
  const int segment = token / Q_LEN * num_kv_heads + kv_head;
  const int group = threadIdx.x / LANES, dim4 = part * LANES + threadIdx.x % LANES;
  // The plan was complete before the kernel whose results are awaited here had started.
  const Splits range = splits[segment];
  wait_for_previous_kernel();
  const int count = range.last - range.first + 1;
  if (count == 1) return;  // whole in one thread block, which wrote it
  if (count == 0) {
    if (threadIdx.x < LANES) output.write_empty(row, dim4);
    return;
  }

  auto row_of = [&](int split) { return partial_row(range.first + split, segment, row_block, query_row % BLOCK_ROWS); };
  auto load = [&](int split) {
    return split < count ? reinterpret_cast<const float4*>(partial)[row_of(split) * (HEAD_DIM / 4) + dim4] : float4{0, 0, 0, 0};
  };
  float4 ahead[AHEAD];
#pragma unroll
  for (int i = 0; i < AHEAD; i++) ahead[i] = load(group + i * GROUPS);
  float2 softmax = {NO_SCORE, 0};
  for (int split = threadIdx.x; split < count; split += THREADS) softmax = merge(softmax, partial_softmax[row_of(split)]);
#pragma unroll
  for (int step = 16; step; step /= 2)
    softmax = merge(softmax, {__shfl_xor_sync(ALL_LANES, softmax.x, step), __shfl_xor_sync(ALL_LANES, softmax.y, step)});
  if (threadIdx.x % 32 == 0) softmax_of_warp[threadIdx.x / 32] = softmax;
  __syncthreads();
  softmax = softmax_of_warp[0];
#pragma unroll
  for (int warp = 1; warp < THREADS / 32; warp++) softmax = merge(softmax, softmax_of_warp[warp]);

  float4 sum = {0, 0, 0, 0};
  for (int start = group; start < count; start += AHEAD * GROUPS) {
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      const int split = start + i * GROUPS;
      if (split < count) add_scaled(sum, start == group ? ahead[i] : load(split), exp2_fast(partial_softmax[row_of(split)].x - softmax.x));
    }
  }
  sum_of_group[group][threadIdx.x % LANES] = sum;
  __syncthreads();
  if (threadIdx.x >= LANES) return;
  for (int other = 1; other < GROUPS; other++) add_scaled(sum, sum_of_group[other][threadIdx.x], 1);
  output.write(row, kv_head, dim4, sum, softmax);
}

extern "C" __global__ void __launch_bounds__(128)
combine_rows(const float* partial, const float2* partial_softmax, const Splits* splits, Output output, int num_heads, int num_kv_heads) {
  combine<1, 128>(partial, partial_softmax, splits, output, num_heads, num_kv_heads);
}
extern "C" __global__ void __launch_bounds__(256)
combine_parts(const float* partial, const float2* partial_softmax, const Splits* splits, Output output, int num_heads, int num_kv_heads) {
  combine<4, 256>(partial, partial_softmax, splits, output, num_heads, num_kv_heads);
}
