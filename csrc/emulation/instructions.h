// What the wrappers in csrc/ptx do when the kernels are compiled for the CPU. The meaning of each instruction
// is written here from the PTX ISA alone, independently of the decoded device path; machine.h holds the
// thread block.
#pragma once

#include <cstdint>

namespace emu {

// Place of the running thread.
int thread_index();
int block_index();
int grid_width();
int block_index_y();
int block_index_z();

// Barriers. Each orders memory among the threads it names, and only among those.
void sync_warp();
void sync_block();
void cluster_arrive_relaxed();
void cluster_wait();
void mbarrier_init_and_expect(uint32_t barrier, uint32_t bytes);
void publish_mbarrier();
void mbarrier_wait(uint32_t barrier);

// Programmatic dependent launch.
void launch_dependents();
void wait_for_dependencies();

// Memory. Shared addresses are offsets into the CTA's shared memory.
uint32_t dynamic_shared_base();
void load_shared(uint32_t address, void* value, int bytes);
void store_shared(uint32_t address, const void* value, int bytes);
void set_shared_bits(uint32_t address, uint32_t bits);
void store_async(uint32_t address, uint32_t barrier, uint32_t rank, const void* value, int bytes);
void load_global(const void* address, void* value, int bytes);
void store_global(void* address, const void* value, int bytes);

// cp.async: the bytes arrive when the issuing thread waits for their group, not before.
void cp_async(uint32_t shared_address, const void* source, int bytes, int width);
void cp_async_commit();
void cp_async_wait(int pending);

// Warp instructions.
uint32_t shuffle_xor(uint32_t value, int mask);
uint32_t shuffle(uint32_t value, int lane);
uint32_t ballot(bool flag);
void ldmatrix(uint32_t* registers, int matrices, uint32_t row_address);
void mma_nvfp4(float* d, const uint32_t* a, const uint32_t* b, uint32_t scale_a, uint32_t scale_b,
               int select_a, int select_b);

// Number formats.
float bits_to_float(uint32_t bits);
uint32_t float_to_bits(float value);
uint16_t float_to_bf16(float value);
uint16_t float_to_f16(float value);
float f16_to_float(uint16_t bits);
double e2m1_to_double(uint32_t code);
double ue4m3_to_double(uint32_t byte);
uint32_t float_to_e4m3(float value);  // of a non-negative number, saturating
uint32_t float_to_e2m1(float value);

}  // namespace emu
