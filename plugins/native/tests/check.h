// A harness of one page: CHECK in functions run by RUN, and main returns how many failed.
//
//   void adds() { CHECK(1 + 1 == 2) << "arithmetic"; }
//   int main() { RUN(adds); return ew::check::result(); }
#pragma once

#include <cstdio>
#include <exception>
#include <sstream>
#include <string>

namespace ew::check {

inline int& failures() {
  static int count = 0;
  return count;
}

// Collects what is streamed into it and prints it with the place when it goes; the first 20 failures in full.
class Failure {
 public:
  Failure(const char* file, int line, const char* what) {
    text_ << file << ":" << line << ": " << what << "  ";
  }
  ~Failure() {
    if (++failures() <= 20) std::fprintf(stderr, "FAILED %s\n", text_.str().c_str());
  }
  template <class T>
  Failure& operator<<(const T& value) {
    text_ << value;
    return *this;
  }

 private:
  std::ostringstream text_;
};

template <class F>
void run(const char* name, const F& test) {
  const int before = failures();
  try {
    test();
  } catch (const std::exception& e) {
    Failure(name, 0, "threw") << e.what();
  }
  std::printf("%s %s\n", failures() == before ? "ok    " : "FAILED", name);
}

// For main: 0 if every check held.
inline int result() {
  if (failures() > 0) std::fprintf(stderr, "%d checks failed\n", failures());
  return failures() > 0 ? 1 : 0;
}

}  // namespace ew::check

#define CHECK(condition) \
  if (condition) {       \
  } else                 \
    ::ew::check::Failure(__FILE__, __LINE__, #condition)

#define CHECK_THROWS(expression, type)                         \
  do {                                                         \
    bool thrown = false;                                       \
    try {                                                      \
      expression;                                              \
    } catch (const type&) {                                    \
      thrown = true;                                           \
    }                                                          \
    CHECK(thrown) << #expression << " was to throw " << #type; \
  } while (false)

#define RUN(test) ::ew::check::run(#test, test)
