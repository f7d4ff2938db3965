// The packed products of the translation unit's instruction set: see dot_portable.h for what each function
// means.
#pragma once

#if defined(EW_ISA_AVX512)
#include "dot_avx512.h"
#elif defined(EW_ISA_AVX2)
#include "dot_avx2.h"
#else
#include "dot_portable.h"
#endif
