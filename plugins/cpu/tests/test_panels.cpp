// Packing of weights: every element is where the layouts say, padding is zero, and unpacking gives it back.
#include <vector>

#include "check.h"
#include "panels.h"
#include "thread_pool.h"

namespace {

using namespace ew;

// Packs two matrices of n x k that lie apart, and looks at every place. `step`: k side by side.
template <class T, class U, class Pack, class Unpack>
void check_layout(int64_t n, int64_t k, int64_t step, U padding, U shift, const Pack& pack,
                  const Unpack& unpack) {
  const int64_t stride = k + 3, apart = n * stride + 5, panels = (n + 31) / 32, steps = (k + step - 1) / step;
  std::vector<T> rows(static_cast<size_t>(2 * apart));
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<T>(static_cast<int64_t>(i) % 251 - 125);
  for (const int threads : {1, 3}) {
    ThreadPool pool(threads);
    std::vector<U> packed(static_cast<size_t>(2 * panels * steps * 32 * step), U{77});
    pack(Matrices<T>{rows.data(), 2, n, k, apart, stride}, packed.data(), pool);
    const U* at = packed.data();
    for (int64_t e = 0; e < 2; ++e) {
      std::vector<T> plain(static_cast<size_t>(n * k));
      unpack(packed.data() + e * panels * steps * 32 * step, n, k, plain.data());
      for (int64_t i = 0; i < panels * steps * 32 * step; ++i, ++at) {
        const int64_t row = i / (steps * 32 * step) * 32 + i / step % 32;
        const int64_t column = i / (32 * step) % steps * step + i % step;
        if (row >= n || column >= k) {
          CHECK(*at == padding) << n << " x " << k << " step " << step << " place " << i;
          continue;
        }
        const T value = rows[static_cast<size_t>(e * apart + row * stride + column)];
        CHECK(*at == static_cast<U>(value + shift)) << n << " x " << k << " step " << step << " place " << i;
        CHECK(plain[static_cast<size_t>(row * k + column)] == value) << n << " x " << k;
      }
    }
  }
}

void layouts() {
  for (const int64_t n : {1, 31, 32, 70}) {
    for (const int64_t k : {1, 2, 3, 16, 37, 130}) {
      check_layout<float, float>(n, k, 1, 0, 0, pack_panel32<float>, unpack_panel32<float>);
      check_layout<uint16_t, uint16_t>(n, k, 1, 0, 0, pack_panel32<uint16_t>, unpack_panel32<uint16_t>);
      check_layout<uint16_t, uint16_t>(n, k, 2, 0, 0, pack_panel32x2, unpack_panel32x2);
      check_layout<int8_t, uint8_t>(n, k, 4, 128, 128, pack_panel32x4, unpack_panel32x4);
    }
  }
}

}  // namespace

int main() {
  RUN(layouts);
  return check::result();
}
