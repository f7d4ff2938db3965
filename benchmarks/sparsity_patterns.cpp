// The product loops of sparsity_patterns.py: y[m, n] = the sum over groups g of 32 k of
//   x_scale[m, g] * w_scale[n, g] * (the sum over k in g of x[m, k] * w[n, k]),  x and w of 8 bits,
// with w dense or sparse. Weights stand in panels of 32 outputs; a step of a panel is its 4 next k, 128
// bytes.
//
//   dense   of each panel and group: 32 scales (float16), 8 steps
//   32x4    steps that stay: scales and a count for each group, then each step's place
//   32x32   groups that stay, each as in dense, and its place
//   none    any weights: scales, then for each 16 outputs of a step a mask of 64 bits; the bytes that stay
//
// Weights are stored as value + 128, as the product instruction wants them; 128 times the sum of x is taken
// off. usage: sparsity_patterns SIZE BYTES ROUNDS ROWS..  prints a line for each pattern, density and number
// of rows.
#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

namespace {

constexpr int kPanel = 32, kGroup = 32, kQuad = 4, kSteps = kGroup / kQuad, kStepBytes = kPanel * kQuad;
constexpr int kRows = 6;  // rows that share a weight in registers: 12 sums of integers, 12 of floats
enum Kind { kDense, kSteps32x4, kGroups32x32, kAny };

struct Inputs {  // of kRows rows at a time; the last ones are filled with zeros
  int rows, k;
  std::vector<int8_t> x;         // [rows, k]
  std::vector<float> scales;     // [rows, groups]
  std::vector<int32_t> sums;     // [rows, groups], of x, times 128
  std::vector<int16_t> by_step;  // [rows / kRows, k / 4, 8], of x
};

struct Panel {
  const uint8_t* scales;  // float16
  const uint8_t* counts;  // of a group's steps; 32x32: not read
  const uint8_t* places;  // of steps; 32x32: uint16 of groups
  const uint8_t* masks;
  const uint8_t* values;
  int kept;  // groups of 32x32
};

struct Weights {
  Kind kind;
  std::vector<std::vector<uint8_t>> memory;
  std::vector<Panel> panels;
  size_t bytes = 0;
};

template <int R>
struct Sums {
  __m512i integers[R][2];
  __m512 floats[R][2];

  void clear() {
    for (int r = 0; r < R; ++r) integers[r][0] = integers[r][1] = _mm512_setzero_si512();
  }
  void add(const int8_t* x, int stride, __m512i left, __m512i right) {
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      int32_t four;
      std::memcpy(&four, x + r * stride, 4);
      const __m512i quad = _mm512_set1_epi32(four);
      integers[r][0] = _mm512_dpbusd_epi32(integers[r][0], left, quad);
      integers[r][1] = _mm512_dpbusd_epi32(integers[r][1], right, quad);
    }
  }
  void end_group(const uint8_t* scales, const float* x_scales, int stride, const int32_t* sums,
                 int sums_stride) {
    const __m512 left = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(scales)));
    const __m512 right = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(scales + 32)));
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const __m512 own = _mm512_set1_ps(x_scales[r * stride]);
      const __m512i off = _mm512_set1_epi32(sums[r * sums_stride]);
      const __m512 a = _mm512_cvtepi32_ps(_mm512_sub_epi32(integers[r][0], off));
      const __m512 b = _mm512_cvtepi32_ps(_mm512_sub_epi32(integers[r][1], off));
      floats[r][0] = _mm512_fmadd_ps(a, _mm512_mul_ps(left, own), floats[r][0]);
      floats[r][1] = _mm512_fmadd_ps(b, _mm512_mul_ps(right, own), floats[r][1]);
    }
  }
};

__m512i load(const uint8_t* at) { return _mm512_loadu_si512(at); }

