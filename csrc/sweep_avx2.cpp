// The sweep for x86-64 machines with AVX2 and FMA. Compiled with those flags; called only where they are supported.
#define RECOLLECT_SWEEP_ISA avx2
#include "sweep.hpp"

namespace recollect::sweep {

Table avx2_table() { return avx2::table(); }

}  // namespace recollect::sweep
