/* Metal's language, as far as our kernels use it, in C++17: a kernel's source runs on the CPU.
 *
 * The threads of a threadgroup are fibers of one thread of the system, switched where they wait for
 * each other: at barriers, and where lanes of a simdgroup exchange numbers. In what order they run
 * is chosen by `order`: as they are numbered, the other way round, or by chance, so that a result
 * that depends on it, as without a barrier, is not the same in each. Memory of a threadgroup is
 * poisoned before it begins; two threads that write to the same byte of it without a barrier
 * between are a race, if what they write differs. Buffers lie against a page that cannot be touched,
 * before or behind them, so that every access outside of them is seen.
 */

#pragma once

#include <signal.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#define constant
#define device
#define thread
/* All memory of threadgroups is in a section of its own, where it can be found. */
#define threadgroup static __attribute__((section("threadgroups")))

typedef unsigned int uint;
typedef unsigned short ushort;
struct uint3 {
    uint x, y, z;
};

/* Numbers of 16 bits: computed with as floats, rounded to nearest even. */
struct half {
    uint16_t bits;
    half() = default;
    half(float value)
    {
        uint32_t all;
        memcpy(&all, &value, 4);
        uint32_t sign = all >> 16 & 0x8000, size = all & 0x7fffffff;
        if (size > 0x7f800000)
            bits = sign | 0x7e00;
        else if (size >= 0x477ff000)
            bits = sign | 0x7c00;
        else if (size < 0x38800000) {
            float apart = std::fabs(value) * 16777216.0f; /* in steps of the least number */
            bits = sign | (uint16_t)std::nearbyint(apart);
        } else
            bits = sign | ((size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13);
    }
    half(int value) : half((float)value) {}
    operator float() const
    {
        float size = std::ldexp((float)(bits & 0x3ff) + (bits & 0x7c00 ? 1024 : 0),
                                (bits & 0x7c00 ? (bits >> 10 & 31) : 1) - 25);
        if ((bits & 0x7c00) == 0x7c00)
            size = bits & 0x3ff ? std::numeric_limits<float>::quiet_NaN()
                                : std::numeric_limits<float>::infinity();
        return bits & 0x8000 ? -size : size;
    }
};
struct bfloat {
    uint16_t bits;
    bfloat() = default;
    bfloat(float value)
    {
        uint32_t all;
        memcpy(&all, &value, 4);
        bits = value != value ? 0x7fc0 : (all + 0x7fff + (all >> 16 & 1)) >> 16;
    }
    bfloat(int value) : bfloat((float)value) {}
    operator float() const
    {
        uint32_t all = (uint32_t)bits << 16;
        float value;
        memcpy(&value, &all, 4);
        return value;
    }
};
typedef half float16_t;
typedef bfloat bfloat16_t;

namespace interpreter {

constexpr int LANES = 32, SLOT = 16, STACK = 1 << 16;
enum State { RUNS, IN_SIMDGROUP, IN_GROUP, ENDED };

/* Where a thread is, as attributes of Metal say it. */
struct Position {
    uint3 thread_position_in_grid, thread_position_in_threadgroup, threadgroup_position_in_grid;
    uint3 threads_per_threadgroup, threads_per_grid;
    uint thread_index_in_threadgroup, thread_index_in_simdgroup, simdgroup_index_in_threadgroup;
    uint simdgroups_per_threadgroup;
};

struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    Position at;
    State state;
    int operation;       /* what it exchanges, by the place in the source */
    int turn;            /* how many exchanges it has done */
    int barriers;        /* how many barriers of its simdgroup it has passed */
    alignas(16) char slots[2][SLOT];
};

struct Writer {
    int fiber, epoch, barriers;
};

static std::vector<Fiber> fibers;
static int current, epoch;
static ucontext_t scheduler;
static char fault[256];
static sigjmp_buf outside;

static void fail(const char *what)
{
    if (!*fault)
        snprintf(fault, sizeof fault, "%s, thread %d of group (%u, %u, %u)", what, current,
                 fibers[current].at.threadgroup_position_in_grid.x,
                 fibers[current].at.threadgroup_position_in_grid.y,
                 fibers[current].at.threadgroup_position_in_grid.z);
}

/* Wait until the others of the simdgroup, or of the threadgroup, are here, too. */
static void wait(State state, int operation)
{
    Fiber &own = fibers[current];
    own.state = state;
    own.operation = operation;
    swapcontext(&own.context, &scheduler);
}

/* Give a value to the other lanes of the simdgroup; what they gave is read by `of_lane`. */
template <typename T> static void give(T value, int operation)
{
    static_assert(sizeof(T) <= SLOT, "");
    Fiber &own = fibers[current];
    memcpy(own.slots[++own.turn & 1], &value, sizeof value);
    wait(IN_SIMDGROUP, operation);
}
template <typename T> static T of_lane(uint lane)
{
    const Fiber &own = fibers[current];
    size_t other = current / LANES * LANES + lane;
    T value;
    memset(&value, 0xff, sizeof value); /* of no lane */
    if (lane < LANES && other < fibers.size())
        memcpy(&value, fibers[other].slots[own.turn & 1], sizeof value);
    return value;
}

} // namespace interpreter

