// What a kernel may touch when: races and copies in flight in shared memory, declared regions in global
// memory.
#include <algorithm>
#include <cstring>

#include "state.h"

namespace emu {

std::vector<Region> regions;

static bool knows(const Thread& thread, int other, uint32_t clock) {
  return thread.clock[other] >= clock;
}

static void note(std::vector<std::pair<int, uint32_t>>& accesses, const Thread& thread) {
  const auto mine = std::make_pair(machine->running, thread.clock[machine->running]);
  auto seen = std::find_if(accesses.begin(), accesses.end(), [&](auto& a) { return a.first == mine.first; });
  if (seen == accesses.end()) {
    accesses.push_back(mine);
  } else {
    *seen = mine;
  }
}

static void require_all_known(const std::vector<std::pair<int, uint32_t>>& accesses, const Thread& thread,
                              const char* race) {
  for (auto& [other, clock] : accesses) {
    if (other != machine->running && !knows(thread, other, clock)) fail(race);
  }
}

void check_read(Cta& cta, uint32_t address, int bytes) {
  Thread& thread = self();
  if (address % bytes != 0) fail("misaligned shared load");
  if (address + bytes > cta.shared.size()) fail("shared load out of bounds");
  for (uint32_t i = address / 4; i < (address + bytes) / 4; ++i) {
    Cell& cell = cta.cells[i];
    if (cell.in_flight) fail("shared load of bytes that a cp.async has not delivered");
    if (cell.writer < 0) fail("shared load of bytes that nothing wrote");
    if (!knows(thread, cell.writer, cell.write_clock)) fail("race: shared load not ordered after the store");
    require_all_known(cell.updaters, thread, "race: shared load not ordered after an atomic");
    note(cell.readers, thread);
  }
}

void check_write(Cta& cta, uint32_t address, int bytes) {
  Thread& thread = self();
  if (address % bytes != 0) fail("misaligned shared store");
  if (address + bytes > cta.shared.size()) fail("shared store out of bounds");
  for (uint32_t i = address / 4; i < (address + bytes) / 4; ++i) {
    Cell& cell = cta.cells[i];
    if (cell.in_flight) fail("shared store over a cp.async in flight");
    if (cell.writer >= 0 && !knows(thread, cell.writer, cell.write_clock)) {
      fail("race: shared store not ordered after another store");
    }
    require_all_known(cell.updaters, thread, "race: shared store not ordered after an atomic");
    require_all_known(cell.readers, thread, "race: shared store not ordered after a load of the old value");
  }
}

void check_update(Cta& cta, uint32_t address) {
  Thread& thread = self();
  if (address % 4 != 0) fail("misaligned shared atomic");
  if (address + 4 > cta.shared.size()) fail("shared atomic out of bounds");
  Cell& cell = cta.cells[address / 4];
  if (cell.in_flight) fail("shared atomic on a cp.async in flight");
  if (cell.writer < 0) fail("shared atomic on bytes that nothing wrote");
  if (!knows(thread, cell.writer, cell.write_clock)) fail("race: shared atomic not ordered after the store");
  require_all_known(cell.readers, thread, "race: shared atomic not ordered after a load of the old value");
  note(cell.updaters, thread);
}

void record_write(Cta& cta, uint32_t address, int bytes) {
  for (uint32_t i = address / 4; i < (address + bytes) / 4; ++i) {
    Cell& cell = cta.cells[i];
    cell.writer = machine->running;
    cell.write_clock = self().clock[machine->running];
    cell.in_flight = false;
    cell.readers.clear();
    cell.updaters.clear();
  }
}

Region& find_region(const void* address, int bytes, const char* what) {
  const auto* p = static_cast<const unsigned char*>(address);
  for (Region& region : regions) {
    if (p >= region.begin && p + bytes <= region.begin + region.bytes) return region;
  }
  fail(std::string(what) + " outside every declared region");
}

void check_global_read(const void* address, int bytes, const char* what) {
  Region& region = find_region(address, bytes, what);
  if (region.kind == RegionKind::kOutput) fail(std::string(what) + " of output '" + region.name + "'");
  if (region.kind != RegionKind::kWeights && !self().dependencies_done) {
    fail(std::string(what) + " of '" + region.name + "' before griddepcontrol.wait");
  }
}

void land(const Copy& copy) {
  Cta& cta = own_cta();
  std::memcpy(&cta.shared[copy.address], copy.source, copy.bytes);
  std::memset(&cta.shared[copy.address + copy.bytes], 0, copy.width - copy.bytes);
  record_write(cta, copy.address, copy.width);
}

void forget_regions() {
  regions.clear();
}

void declare_region(const char* name, RegionKind kind, const void* begin, size_t bytes) {
  auto written = kind == RegionKind::kOutput ? std::make_shared<std::vector<bool>>(bytes) : nullptr;
  regions.push_back({name, kind, static_cast<const unsigned char*>(begin), bytes, written});
}

}  // namespace emu
