// Plans a decode step from the sequence lengths on the device, once for all layers.
#include "schedule.cuh"

constexpr int THREADS = 1024;

// before[b]: regions of one head in the sequences before b; before[batch]: in all.
extern "C" __global__ void __launch_bounds__(THREADS)
plan(const int* seq_lens, int batch, int num_kv_heads, int shares, int* before, Share* share, Splits* splits) {
  __shared__ int warp_sums[32];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int sum = 0;
  for (int start = 0; start < batch; start += THREADS) {
    const int b = start + threadIdx.x;
    int scan = b < batch ? regions_of(seq_lens[b]) : 0;
    for (int step = 1; step < 32; step *= 2) {
      const int left = __shfl_up_sync(ALL_LANES, scan, step);
      if (lane >= step) scan += left;
    }
    if (lane == 31) warp_sums[warp] = scan;
    __syncthreads();
    int earlier = sum, total = 0;
    for (int w = 0; w < 32; w++) {
      if (w < warp) earlier += warp_sums[w];
      total += warp_sums[w];
    }
    if (b < batch) before[b + 1] = earlier + scan;
    sum += total;
    __syncthreads();
  }
  if (threadIdx.x == 0) before[0] = 0;
  __syncthreads();

  const int all = sum * num_kv_heads;
  // A whole number of regions per warp costs nothing where a share lies in one segment.
  const int even = max((all + shares - 1) / shares, 1), size = even < WARPS ? even : (even + WARPS - 1) / WARPS * WARPS;
  for (int s = threadIdx.x; s < shares; s += THREADS) {
    const int start = s * size;
    int low = 0, high = batch;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (before[middle] * num_kv_heads <= start) low = middle; else high = middle;
    }
    share[s] = {low, start - before[low] * num_kv_heads, min(size, all - start), seq_lens[low]};
  }
  for (int s = threadIdx.x; s < batch * num_kv_heads; s += THREADS) {
    const int b = s / num_kv_heads, regions = before[b + 1] - before[b], start = before[b] * num_kv_heads + (s % num_kv_heads) * regions;
    splits[s] = regions ? Splits{start / size, (start + regions - 1) / size} : Splits{0, -1};
  }
}
