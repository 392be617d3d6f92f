// The sweep for every machine the module is built for: SSE2 on x86-64, NEON on ARM.
#define RELIVE_SWEEP_ISA baseline
#include "sweep.hpp"

namespace relive::sweep {

Table baseline_table() { return baseline::table(); }

}  // namespace relive::sweep
