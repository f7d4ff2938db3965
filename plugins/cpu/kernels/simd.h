// The vectors of the translation unit's instruction set, which avx512.cpp, avx2.cpp and portable.cpp name by
// a macro.
#pragma once

#if defined(EW_ISA_AVX512)
#include "simd_avx512.h"
#elif defined(EW_ISA_AVX2)
#include "simd_avx2.h"
#else
#include "simd_portable.h"
#endif
