#include "sampling_bindings.h"

#include <nanobind/ndarray.h>

#include <algorithm>
#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>

#include "bindings.h"
#include "thread_pool.h"

namespace ew {
namespace {

using namespace nb::literals;

template <class T>
using Vector = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Logits = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// A sampling option has a field of RowSampling, a line here, and an array in contracts.SamplingBatch.
template <class T>
struct Option {
  const char* name;
  T RowSampling::* field;
};
constexpr Option<float> kFloats[] = {{"temperature", &RowSampling::temperature},
                                     {"top_p", &RowSampling::top_p},
                                     {"min_p", &RowSampling::min_p},
                                     {"typical_p", &RowSampling::typical_p},
                                     {"repetition_penalty", &RowSampling::repetition_penalty},
                                     {"frequency_penalty", &RowSampling::frequency_penalty},
                                     {"presence_penalty", &RowSampling::presence_penalty},
                                     {"top_n_sigma", &RowSampling::top_n_sigma},
                                     {"xtc_probability", &RowSampling::xtc_probability},
                                     {"xtc_threshold", &RowSampling::xtc_threshold}};
constexpr Option<int32_t> kIntegers[] = {{"top_k", &RowSampling::top_k},
                                         {"scored", &RowSampling::scored},
                                         {"top_allowed", &RowSampling::top_allowed}};
constexpr Option<uint64_t> kNumbers[] = {{"seed", &RowSampling::seed}, {"counter", &RowSampling::counter}};

template <class T>
Vector<T> array(const std::string& name, nb::handle value, size_t size) {
  Vector<T> result;
  if (!nb::try_cast(value, result, false)) {
    throw std::invalid_argument("sampling: " + name + " has another type than " +
                                (std::is_same_v<T, float>     ? "float32"
                                 : std::is_same_v<T, int32_t> ? "int32"
                                                              : "uint64") +
                                ", or isn't one contiguous array");
  }
  if (result.size() != size) {
    throw std::invalid_argument("sampling: " + name + " must have " + std::to_string(size) +
                                " entries, not " + std::to_string(result.size()));
  }
  return result;
}

template <class T, size_t N>
bool set(std::vector<RowSampling>& rows, const Option<T> (&table)[N], const std::string& name,
         nb::handle value) {
  for (const Option<T>& option : table) {
    if (name != option.name) continue;
    const Vector<T> values = array<T>(name, value, rows.size());
    for (size_t i = 0; i < rows.size(); ++i) rows[i].*option.field = values.data()[i];
    return true;
  }
  return false;
}

// Lists of different lengths: the rows' lists lie one behind the other, and <first name>_start[i] :
// <first name>_start[i + 1] is row i's. Those of token ids are checked to be in the vocabulary.
template <class T>
struct List {
  const char* name;
  const char* starts;
  std::span<const T> RowSampling::* field;
  bool ids;
};
constexpr List<int32_t> kIntegerLists[] = {{"seen", "seen_start", &RowSampling::seen, true},
                                           {"counted", "counted_start", &RowSampling::counted, true},
                                           {"counts", "counted_start", &RowSampling::counts, false},
                                           {"biased", "biased_start", &RowSampling::biased, true},
                                           {"dry", "dry_start", &RowSampling::dry, true},
                                           {"allowed", "allowed_start", &RowSampling::allowed, true}};
constexpr List<float> kFloatLists[] = {{"bias", "biased_start", &RowSampling::bias, false},
                                       {"dry_bias", "dry_start", &RowSampling::dry_bias, false}};

template <class T, size_t N>
bool set_lists(std::vector<RowSampling>& rows, const List<T> (&table)[N], const std::string& name,
               const nb::dict& options, int64_t vocab) {
  for (const List<T>& list : table) {
    if (name != list.name) continue;
    const Vector<int32_t> starts = array<int32_t>(list.starts, options[list.starts], rows.size() + 1);
    const int32_t* start = starts.data();
    const Vector<T> values =
        array<T>(name, options[list.name], static_cast<size_t>(std::max(start[rows.size()], 0)));
    for (size_t i = 0; i < rows.size(); ++i) {
      if (start[0] != 0 || start[i + 1] < start[i]) {
        throw std::invalid_argument(std::string("sampling: ") + list.starts +
                                    " must begin with 0 and never fall");
      }
    }
    for (size_t i = 0; list.ids && i < values.size(); ++i) {
      if (values.data()[i] < 0 || static_cast<int64_t>(values.data()[i]) >= vocab) {
        throw std::invalid_argument("sampling: " + name + " has token " +
                                    std::to_string(static_cast<int64_t>(values.data()[i])) +
                                    ", which is not in [0, " + std::to_string(vocab) + ")");
      }
    }
    for (size_t i = 0; i < rows.size(); ++i) {
      rows[i].*list.field = {values.data() + start[i], static_cast<size_t>(start[i + 1] - start[i])};
    }
    return true;
  }
  return false;
}

// Masks of some rows: "mask_rows" says which of "masks" [n, words] is a row's, -1 none.
void set_masks(std::vector<RowSampling>& rows, const nb::dict& options, int64_t vocab) {
  nb::ndarray<const uint32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu> masks;
  const size_t words = static_cast<size_t>((vocab + 31) / 32);
  if (!nb::try_cast(options["masks"], masks, false) || masks.shape(1) != words) {
    throw std::invalid_argument("sampling: masks must be one contiguous array of uint32 with " +
                                std::to_string(words) + " words a row");
  }
  const Vector<int32_t> of = array<int32_t>("mask_rows", options["mask_rows"], rows.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    const int32_t at = of.data()[i];
    if (at < -1 || at >= static_cast<int64_t>(masks.shape(0))) {
      throw std::invalid_argument("sampling: mask_rows has " + std::to_string(at) + " of " +
                                  std::to_string(masks.shape(0)) + " masks");
    }
    if (at >= 0) rows[i].mask = masks.data() + static_cast<size_t>(at) * words;
  }
}

bool is_starts(const std::string& name) {
  const auto same = [&](const auto& list) { return name == list.starts; };
  return std::ranges::any_of(kIntegerLists, same) || std::ranges::any_of(kFloatLists, same);
}

// Of two that go together, and have one list of starts.
void check_pair(const nb::dict& options, const char* one, const char* other, const char* starts) {
  if (options.contains(one) != options.contains(other) || options.contains(one) != options.contains(starts)) {
    throw std::invalid_argument(std::string("sampling: ") + one +
                                (std::string_view(one) == other ? "" : std::string(", ") + other) + " and " +
                                starts + " go together");
  }
}

// A sampler with threads of its own, for logits that come from elsewhere.
class RowSampler {
 public:
  explicit RowSampler(int threads) : pool_(threads) {}

