// A thread block cluster on the CPU. Every CUDA thread is a fiber; a seeded scheduler decides who runs next,
// so each seed is one legal interleaving of warps and CTAs. Besides running the kernel the machine checks
// what a lucky run hides:
//
//   * shared memory: each 4-byte cell remembers who wrote and read it at which vector-clock time. An access
//   that no
//     barrier orders after a conflicting one is an error, whatever the interleaving was.
//   * cp.async: a cell is poisoned from the issue of a copy to the wait of the issuing thread; touching it is
//   an error.
//   * global memory: accesses must lie in a declared region, aligned. Before griddepcontrol.wait only regions
//   declared
//     `kWeights` may be read and nothing may be written. An output element is written at most once.
//   * exits: every thread has waited for its dependencies, has let the dependents go and has no copy in
//   flight.
//   * a remote store needs a target CTA that is known to have started and has not exited.
//
// An error prints one line and ends the process with status 3.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "instructions.h"

namespace emu {

enum class RegionKind { kWeights, kInput, kOutput };

/// Declare [begin, begin + bytes) as memory that the next launches may touch.
void declare_region(const char* name, RegionKind kind, const void* begin, size_t bytes);

/// Take back every declaration, for a launch that reads what the last one wrote.
void forget_regions();

struct LaunchShape {
  int grid;
  int grid_rows;
  int cluster;
  int threads;
  uint32_t shared_bytes;
  uint64_t seed;
  int grid_planes = 1;
};

/// Run `kernel` once for every thread of the grid. Clusters run one after another in an order given by the
/// seed.
void launch(const LaunchShape& shape, const std::function<void()>& kernel);

/// Print `message` with the running thread's place and end the process with status 3.
[[noreturn]] void fail(const std::string& message);

}  // namespace emu
