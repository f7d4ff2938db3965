// Marks a symbol that other libraries take from libenginewright_kernels.so: all others stay within it.
#pragma once

#define EW_EXPORTED __attribute__((visibility("default")))
