// SPDX-License-Identifier: Apache-2.0
// Chooses an instruction set at run time.
#include <cstring>

#include "kernels.h"
#include "layout.h"

const Isa* find_isa(const char* name) {
    const Isa* known[] = {
#ifdef VLLM_DPA_X86
        amx_isa(),
        avx512_isa(),
        avx2_isa(),
#endif
        portable_isa(),
    };
    for (const Isa* isa : known) {
        if (isa && (!name || !*name || !strcmp(name, isa->name))) return isa;
    }
    return nullptr;
}

VLLM_DPA_API const char* vllm_dpa_find_isa(const char* name) {
    const Isa* isa = find_isa(name);
    return isa ? isa->name : nullptr;
}
