// CUDA's warp matrix functions as far as TVM's code generator uses them (CUDA Programming Guide, warp matrix functions):
// operands half or bfloat16, sums float, whatever the order in which a tensor core adds.
//
// Each lane of a warp has what it needs for the sums that it owns: a part of a row of the result, M·N/32 elements.
#pragma once

namespace nvcuda {
namespace wmma {

struct matrix_a {};
struct matrix_b {};
struct accumulator {};
struct row_major {};
struct col_major {};
enum layout_t { mem_row_major, mem_col_major };

template <int M, int N>
struct Part {
  static constexpr int COUNT = M * N / 32;  // neighbours in one row
  static int row() { return (int)lane_in_warp() * COUNT / N; }
  static int column() { return (int)lane_in_warp() * COUNT % N; }
};

template <typename Use, int M, int N, int K, typename T, typename Layout = void>
struct fragment;

template <int M, int N, int K, typename T>
struct fragment<accumulator, M, N, K, T, void> {
  static constexpr int num_elements = Part<M, N>::COUNT;
  T x[num_elements];
};
template <int M, int N, int K, typename T, typename Layout>
struct fragment<matrix_a, M, N, K, T, Layout> {
  float row[K];
};
template <int M, int N, int K, typename T, typename Layout>
struct fragment<matrix_b, M, N, K, T, Layout> {
  float rows[K][Part<M, N>::COUNT];
};

template <typename T>
static inline T element(const T* matrix, unsigned stride, int row, int column, row_major) {
  return matrix[row * (long)stride + column];
}
template <typename T>
static inline T element(const T* matrix, unsigned stride, int row, int column, col_major) {
  return matrix[column * (long)stride + row];
}

template <int M, int N, int K, typename T, typename Layout>
static inline void load_matrix_sync(fragment<matrix_a, M, N, K, T, Layout>& a, const T* matrix, unsigned stride) {
  synchronize_warp();
  for (int k = 0; k < K; ++k) a.row[k] = (float)element(matrix, stride, Part<M, N>::row(), k, Layout());
}
template <int M, int N, int K, typename T, typename Layout>
static inline void load_matrix_sync(fragment<matrix_b, M, N, K, T, Layout>& b, const T* matrix, unsigned stride) {
  synchronize_warp();
  for (int k = 0; k < K; ++k)
    for (int i = 0; i < Part<M, N>::COUNT; ++i)
      b.rows[k][i] = (float)element(matrix, stride, k, Part<M, N>::column() + i, Layout());
}

template <int M, int N, int K, typename T>
static inline void fill_fragment(fragment<accumulator, M, N, K, T>& c, T value) {
  for (T& x : c.x) x = value;
}

template <int M, int N, int K, typename T, typename A, typename B>
static inline void mma_sync(fragment<accumulator, M, N, K, float>& d, const fragment<matrix_a, M, N, K, T, A>& a,
                            const fragment<matrix_b, M, N, K, T, B>& b,
                            const fragment<accumulator, M, N, K, float>& c) {
  constexpr int COUNT = Part<M, N>::COUNT;
  float sums[COUNT];
  for (int i = 0; i < COUNT; ++i) sums[i] = c.x[i];
  for (int k = 0; k < K; ++k)
    for (int i = 0; i < COUNT; ++i) sums[i] += a.row[k] * b.rows[k][i];
  for (int i = 0; i < COUNT; ++i) d.x[i] = sums[i];
}

template <int M, int N, int K, typename T>
static inline void store_matrix_sync(T* matrix, const fragment<accumulator, M, N, K, T>& c, unsigned stride,
                                     layout_t layout) {
  for (int i = 0; i < Part<M, N>::COUNT; ++i) {
    long row = Part<M, N>::row(), column = Part<M, N>::column() + i;
    matrix[layout == mem_row_major ? row * stride + column : column * stride + row] = c.x[i];
  }
  synchronize_warp();
}

}  // namespace wmma
}  // namespace nvcuda

// What harness/compiler/schedules/gpu/fragments.py writes in PTX for the device (PTX ISA, mma.m16n8k16 and ldmatrix): a lane holds
// pairs of neighbours, 32 bits each, and knows which by its row `lane / 4` and its pair `lane % 4`.
namespace emulated {

template <typename T>
static inline void unpack(unsigned pair, float* values) {
  T halves[2];
  __builtin_memcpy(halves, &pair, 4);
  values[0] = (float)halves[0];
  values[1] = (float)halves[1];
}

template <typename T>
static inline unsigned pack(float low, float high) {
  T halves[2] = {(T)low, (T)high};
  unsigned pair;
  __builtin_memcpy(&pair, halves, 4);
  return pair;
}

template <typename T>
static inline void multiply(float* d, const unsigned* a, const unsigned* b) {
  struct Left {
    unsigned pairs[4];
  } left = {{a[0], a[1], a[2], a[3]}};
  struct Right {
    unsigned pairs[2];
  } right = {{b[0], b[1]}};
  unsigned lane = lane_in_warp(), row = lane / 4, pair = lane % 4;
  float rows[2][16], columns[2][16];
  for (unsigned i = 0; i < 4; ++i) {
    Left other = exchange_in_warp(left, 4 * row + i);
    for (unsigned n = 0; n < 4; ++n) unpack<T>(other.pairs[n], rows[n % 2] + n / 2 * 8 + 2 * i);
  }
  for (unsigned column = 0; column < 2; ++column)
    for (unsigned i = 0; i < 4; ++i) {
      Right other = exchange_in_warp(right, 4 * (2 * pair + column) + i);
      for (unsigned n = 0; n < 2; ++n) unpack<T>(other.pairs[n], columns[column] + n * 8 + 2 * i);
    }
  for (unsigned n = 0; n < 4; ++n)
    for (unsigned k = 0; k < 16; ++k) d[n] += rows[n / 2][k] * columns[n % 2][k];
}

template <typename T>
static inline void load_matrices(unsigned* d, const T* row, bool transposed) {
  unsigned lane = lane_in_warp();
  for (unsigned matrix = 0; matrix < 4; ++matrix) {
    T halves[2];
    for (unsigned n = 0; n < 2; ++n) {
      unsigned of = transposed ? 2 * (lane % 4) + n : lane / 4, at = transposed ? lane / 4 : 2 * (lane % 4) + n;
      halves[n] = exchange_in_warp(row, 8 * matrix + of)[at];
    }
    __builtin_memcpy(d + matrix, halves, 4);
  }
}

}  // namespace emulated
