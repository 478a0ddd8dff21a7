// 32 vectors of bf16, 256 bytes each, times a matrix, by one warp; HEAD_DIM is 128.
//
// The instruction leaves open in which order dimensions are summed and rows of the matrix are taken. Both are chosen so that lane
// (g = lane / 4, t = lane % 4) reads and writes whole 16-byte pieces, dimensions 32 c + 8 t .. + 7, of vectors g, 8 + g, 16 + g and
// 24 + g. kvlab/kernels/folding.py orders the matrix for that, and no lane needs another's part of a vector.
#pragma once
#include "hopper.cuh"

constexpr int WARPS = 4;
constexpr int VECTORS = 32;              // of a warp's tile
constexpr int HELD = VECTORS / 8;        // of which a lane holds a part
constexpr int PIECES = HEAD_DIM / 32;    // 16-byte pieces that a lane holds of each
constexpr int PIECE = 8;                 // dimensions of a piece
constexpr int QUARTERS = HEAD_DIM / 32;  // of a result: what one piece per lane covers
static_assert(WARPS == QUARTERS, "a block encodes a vector with one warp per quarter");

constexpr float TINY = 1e-30f;                // keeps the scale of an all-zero vector finite
constexpr uint32_t EXPONENT = 0x7f800000u;    // these bits of a float
constexpr uint32_t TWICE_BIAS = 0x7f000000u;  // and there, the sum of the exponents of a power of two and of its inverse

// In pieces of 16 bytes: one term of a matrix, and a warp's tile.
constexpr int TERM_FRAGMENTS = HEAD_DIM * HEAD_DIM / PIECE;
constexpr int TILE_FRAGMENTS = VECTORS * HEAD_DIM / PIECE;

// To store: two terms of a matrix. To rotate queries: one term, and for each warp the tile that it rotates next.
extern __shared__ uint4 shared_matrix[];
static_assert(WARPS * TILE_FRAGMENTS <= TERM_FRAGMENTS, "the tiles fit where the second term would be");
__shared__ float shared_bias[HEAD_DIM];
static_assert(WARPS * 32 == HEAD_DIM, "a thread loads one number of the bias");

struct Lane {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
};

// What is done to a vector: the matrix of its KV head, in the order of folding.py, in fp16 times a power of two whose inverse is
// `unscale`; then the bias. Either may be missing. The stride is in fragments, 0 for a shared matrix.
struct Affine {
  const uint4* fragments;
  const float* bias;
  int head_stride;
  float unscale;

  __device__ __forceinline__ Affine of_head(int kv_head) const {
    return {fragments ? fragments + kv_head * head_stride : nullptr, bias ? bias + kv_head * HEAD_DIM : nullptr, 0, unscale};
  }
};

typedef uint32_t Vector[PIECES][4];             // a lane's part of one vector, two numbers to a register
typedef uint32_t Tile[HELD / 2][PIECES][2][4];  // of 32 vectors, as the instruction takes them: see `word_in_tile`
typedef float Product[HELD / 2][4][4];          // a lane's part of one quarter of 32 results

// Of 4 registers, two are from vector g of a tile of 16 and two, between them, from vector g + 8.
__device__ __forceinline__ constexpr int word_in_tile(int vector, int word) { return 2 * (word % 2) + vector % 2; }

// Volatile, or reads would move above the wait for the kernel that writes what they read.
__device__ __forceinline__ uint4 load_16(const void* from) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
  return v;
}
__device__ __forceinline__ void store_16(void* to, const uint32_t (&v)[4]) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
}
// Copies of a lane for itself: it waits for them, and needs no barrier.
__device__ __forceinline__ void copy_16(uint4* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ __forceinline__ void unpack(uint32_t (&x)[4], const uint4& v) { x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w; }

// Turn bf16 into fp16 times a power of two near 1 / rms: exact, as bf16 has 8 significant bits and fp16 11. Returns what the
// product must still be multiplied with, for x / sqrt(mean(x^2) + eps) or for x itself.
__device__ __forceinline__ float to_half(Vector& x, bool normalise, float eps) {
  float sum = 0.f;
#pragma unroll
  for (int c = 0; c < PIECES; c++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float low = bfloat_low(x[c][i]), high = bfloat_high(x[c][i]);
      sum += low * low, sum += high * high;
    }
  sum += __shfl_xor_sync(ALL_LANES, sum, 1);
  sum += __shfl_xor_sync(ALL_LANES, sum, 2);
  const float mean = sum * (1.f / HEAD_DIM);
  const float power = __uint_as_float(__float_as_uint(rsqrtf(fmaxf(mean, TINY))) & EXPONENT);
#pragma unroll
  for (int c = 0; c < PIECES; c++)
#pragma unroll
    for (int i = 0; i < 4; i++) x[c][i] = pack_half(bfloat_low(x[c][i]) * power, bfloat_high(x[c][i]) * power);
  return (normalise ? rsqrtf(mean + eps) : 1.f) * __uint_as_float(TWICE_BIAS - __float_as_uint(power));
}

// Matrices do not change while a model is served: they may be read before the previous kernel has ended.
template <int TERMS>
__device__ __forceinline__ void load_matrix(const uint4* fragments) {
#pragma unroll 16
  for (int i = threadIdx.x; i < TERMS * TERM_FRAGMENTS; i += WARPS * 32) shared_matrix[i] = __ldg(fragments + i);
}

// One quarter of 32 products with a matrix that is the sum of TERMS fp16 matrices.
template <int TERMS>
__device__ __forceinline__ void multiply(Product& product, const Tile& x, int quarter, int lane) {
#pragma unroll
  for (int m = 0; m < HELD / 2; m++)
#pragma unroll
    for (int j = 0; j < 4; j++) product[m][j][0] = product[m][j][1] = product[m][j][2] = product[m][j][3] = 0.f;
#pragma unroll
  for (int term = 0; term < TERMS; term++)
#pragma unroll
    for (int c = 0; c < PIECES; c++) {
      uint32_t b[4][4];
#pragma unroll
      for (int j = 0; j < 4; j++) unpack(b[j], shared_matrix[(((term * QUARTERS + quarter) * PIECES + c) * 4 + j) * 32 + lane]);
      // Eight products in turn: an instruction does not wait for the one before.
#pragma unroll
      for (int p = 0; p < 2; p++)
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
          for (int m = 0; m < HELD / 2; m++) multiply_half(product[m][j], x[m][c][p], b[j][2 * p], b[j][2 * p + 1]);
    }
}
// Number k of the lane's piece of its vector i.
__device__ __forceinline__ float at(const Product& product, int i, int k) { return product[i / 2][k / 2][2 * (i % 2) + k % 2]; }
