// What AVX512_BF16 adds to avx512.cpp.
#define EW_ISA_AVX512
#define EW_BF16
#include "attention.h"
#include "experts.h"
#include "linear_bf16.h"
#include "packed_attention.h"
#include "peak.h"
#include "ring_attention.h"

namespace ew {

void use_avx512_bf16(KernelTable* table);
void use_avx512_bf16(KernelTable* table) {
  table->paged_attention = paged_attention;
  table->ring_attention = ring_attention;
  table->attention = attention;
  table->linear_bf16 = linear_bf16;
  table->peak_bf16 = peak_bf16;
  table->grouped_linear_bf16 = grouped_linear<LinearBf16Args, linear_bf16>;
}

}  // namespace ew
