// What gemm.cc uses of the AIE API, in plain C++, so that its indexing and its rounding can be tested without an NPU.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

struct accauto {};
struct int4 {};  // two a byte: never one by itself

namespace aie {

enum class rounding_mode { floor, positive_inf, conv_even };
enum class saturation_mode { none, saturate };

inline rounding_mode rounding = rounding_mode::floor;
inline saturation_mode saturation = saturation_mode::none;
inline void set_rounding(rounding_mode mode) { rounding = mode; }
inline void set_saturation(saturation_mode mode) { saturation = mode; }

template <class T, unsigned N> struct vector {
  T lanes[N];
};

template <unsigned N> struct vector<int4, N> {  // unpacked, with their sign
  int8_t lanes[N];
};

template <class T, unsigned N> vector<T, N> zeros() { return {}; }

template <unsigned N, class T> vector<T, N> load_v(const T *from) {
  vector<T, N> result;
  for (unsigned i = 0; i < N; i++) result.lanes[i] = from[i];
  return result;
}

template <unsigned N> vector<int4, N> load_v(const int4 *from) {
  vector<int4, N> result;
  const uint8_t *bytes = reinterpret_cast<const uint8_t *>(from);
  for (unsigned i = 0; i < N; i++) {
    const int half = i % 2 ? bytes[i / 2] / 16 : bytes[i / 2] % 16;
    result.lanes[i] = static_cast<int8_t>(half < 8 ? half : half - 16);
  }
  return result;
}

template <class T, unsigned N> void store_v(T *to, const vector<T, N> &from) {
  for (unsigned i = 0; i < N; i++) to[i] = from.lanes[i];
}

// Shift, round, saturate; by floating point, to be another way than kernels.py's. Exact: 32 bits fit a double.
template <class T> T narrow(int64_t value, int shift) {
  double exact = std::ldexp(static_cast<double>(value), -shift);
  if (rounding == rounding_mode::floor) exact = std::floor(exact);
  if (rounding == rounding_mode::positive_inf) exact = std::floor(exact + 0.5);
  if (rounding == rounding_mode::conv_even) exact = std::nearbyint(exact);
  const double low = std::numeric_limits<T>::min(), high = std::numeric_limits<T>::max();
  if (saturation == saturation_mode::saturate) exact = exact < low ? low : exact > high ? high : exact;
  return static_cast<T>(static_cast<int64_t>(exact));
}

template <unsigned M, unsigned K, unsigned N, class A, class B, class Accumulator> struct mmul {
  static constexpr unsigned size_A = M * K, size_B = K * N, size_C = M * N;
  int64_t sums[size_C];

  explicit mmul(const vector<int32_t, size_C> &start) {
    for (unsigned i = 0; i < size_C; i++) sums[i] = start.lanes[i];
  }

  void mac(const vector<A, size_A> &a, const vector<B, size_B> &b) {
    for (unsigned i = 0; i < M; i++)
      for (unsigned j = 0; j < N; j++)
        for (unsigned k = 0; k < K; k++) sums[i * N + j] += a.lanes[i * K + k] * b.lanes[k * N + j];
  }

  template <class T> vector<T, size_C> to_vector(int shift = 0) const {
    vector<T, size_C> result;
    for (unsigned i = 0; i < size_C; i++) result.lanes[i] = narrow<T>(sums[i], shift);
    return result;
  }
};

}  // namespace aie
