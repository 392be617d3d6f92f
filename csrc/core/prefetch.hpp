// Asks the processor to bring an address into its cache before the address is read.
#pragma once

#if defined(__GNUC__) || defined(__clang__)
#define RELIVE_PREFETCH(address) __builtin_prefetch(address)
#else
#define RELIVE_PREFETCH(address) static_cast<void>(address)
#endif
