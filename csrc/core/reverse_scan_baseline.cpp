// The reverse scan for every machine that the module is built for: SSE2 on x86-64, NEON on ARM.
#define RELIVE_SCAN_ISA baseline
#include "reverse_scan_loops.hpp"

namespace relive::scan {

Table baseline_table() { return baseline::table(); }

}  // namespace relive::scan
