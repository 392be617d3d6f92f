// The reverse scan compiled for the baseline instruction set (SSE2 on x86-64, NEON on ARM), and the choice between it
// and AVX2.
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

Table get_table(bool avx2) {
#ifdef RELIVE_AVX2
    if (avx2) return avx2_table();
#endif
    static_cast<void>(avx2);
    return baseline::table();
}

Table& active_table() {
    static Table table = get_table(has_avx2());
    return table;
}

}

const Table& table() { return active_table(); }

bool use_avx2(bool on) {
    const bool avx2 = on && has_avx2();
    active_table() = get_table(avx2);
    return avx2;
}

}
