// Intel's AMX without one: its instructions trap (SIGILL), and this handler does to memory what they would do to tiles.
//
// Intel's manual, volume 2: LDTILECFG, TILERELEASE, TILEZERO, TILELOADD, TILESTORED and TDPBF16PS. An instruction that
// a processor with the unit would refuse, because tiles are not configured or their shapes do not fit, ends the process
// as it would there. Any other instruction that traps goes to the handler that was there before.

#define _GNU_SOURCE
#include <immintrin.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

enum { TILES = 8, ROWS = 16, ROW_BYTES = 64, CONFIGURATION_BYTES = 64, LANES = 16, BLOCK = 4 };

typedef struct {
    int rows, row_bytes;
} Shape;

static __thread struct {
    int configured;
    Shape shapes[TILES];
    _Alignas(64) uint8_t data[TILES][ROWS][ROW_BYTES];
} unit;  // of a thread

static uint64_t products;
static int leaves_out;
static struct sigaction previous;

// Of the processor's numbers of general registers.
static const int registers[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                  REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};

typedef struct {
    int prefix, opcode;    // pp of the VEX prefix: 0 none, 1 66, 2 F3, 3 F2
    int reg, rm, vvvv;     // operands that are registers
    int in_memory;         // whether the operand of rm is in memory, and then
    int indexed;           // whether it is written with an index, as tiles are
    uint8_t *address;      // where, without the index
    int64_t stride;        // index, scaled; 0 where there is none
    const uint8_t *after;  // the next instruction
} Instruction;

