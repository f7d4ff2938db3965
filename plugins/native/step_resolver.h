// A step's operands for one set of sizes, of which ops make the arguments of their kernels.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "resolver.h"

namespace ew {

class StepResolver {
 public:
  StepResolver(const Program& program, const Memory& memory, const Sizes& sizes, size_t index);

  bool is_empty() const { return !out_.empty() && out_[0].bytes == 0; }
  void check_overlap() const;
  IndexCheck index_check() const;

  size_t inputs() const { return in_.size(); }
  const Place& in(size_t i) const { return in_[i]; }
  const Place& out(size_t i = 0) const { return out_[i]; }
  const Attributes& attributes() const { return step_.attributes; }
  const Memory& memory() const { return memory_; }
  RankGroup ranks() const { return program_.ranks(); }
  size_t index() const { return index_; }  // of the step, in the program
  const Sizes& sizes() const { return sizes_; }
  // Of an input: its type, the weight or the cache that it is, and entries from row to row of the cache's
  // block table.
  Dtype dtype(size_t i) const { return step_.inputs[i].dtype; }
  const Weight& weight(size_t i) const { return program_.weights()[step_.inputs[i].index]; }
  const KvCache& cache(size_t i) const { return memory_.caches[step_.inputs[i].index]; }
  OffloadedLayer* offloaded(size_t i) const { return memory_.offloaded[step_.inputs[i].index]; }
  int64_t block_table_stride(size_t i) const {
    return memory_.table_strides[program_.caches()[step_.inputs[i].index].group];
  }
  int64_t block_tokens(size_t i) const {
    return program_.groups()[static_cast<size_t>(program_.caches()[step_.inputs[i].index].group)]
        .block_tokens;
  }
  // Throw std::invalid_argument: the step, the operand's name and the problem.
  [[noreturn]] void fail_input(size_t i, const std::string& problem) const;
  [[noreturn]] void fail_output(size_t i, const std::string& problem) const;

 private:
  Place place(const Operand& operand) const;

  const Program& program_;
  const Memory& memory_;
  const Sizes& sizes_;
  const Step& step_;
  const size_t index_;
  const std::string title_;
  std::vector<Place> in_, out_;
};

template <class T>
void set(T*& to, const Place& place) {
  to = place.as<T>();
}

// A tensor of rank 1 to 3 as [outer, inner, C].
template <class T>
Rows<T> rows(const Place& place) {
  const size_t rank = place.shape.size();
  return {place.as<T>(), rank > 1 ? place.strides[0] : 0, rank > 2 ? place.strides[1] : 0};
}
inline int64_t outer(const Place& place) { return place.shape.size() > 1 ? place.shape[0] : 1; }
inline int64_t inner(const Place& place) { return place.shape.size() > 2 ? place.shape[1] : 1; }

// Of rank 4, missing dimensions first: a view broadcast to the shape `to`, and a shape.
View view(const Place& place, const Place& to);
inline void set_shape(const Place& place, int64_t* shape) {
  std::copy(place.shape.begin(), place.shape.end(), shape + kMaxRank - place.shape.size());
}

}  // namespace ew
