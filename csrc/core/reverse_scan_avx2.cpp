// The reverse scan compiled for x86-64 with AVX2 and FMA; called only where both are supported.
#define RELIVE_SCAN_ISA avx2
#include "reverse_scan_kernels.hpp"

namespace relive::scan {

Table avx2_table() { return avx2::table(); }

}