namespace metal {
enum class mem_flags { mem_none, mem_device, mem_threadgroup };
using std::fma;
using std::numeric_limits;
static inline float rsqrt(float x) { return 1.0f / std::sqrt(x); }
static inline float exp(float x) { return std::exp(x); }
static inline float tanh(float x) { return std::tanh(x); }
template <typename T> static inline T min(T a, T b) { return b < a ? b : a; }
template <typename T> static inline T max(T a, T b) { return a < b ? b : a; }

#define threadgroup_barrier(flags) interpreter::wait(interpreter::IN_GROUP, __LINE__)
#define simdgroup_barrier(flags) \
    (interpreter::wait(interpreter::IN_SIMDGROUP, -__LINE__), \
     interpreter::fibers[interpreter::current].barriers++)

static inline uint own_lane() { return interpreter::current % interpreter::LANES; }
template <typename T> static T simd_shuffle(T value, uint lane)
{
    interpreter::give(value, 1);
    return interpreter::of_lane<T>(lane);
}
template <typename T> static T simd_shuffle_xor(T value, uint mask)
{
    interpreter::give(value, 2);
    return interpreter::of_lane<T>(own_lane() ^ mask);
}
template <typename T> static T simd_shuffle_down(T value, uint by)
{
    interpreter::give(value, 3);
    return interpreter::of_lane<T>(own_lane() + by);
}
template <typename T> static T simd_broadcast(T value, uint lane) { return simd_shuffle(value, lane); }
template <typename T, typename F> static T of_all(T value, int operation, F both)
{
    interpreter::give(value, operation);
    T parts[interpreter::LANES];
    for (int i = 0; i < interpreter::LANES; i++)
        parts[i] = interpreter::of_lane<T>(i);
    for (int apart = interpreter::LANES / 2; apart; apart /= 2)
        for (int i = 0; i < apart; i++)
            parts[i] = both(parts[i], parts[i + apart]);
    return parts[0];
}
template <typename T> static T simd_sum(T value)
{
    return of_all(value, 4, [](T a, T b) { return a + b; });
}
template <typename T> static T simd_max(T value)
{
    return of_all(value, 5, [](T a, T b) { return a < b ? b : a; });
}
} // namespace metal

extern "C" char __start_threadgroups[] __attribute__((weak));
extern "C" char __stop_threadgroups[] __attribute__((weak));

