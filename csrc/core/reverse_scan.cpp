// The reverse scan for every machine that the module is built for (SSE2 on x86-64, NEON on ARM), and the choice between it
// and the one for AVX2.
#define RELIVE_SCAN_ISA baseline
#include "reverse_scan_kernels.hpp"

namespace relive::scan {
namespace {

bool has_avx2() {
#ifdef RELIVE_AVX2
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
    return false;
#endif
}

Table table_of(bool avx2) {
#ifdef RELIVE_AVX2
    if (avx2) return avx2_table();
#endif
    static_cast<void>(avx2);
    return baseline::table();
}

Table& chosen() {
    static Table table = table_of(has_avx2());
    return table;
}

}  // namespace

const Table& table() { return chosen(); }

bool use_avx2(bool on) {
    const bool avx2 = on && has_avx2();
    chosen() = table_of(avx2);
    return avx2;
}

}  // namespace relive::scan
