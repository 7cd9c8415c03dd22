// Insides of the emulated machine, shared by its source files: machine.cc (fibers, scheduler, barriers),
// memory.cc (what may be touched when) and instructions.cc (one function per instruction).
#pragma once

#include <ucontext.h>

#include <deque>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "machine.h"

namespace emu {

constexpr size_t kStackBytes = 256 * 1024;
constexpr int kWarp = 32;
constexpr int kPayloadWords = 16;

struct Region {
  std::string name;
  RegionKind kind;
  const unsigned char* begin;
  size_t bytes;
  std::shared_ptr<std::vector<bool>> written;
};

struct Copy {
  uint32_t address;
  const unsigned char* source;
  int bytes;  // that are copied; the rest of the width becomes zeros
  int width;
};

// One 4-byte cell of shared memory. Threads are numbered through the cluster.
struct Cell {
  int writer = -1;
  uint32_t write_clock = 0;
  bool in_flight = false;
  std::vector<std::pair<int, uint32_t>> readers;
  std::vector<std::pair<int, uint32_t>>
      updaters;  // atomic, since the last store: in no order among themselves
};

// Threads that meet: a warp, a CTA or the cluster.
struct Meeting {
  int expected = 0;
  int arrived = 0;
  uint64_t generation = 0;
  std::vector<int> waiting;
  std::vector<uint32_t> clock[2];  // joined clock of the meeting being gathered, by generation parity
};

struct Warp {
  Meeting exchange;
  Meeting barrier;
  uint32_t payload[2][kWarp][kPayloadWords];
};

// One mbarrier a CTA is enough for the kernels here.
struct Mbarrier {
  uint32_t address = 0;
  bool initialised = false;
  bool published = false;
  int64_t pending = 0;
  std::vector<int> waiting;
  std::vector<uint32_t> clock;
  int initialised_by = 0;
  uint32_t initialised_at = 0;
};

struct Cta {
  int block = 0;
  int live = 0;
  std::vector<unsigned char> shared;
  std::vector<Cell> cells;
  std::vector<Warp> warps;
  Meeting barrier;
  Mbarrier mbarrier;
};

struct Thread {
  ucontext_t context;
  unsigned char* stack = nullptr;
  void* fake_stack = nullptr;
  int cta = 0;
  int index = 0;
  bool done = false;
  bool dependencies_done = false;
  bool dependents_launched = false;
  uint64_t cluster_generation = 0;
  bool cluster_arrived = false;
  bool knows_cluster_runs = false;
  std::vector<uint32_t> clock;
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> groups;
};

struct Machine {
  LaunchShape shape;
  const std::function<void()>* kernel = nullptr;
  std::vector<Cta> ctas;
  std::vector<Thread> threads;
  std::vector<int> runnable;
  Meeting cluster;
  ucontext_t scheduler;
  void* scheduler_fake_stack = nullptr;
  const void* scheduler_stack = nullptr;
  size_t scheduler_stack_bytes = 0;
  int running = -1;
  int grid_row = 0;
  int grid_plane = 0;
  std::mt19937_64 random;
};

extern std::vector<Region> regions;
extern Machine* machine;

inline Thread& self() {
  return machine->threads[machine->running];
}
inline Cta& own_cta() {
  return machine->ctas[self().cta];
}
inline Warp& own_warp() {
  return own_cta().warps[self().index / kWarp];
}

// Scheduling and barriers (machine.cc).
void maybe_yield();
void leave_to_scheduler();
void join(std::vector<uint32_t>& into, const std::vector<uint32_t>& from);
uint64_t arrive(Meeting& meeting, Thread& thread, bool orders_memory);
void wait(Meeting& meeting, uint64_t generation, Thread& thread, bool orders_memory);
void meet(Meeting& meeting, bool orders_memory);
const uint32_t (*exchange(const uint32_t* mine, int words))[kPayloadWords];

// Memory rules (memory.cc).
void check_read(Cta& cta, uint32_t address, int bytes);
void check_write(Cta& cta, uint32_t address, int bytes);
void check_update(Cta& cta, uint32_t address);
void record_write(Cta& cta, uint32_t address, int bytes);
Region& find_region(const void* address, int bytes, const char* what);
void check_global_read(const void* address, int bytes, const char* what);
void land(const Copy& copy);

}  // namespace emu
