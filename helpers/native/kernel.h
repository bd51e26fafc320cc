/* The kernel's interface for programs without a libc: system calls, a few structures, the entry point.
 *
 * The programs of this directory run where no library may be trusted or found: the trampoline inside a sandbox
 * whose /usr belongs to somebody else, the holder for as long as a session lives, across upgrades, the launcher
 * before everything, where loading a libc would take longer than its work. Everything here returns what the kernel
 * returned: a value, or a negated errno(3).
 *
 * x86-64 and aarch64 only. Calls that aarch64 does not have (fork, open, dup2, poll, stat) are not used at all.
 */

#ifndef RAL_KERNEL_H
#define RAL_KERNEL_H

#include <stddef.h>
#include <stdint.h>

#include <asm/errno.h>
#include <asm/ioctls.h>
#include <asm/poll.h>
#include <asm/signal.h>
#include <asm/socket.h>
#include <asm/termios.h>
#include <asm/unistd.h>
#include <linux/fcntl.h>
#include <linux/mman.h>
#include <linux/prctl.h>
#include <linux/resource.h>
#include <linux/signalfd.h>
#include <linux/stat.h>
#include <linux/wait.h>

/* Not in the kernel's exported headers, or newer than those of Debian 12. */
enum {
    AF_UNIX_ = 1,
    SOCKET_LEVEL = 1, /* SOL_SOCKET */
    SCM_RIGHTS_ = 1,
    MSG_CTRUNC_ = 0x08,
    MSG_TRUNC_ = 0x20,
    MSG_DONTWAIT_ = 0x40,
    MSG_NOSIGNAL_ = 0x4000,
    MSG_CMSG_CLOEXEC_ = 0x40000000,
    SO_PEERPIDFD_ = 77,
    LAST_SIGNAL = 64,
};
#define ALL_SEALS (F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE)

/* ioctl_pidfd(2), Linux 6.11 */
#define PIDFD_GET_MNT_NAMESPACE_ 0xff03
#define PIDFD_GET_PID_NAMESPACE_ 0xff05
#define PIDFD_GET_USER_NAMESPACE_ 0xff09

struct iovec_ {
    const void *base;
    size_t length;
};

struct msghdr_ {
    void *name;
    int name_length;
    struct iovec_ *iov;
    size_t iov_count;
    void *control;
    size_t control_length;
    unsigned flags;
};

/* A control message with room for a few descriptors; its layout is that of struct cmsghdr. */
enum { MAX_PASSED = 4 };
struct rights {
    size_t length;
    int level;
    int type;
    int fds[MAX_PASSED];
};

/* What rt_sigaction(2) takes: not the structure of sigaction(3). */
struct action {
    uintptr_t handler;
    unsigned long flags;
    uintptr_t restorer;
    uint64_t mask;
};

struct ucred_ {
    int pid;
    unsigned uid;
    unsigned gid;
};

#if defined(__x86_64__)
static inline long kernel(long number, long a, long b, long c, long d, long e, long f)
{
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = e;
    register long r9 __asm__("r9") = f;
    long result;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return result;
}
__asm__(".globl _start\n_start:\n\txor %ebp, %ebp\n\tmov %rsp, %rdi\n\tand $-16, %rsp\n\tcall entry\n\thlt\n");
#elif defined(__aarch64__)
static inline long kernel(long number, long a, long b, long c, long d, long e, long f)
{
    register long x8 __asm__("x8") = number;
    register long x0 __asm__("x0") = a;
    register long x1 __asm__("x1") = b;
    register long x2 __asm__("x2") = c;
    register long x3 __asm__("x3") = d;
    register long x4 __asm__("x4") = e;
    register long x5 __asm__("x5") = f;
    __asm__ volatile("svc #0"
                     : "+r"(x0)
                     : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5)
                     : "memory");
    return x0;
}
__asm__(".globl _start\n_start:\n\tmov x29, #0\n\tmov x30, #0\n\tmov x0, sp\n\tbl entry\n\tbrk #1\n");
#else
#error "ral's native programs are written for x86-64 and aarch64"
#endif

/* The entry point; `stack` points at argc, followed by argv (elf(5)). */
__attribute__((noreturn, used)) void entry(long *stack);

#define CALL(name, a, b, c, d, e, f) \
    kernel(__NR_##name, (long)(a), (long)(b), (long)(c), (long)(d), (long)(e), (long)(f))
#define CALL0(name) CALL(name, 0, 0, 0, 0, 0, 0)
#define CALL1(name, a) CALL(name, a, 0, 0, 0, 0, 0)
#define CALL2(name, a, b) CALL(name, a, b, 0, 0, 0, 0)
#define CALL3(name, a, b, c) CALL(name, a, b, c, 0, 0, 0)
#define CALL4(name, a, b, c, d) CALL(name, a, b, c, d, 0, 0)
#define CALL5(name, a, b, c, d, e) CALL(name, a, b, c, d, e, 0)

/* The compiler emits calls to these two whatever it is told. */
void *memcpy(void *restrict to, const void *restrict from, size_t count);
void *memset(void *to, int byte, size_t count);

__attribute__((used)) void *memcpy(void *restrict to, const void *restrict from, size_t count)
{
    unsigned char *out = to;
    const unsigned char *in = from;
    while (count--)
        *out++ = *in++;
    return to;
}

__attribute__((used)) void *memset(void *to, int byte, size_t count)
{
    unsigned char *out = to;
    while (count--)
        *out++ = (unsigned char)byte;
    return to;
}

static inline size_t length_of(const char *text)
{
    size_t count = 0;
    while (text[count])
        count++;
    return count;
}

__attribute__((noreturn)) static inline void exit_with(int status)
{
    for (;;)
        CALL1(exit_group, status);
}

static inline void close_fd(int fd)
{
    if (fd >= 0)
        CALL1(close, fd);
}

static inline uint64_t signal_bit(int number)
{
    return (uint64_t)1 << (number - 1);
}

/* Errors are of no interest: the kernel refuses only 9, 19 and numbers that do not exist. */
static inline void set_disposition(int number, int ignore)
{
    struct action action = {.handler = ignore ? 1 : 0};
    CALL4(rt_sigaction, number, &action, 0, sizeof action.mask);
}

/* glibc leaves 32 and 33 as it found them, so a process that was started with them ignored passes that on. */
static inline void reset_dispositions(void)
{
    for (int number = 1; number <= LAST_SIGNAL; number++)
        set_disposition(number, 0);
}

static inline void set_signal_mask(uint64_t mask)
{
    CALL4(rt_sigprocmask, SIG_SETMASK, &mask, 0, sizeof mask);
}

/* One packet of slot 100 and of the lease (docs/protocol.md section 3). */
enum packet_kind { READY = 1, GO, STARTED, FAILED, STOPPED, CONTINUED, SIGNAL };
struct packet {
    uint32_t kind;
    int32_t a;
    int32_t b;
    uint32_t zero;
};

/* Send a packet, with one descriptor unless `fd` is negative. */
static inline long send_packet(int socket, struct packet packet, int fd, int flags)
{
    struct iovec_ part = {&packet, sizeof packet};
    struct msghdr_ message = {.iov = &part, .iov_count = 1};
    struct rights rights = {offsetof(struct rights, fds) + sizeof(int), SOCKET_LEVEL, SCM_RIGHTS_, {fd}};
    if (fd >= 0) {
        message.control = &rights;
        message.control_length = (rights.length + 7) & ~(size_t)7;
    }
    return CALL3(sendmsg, socket, &message, flags | MSG_NOSIGNAL_);
}

#endif
