// The core kernels of a GemmPlan, on the AIE API. Emulated; not yet run on a Phoenix, nor compiled for one: the tests
// build them with a stand-in for the API, in plain C++, and compare with kernels.py.
//
// The plan's tile is given when this is compiled: TILE_M, TILE_K, TILE_N, WEIGHT_BITS (8 or 4; b has two int4 a byte,
// the first in the lower half) and OUTPUT (int8_t, int16_t or int32_t).

#include <aie_api/aie.hpp>
#include <cstdint>

namespace {

#if WEIGHT_BITS == 4
constexpr unsigned DEEP = 16;
using Weight = int4;
#else
constexpr unsigned DEEP = 8;
using Weight = int8_t;
#endif
using Product = aie::mmul<4, DEEP, 8, int8_t, Weight, accauto>;

constexpr unsigned ROWS = TILE_M / 4, DEPTH = TILE_K / DEEP, COLUMNS = TILE_N / 8;  // in vector tiles
constexpr unsigned B_BYTES = Product::size_B * WEIGHT_BITS / 8;
static_assert(TILE_M % 8 == 0 && TILE_K % DEEP == 0 && TILE_N % 16 == 0, "two by two vector tiles at a time");

auto weights_at(const int8_t *b) { return aie::load_v<Product::size_B>(reinterpret_cast<const Weight *>(b)); }

Product sums_at(const int32_t *c) { return Product(aie::load_v<Product::size_C>(c)); }

void keep(int32_t *c, Product &sums) { aie::store_v(c, sums.template to_vector<int32_t>()); }

void store(const int32_t *__restrict sums, OUTPUT *__restrict c, int32_t shift, aie::rounding_mode rounding) {
  aie::set_rounding(rounding);
  aie::set_saturation(aie::saturation_mode::saturate);
  for (unsigned i = 0; i < TILE_M * TILE_N; i += Product::size_C)
    aie::store_v(c + i, sums_at(sums + i).template to_vector<OUTPUT>(shift));
}

}  // namespace

extern "C" {

void zero(int32_t *__restrict c) {
  for (unsigned i = 0; i < TILE_M * TILE_N; i += 16) aie::store_v(c + i, aie::zeros<int32_t, 16>());
}

// c += a x b. Of each operand loaded, two products are made.
void multiply(const int8_t *__restrict a, const int8_t *__restrict b, int32_t *__restrict c) {
  for (unsigned row = 0; row < ROWS; row += 2)
    for (unsigned column = 0; column < COLUMNS; column += 2) {
      int32_t *upper = c + (row * COLUMNS + column) * Product::size_C;
      int32_t *lower = upper + COLUMNS * Product::size_C;
      Product c00 = sums_at(upper), c01 = sums_at(upper + Product::size_C);
      Product c10 = sums_at(lower), c11 = sums_at(lower + Product::size_C);
      for (unsigned k = 0; k < DEPTH; k++) {
        const int8_t *rows = a + (row * DEPTH + k) * Product::size_A;
        const int8_t *columns = b + (k * COLUMNS + column) * B_BYTES;
        auto a0 = aie::load_v<Product::size_A>(rows);
        auto a1 = aie::load_v<Product::size_A>(rows + DEPTH * Product::size_A);
        auto b0 = weights_at(columns), b1 = weights_at(columns + B_BYTES);
        c00.mac(a0, b0);
        c01.mac(a0, b1);
        c10.mac(a1, b0);
        c11.mac(a1, b1);
      }
      keep(upper, c00);
      keep(upper + Product::size_C, c01);
      keep(lower, c10);
      keep(lower + Product::size_C, c11);
    }
}

void store_floor(const int32_t *sums, OUTPUT *c, int32_t shift) { store(sums, c, shift, aie::rounding_mode::floor); }

void store_half_up(const int32_t *sums, OUTPUT *c, int32_t shift) {
  store(sums, c, shift, aie::rounding_mode::positive_inf);
}

void store_half_even(const int32_t *sums, OUTPUT *c, int32_t shift) {
  store(sums, c, shift, aie::rounding_mode::conv_even);
}

}  // extern "C"