namespace interpreter {

typedef void (*Kernel)(char *const *buffers, const Position &at);
static Kernel kernel;
static char *const *arguments;

static void begin()
{
    kernel(arguments, fibers[current].at);
    fibers[current].state = ENDED;
    swapcontext(&fibers[current].context, &scheduler);
}

/* Let those go on who wait for nobody else; false if nobody can. */
static bool release()
{
    bool released = false, all_in_group = true;
    for (size_t first = 0; first < fibers.size(); first += LANES) {
        size_t last = std::fmin(first + LANES, fibers.size()), here = 0;
        int operation = 0;
        bool same = true;
        for (size_t i = first; i < last; i++) {
            all_in_group &= fibers[i].state == IN_GROUP;
            if (fibers[i].state == IN_SIMDGROUP) {
                same &= !here || fibers[i].operation == operation;
                operation = fibers[i].operation;
                here++;
            }
        }
        if (here && same && here == last - first) {
            for (size_t i = first; i < last; i++)
                fibers[i].state = RUNS;
            released = true;
        }
    }
    if (all_in_group) {
        for (size_t i = 1; i < fibers.size(); i++)
            if (fibers[i].operation != fibers[0].operation)
                return false;
        for (Fiber &each : fibers)
            each.state = RUNS;
        epoch++;
        return true;
    }
    return released;
}

static void run_group(int order, uint32_t &chance)
{
    char *shared = __start_threadgroups;
    size_t size = __stop_threadgroups - __start_threadgroups;
    memset(shared, 0xff, size); /* not a number */
    std::vector<char> before(shared, shared + size);
    std::vector<Writer> writers(size, Writer{-1, -1, 0});
    epoch = 0;
    for (size_t i = 0; i < fibers.size(); i++) {
        Fiber &each = fibers[i];
        each.stack.resize(STACK);
        each.state = RUNS;
        each.turn = each.barriers = 0;
        getcontext(&each.context);
        each.context.uc_stack.ss_sp = each.stack.data();
        each.context.uc_stack.ss_size = STACK;
        each.context.uc_link = nullptr;
        makecontext(&each.context, begin, 0);
    }
    while (!*fault) {
        std::vector<int> ready;
        for (size_t i = 0; i < fibers.size(); i++)
            if (fibers[i].state == RUNS)
                ready.push_back(i);
        if (ready.empty()) {
            bool over = true;
            for (const Fiber &each : fibers)
                over &= each.state == ENDED;
            if (over)
                return;
            if (!release())
                fail("some threads wait where others do not come");
            continue;
        }
        chance = chance * 1664525 + 1013904223;
        size_t next = order == 0 ? 0 : order == 1 ? ready.size() - 1 : (chance >> 8) % ready.size();
        current = ready[next];
        swapcontext(&scheduler, &fibers[current].context);
        const Fiber &own = fibers[current];
        for (size_t i = 0; i < size; i++) {
            if (shared[i] == before[i])
                continue;
            before[i] = shared[i];
            Writer &last = writers[i];
            bool ordered = last.fiber / LANES == current / LANES && last.barriers < own.barriers;
            if (last.epoch == epoch && last.fiber != current && !ordered)
                fail("two threads write to the same place without a barrier between");
            last = Writer{current, epoch, own.barriers};
        }
    }
}

static void outside_of_buffers(int, siginfo_t *, void *)
{
    siglongjmp(outside, 1);
}

/* Run a kernel over a grid, as MLX dispatches it: the last threadgroups may be smaller.
 *
 * Each buffer is copied to memory that ends (`at_end`) or begins at a page that cannot be touched,
 * and back. Returns what went wrong, or an empty text.
 */
static const char *run(Kernel of, void *const *given, const size_t *sizes, int count, const uint *grid,
                       const uint *group, int order, int at_end)
{
    size_t page = sysconf(_SC_PAGESIZE);
    std::vector<char *> maps(count), buffers(count);
    std::vector<size_t> lengths(count);
    for (int i = 0; i < count; i++) {
        size_t inner = (sizes[i] + page - 1) / page * page;
        lengths[i] = inner + 2 * page;
        maps[i] = (char *)mmap(nullptr, lengths[i], PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        mprotect(maps[i] + page, inner, PROT_READ | PROT_WRITE);
        buffers[i] = maps[i] + page + (at_end ? inner - sizes[i] : 0);
        memcpy(buffers[i], given[i], sizes[i]);
    }
    *fault = 0;
    kernel = of;
    arguments = buffers.data();
    static char stack[1 << 16];
    stack_t other = {};
    other.ss_sp = stack;
    other.ss_size = sizeof stack;
    sigaltstack(&other, nullptr);
    struct sigaction action = {}, before[2];
    action.sa_sigaction = outside_of_buffers;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigaction(SIGSEGV, &action, &before[0]);
    sigaction(SIGBUS, &action, &before[1]);
    uint32_t chance = order;
    if (sigsetjmp(outside, 1))
        fail("it reads or writes outside of a buffer");
    else
        for (uint z = 0; z < grid[2] && !*fault; z += group[2])
            for (uint y = 0; y < grid[1] && !*fault; y += group[1])
                for (uint x = 0; x < grid[0] && !*fault; x += group[0]) {
                    uint size[3] = {metal::min(group[0], grid[0] - x), metal::min(group[1], grid[1] - y),
                                    metal::min(group[2], grid[2] - z)};
                    fibers.resize(size[0] * size[1] * size[2]);
                    for (uint i = 0; i < fibers.size(); i++) {
                        uint3 own = {i % size[0], i / size[0] % size[1], i / size[0] / size[1]};
                        fibers[i].at = Position{
                            {x + own.x, y + own.y, z + own.z},
                            own,
                            {x / group[0], y / group[1], z / group[2]},
                            {size[0], size[1], size[2]},
                            {grid[0], grid[1], grid[2]},
                            i,
                            i % LANES,
                            i / LANES,
                            (uint)(fibers.size() + LANES - 1) / LANES};
                    }
                    run_group(order, chance);
                }
    sigaction(SIGSEGV, &before[0], nullptr);
    sigaction(SIGBUS, &before[1], nullptr);
    for (int i = 0; i < count; i++) {
        memcpy(given[i], buffers[i], sizes[i]);
        munmap(maps[i], lengths[i]);
    }
    return fault;
}

} // namespace interpreter
