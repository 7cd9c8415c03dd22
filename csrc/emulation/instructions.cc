// One function per instruction that csrc/ptx wraps.
#include <algorithm>
#include <cstring>

#include "mma_model.h"
#include "state.h"

namespace emu {

int thread_index() {
  return self().index;
}
int block_index() {
  return own_cta().block;
}
int grid_width() {
  return machine->shape.grid;
}
int block_index_y() {
  return machine->grid_row;
}
int block_index_z() {
  return machine->grid_plane;
}
uint32_t dynamic_shared_base() {
  return 0;
}

void sync_warp() {
  meet(own_warp().barrier, true);
}
void sync_block() {
  meet(own_cta().barrier, true);
}

// The relaxed arrive publishes nothing but that this CTA runs, and its mbarrier if that was fenced before.
void cluster_arrive_relaxed() {
  Thread& thread = self();
  if (thread.cluster_arrived) fail("cluster arrive twice without a wait");
  thread.cluster_arrived = true;
  thread.cluster_generation = arrive(machine->cluster, thread, false);
}

void cluster_wait() {
  Thread& thread = self();
  if (!thread.cluster_arrived) fail("cluster wait without an arrive");
  wait(machine->cluster, thread.cluster_generation, thread, false);
  thread.cluster_arrived = false;
  thread.knows_cluster_runs = true;
}

void mbarrier_init_and_expect(uint32_t barrier, uint32_t bytes) {
  Mbarrier& mbarrier = own_cta().mbarrier;
  if (barrier % 8 != 0) fail("misaligned mbarrier");
  if (mbarrier.initialised) fail("mbarrier initialised twice");
  store_shared(barrier, &bytes, 4);  // the place is taken: other uses of it are races
  mbarrier.address = barrier;
  mbarrier.initialised = true;
  mbarrier.pending = bytes;
  mbarrier.initialised_by = machine->running;
  mbarrier.initialised_at = self().clock[machine->running];
}

void publish_mbarrier() {
  Mbarrier& mbarrier = own_cta().mbarrier;
  if (mbarrier.initialised && !self().cluster_arrived) mbarrier.published = true;
}

void mbarrier_wait(uint32_t barrier) {
  Thread& thread = self();
  Mbarrier& mbarrier = own_cta().mbarrier;
  if (!mbarrier.initialised || mbarrier.address != barrier) fail("wait on something that is no mbarrier");
  if (thread.clock[mbarrier.initialised_by] < mbarrier.initialised_at)
    fail("race: mbarrier not known to be initialised");
  if (mbarrier.pending > 0) {
    mbarrier.waiting.push_back(machine->running);
    leave_to_scheduler();
  }
  join(thread.clock, mbarrier.clock);
}

void launch_dependents() {
  self().dependents_launched = true;
}
void wait_for_dependencies() {
  self().dependencies_done = true;
}

void load_shared(uint32_t address, void* value, int bytes) {
  maybe_yield();
  check_read(own_cta(), address, bytes);
  std::memcpy(value, &own_cta().shared[address], bytes);
}

static void store_to(Cta& cta, uint32_t address, const void* value, int bytes) {
  check_write(cta, address, bytes);
  record_write(cta, address, bytes);
  std::memcpy(&cta.shared[address], value, bytes);
}

void store_shared(uint32_t address, const void* value, int bytes) {
  maybe_yield();
  store_to(own_cta(), address, value, bytes);
}

void set_shared_bits(uint32_t address, uint32_t bits) {
  maybe_yield();
  Cta& cta = own_cta();
  check_update(cta, address);
  uint32_t word;
  std::memcpy(&word, &cta.shared[address], sizeof(word));
  word |= bits;
  std::memcpy(&cta.shared[address], &word, sizeof(word));
}

void store_async(uint32_t address, uint32_t barrier, uint32_t rank, const void* value, int bytes) {
  maybe_yield();
  Thread& thread = self();
  if (rank >= static_cast<uint32_t>(machine->shape.cluster))
    fail("remote store to a rank outside the cluster");
  Cta& target = machine->ctas[rank];
  if (!thread.knows_cluster_runs) fail("remote store to a CTA that may not have started");
  if (target.live == 0) fail("remote store to a CTA that has exited");
  Mbarrier& mbarrier = target.mbarrier;
  if (!mbarrier.published || mbarrier.address != barrier)
    fail("remote store counts on an mbarrier never published");
  store_to(target, address, value, bytes);
  mbarrier.pending -= bytes;
  if (mbarrier.pending < 0) fail("more bytes arrive at an mbarrier than it expects");
  join(mbarrier.clock, thread.clock);
  ++thread.clock[machine->running];
  if (mbarrier.pending == 0) {
    machine->runnable.insert(machine->runnable.end(), mbarrier.waiting.begin(), mbarrier.waiting.end());
    mbarrier.waiting.clear();
  }
}

void load_global(const void* address, void* value, int bytes) {
  maybe_yield();
  if (reinterpret_cast<uintptr_t>(address) % bytes != 0) fail("misaligned global load");
  check_global_read(address, bytes, "load");
  std::memcpy(value, address, bytes);
}

void store_global(void* address, const void* value, int bytes) {
  maybe_yield();
  if (reinterpret_cast<uintptr_t>(address) % bytes != 0) fail("misaligned global store");
  Region& region = find_region(address, bytes, "store");
  if (region.kind != RegionKind::kOutput) fail("store to '" + region.name + "', which is no output");
  if (!self().dependencies_done) fail("store to '" + region.name + "' before griddepcontrol.wait");
  const auto offset = static_cast<const unsigned char*>(address) - region.begin;
  for (int i = 0; i < bytes; ++i) {
    if ((*region.written)[offset + i]) fail("'" + region.name + "' is written twice");
    (*region.written)[offset + i] = true;
  }
  std::memcpy(address, value, bytes);
}

void cp_async(uint32_t shared_address, const void* source, int bytes, int width) {
  maybe_yield();
  Cta& cta = own_cta();
  if (bytes < 0 || bytes > width) fail("cp.async with a source size below 0 or above its width");
  if (reinterpret_cast<uintptr_t>(source) % width != 0) fail("misaligned cp.async source");
  if (bytes > 0) check_global_read(source, bytes, "cp.async");
  check_write(cta, shared_address, width);
  for (uint32_t i = shared_address / 4; i < (shared_address + width) / 4; ++i) cta.cells[i].in_flight = true;
  std::memset(&cta.shared[shared_address], 0xFF, width);
  self().open.push_back({shared_address, static_cast<const unsigned char*>(source), bytes, width});
}

void cp_async_commit() {
  self().groups.push_back(std::move(self().open));
  self().open.clear();
}

void cp_async_wait(int pending) {
  Thread& thread = self();
  while (static_cast<int>(thread.groups.size()) > pending) {
    for (const Copy& copy : thread.groups.front()) land(copy);
    thread.groups.pop_front();
  }
  maybe_yield();
}

uint32_t shuffle_xor(uint32_t value, int mask) {
  if (mask < 1 || mask >= kWarp) fail("shuffle with a mask outside 1..31");
  return exchange(&value, 1)[(self().index % kWarp) ^ mask][0];
}

uint32_t shuffle(uint32_t value, int lane) {
  if (lane < 0 || lane >= kWarp) fail("shuffle from a lane outside 0..31");
  return exchange(&value, 1)[lane][0];
}

uint32_t ballot(bool flag) {
  const uint32_t mine = flag;
  const auto* lanes = exchange(&mine, 1);
  uint32_t votes = 0;
  for (int lane = 0; lane < kWarp; ++lane) votes |= lanes[lane][0] << lane;
  return votes;
}

void ldmatrix(uint32_t* registers, int matrices, uint32_t row_address) {
  const auto* addresses = exchange(&row_address, 1);
  const int lane = self().index % kWarp;
  for (int i = 0; i < matrices; ++i) {
    const uint32_t row = addresses[8 * i + lane / 4][0];
    if (row % 16 != 0) fail("misaligned ldmatrix row");
    check_read(own_cta(), row + 4 * (lane % 4), 4);
    std::memcpy(&registers[i], &own_cta().shared[row + 4 * (lane % 4)], 4);
  }
}

// Each lane computes its own four results of the 16x8 tile from every lane's registers.
void mma_nvfp4(float* d, const uint32_t* a, const uint32_t* b, uint32_t scale_a, uint32_t scale_b,
               int select_a, int select_b) {
  const uint32_t mine[kMmaWords] = {a[0], a[1], a[2], a[3], b[0], b[1], scale_a, scale_b};
  const auto* lanes = exchange(mine, kMmaWords);
  for (int i = 0; i < 4; ++i) {
    const MmaElement element =
        mma_element(lanes[0], kPayloadWords, select_a, select_b, self().index % kWarp, i);
    if (element.illegal) fail("ue4m3 scale with its top bit set");
    d[i] = static_cast<float>(static_cast<double>(d[i]) + element.sum);
  }
}

}  // namespace emu