template <int R, Kind K>
void product(const Panel& p, const Inputs& in, int row, float* y, int n) {
  const int groups = in.k / kGroup;
  const int8_t* x = in.x.data() + static_cast<size_t>(row) * in.k;
  const float* x_scales = in.scales.data() + static_cast<size_t>(row) * groups;
  const int32_t* sums = in.sums.data() + static_cast<size_t>(row) * groups;
  const int16_t* by_step = in.by_step.data() + static_cast<size_t>(row / kRows) * (in.k / kQuad) * 8;
  const uint8_t *values = p.values, *places = p.places, *masks = p.masks;
  Sums<R> sum;
  for (int r = 0; r < R; ++r) sum.floats[r][0] = sum.floats[r][1] = _mm512_setzero_ps();
  const int count = K == kGroups32x32 ? p.kept : groups;
  for (int i = 0; i < count; ++i) {
    int g = i;
    if constexpr (K == kGroups32x32) {
      uint16_t place;
      std::memcpy(&place, places + 2 * i, 2);
      g = place;
    }
    sum.clear();
    _mm_prefetch(values + 2048, _MM_HINT_T0);
    if constexpr (K == kSteps32x4) {
      const int kept = p.counts[g];
      __m128i off = _mm_setzero_si128();
      for (int s = 0; s < kept; ++s, values += kStepBytes) {
        const int step = g * kSteps + *places++;
        sum.add(x + step * kQuad, in.k, load(values), load(values + 64));
        off = _mm_add_epi16(off, _mm_load_si128(reinterpret_cast<const __m128i*>(by_step + step * 8)));
      }
      alignas(32) int32_t own[8];
      _mm256_store_si256(reinterpret_cast<__m256i*>(own), _mm256_slli_epi32(_mm256_cvtepi16_epi32(off), 7));
      sum.end_group(p.scales + g * 64, x_scales + g, groups, own, 1);
    } else if constexpr (K == kAny) {
      const __m512i zero = _mm512_set1_epi8(static_cast<char>(128));
#pragma GCC unroll 8
      for (int s = 0; s < kSteps; ++s, masks += 16) {
        uint64_t mask[2];
        std::memcpy(mask, masks, 16);
        const uint8_t* behind = values + _mm_popcnt_u64(mask[0]);
        const __m512i left = _mm512_mask_expand_epi8(zero, mask[0], load(values));
        const __m512i right = _mm512_mask_expand_epi8(zero, mask[1], load(behind));
        values = behind + _mm_popcnt_u64(mask[1]);
        sum.add(x + g * kGroup + s * kQuad, in.k, left, right);
      }
      sum.end_group(p.scales + g * 64, x_scales + g, groups, sums + g, groups);
    } else {
      const uint8_t* scales = values;
      values += 64;
#pragma GCC unroll 8
      for (int s = 0; s < kSteps; ++s, values += kStepBytes) {
        sum.add(x + g * kGroup + s * kQuad, in.k, load(values), load(values + 64));
      }
      sum.end_group(scales, x_scales + g, groups, sums + g, groups);
    }
  }
  for (int r = 0; r < R; ++r) {
    _mm512_storeu_ps(y + static_cast<size_t>(row + r) * n, sum.floats[r][0]);
    _mm512_storeu_ps(y + static_cast<size_t>(row + r) * n + 16, sum.floats[r][1]);
  }
}

// Makes a panel dense: for prompts any other way to read it costs more.
void spread(const Panel& p, int groups, std::vector<uint8_t>& out) {
  out.resize(static_cast<size_t>(groups) * (64 + kSteps * kStepBytes));
  const __m512i zero = _mm512_set1_epi8(static_cast<char>(128));
  const uint8_t *values = p.values, *masks = p.masks;
  uint8_t* to = out.data();
  for (int g = 0; g < groups; ++g) {
    std::memcpy(to, p.scales + g * 64, 64);
    to += 64;
    for (int half = 0; half < kSteps * 2; ++half, masks += 8, to += 64) {
      uint64_t mask;
      std::memcpy(&mask, masks, 8);
      _mm512_storeu_si512(to, _mm512_mask_expand_epi8(zero, mask, load(values)));
      values += _mm_popcnt_u64(mask);
    }
  }
}

template <Kind K>
void rows_of(const Panel& p, const Inputs& in, float* y, int n) {
  if (in.rows == 1) return product<1, K>(p, in, 0, y, n);
  for (int row = 0; row < in.rows; row += kRows) product<kRows, K>(p, in, row, y, n);
}

void linear(const Weights& w, size_t first, const Inputs& in, float* y, int n) {
#pragma omp parallel for schedule(static)
  for (int p = 0; p < n / kPanel; ++p) {
    const Panel& panel = w.panels[first + p];
    float* to = y + p * kPanel;
    switch (w.kind) {
      case kDense:
        rows_of<kDense>(panel, in, to, n);
        break;
      case kSteps32x4:
        rows_of<kSteps32x4>(panel, in, to, n);
        break;
      case kGroups32x32:
        rows_of<kGroups32x32>(panel, in, to, n);
        break;
      case kAny:
        if (in.rows <= 12) {
          rows_of<kAny>(panel, in, to, n);
        } else {
          thread_local std::vector<uint8_t> dense;
          spread(panel, in.k / kGroup, dense);
          rows_of<kDense>(Panel{nullptr, nullptr, nullptr, nullptr, dense.data(), 0}, in, to, n);
        }
    }
  }
}

