// Intel's AMX without one: its instructions trap (SIGILL), and this handler does to memory what they would do to tiles.
//
// Intel's manual, volume 2: LDTILECFG, TILERELEASE, TILEZERO, TILELOADD, TILESTORED and TDPBF16PS. An instruction that a
// processor with the unit would refuse, because tiles are not configured or their shapes do not fit, ends the process
// as it would there. What has no tiles of AMX goes to the handler that was there before.

#define _GNU_SOURCE
#include <immintrin.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <ucontext.h>

enum { TILES = 8, ROWS = 16, ROW_BYTES = 64, CONFIGURATION_BYTES = 64, LANES = 16 };

typedef struct {
    int rows, row_bytes;
} Shape;

static __thread struct {
    int configured;
    Shape shapes[TILES];
    _Alignas(64) uint8_t data[TILES][ROWS][ROW_BYTES];
} unit;  // of a thread

static uint64_t products;
static struct sigaction previous;

// Of the processor's numbers of general registers.
static const int registers[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                  REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};

typedef struct {
    int prefix, opcode;    // pp of the VEX prefix: 0 none, 1 66, 2 F3, 3 F2
    int reg, rm, vvvv;     // operands that are registers
    int in_memory;         // whether the operand of rm is in memory, and then
    uint8_t *address;      // where, without the index
    int64_t stride;        // index, scaled; 0 where there is none
    const uint8_t *after;  // the next instruction
} Instruction;

// Whether there is an instruction of map 0F38 with a VEX prefix of three bytes, W0 and 128 bits, and which one.
static int decode(const uint8_t *at, const greg_t *values, Instruction *found) {
    if (at[0] != 0xC4 || (at[1] & 0x1F) != 2 || (at[2] & 0x84) != 0) return 0;
    const int r = at[1] & 0x80 ? 0 : 8, x = at[1] & 0x40 ? 0 : 8, b = at[1] & 0x20 ? 0 : 8;
    const int mod = at[4] >> 6, rm = at[4] & 7;
    *found = (Instruction){.prefix = at[2] & 3, .opcode = at[3], .reg = r | (at[4] >> 3 & 7), .rm = b | rm};
    found->vvvv = ~(at[2] >> 3) & 15;
    found->in_memory = mod != 3;
    const uint8_t *next = at + 5;
    if (found->in_memory) {
        int base = b | rm, from_here = 0;
        if (rm == 4) {
            const int index = x | (*next >> 3 & 7), scale = *next >> 6;
            if (index != 4) found->stride = (int64_t)((uint64_t)values[registers[index]] << scale);
            base = b | (*next & 7);
            ++next;
            if (mod == 0 && (base & 7) == 5) base = -1;
        } else if (mod == 0 && rm == 5) {
            base = -1;
            from_here = 1;
        }
        int32_t offset = 0;
        if (mod == 1) {
            offset = (int8_t)*next++;
        } else if (mod == 2 || base < 0) {
            memcpy(&offset, next, 4);
            next += 4;
        }
        const int64_t origin = from_here ? (int64_t)(intptr_t)next : base < 0 ? 0 : (int64_t)values[registers[base]];
        found->address = (uint8_t *)(intptr_t)(origin + offset);
    }
    found->after = next;
    return 1;
}

static int usable(int tile) { return unit.configured && tile < TILES && unit.shapes[tile].rows > 0; }

static void release(void) {
    unit.configured = 0;
    memset(unit.shapes, 0, sizeof unit.shapes);
    memset(unit.data, 0, sizeof unit.data);
}

static int configure(const uint8_t *from) {
    static const uint8_t zeros[CONFIGURATION_BYTES];
    if (from[0] == 0) {
        release();
        return 1;
    }
    // Palette 1; a first row is of an interrupted instruction, which there is none of here.
    if (from[0] != 1 || memcmp(from + 1, zeros, 15) != 0 || memcmp(from + 32, zeros, 16) != 0) return 0;
    if (memcmp(from + 56, zeros, 8) != 0) return 0;
    Shape shapes[TILES];
    for (int n = 0; n < TILES; ++n) {
        shapes[n] = (Shape){from[48 + n], from[16 + 2 * n] | from[17 + 2 * n] << 8};
        if (shapes[n].rows > ROWS || shapes[n].row_bytes > ROW_BYTES) return 0;
        if ((shapes[n].rows == 0) != (shapes[n].row_bytes == 0)) return 0;
    }
    release();
    memcpy(unit.shapes, shapes, sizeof shapes);
    unit.configured = 1;
    return 1;
}

// Terms of even index are the lower halves of pairs; bfloat16 is the upper half of fp32.
__attribute__((target("avx2,fma"))) static __m256 lower(__m256i pairs) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
}

