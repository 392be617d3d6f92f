// Which instruction set the reverse scan uses on this machine.
#include "reverse_scan.hpp"

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
    return baseline_table();
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