Inputs inputs(int wanted, int k, std::mt19937& random) {
  Inputs in;
  in.rows = wanted == 1 ? 1 : (wanted + kRows - 1) / kRows * kRows;
  in.k = k;
  const int groups = k / kGroup, blocks = (in.rows + kRows - 1) / kRows;
  in.x.assign(static_cast<size_t>(in.rows) * k, 0);
  in.scales.assign(static_cast<size_t>(in.rows) * groups, 0);
  in.sums.assign(static_cast<size_t>(in.rows) * groups, 0);
  in.by_step.assign(static_cast<size_t>(blocks) * (k / kQuad) * 8, 0);
  for (int r = 0; r < wanted; ++r) {
    for (int i = 0; i < k; ++i) {
      const int value = static_cast<int>(random() % 255) - 127;
      in.x[static_cast<size_t>(r) * k + i] = static_cast<int8_t>(value);
      in.sums[static_cast<size_t>(r) * groups + i / kGroup] += value * 128;
      in.by_step[(static_cast<size_t>(r / kRows) * (k / kQuad) + i / kQuad) * 8 + r % kRows] += value;
    }
    for (int g = 0; g < groups; ++g)
      in.scales[static_cast<size_t>(r) * groups + g] = 0.5f + (random() % 64) / 64.0f;
  }
  return in;
}

// Which of [n / 32 panels, k / 4 steps, 128 bytes] stay: 1 or 0.
std::vector<uint8_t> kept(Kind kind, double density, int n, int k, std::mt19937& random) {
  const int panels = n / kPanel, steps = k / kQuad;
  std::vector<uint8_t> mask(static_cast<size_t>(n) * k, kind == kDense);
  const int unit = kind == kSteps32x4 ? 1 : kSteps,
            round = kind == kSteps32x4 ? 16 : steps / kSteps;  // of units
  for (int p = 0; p < panels; ++p) {
    uint8_t* own = mask.data() + static_cast<size_t>(p) * steps * kStepBytes;
    if (kind == kAny) {
      for (int i = 0; i < steps * kStepBytes; ++i) own[i] = random() % 1000 < density * 1000;
    }
    if (kind != kSteps32x4 && kind != kGroups32x32) continue;
    std::vector<int> order(round);
    for (int start = 0; start < steps; start += round * unit) {
      for (int i = 0; i < round; ++i) order[i] = i;
      std::shuffle(order.begin(), order.end(), random);
      for (int i = 0; i < std::max(1L, std::lround(round * density)); ++i) {
        std::memset(own + static_cast<size_t>(start + order[i] * unit) * kStepBytes, 1, unit * kStepBytes);
      }
    }
  }
  return mask;
}

// Appends matrices to `w`, and to `dense` the same with zeros in place (or, with no `dense`, nowhere).
void append(Weights& w, Weights* dense, const std::vector<uint8_t>& mask, int n, int k,
            std::mt19937& random) {
  const int groups = k / kGroup;
  for (int p = 0; p < n / kPanel; ++p) {
    std::vector<uint8_t> scales, counts, places, masks, values, whole;
    int stay = 0;
    for (int g = 0; g < groups; ++g) {
      uint16_t own[kPanel];
      for (auto& s : own) s = static_cast<uint16_t>(0x2000 + random() % 0x400);  // float16 about 0.01
      const auto* bytes = reinterpret_cast<const uint8_t*>(own);
      whole.insert(whole.end(), bytes, bytes + 64);
      scales.insert(scales.end(), bytes, bytes + 64);
      int in_group = 0;
      const size_t from = values.size();
      for (int s = 0; s < kSteps; ++s) {
        const uint8_t* keep = mask.data() + ((static_cast<size_t>(p) * groups + g) * kSteps + s) * kStepBytes;
        uint64_t bits[2] = {0, 0};
        for (int i = 0; i < kStepBytes; ++i) {
          const uint8_t value = keep[i] ? static_cast<uint8_t>(1 + random() % 255) : 128;
          whole.push_back(value);
          if (w.kind == kAny ? keep[i] != 0 : (w.kind == kDense || keep[0])) values.push_back(value);
          bits[i / 64] |= static_cast<uint64_t>(keep[i]) << (i % 64);
        }
        if (keep[0]) ++in_group, places.push_back(static_cast<uint8_t>(s));
        const auto* b = reinterpret_cast<const uint8_t*>(bits);
        masks.insert(masks.end(), b, b + 16);
      }
      counts.push_back(static_cast<uint8_t>(in_group));
      if (w.kind == kDense || (w.kind == kGroups32x32 && in_group)) {  // the scales stand before the values
        values.insert(values.begin() + static_cast<std::ptrdiff_t>(from), bytes, bytes + 64);
        ++stay;
      }
    }
    if (w.kind == kGroups32x32) {
      places.clear();
      for (int g = 0; g < groups; ++g) {
        if (counts[g])
          places.push_back(static_cast<uint8_t>(g & 255)), places.push_back(static_cast<uint8_t>(g >> 8));
      }
    }
    const bool apart = w.kind == kSteps32x4 || w.kind == kAny;
    std::vector<uint8_t> all;
    size_t at[5] = {0, 0, 0, 0, 0};
    const auto put = [&](int i, const std::vector<uint8_t>& part, bool used) {
      at[i] = all.size();
      if (used) all.insert(all.end(), part.begin(), part.end());
    };
    put(0, scales, apart);
    put(1, counts, w.kind == kSteps32x4);
    put(2, places, w.kind == kSteps32x4 || w.kind == kGroups32x32);
    put(3, masks, w.kind == kAny);
    all.resize((all.size() + 63) / 64 * 64);
    put(4, values, true);
    w.bytes += all.size();
    all.resize(all.size() + 64);  // what an expanding load reads behind the last
    w.memory.push_back(std::move(all));
    const uint8_t* base = w.memory.back().data();
    w.panels.push_back({base + at[0], base + at[1], base + at[2], base + at[3], base + at[4], stay});
    if (dense) {
      dense->memory.push_back(std::move(whole));
      dense->panels.push_back({nullptr, nullptr, nullptr, nullptr, dense->memory.back().data(), groups});
    }
  }
}