__attribute__((target("avx2,fma"))) static __m256 upper(__m256i pairs) {
    return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32((int)0xFFFF0000)));
}

// First terms and second terms of pairs are summed by themselves, then both sums, then that to what the tile has; each
// of it rounds to nearest, and denormal numbers are zero.
__attribute__((target("avx2,fma"))) static int multiply(int sums, int left, int right) {
    if (sums == left || sums == right || left == right) return 0;
    if (!usable(sums) || !usable(left) || !usable(right)) return 0;
    const Shape of_sums = unit.shapes[sums], of_left = unit.shapes[left], of_right = unit.shapes[right];
    if (of_sums.row_bytes % 4 || of_left.row_bytes % 4 || of_sums.row_bytes != of_right.row_bytes) return 0;
    if (of_sums.rows != of_left.rows || of_left.row_bytes != 4 * of_right.rows) return 0;
    _mm_setcsr(0x9FC0);  // no exceptions, to nearest, denormals are zero, as operands and as results
    for (int m = 0; m < of_sums.rows; ++m) {
        for (int n = 0; n < LANES; n += 8) {
            __m256 first = _mm256_setzero_ps(), second = _mm256_setzero_ps();
            for (int k = 0; k < of_right.rows; ++k) {
                int32_t pair;
                memcpy(&pair, &unit.data[left][m][4 * k], 4);
                const __m256i a = _mm256_set1_epi32(pair);
                const __m256i b = _mm256_load_si256((const __m256i *)&unit.data[right][k][4 * n]);
                first = _mm256_fmadd_ps(lower(a), lower(b), first);
                second = _mm256_fmadd_ps(upper(a), upper(b), second);
            }
            float *sum = (float *)&unit.data[sums][m][4 * n];
            _mm256_store_ps(sum, _mm256_add_ps(_mm256_load_ps(sum), _mm256_add_ps(first, second)));
        }
    }
    __atomic_fetch_add(&products, 1, __ATOMIC_RELAXED);
    return 1;
}

static int move(const Instruction *given, int load) {
    const int tile = given->reg;
    if (!given->in_memory || (given->rm & 7) != 4 || !usable(tile)) return 0;
    const Shape shape = unit.shapes[tile];
    if (load) memset(unit.data[tile], 0, sizeof unit.data[tile]);
    for (int row = 0; row < shape.rows; ++row) {
        uint8_t *there = given->address + row * given->stride;
        if (load) {
            memcpy(unit.data[tile][row], there, shape.row_bytes);
        } else {
            memcpy(there, unit.data[tile][row], shape.row_bytes);
        }
    }
    return 1;
}

// Whether it is an instruction of the unit that the unit would carry out.
static int carry_out(const Instruction *given) {
    switch (given->opcode << 4 | given->prefix) {
        case 0x490:
            if (given->in_memory) return given->reg == 0 && configure(given->address);
            if (given->reg != 0 || given->rm != 0) return 0;
            release();
            return 1;
        case 0x493:
            if (given->in_memory || !usable(given->reg)) return 0;
            memset(unit.data[given->reg], 0, sizeof unit.data[given->reg]);
            return 1;
        case 0x4B1:  // TILELOADDT1: the same, with a hint
        case 0x4B3: return move(given, 1);
        case 0x4B2: return move(given, 0);
        case 0x5C2: return !given->in_memory && multiply(given->reg, given->rm, given->vvvv);
        default: return 0;
    }
}

static void handle(int signal_number, siginfo_t *information, void *context) {
    greg_t *values = ((ucontext_t *)context)->uc_mcontext.gregs;
    Instruction found;
    int any = 0;
    // Those that follow at once need no trap of their own.
    while (decode((const uint8_t *)(intptr_t)values[REG_RIP], values, &found) && carry_out(&found)) {
        values[REG_RIP] = (greg_t)(intptr_t)found.after;
        any = 1;
    }
    if (any) return;
    if (previous.sa_flags & SA_SIGINFO) {
        previous.sa_sigaction(signal_number, information, context);
    } else if (previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN) {
        previous.sa_handler(signal_number);
    } else {
        signal(SIGILL, SIG_DFL);  // it traps once more, and ends the process
    }
}

// Lets the instructions trap from now on; 0, or -1 where the system refuses.
int emulate_matrix_unit(void) {
    struct sigaction action = {.sa_sigaction = handle, .sa_flags = SA_SIGINFO | SA_NODEFER};
    return sigaction(SIGILL, &action, &previous);
}

// How many TDPBF16PS were carried out in this process, by all threads.
uint64_t products_in_matrix_unit(void) { return __atomic_load_n(&products, __ATOMIC_RELAXED); }