  int threads() const { return pool_.size(); }
  nb::dict sample(const Logits& logits, const nb::dict& options, int top);
  nb::object distribution(const Logits& logits, const nb::dict& options);

 private:
  ThreadPool pool_;
  Sampler sampler_;
  std::mutex mutex_;
};

nb::dict RowSampler::sample(const Logits& logits, const nb::dict& options, int top) {
  const int64_t rows = static_cast<int64_t>(logits.shape(0)), vocab = static_cast<int64_t>(logits.shape(1));
  const SamplingArrays samples(options, logits.shape(0), top, vocab);
  {
    nb::gil_scoped_release release;
    samples.wait();
    const std::lock_guard<std::mutex> lock(mutex_);
    sampler_.sample(logits.data(), rows, vocab, vocab, samples.rows.data(), samples.result, pool_);
  }
  nb::dict output;
  samples.put(output);
  return output;
}

nb::object RowSampler::distribution(const Logits& logits, const nb::dict& options) {
  const int64_t vocab = static_cast<int64_t>(logits.shape(1));
  const SamplingArrays samples(options, logits.shape(0), -1, vocab);
  float* weights = nullptr;
  nb::object result = new_array<float>({logits.shape(0), logits.shape(1)}, &weights);
  const std::lock_guard<std::mutex> lock(mutex_);
  for (size_t i = 0; i < samples.rows.size(); ++i) {
    const int64_t at = static_cast<int64_t>(i) * vocab;
    sampler_.distribution(logits.data() + at, vocab, samples.rows[i], weights + at);
  }
  return result;
}

}  // namespace

SamplingArrays::SamplingArrays(const nb::dict& options, size_t count, int top, int64_t vocab) : rows(count) {
  if (top < -1 || top > vocab) {
    throw std::invalid_argument("logprobs = " + std::to_string(top) + " is not in [0, " +
                                std::to_string(vocab) + "]");
  }
  check_pair(options, "seen", "seen", "seen_start");
  check_pair(options, "allowed", "allowed", "allowed_start");
  check_pair(options, "counted", "counts", "counted_start");
  check_pair(options, "biased", "bias", "biased_start");
  check_pair(options, "dry", "dry_bias", "dry_start");
  check_pair(options, "masks", "masks", "mask_rows");
  if (options.contains("masks")) set_masks(rows, options, vocab);
  if (options.contains("before_sampling")) before = options["before_sampling"];
  for (const auto& [key, value] : options) {
    const auto name = nb::cast<std::string>(key);
    if (is_starts(name) || name == "masks" || name == "mask_rows" || name == "before_sampling") continue;
    if (!set(rows, kFloats, name, value) && !set(rows, kIntegers, name, value) &&
        !set(rows, kNumbers, name, value) && !set_lists(rows, kIntegerLists, name, options, vocab) &&
        !set_lists(rows, kFloatLists, name, options, vocab)) {
      throw std::invalid_argument("sampling: there is no option " + name);
    }
  }
  for (const RowSampling& row : rows) {
    if (row.scored < -1 || row.scored >= vocab) {
      throw std::invalid_argument("sampling: scored has token " + std::to_string(row.scored) +
                                  ", which is not in [-1, " + std::to_string(vocab) + ")");
    }
  }
  tokens = new_array<int32_t>({count}, &result.tokens);
  if (top < 0) return;
  const size_t columns = static_cast<size_t>(top);
  result.top = top;
  token_logprobs = new_array<float>({count}, &result.token_logprobs);
  top_ids = new_array<int32_t>({count, columns}, &result.top_ids);
  top_logprobs = new_array<float>({count, columns}, &result.top_logprobs);
}

void SamplingArrays::wait() const {
  if (before.is_none()) return;
  const nb::gil_scoped_acquire acquire;
  before();
}

void SamplingArrays::put(nb::dict& into) const {
  into["tokens"] = tokens;
  into["token_logprobs"] = token_logprobs;
  into["top_ids"] = top_ids;
  into["top_logprobs"] = top_logprobs;
}

void bind_row_sampler(nb::module_& m) {
  nb::class_<RowSampler>(m, "RowSampler")
      .def(nb::init<int>(), "threads"_a = 1)
      .def_prop_ro("threads", &RowSampler::threads)
      .def("sample", &RowSampler::sample, "logits"_a.noconvert(), "sampling"_a, "logprobs"_a = -1)
      .def("distribution", &RowSampler::distribution, "logits"_a.noconvert(), "sampling"_a);
}

}  // namespace ew
