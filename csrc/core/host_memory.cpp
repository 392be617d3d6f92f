#include "host_memory.hpp"

#include <cstdio>

namespace relive {

void look_for_memory(int64_t bytes) {
#if defined(__linux__)
    std::FILE* file = std::fopen("/proc/meminfo", "r");
    if (!file) return;
    char line[128];
    long long kilobytes = -1;
    while (kilobytes < 0 && std::fgets(line, sizeof line, file))
        if (std::sscanf(line, "MemAvailable: %lld", &kilobytes) != 1) kilobytes = -1;
    std::fclose(file);
    if (kilobytes >= 0 && bytes / 1024 > kilobytes) throw OutOfMemory();
#else
    static_cast<void>(bytes);
#endif
}

}  // namespace relive
