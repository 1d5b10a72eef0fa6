// The core kernels of a GemmPlan, on the AIE API. Emulated; not yet run on a Phoenix, nor compiled for one: the tests
// build them with a stand-in for the API, in plain C++, and compare with kernels.py.
//
// The plan's tile is given when this is compiled: TILE_M, TILE_K, TILE_N, and OUTPUT (int8_t, int16_t or int32_t).

#include <aie_api/aie.hpp>
#include <cstdint>

namespace {

using Product = aie::mmul<4, 8, 8, int8_t, int8_t, accauto>;

constexpr unsigned ROWS = TILE_M / 4, DEPTH = TILE_K / 8, COLUMNS = TILE_N / 8;  // in vector tiles
static_assert(TILE_M % 8 == 0 && TILE_K % 8 == 0 && TILE_N % 16 == 0, "cores multiply 2 x 2 vector tiles at a time");

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
        const int8_t *columns = b + (k * COLUMNS + column) * Product::size_B;
        auto a0 = aie::load_v<Product::size_A>(rows);
        auto a1 = aie::load_v<Product::size_A>(rows + DEPTH * Product::size_A);
        auto b0 = aie::load_v<Product::size_B>(columns);
        auto b1 = aie::load_v<Product::size_B>(columns + Product::size_B);
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