// Reads the byte of the operands and what follows it, but for an immediate operand of some bytes.
static void read_operands(const uint8_t *at, int r, int x, int b, const greg_t *values, int immediate,
                          Instruction *found) {
    const int mod = *at >> 6, rm = *at & 7;
    const uint8_t *next = at + 1;
    found->reg = r | (*at >> 3 & 7);
    found->rm = b | rm;
    found->in_memory = mod != 3;
    found->indexed = found->in_memory && rm == 4;
    if (found->in_memory) {
        int base = b | rm, from_here = 0;
        if (found->indexed) {
            const int index = x | (*next >> 3 & 7), scale = *next >> 6;
            if (index != 4) found->stride = (int64_t)((uint64_t)values[registers[index]] << scale);
            base = mod == 0 && (*next & 7) == 5 ? -1 : b | (*next & 7);
            ++next;
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
        const greg_t from = from_here ? (greg_t)(intptr_t)(next + immediate) : base < 0 ? 0 : values[registers[base]];
        found->address = (uint8_t *)(intptr_t)(from + offset);
    }
    found->after = next + immediate;
}

// Whether there is an instruction of map 0F38 with a VEX prefix of three bytes, W0 and 128 bits, and which one.
static int decode(const uint8_t *at, const greg_t *values, Instruction *found) {
    if (at[0] != 0xC4 || (at[1] & 0x1F) != 2 || (at[2] & 0x84) != 0) return 0;
    const int r = at[1] & 0x80 ? 0 : 8, x = at[1] & 0x40 ? 0 : 8, b = at[1] & 0x20 ? 0 : 8;
    *found = (Instruction){.prefix = at[2] & 3, .opcode = at[3], .vvvv = ~(at[2] >> 3) & 15};
    read_operands(at + 4, r, x, b, values, 0, found);
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
    _Alignas(32) float terms[2][ROWS][LANES];
    for (int m = 0; m < ROWS; ++m) {
        for (int k = 0; k < LANES; k += 8) {
            const __m256i a = _mm256_load_si256((const __m256i *)&unit.data[left][m][4 * k]);
            _mm256_store_ps(&terms[0][m][k], lower(a));
            _mm256_store_ps(&terms[1][m][k], upper(a));
        }
    }
    for (int n = 0; n < LANES; n += 8) {
        for (int m = 0; m < of_sums.rows; m += BLOCK) {
            // Rows of the block beyond the tile's are zero, and stay so.
            __m256 first[BLOCK], second[BLOCK];
            for (int row = 0; row < BLOCK; ++row) first[row] = second[row] = _mm256_setzero_ps();
            for (int k = 0; k < of_right.rows; ++k) {
                const __m256i b = _mm256_load_si256((const __m256i *)&unit.data[right][k][4 * n]);
                const __m256 b_lower = lower(b), b_upper = upper(b);
                for (int row = 0; row < BLOCK; ++row) {
                    first[row] = _mm256_fmadd_ps(_mm256_broadcast_ss(&terms[0][m + row][k]), b_lower, first[row]);
                    second[row] = _mm256_fmadd_ps(_mm256_broadcast_ss(&terms[1][m + row][k]), b_upper, second[row]);
                }
            }
            for (int row = 0; row < BLOCK && m + row < of_sums.rows; ++row) {
                float *sum = (float *)&unit.data[sums][m + row][4 * n];
                const __m256 product = _mm256_add_ps(first[row], second[row]);
                _mm256_store_ps(sum, _mm256_add_ps(_mm256_load_ps(sum), product));
            }
        }
    }
    __atomic_fetch_add(&products, 1, __ATOMIC_RELAXED);
    return 1;
}

static int move(const Instruction *given, int load) {
    const int tile = given->reg;
    if (!given->indexed || !usable(tile)) return 0;
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

// Whether it is an instruction of the unit, which it overwrites by one that does nothing. No other thread may be there.
static int leave_out(const Instruction *given, uint8_t *at) {
    static const uint8_t nothing[10][9] = {  // Intel's manual, volume 2, NOP: by bytes
        {0}, {0x90}, {0x66, 0x90}, {0x0F, 0x1F, 0x00}, {0x0F, 0x1F, 0x40, 0x00}, {0x0F, 0x1F, 0x44, 0x00, 0x00},
        {0x66, 0x0F, 0x1F, 0x44, 0x00, 0x00}, {0x0F, 0x1F, 0x80, 0x00, 0x00, 0x00, 0x00},
        {0x0F, 0x1F, 0x84, 0x00, 0x00, 0x00, 0x00, 0x00}, {0x66, 0x0F, 0x1F, 0x84, 0x00, 0x00, 0x00, 0x00, 0x00}};
    if (given->opcode != 0x49 && given->opcode != 0x4B && given->opcode != 0x5C) return 0;
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), first = (uintptr_t)at & ~(page - 1);
    const size_t bytes = (uintptr_t)given->after - first;
    if (mprotect((void *)first, bytes, PROT_READ | PROT_WRITE | PROT_EXEC) != 0) return 0;
    while (at < given->after) {
        const size_t left = (size_t)(given->after - at), now = left < 9 ? left : 9;
        memcpy(at, nothing[now], now);
        at += now;
    }
    return mprotect((void *)first, bytes, PROT_READ | PROT_EXEC) == 0;
}

enum { CARRY = 1, PARITY = 4, ADJUST = 16, ZERO = 64, SIGN = 128, OVERFLOW = 2048 };

// a + b + carry in 32 or 64 bits, and the flags that are told of it; a - b is a + ~b + 1, with both carries the other
// way round.
static uint64_t add(uint64_t a, uint64_t b, int subtract, int wide, int *flags) {
    const uint64_t mask = wide ? ~0ULL : 0xFFFFFFFFULL, top = wide ? 1ULL << 63 : 1ULL << 31;
    const uint64_t other = (subtract ? ~b : b) & mask, from = a & mask;
    const uint64_t sum = (from + other + (uint64_t)subtract) & mask;
    const uint64_t carries = (from & other) | ((from | other) & ~sum);
    *flags = (!!(carries & top) ^ subtract) * CARRY | (sum == 0) * ZERO | !!(sum & top) * SIGN;
    *flags |= !__builtin_parity((unsigned)(sum & 0xFF)) * PARITY | (!!(carries & 8) ^ subtract) * ADJUST;
    *flags |= !!((from ^ sum) & (other ^ sum) & top) * OVERFLOW;
    return sum;
}

// Whether a condition of Jcc holds, by its code.
static int holds(int code, greg_t flags) {
    const int less = !!(flags & SIGN) != !!(flags & OVERFLOW);
    const int conditions[] = {!!(flags & OVERFLOW), !!(flags & CARRY), !!(flags & ZERO), !!(flags & (CARRY | ZERO)),
                              !!(flags & SIGN),     !!(flags & PARITY), less,            (flags & ZERO) || less};
    return conditions[code >> 1] ^ (code & 1);
}

static void set_flags(greg_t *values, int flags, int told) {
    values[REG_EFL] = (values[REG_EFL] & ~(greg_t)told) | (flags & told);
}

static int32_t constant_at(const uint8_t *at) {
    int32_t found;
    memcpy(&found, at, 4);
    return found;
}

// Whether it is a jump, which it carries out.
static int jump(greg_t *values) {
    const uint8_t *at = (const uint8_t *)(intptr_t)values[REG_RIP];
    const greg_t flags = values[REG_EFL];
    if (*at == 0xEB || (*at & 0xF0) == 0x70) {
        values[REG_RIP] += 2 + (*at == 0xEB || holds(*at & 15, flags) ? (int8_t)at[1] : 0);
    } else if (*at == 0xE9) {
        values[REG_RIP] += 5 + constant_at(at + 1);
    } else if (*at == 0x0F && (at[1] & 0xF0) == 0x80) {
        values[REG_RIP] += 6 + (holds(at[1] & 15, flags) ? constant_at(at + 2) : 0);
    } else {
        return 0;
    }
    return 1;
}

// Carries out what loops have between the unit's instructions, so that they need not trap one by one: jumps, LEA, INC,
// MOV, ADD, SUB, CMP and XOR of registers and constants. Whether it was one of these.
static int carry_out_between(greg_t *values) {
    enum { PLUS = 0x01, XOR = 0x31, WORD = 0x81, BYTE = 0x83, MOVE = 0x89, LOAD = 0x8B };
    enum { LEA = 0x8D, SET = 0xB8, INC = 0xFF };
    const int all = CARRY | PARITY | ADJUST | ZERO | SIGN | OVERFLOW;
    if (jump(values)) return 1;
    const uint8_t *at = (const uint8_t *)(intptr_t)values[REG_RIP];
    const int rex = (*at & 0xF0) == 0x40 ? *at++ : 0, wide = !!(rex & 8), opcode = *at;
    const uint64_t mask = wide ? ~0ULL : 0xFFFFFFFFULL;
    if ((opcode & 0xF8) == SET && !wide) {
        values[registers[(rex & 1) << 3 | (opcode & 7)]] = (greg_t)(uint32_t)constant_at(at + 1);
        values[REG_RIP] = (greg_t)(intptr_t)(at + 5);
        return 1;
    }
    const int immediate = opcode == BYTE ? 1 : opcode == WORD ? 4 : 0;
    if (!immediate && opcode != LEA && opcode != INC && opcode != MOVE && opcode != LOAD && opcode != PLUS &&
        opcode != XOR) {
        return 0;
    }
    Instruction given = {.opcode = opcode};
    read_operands(at + 1, (rex & 4) << 1, (rex & 2) << 2, (rex & 1) << 3, values, immediate, &given);
    if (given.in_memory != (opcode == LEA)) return 0;
    greg_t *reg = &values[registers[given.reg]], *rm = &values[registers[given.rm]];
    const int extension = given.reg & 7, compare = extension == 7, subtract = compare || extension == 5;
    int flags = 0;
    switch (opcode) {
        case LEA: *reg = (greg_t)(((uint64_t)(intptr_t)given.address + (uint64_t)given.stride) & mask); break;
        case MOVE: *rm = (greg_t)((uint64_t)*reg & mask); break;
        case LOAD: *reg = (greg_t)((uint64_t)*rm & mask); break;
        case XOR:
            *rm = (greg_t)((uint64_t)(*rm ^ *reg) & mask);
            add((uint64_t)*rm, 0, 0, wide, &flags);
            set_flags(values, flags, all);
            break;
        case PLUS:
            *rm = (greg_t)add((uint64_t)*rm, (uint64_t)*reg, 0, wide, &flags);
            set_flags(values, flags, all);
            break;
        case INC:
            if (extension != 0) return 0;
            *rm = (greg_t)add((uint64_t)*rm, 1, 0, wide, &flags);
            set_flags(values, flags, all & ~CARRY);
            break;
        default: {
            if (extension != 0 && !subtract) return 0;
            const int32_t constant = opcode == BYTE ? (int8_t)given.after[-1] : constant_at(given.after - 4);
            const uint64_t sum = add((uint64_t)*rm, (uint64_t)(int64_t)constant, subtract, wide, &flags);
            if (!compare) *rm = (greg_t)sum;
            set_flags(values, flags, all);
        }
    }
    values[REG_RIP] = (greg_t)(intptr_t)given.after;
    return 1;
}

static void handle(int signal_number, siginfo_t *information, void *context) {
    greg_t *values = ((ucontext_t *)context)->uc_mcontext.gregs;
    Instruction found;
    int any = 0;
    uint8_t *here = (uint8_t *)(intptr_t)values[REG_RIP];
    if (leaves_out && decode(here, values, &found) && leave_out(&found, here)) return;  // and goes on from there
    for (;;) {
        if (decode((const uint8_t *)(intptr_t)values[REG_RIP], values, &found) && carry_out(&found)) {
            values[REG_RIP] = (greg_t)(intptr_t)found.after;
            any = 1;
        } else if (!any || !carry_out_between(values)) {
            break;
        }
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
    struct sigaction action = {.sa_sigaction = handle, .sa_flags = SA_SIGINFO};
    return sigaction(SIGILL, &action, &previous);
}

// From now on instructions that trap do nothing, and nothing traps twice.
void leave_out_matrix_unit(void) { leaves_out = 1; }

// How many TDPBF16PS were carried out in this process, by all threads.
uint64_t products_in_matrix_unit(void) { return __atomic_load_n(&products, __ATOMIC_RELAXED); }
