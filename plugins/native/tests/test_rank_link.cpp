// Ranks on one file of shared memory: as threads, and as processes that die or stop. Run it under TSan too.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "rank_link.h"
#include "rank_steps.h"
#include "small_model.h"

namespace {

using ew::RankLink;
using std::chrono::microseconds;

RankLink join(const RankLink& first, int rank, microseconds spin = microseconds(50)) {
  std::vector<int64_t> caches;
  for (int i = 0; i < first.ranks(); ++i) caches.push_back(first.cache_bytes(i));
  return RankLink(dup(first.fd()), rank, caches, spin);
}

// Every rank writes before a meeting what all read after it, in two places in turn: an even number of rounds,
// if others follow. Returns how often it was wrong.
int64_t meet_often(RankLink& link, int rounds) {
  const int ranks = link.ranks();
  volatile int32_t* const places =
      reinterpret_cast<int32_t*>(link.memory(3, 2 * ranks * static_cast<int64_t>(sizeof(int32_t))));
  int64_t wrong = 0;
  for (int round = 1; round <= rounds; ++round) {
    volatile int32_t* const now = places + (round % 2) * ranks;
    now[link.rank()] = round;
    link.meet({0, ranks});
    for (int rank = 0; rank < ranks; ++rank) wrong += now[rank] != round;
  }
  return wrong;
}

// Runs `body` in a process of its own, which exits with what it gives; 99 for an exception.
pid_t start(const std::function<int()>& body) {
  const pid_t child = fork();
  if (child != 0) return child;
  int code = 99;
  try {
    code = body();
  } catch (const std::exception& e) {
    std::fprintf(stderr, "child: %s\n", e.what());
  }
  _exit(code);
}

int exit_code(pid_t child) {
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

void threads_meet() {
  for (const int ranks : {2, 3, 4}) {
    RankLink first(-1, 0, std::vector<int64_t>(static_cast<size_t>(ranks), 0), microseconds(50));
    std::vector<std::thread> others;
    std::atomic<int64_t> wrong = 0;
    for (int rank = 1; rank < ranks; ++rank) {
      others.emplace_back([&, rank] {
        RankLink link = join(first, rank);
        wrong += meet_often(link, 20'000);
      });
    }
    wrong += meet_often(first, 20'000);
    for (std::thread& other : others) other.join();
    CHECK(wrong == 0) << ranks << " ranks";
  }
}

void processes_meet() {
  for (const int ranks : {2, 3, 4}) {
    for (const int spin : {0, 5}) {  // with 0 whoever comes first always sleeps
      const int rounds = (spin == 0 ? 5'000 : 100'000) * 2 / ranks;
      RankLink first(-1, 0, std::vector<int64_t>(static_cast<size_t>(ranks), 0), microseconds(spin));
      std::vector<pid_t> others;
      for (int rank = 1; rank < ranks; ++rank) {
        others.push_back(start([&] {
          RankLink link = join(first, rank, microseconds(spin));
          return meet_often(link, rounds) == 0 ? 0 : 1;
        }));
      }
      CHECK(meet_often(first, rounds) == 0) << ranks << " ranks";
      for (const pid_t other : others) CHECK(exit_code(other) == 0) << ranks << " ranks";
    }
  }
}

// Rank 0 sends a message a step, by a region that holds one, and rank 1 is late in taking every tenth.
void messages_wait_for_room() {
  RankLink first(-1, 0, {0, 0}, microseconds(20));
  const pid_t other = start([&] {
    RankLink link = join(first, 1, microseconds(20));
    std::span<const char> inputs;
    for (int count = 1; link.wait_step(&inputs); ++count) {
      if (count % 10 == 0) usleep(1000);
      link.await_message({0, 1});
      if (*reinterpret_cast<volatile int32_t*>(link.memory(7, 4)) != count) return 1;
      link.taken();
      link.finish_step();
    }
    return 0;
  });
  for (int count = 1; count <= 300; ++count) {
    first.inbox(1);
    first.post(1);
    first.await_room({1, 1});
    *reinterpret_cast<volatile int32_t*>(first.memory(7, 4)) = count;
    first.sent();
  }
  first.wait_done();
  first.stop();
  CHECK(exit_code(other) == 0);
}

void one_that_dies_ends_all() {
  for (const int spin : {0, 1'000'000}) {
    RankLink first(-1, 0, {0, 0, 0}, microseconds(spin));
    const auto live = [&](int rank, int dies) {
      return start([&first, rank, dies, spin] {
        RankLink link = join(first, rank, microseconds(spin));
        try {
          meet_often(link, dies);
          if (rank == 1) std::raise(SIGKILL);
          meet_often(link, 1'000'000);
        } catch (const std::runtime_error& e) {
          return std::string(e.what()) == "rank 1 was killed" ? 0 : 1;
        }
        return 2;
      });
    };
    const pid_t killed = live(1, 100), other = live(2, 100);
    std::thread watcher([&] {
      CHECK(exit_code(killed) == 128 + SIGKILL);
      first.abandon("rank 1 was killed");
      first.abandon("too late to be heard");
    });
    std::string problem;
    try {
      meet_often(first, 1'000'000);
    } catch (const std::runtime_error& e) {
      problem = e.what();
    }
    watcher.join();
    CHECK(problem == "rank 1 was killed") << problem;
    CHECK(first.problem() == problem);
    CHECK_THROWS(first.meet({0, 3}), std::runtime_error);
    CHECK_THROWS(first.inbox(1), std::runtime_error);
    CHECK(exit_code(other) == 0);
  }
}

void one_that_stops_and_goes_on_is_waited_for() {
  RankLink first(-1, 0, {0, 0}, microseconds(0));
  const pid_t child = start([&] {
    RankLink link = join(first, 1);
    int64_t wrong = meet_often(link, 100);
    std::raise(SIGSTOP);
    wrong += meet_often(link, 200);
    return wrong == 0 ? 0 : 1;
  });
  std::atomic<bool> stopped = false;
  std::thread watcher([&] {
    int status = 0;
    waitpid(child, &status, WUNTRACED);
    CHECK(WIFSTOPPED(status));
    stopped = true;
    kill(child, SIGCONT);
  });
  CHECK(meet_often(first, 100) == 0);
  CHECK(meet_often(first, 200) == 0);
  CHECK(stopped);  // the last meetings needed it to go on
  watcher.join();
  const int code = exit_code(child);
  CHECK(code == 0) << code;
}

void steps_reach_all() {
  RankLink first(-1, 0, {0, 0, 0}, microseconds(20));
  std::vector<pid_t> others;
  for (const int rank : {1, 2}) {
    others.push_back(start([&first, rank] {
      RankLink link = join(first, rank, microseconds(20));
      std::span<const char> inputs;
      int count = 0;
      while (link.wait_step(&inputs)) {
        ++count;
        for (const char byte : inputs) {
          if (byte != static_cast<char>(count)) return 1;
        }
        if (inputs.size() != static_cast<size_t>(count) * 7) return 2;
        try {
          if (count % 10 == 3 && rank == 2) throw std::runtime_error("an odd step");
          meet_often(link, count % 5);
        } catch (const std::runtime_error& e) {
          if (!link.problem().empty()) return 3;
          link.fail_step(e.what());
        }
        link.finish_step();
      }
      return count == 300 ? 0 : 4;
    }));
  }
  for (int count = 1; count <= 300; ++count) {
    std::memset(first.inbox(count * 7), count, static_cast<size_t>(count) * 7);
    first.post(count * 7);
    std::string problem;
    try {
      CHECK(meet_often(first, count % 5) == 0);
    } catch (const std::runtime_error& e) {
      problem = e.what();
      first.fail_step(problem);
    }
    CHECK(problem == (count % 10 == 3 ? "rank 2: an odd step" : "")) << count << ": " << problem;
  }
  first.wait_done();
  first.stop();
  for (const pid_t other : others) CHECK(exit_code(other) == 0);
}

// A model that runs whole on both ranks, and a step that no rank can take.
void executors_run_what_is_posted() {
  ew::testing::Model model;
  RankLink first(-1, 0, {0, 0}, microseconds(20));
  const pid_t other = start([&] {
    RankLink link = join(first, 1, microseconds(20));
    ew::Executor executor(model.program, {4}, 1, "portable");
    ew::run_posted_steps(link, executor);
    const std::vector<float> rows(executor.logits(), executor.logits() + 2 * ew::testing::Model::kVocab);
    std::memcpy(link.memory(0, 1 << 20) + 4096, rows.data(), rows.size() * sizeof(float));
    return 0;
  });
  ew::Executor executor(model.program, {4}, 1, "portable");
  const std::vector<int32_t> ids = {5, 36, 1}, far = {5, 37, 1}, places = {0, 1, 2}, starts = {0, 3},
                             lengths = {3}, rows = {0, 2}, slots = {96, 97, 98}, table = {3};
  ew::StepArrays step{{{ids}, {places}, {starts}, {lengths}, {rows}, {slots}, {table}}};
  for (int count = 0; count < 50; ++count) {
    step.ports[0] = {count % 3 == 1 ? far : ids};
    ew::post_step(first, step);
    if (count % 3 == 1) {
      CHECK_THROWS(executor.run(step), std::invalid_argument);
    } else {
      executor.run(step);
    }
  }
  step.ports[0] = {ids};
  ew::post_step(first, step);
  executor.run(step);
  first.wait_done();
  first.stop();
  CHECK(exit_code(other) == 0);
  CHECK(std::memcmp(first.memory(0, 1 << 20) + 4096, executor.logits(),
                    2 * ew::testing::Model::kVocab * sizeof(float)) == 0);
}

void caches_are_seen_by_all() {
  const int64_t page = RankLink::kCacheAlign;
  RankLink first(-1, 0, {3 * page, 2 * page + 5}, microseconds(0));
  RankLink second = join(first, 1);
  CHECK(first.cache_memory(page + 1) == first.cache_region(0));
  CHECK(first.cache_memory(page) == first.cache_region(0) + 2 * page);
  CHECK_THROWS(first.cache_memory(1), std::bad_alloc);
  char* const own = second.cache_memory(page) - page + page;
  CHECK(own[0] == 0);
  own[0] = 'a';
  CHECK(second.cache_memory(page + 5) == own + page);
  own[2 * page + 4] = 'z';
  CHECK(first.cache_region(1)[0] == 'a' && first.cache_region(1)[2 * page + 4] == 'z');
  CHECK_THROWS(second.cache_memory(-1), std::bad_alloc);
}

void what_does_not_fit_is_refused() {
  RankLink first(-1, 0, {4096, 4096}, microseconds(0));
  CHECK_THROWS(first.memory(0, int64_t{1} << 37), ew::NoSharedMemory);
  CHECK_THROWS(first.memory(RankLink::kRegions, 1), std::bad_alloc);
  CHECK_THROWS(first.inbox(int64_t{1} << 33), ew::NoSharedMemory);
  CHECK_THROWS(RankLink(dup(first.fd()), 1, {4096, 8192}, microseconds(0)), std::invalid_argument);
  CHECK_THROWS(RankLink(dup(first.fd()), 2, {4096, 4096}, microseconds(0)), std::invalid_argument);
  CHECK_THROWS(RankLink(-1, 0, {4096, INT64_MAX}, microseconds(0)), std::bad_alloc);
  const int stranger = memfd_create("stranger", MFD_CLOEXEC);
  CHECK(ftruncate(stranger, lseek(first.fd(), 0, SEEK_END)) == 0);
  CHECK_THROWS(RankLink(stranger, 1, {4096, 4096}, microseconds(0)), std::invalid_argument);
}

}  // namespace

int main() {
  RUN(processes_meet);  // before the first thread: a forked child has none
  RUN(steps_reach_all);
  RUN(messages_wait_for_room);
  RUN(executors_run_what_is_posted);
  RUN(threads_meet);
  RUN(one_that_dies_ends_all);
  RUN(one_that_stops_and_goes_on_is_waited_for);
  RUN(caches_are_seen_by_all);
  RUN(what_does_not_fit_is_refused);
  return ew::check::result();
}
