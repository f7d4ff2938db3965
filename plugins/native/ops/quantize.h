// Rows that are quantized as they are stored: quantize_activation's results, and those of ops fused with it.
#pragma once

#include "step_resolver.h"
#include "step_verifier.h"

namespace ew {

constexpr int64_t kLongestGroup = 1 << 16;  // 2^16 products of an int8 and a byte are below 2^31

inline int64_t groups_of(int64_t size, int64_t group) { return group > 0 ? (size + group - 1) / group : 1; }

// The first three outputs: values i8 [rows, columns], scales [rows, G], sums i32 [rows, G].
void verify_quantized_rows(StepVerifier& v, const Affine& rows, int64_t columns);
QuantizeActivationArgs quantized_rows(const StepResolver& s);  // without x

}  // namespace ew