double seconds(const Weights& w, const Inputs& in, float* y, int n) {
  const auto start = std::chrono::steady_clock::now();
  for (size_t first = 0; first < w.panels.size(); first += n / kPanel) linear(w, first, in, y, n);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 5) return std::fprintf(stderr, "usage: sparsity_patterns SIZE BYTES ROUNDS ROWS..\n"), 2;
  const int size = std::atoi(argv[1]), rounds = std::atoi(argv[3]);
  const double bytes = std::atof(argv[2]);
  const struct {
    const char* name;
    Kind kind;
    double density;
  } patterns[] = {
      {"none-50", kAny, 0.5},          {"none-70", kAny, 0.3},          {"none-90", kAny, 0.1},
      {"32x4-50", kSteps32x4, 0.5},    {"32x4-70", kSteps32x4, 0.3125}, {"32x4-90", kSteps32x4, 0.125},
      {"32x32-50", kGroups32x32, 0.5}, {"32x32-70", kGroups32x32, 0.3}, {"32x32-90", kGroups32x32, 0.1}};
  for (int a = 4; a < argc; ++a) {
    const int rows = std::atoi(argv[a]);
    std::mt19937 random(0);
    const Inputs in = inputs(rows, size, random);
    const int count = std::max(1, static_cast<int>((rows < 64 ? bytes : bytes / 8) / (1.0625 * size * size)));
    std::vector<float> y(static_cast<size_t>(in.rows) * size), expected(y.size());
    Weights dense{kDense, {}, {}};
    for (int i = 0; i < count; ++i)
      append(dense, nullptr, kept(kDense, 1, size, size, random), size, size, random);
    for (const auto& pattern : patterns) {
      Weights sparse{pattern.kind, {}, {}}, same{kDense, {}, {}};
      append(sparse, &same, kept(pattern.kind, pattern.density, size, size, random), size, size, random);
      linear(sparse, 0, in, y.data(), size);
      linear(same, 0, in, expected.data(), size);
      if (y != expected)
        return std::fprintf(stderr, "%s: not the product of the same weights\n", pattern.name), 1;
      for (int i = 1; i < count; ++i) {
        append(sparse, nullptr, kept(pattern.kind, pattern.density, size, size, random), size, size, random);
      }
      std::vector<double> ratios, times;
      for (int i = 0; i <= rounds; ++i) {
        const double of_dense = seconds(dense, in, y.data(), size), own = seconds(sparse, in, y.data(), size);
        if (i) ratios.push_back(of_dense / own), times.push_back(of_dense);  // the first warms up
      }
      std::printf(
          "{\"pattern\": \"%s\", \"rows\": %d, \"bytes\": %.4f, \"speed\": %.3f, \"least\": %.3f, "
          "\"most\": %.3f, \"dense_microseconds\": %.1f}\n",
          pattern.name, rows, static_cast<double>(sparse.bytes) / dense.bytes, median(ratios),
          *std::min_element(ratios.begin(), ratios.end()), *std::max_element(ratios.begin(), ratios.end()),
          median(times) / count * 1e6);
      std::fflush(stdout);
    }
  }
}
