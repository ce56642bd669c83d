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
