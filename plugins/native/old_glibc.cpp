// What a compiler of today takes from glibc 2.29 to 2.34 and from GCC 11's libstdc++, by names that older
// ones have.
//
// With this in it (EW_OLD_GLIBC) a library needs glibc 2.27 and GCC 7's libstdc++, so that a wheel fits
// distributions that are older than the machine that builds it. Everything here is hidden: other libraries of
// the process have their own.

#include <sched.h>

#include <new>

#if defined(__x86_64__) && defined(__GLIBC__)

#define EW_HIDDEN __attribute__((visibility("hidden")))

extern "C" {

double ew_log(double x);
__asm__(".symver ew_log,log@GLIBC_2.2.5");  // 2.29's is the same, but for how it sets errno
EW_HIDDEN double log(double x) { return ew_log(x); }
__asm__(".hidden log");  // a header may have declared it before, and what counts is the first declaration

int ew_setaffinity(unsigned long thread, size_t bytes, const cpu_set_t* set);
__asm__(".symver ew_setaffinity,pthread_setaffinity_np@GLIBC_2.3.4");  // 2.34 moved it to another library
EW_HIDDEN int pthread_setaffinity_np(unsigned long thread, size_t bytes, const cpu_set_t* set) {
  return ew_setaffinity(thread, bytes, set);
}

// std::condition_variable::wait, which GCC 12 gave a new version.
void ew_wait(void* self, void* lock);
__asm__(".symver ew_wait,_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE@GLIBCXX_3.4.11");
EW_HIDDEN void ew_wait_here(void* self,
                            void* lock) __asm__("_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE");
void ew_wait_here(void* self, void* lock) { ew_wait(self, lock); }

// Whether there is one thread only, for counts without atomics. It may always say no.
EW_HIDDEN extern char __libc_single_threaded;
char __libc_single_threaded = 0;

// The copy constructor and the destructor of std::exception_ptr, which GCC 11 made inline.
void ew_copy(void* self, const void* other) __asm__("_ZNSt15__exception_ptr13exception_ptrC1ERKS0_");
void ew_destroy(void* self) __asm__("_ZNSt15__exception_ptr13exception_ptrD1Ev");
EW_HIDDEN void ew_addref(void* const* self) __asm__("_ZNSt15__exception_ptr13exception_ptr9_M_addrefEv");
EW_HIDDEN void ew_release(void** self) __asm__("_ZNSt15__exception_ptr13exception_ptr10_M_releaseEv");

void ew_addref(void* const* self) {
  void* copy = nullptr;
  ew_copy(&copy, self);  // it isn't destroyed, so its count stays
}

void ew_release(void** self) {
  void* one = *self;
  ew_destroy(&one);
}

[[noreturn]] EW_HIDDEN void ew_bad_array_length() __asm__("_ZSt28__throw_bad_array_new_lengthv");
void ew_bad_array_length() { throw std::bad_array_new_length(); }

}  // extern "C"

#endif
