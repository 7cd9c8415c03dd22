// Fibers, scheduler and barriers of the emulated thread block cluster.
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>

#include "state.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace emu {

Machine* machine = nullptr;

namespace {

void begin_switch(void** save, const void* stack, size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(save, stack, bytes);
#else
  (void)save, (void)stack, (void)bytes;
#endif
}

void end_switch(void* saved, const void** old_stack, size_t* old_bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(saved, old_stack, old_bytes);
#else
  (void)saved, (void)old_stack, (void)old_bytes;
#endif
}

}  // namespace

void leave_to_scheduler() {
  Thread& thread = self();
  begin_switch(thread.done ? nullptr : &thread.fake_stack, machine->scheduler_stack,
               machine->scheduler_stack_bytes);
  swapcontext(&thread.context, &machine->scheduler);
  end_switch(thread.fake_stack, nullptr, nullptr);
}

/// Let others run, now and then: memory operations are points where warps may overtake each other.
void maybe_yield() {
  if (machine->random() % 8 == 0) {
    machine->runnable.push_back(machine->running);
    leave_to_scheduler();
  }
}

void join(std::vector<uint32_t>& into, const std::vector<uint32_t>& from) {
  if (into.empty()) into.resize(from.size(), 0);
  for (size_t i = 0; i < from.size(); ++i) into[i] = std::max(into[i], from[i]);
}

/// Join `thread`'s clock into the meeting; the last one opens it and wakes those who wait. Returns the
/// generation.
uint64_t arrive(Meeting& meeting, Thread& thread, bool orders_memory) {
  const uint64_t generation = meeting.generation;
  if (orders_memory) join(meeting.clock[generation % 2], thread.clock);
  if (++meeting.arrived == meeting.expected) {
    meeting.arrived = 0;
    ++meeting.generation;
    meeting.clock[meeting.generation % 2].clear();
    machine->runnable.insert(machine->runnable.end(), meeting.waiting.begin(), meeting.waiting.end());
    meeting.waiting.clear();
  }
  return generation;
}

void wait(Meeting& meeting, uint64_t generation, Thread& thread, bool orders_memory) {
  if (meeting.generation == generation) {
    meeting.waiting.push_back(machine->running);
    leave_to_scheduler();
  }
  if (orders_memory) {
    join(thread.clock, meeting.clock[generation % 2]);
    ++thread.clock[machine->running];
  }
}

void meet(Meeting& meeting, bool orders_memory) {
  Thread& thread = self();
  wait(meeting, arrive(meeting, thread, orders_memory), thread, orders_memory);
}

/// Every lane puts `words` words in and, once all 32 have, sees everyone's. Orders no memory.
const uint32_t (*exchange(const uint32_t* mine, int words)) [kPayloadWords] {
  Warp& warp = own_warp();
  Thread& thread = self();
  const int parity = static_cast<int>(warp.exchange.generation % 2);
  std::copy(mine, mine + words, warp.payload[parity][thread.index % kWarp]);
  wait(warp.exchange, arrive(warp.exchange, thread, false), thread, false);
  return warp.payload[parity];
}

namespace {
  void thread_main() {
    end_switch(nullptr, &machine->scheduler_stack, &machine->scheduler_stack_bytes);
    (*machine->kernel)();
    Thread& thread = self();
    if (!thread.dependencies_done) fail("exit without griddepcontrol.wait");
    if (!thread.dependents_launched) fail("exit without griddepcontrol.launch_dependents");
    if (own_cta().mbarrier.pending > 0 && own_cta().live == 1)
      fail("exit before the bytes of an mbarrier arrived");
    if (!thread.open.empty()) fail("exit with cp.async copies in no group");
    for (auto& group : thread.groups) {
      if (!group.empty()) fail("exit with cp.async copies in flight");
    }
    if (thread.cluster_arrived) fail("exit between cluster arrive and wait");
    thread.done = true;
    --own_cta().live;
    leave_to_scheduler();
  }

  void build_cluster(Machine & m, int first_block) {
    const int per_cta = m.shape.threads;
    const int total = per_cta * m.shape.cluster;
    m.ctas = std::vector<Cta>(m.shape.cluster);
    m.cluster = Meeting{};
    m.cluster.expected = total;
    m.runnable.clear();
    for (int c = 0; c < m.shape.cluster; ++c) {
      Cta& cta = m.ctas[c];
      cta.block = first_block + c;
      cta.live = per_cta;
      cta.shared.assign(m.shape.shared_bytes, 0xFF);
      cta.cells.resize(m.shape.shared_bytes / 4);
      cta.barrier.expected = per_cta;
      cta.warps = std::vector<Warp>(per_cta / kWarp);
      for (Warp& warp : cta.warps) warp.exchange.expected = warp.barrier.expected = kWarp;
    }
    for (int i = 0; i < total; ++i) {
      Thread& thread = m.threads[i];
      unsigned char* stack = thread.stack;
      thread = Thread{};
      thread.stack = stack;
      thread.cta = i / per_cta;
      thread.index = i % per_cta;
      thread.clock.assign(total, 0);
      thread.clock[i] = 1;
      getcontext(&thread.context);
      thread.context.uc_stack.ss_sp = stack;
      thread.context.uc_stack.ss_size = kStackBytes;
      thread.context.uc_link = nullptr;
      makecontext(&thread.context, thread_main, 0);
      m.runnable.push_back(i);
    }
  }

  void run_cluster(Machine & m) {
    while (!m.runnable.empty()) {
      const size_t pick = m.random() % m.runnable.size();
      m.running = m.runnable[pick];
      m.runnable[pick] = m.runnable.back();
      m.runnable.pop_back();
      begin_switch(&m.scheduler_fake_stack, m.threads[m.running].stack, kStackBytes);
      swapcontext(&m.scheduler, &m.threads[m.running].context);
      end_switch(m.scheduler_fake_stack, nullptr, nullptr);
    }
    for (size_t i = 0; i < m.threads.size(); ++i) {
      if (!m.threads[i].done) {
        m.running = static_cast<int>(i);
        fail("deadlock: this thread waits at a barrier that others never reach");
      }
    }
  }

}  // namespace

void fail(const std::string& message) {
  if (machine != nullptr && machine->running >= 0) {
    std::fprintf(stderr, "emulation: %s (block %d, thread %d)\n", message.c_str(), own_cta().block,
                 self().index);
  } else {
    std::fprintf(stderr, "emulation: %s\n", message.c_str());
  }
  std::fflush(nullptr);
  std::_Exit(3);
}

void launch(const LaunchShape& shape, const std::function<void()>& kernel) {
  if (shape.threads % kWarp != 0 || shape.grid % shape.cluster != 0) fail("illegal launch shape");
  Machine m;
  m.shape = shape;
  m.kernel = &kernel;
  m.random.seed(shape.seed);
  m.threads = std::vector<Thread>(shape.threads * shape.cluster);
  for (Thread& thread : m.threads) {
    void* stack = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (stack == MAP_FAILED) fail("no memory for a fiber");
    thread.stack = static_cast<unsigned char*>(stack);
  }
  machine = &m;
  const int clusters = shape.grid / shape.cluster;
  std::vector<int> order(clusters * shape.grid_rows * shape.grid_planes);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), m.random);
  for (int index : order) {
    m.grid_row = index / clusters % shape.grid_rows;
    m.grid_plane = index / clusters / shape.grid_rows;
    build_cluster(m, index % clusters * shape.cluster);
    run_cluster(m);
    m.running = -1;
  }
  for (Thread& thread : m.threads) munmap(thread.stack, kStackBytes);
  machine = nullptr;
}

}  // namespace emu
