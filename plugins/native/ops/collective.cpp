// all_gather, gather_experts: where the ranks of a partitioned program wait for each other; send, receive:
// between the stages of a pipeline. See runtime/ranks/partition.py.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "exchange.h"
#include "op.h"
#include "step_resolver.h"
#include "step_verifier.h"

namespace ew {
namespace {

constexpr int64_t kMostRanks = 1 << 10;

// A matrix of which each rank has some columns, those between two cuts.
Gathered columns_of(const Place& whole, Dtype dtype, const std::vector<int64_t>& cuts) {
  const int64_t element = element_bytes(dtype);
  Gathered found{whole.data, whole.strides[0] * element, {}};
  for (size_t r = 0; r + 1 < cuts.size(); ++r)
    found.parts.push_back({0, whole.shape[0], cuts[r] * element, (cuts[r + 1] - cuts[r]) * element});
  return found;
}

// Of each output.
std::vector<Gathered> gathered_of(const StepResolver& s) {
  std::vector<Gathered> found;
  for (size_t i = 0; i < s.inputs(); ++i)
    found.push_back(columns_of(s.out(i), s.dtype(i), s.attributes().cuts[i]));
  return found;
}

Call bind_all_gather(const StepResolver& s) {
  return [ranks = s.ranks(), to = static_cast<int>(s.attributes().to),
          matrices = gathered_of(s)](const RunContext& run) { run.exchange->gather(ranks, to, matrices); };
}

// Each rank has the rows of its experts: which they are is known when the step runs.
Call bind_gather_experts(const StepResolver& s) {
  const Place& whole = s.out();
  const int64_t bytes = whole.shape[1] * element_bytes(s.dtype(0));
  const Gathered matrix{whole.data, whole.strides[0] * element_bytes(s.dtype(0)), {}};
  return [ranks = s.ranks(), matrix, bytes, starts = s.in(1).as<const int32_t>(),
          cuts = s.attributes().cuts[0]](const RunContext& run) {
    Gathered one = matrix;
    for (size_t r = 0; r + 1 < cuts.size(); ++r) {
      const int64_t first = starts[cuts[r]];
      one.parts.push_back({first, starts[cuts[r + 1]] - first, 0, bytes});
    }
    run.exchange->gather(ranks, -1, {&one, 1});
  };
}

int64_t rows_of_all(const StepResolver& s) { return s.out().shape[0]; }

std::vector<RowCopy> copies_of(const StepResolver& s) {
  std::vector<RowCopy> copies;
  for (size_t i = 0; i < s.inputs(); ++i) {
    const Place &from = s.in(i), &to = s.out(i);
    if (from.bytes == 0) continue;
    const int64_t element = element_bytes(s.dtype(i));
    copies.push_back({from.data, to.data, from.shape[0], from.shape[1] * element, from.strides[0] * element,
                      to.strides[0] * element});
  }
  return copies;
}

Call bind_send(const StepResolver& s) {
  return [group = s.attributes().others, copies = copies_of(s)](const RunContext& run) {
    run.exchange->send(group, copies);
  };
}

Call bind_receive(const StepResolver& s) {
  return [group = s.attributes().others, copies = copies_of(s),
          whole = gathered_of(s)](const RunContext& run) { run.exchange->receive(group, copies, whole); };
}

// "0,32,64": numbers, ascending.
void verify_cuts(StepVerifier& v, const std::string& text, int64_t ranks, int64_t end,
                 const std::string& subject) {
  std::vector<int64_t> cuts;
  int64_t count = 0, last = -1;
  for (size_t at = 0; at <= text.size(); ++count) {
    const size_t comma = std::min(text.find(',', at), text.size());
    const std::string number = text.substr(at, comma - at);
    const bool digits =
        !number.empty() && number.size() < 10 && number.find_first_not_of("0123456789") == std::string::npos;
    v.require(digits && std::stoll(number) >= last, "attribute cuts: " + text + " isn't ascending numbers");
    last = std::stoll(number);
    v.require(count > 0 || last == 0, "attribute cuts: " + text + " doesn't begin with 0");
    cuts.push_back(last);
    at = comma + 1;
  }
  v.require(count == ranks + 1 && last == end, "attribute cuts: " + text + " doesn't cut " + subject +
                                                   " for " + std::to_string(ranks) + " ranks");
  v.attributes().cuts.push_back(std::move(cuts));
}

// The same with semicolons between those of several operands, of which it takes the first away.
void verify_next_cuts(StepVerifier& v, std::string* text, int64_t ranks, const Operand& whole) {
  const size_t end = text->find(';');
  v.require(end != std::string::npos, "attribute cuts has no list for " + shape_text(whole));
  verify_cuts(v, text->substr(0, end), ranks, v.size(whole, 1), shape_text(whole));
  text->erase(0, end + 1);
}

// A rank's own columns of x [M, C], ... -> x, ...
void verify_all_gather(StepVerifier& v) {
  const int64_t ranks = v.integer("ranks", 2, kMostRanks);
  v.attributes().to = v.integer("to", -1, ranks - 1);
  std::string cuts = v.string("cuts") + ";";
  for (size_t i = 0; i < v.inputs(); ++i) {
    const Operand &own = v.in(i), &all = v.out(i);
    v.data(own, all.dtype, 2, 2);
    v.data(all, all.dtype, 2, 2);
    v.require(v.is_shared(own) && v.is_shared(all) && own.index == all.index && own.shape[0] == all.shape[0],
              "operand " + shape_text(own) + " isn't a part of " + shape_text(all) + " that ranks share");
    verify_next_cuts(v, &cuts, ranks, all);
  }
}

// y [M, N], of which a rank has its experts' rows, starts [E + 1] -> y
void verify_gather_experts(StepVerifier& v) {
  const int64_t ranks = v.integer("ranks", 2, kMostRanks);
  v.data(v.in(0), Dtype::f32, 2, 2);
  v.data(v.out(), Dtype::f32, 2, 2);
  v.data(v.in(1), Dtype::i32, 1, 1);
  v.require(v.is_shared(v.out()) && v.in(0).index == v.out().index,
            "operand " + shape_text(v.out()) + " isn't shared by ranks");
  v.same_shape(v.in(0), v.out());
  verify_cuts(v, v.string("cuts"), ranks, v.size(v.in(1), 0) - 1, shape_text(v.in(1)));
}

// Some columns of x [M, C], ... -> the same of a buffer that the next stage reads, ...
void verify_message(StepVerifier& v) {
  const int64_t first = v.integer("first", 0, kMostRanks);
  v.attributes().others = {static_cast<int>(first), static_cast<int>(v.integer("ranks", 1, kMostRanks))};
  for (size_t i = 0; i < v.inputs(); ++i) {
    v.data(v.in(i), v.out(i).dtype, 2, 2);
    v.data(v.out(i), v.out(i).dtype, 2, 2);
    v.same_shape(v.in(i), v.out(i));
  }
}

// All columns of what a stage hands on, of which each of its ranks has sent some.
void verify_receive(StepVerifier& v) {
  verify_message(v);
  std::string cuts = v.string("cuts") + ";";
  for (size_t i = 0; i < v.inputs(); ++i) verify_next_cuts(v, &cuts, v.attributes().others.count, v.out(i));
}

constexpr Op kOps[] = {
    {.name = "all_gather",
     .verify = verify_all_gather,
     .bind = bind_all_gather,
     .in_place = true,
     .meets = true},
    {.name = "gather_experts",
     .verify = verify_gather_experts,
     .bind = bind_gather_experts,
     .indices = {1, "starts", IndexRule::starts, rows_of_all},
     .in_place = true,
     .meets = true},
    {.name = "send", .verify = verify_message, .bind = bind_send, .meets = true},
    {.name = "receive", .verify = verify_receive, .bind = bind_receive, .meets = true},
};

}  // namespace

std::span<const Op> collective_ops() { return kOps; }

}  // namespace ew
