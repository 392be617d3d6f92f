// The reverse scan for x86-64 machines with AVX2 and FMA. Compiled with those flags; called only where they are supported.
#define RELIVE_SCAN_ISA avx2
#include "reverse_scan_kernels.hpp"

namespace relive::scan {

Table avx2_table() { return avx2::table(); }

}  // namespace relive::scan
