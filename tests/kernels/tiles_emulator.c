// The instructions of AMX that `native/tiles.h` uses, in software, for tests on CPUs that have AVX-512 but no tiles:
//
//     cc -O2 -mavx512f -shared -fPIC -o tiles_emulator.so tiles_emulator.c
//     LD_PRELOAD=./tiles_emulator.so REGARD_ISA=amx python ...
//
// Such a CPU answers each of them with SIGILL. The handler decodes it, does what it says to the tiles of its thread,
// and goes on behind it; that takes about two microseconds. Where the CPU has tiles, no signal comes, and nothing
// changes. Whatever else is illegal, or what the CPU would refuse (a tile that is not configured), ends the process as
// before.
#define _GNU_SOURCE
#include <immintrin.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <ucontext.h>

enum { TILES = 8, ROWS = 16, BYTES = 64, PAIRS = BYTES / 4 };

// The state of a thread. The fields of `config` are those of the operand of LDTILECFG.
static __thread __attribute__((tls_model("initial-exec"))) struct {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t bytes[16];  // of a row
        uint8_t rows[16];
    } config;
    _Alignas(64) uint8_t tile[TILES][ROWS][BYTES];
} state;
_Static_assert(sizeof state.config == 64, "as in the manual");

static uint64_t products;  // how many were computed, by all threads

// What the native library asks for, weakly, where the CPU has no tiles.
int regard_emulated_tiles(void) { return 1; }
uint64_t regard_tile_products(void) { return __atomic_load_n(&products, __ATOMIC_RELAXED); }

static bool configured(int t) { return state.config.palette == 1 && t < TILES && state.config.rows[t]; }

static bool configure(const void *from) {
    memcpy(&state.config, from, sizeof state.config);
    memset(state.tile, 0, sizeof state.tile);
    if (state.config.palette > 1 || state.config.start_row) return false;
    for (int t = 0; t < TILES; t++)
        if (state.config.rows[t] > ROWS || state.config.bytes[t] > BYTES || state.config.bytes[t] % 4) return false;
    return true;
}

static void load(int t, const uint8_t *from, int64_t stride) {
    memset(state.tile[t], 0, sizeof state.tile[t]);
    for (int i = 0; i < state.config.rows[t]; i++) memcpy(state.tile[t][i], from + i * stride, state.config.bytes[t]);
}

static void store(int t, uint8_t *to, int64_t stride) {
    for (int i = 0; i < state.config.rows[t]; i++) memcpy(to + i * stride, state.tile[t][i], state.config.bytes[t]);
}

// sum += a b, in the manual's order: the first numbers of all pairs, the second ones, both sums, and then what was
// there. Subnormal numbers are 0, before and after (MXCSR is the thread's own again after the handler).
static bool multiply(int sum, int a, int b) {
    const uint8_t *rows = state.config.rows;
    const uint16_t *bytes = state.config.bytes;
    if (sum == a || sum == b || a == b || rows[sum] != rows[a] || bytes[sum] != bytes[b] || bytes[a] != 4 * rows[b])
        return false;
    _mm_setcsr(0x1f80 | _MM_FLUSH_ZERO_ON | 0x40);
    const __m512i high = _mm512_set1_epi32((int)0xffff0000);
    const __mmask16 columns = (__mmask16)((1u << bytes[sum] / 4) - 1);
    for (int i = 0; i < rows[sum]; i++) {
        __m512 first = _mm512_setzero_ps(), second = first;
        for (int j = 0; j < rows[b]; j++) {
            int32_t pair;
            memcpy(&pair, state.tile[a][i] + 4 * j, 4);
            const __m512i x = _mm512_set1_epi32(pair), y = _mm512_load_si512(state.tile[b][j]);
            first = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(x, 16)),
                                    _mm512_castsi512_ps(_mm512_slli_epi32(y, 16)), first);
            second = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(x, high)),
                                     _mm512_castsi512_ps(_mm512_and_si512(y, high)), second);
        }
        const __m512 before = _mm512_load_ps(state.tile[sum][i]);
        _mm512_store_ps(state.tile[sum][i], _mm512_maskz_add_ps(columns, before, _mm512_add_ps(first, second)));
    }
    __atomic_fetch_add(&products, 1, __ATOMIC_RELAXED);
    return true;
}

