// The sweep for x86-64 machines with AVX2 and FMA. Compiled with those flags; called only where they are supported.
#define RELIVE_SWEEP_ISA avx2
#include "sweep.hpp"

namespace relive::sweep {

Table avx2_table() { return avx2::table(); }

}  // namespace relive::sweep
