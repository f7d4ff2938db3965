// What the kernel tests share: tensors, the reference, and all instruction sets with several threads.
#pragma once

#include <string>

#include "../../native/tests/check.h"
#include "../../native/tests/test_tensors.h"
#include "../../native/thread_pool.h"
#include "../kernels/kernels.h"
#include "reference.h"

namespace ew::testing {

// Under a sanitizer, which takes ten times as long, one in so many of a long table.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr size_t kOneIn = 7;
#else
inline constexpr size_t kOneIn = 1;
#endif

// Whether a sanitizer leaves out the case that comes next.
inline bool left_out() {
  static size_t cases = 0;
  return cases++ % kOneIn != 0;
}

// fn(kernels, pool, "avx2, 3 threads") for every instruction set of this processor with 1, 2 and 3 threads,
// under a sanitizer with 1 and 3.
template <class F>
void for_all(const F& fn, const Tuning& tuning = {}) {
  for (const int threads : {1, 2, 3}) {
    if (kOneIn > 1 && threads == 2) continue;
    ThreadPool pool(threads, Binding::none, tuning);
    for (const std::string& isa : available_isas()) {
      fn(*kernels_for(isa.c_str()), pool, isa + ", " + std::to_string(threads) + " threads");
    }
  }
}

// Whether its products of bf16 are VDPBF16's, in the order of that instruction.
inline bool has_vdpbf16(const KernelTable& kernels) {
  return std::string(kernels.isa) == "avx512_bf16" || std::string(kernels.isa) == "avx512_amx";
}

}  // namespace ew::testing