// An instruction's registers, and its operand in memory.
struct Operands {
    int reg, rm, vvvv;  // `rm`: where it is no memory
    bool memory, has_index;
    int64_t address, stride;
};

static int64_t value_of(const greg_t *registers, int number) {
    static const int names[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                  REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
    return registers[names[number]];
}

// Reads ModRM and what follows it, and returns the end of the instruction. With an index the operand is a tile's rows,
// which begin at base + displacement and are `stride` bytes apart.
static const uint8_t *decode(const uint8_t *at, const uint8_t *vex, const greg_t *registers, struct Operands *to) {
    const int extend_reg = vex[1] & 0x80 ? 0 : 8, extend_index = vex[1] & 0x40 ? 0 : 8,
              extend_base = vex[1] & 0x20 ? 0 : 8;
    const int modrm = *at++, mode = modrm >> 6;
    *to = (struct Operands){.reg = (modrm >> 3 & 7) | extend_reg,
                            .rm = (modrm & 7) | extend_base,
                            .vvvv = ~vex[2] >> 3 & 15,
                            .memory = mode != 3};
    if (mode == 3) return at;
    int base = modrm & 7, bytes = mode == 1 ? 1 : mode == 2 ? 4 : 0;
    bool relative = false;  // to the next instruction
    if (base == 4) {
        const int sib = *at++, index = (sib >> 3 & 7) | extend_index;
        to->has_index = true;
        if (index != 4) to->stride = value_of(registers, index) << (sib >> 6);
        base = sib & 7;
        if (base == 5 && mode == 0) base = -1, bytes = 4;
    } else if (base == 5 && mode == 0) {
        base = -1, bytes = 4, relative = true;
    }
    if (base >= 0) to->address = value_of(registers, base | extend_base);
    int8_t near;
    int32_t far;
    if (bytes == 1) memcpy(&near, at, 1), to->address += near;
    if (bytes == 4) memcpy(&far, at, 4), to->address += far;
    at += bytes;
    if (relative) to->address += (int64_t)(intptr_t)at;
    return at;
}

// Does what the instruction says; returns the next one, or null where it is none of ours.
static const uint8_t *execute(const uint8_t *at, const greg_t *registers) {
    enum { NONE, P66, PF3, PF2 };
    if (at[0] != 0xc4 || (at[1] & 0x1f) != 2 || at[2] & 0x84) return NULL;  // VEX.128.0F38.W0
    struct Operands x;
    const int prefix = at[2] & 3, opcode = at[3];
    const uint8_t *next = decode(at + 4, at, registers, &x);
    uint8_t *const memory = (uint8_t *)(intptr_t)x.address;
    if (opcode == 0x5c && prefix == PF3 && !x.memory) {  // TDPBF16PS reg, rm, vvvv
        if (!configured(x.reg) || !configured(x.rm) || !configured(x.vvvv)) return NULL;
        return multiply(x.reg, x.rm, x.vvvv) ? next : NULL;
    }
    if (opcode == 0x49 && prefix == NONE && x.memory)  // LDTILECFG
        return configure(memory + (x.has_index ? x.stride : 0)) ? next : NULL;
    if (opcode == 0x49 && prefix == NONE && !x.memory && x.reg == 0 && x.rm == 0) {  // TILERELEASE
        memset(&state, 0, sizeof state);
        return next;
    }
    if (!configured(x.reg)) return NULL;
    if (opcode == 0x49 && prefix == PF2 && !x.memory)
        memset(state.tile[x.reg], 0, sizeof state.tile[x.reg]);                               // TILEZERO
    else if (opcode == 0x4b && prefix == PF2 && x.has_index) load(x.reg, memory, x.stride);   // TILELOADD
    else if (opcode == 0x4b && prefix == PF3 && x.has_index) store(x.reg, memory, x.stride);  // TILESTORED
    else return NULL;
    return next;
}

static void handle(int signal_number, siginfo_t *info, void *context) {
    (void)info;
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    const uint8_t *next = execute((const uint8_t *)(intptr_t)registers[REG_RIP], registers);
    if (next) registers[REG_RIP] = (greg_t)(intptr_t)next;
    else signal(signal_number, SIG_DFL);  // (it comes again)
}

__attribute__((constructor)) static void install(void) {
    struct sigaction action = {.sa_sigaction = handle, .sa_flags = SA_SIGINFO};
    sigaction(SIGILL, &action, NULL);
}
