/* The first process of every sandbox: takes its orders from a sealed warrant, starts the program, stays as pid 1.
 *
 * Descriptors: 99 warrant, 100 the socket to the broker and later to whoever holds the lease, 101 Landlock ruleset,
 * 102 this file. docs/protocol.md sections 2 and 3 are the contract.
 *
 * Everything inside has the same uid as this process and may be hostile. It is not dumpable, so that nobody can
 * trace it, read its memory or take its descriptors. As pid 1 it receives from inside only signals that it has
 * blocked and reads from a signalfd, and all it does with them is to pass them on. After the start it opens
 * nothing, maps nothing and forks nothing: another process of the same uid may set its limits (prlimit(2)) to zero.
 */

#include "kernel.h"

enum slot { WARRANT_FD = 99, SOCKET_FD = 100, RULESET_FD = 101 };

enum step { S_WARRANT = 1, S_TERMINAL, S_LANDLOCK, S_LIMITS, S_DESCRIPTORS, S_FORK, S_LOOKUP, S_EXEC };

enum exit_status { CANNOT_EXECUTE = 126, NOT_FOUND = 127, SIGNALLED = 128, LEASE_GONE = 137 };

enum warrant_flag { ENTER_RULESET = 1, MAKE_TERMINAL = 2, TERMINAL_0 = 4, SET_AFFINITY = 32, ALL_FLAGS = 63 };

enum bound {
    HEADER_BYTES = 56,
    LIMIT_BYTES = 24,
    MAX_WARRANT = 8 << 20,
    MAX_LIMITS = 16,
    MAX_AFFINITY = 1024,
    MAX_STRINGS = 1 << 20,
    PATH_BYTES = 4096,
    /* above every slot that a descriptor of the program may have to leave */
    PARKED_FD = 200,
    REAPS_AT_ONCE = 64,
};

struct warrant {
    const uint8_t *bytes;
    size_t size;
    uint32_t flags;
    uint32_t umask;
    int32_t nice;
    uint64_t ignored;
    uint32_t limits;
    uint32_t affinity_bytes;
    uint32_t arguments;
    uint32_t entries;
    const uint8_t *limit_table;
    const uint8_t *affinity;
    size_t pointer_bytes;
    char **pointers; /* one spare, the arguments, NULL, the environment, NULL */
    char **argv;
    char **environment;
};

static struct {
    int program; /* pid, and id of its process group */
    int start_pipe; /* read end; -1 once the start is decided */
    int signals; /* signalfd */
    int stopped_by; /* the signal, 0 while it runs */
    int told; /* what the lease holder knows of stopped_by */
} state = {.start_pipe = -1};

static const uint64_t FORWARDED = (1ULL << (SIGTERM - 1)) | (1ULL << (SIGINT - 1)) | (1ULL << (SIGHUP - 1))
    | (1ULL << (SIGQUIT - 1)) | (1ULL << (SIGUSR1 - 1)) | (1ULL << (SIGUSR2 - 1)) | (1ULL << (SIGTSTP - 1))
    | (1ULL << (SIGCONT - 1)) | (1ULL << (SIGWINCH - 1));
static const uint64_t ENDING = (1ULL << (SIGTERM - 1)) | (1ULL << (SIGINT - 1)) | (1ULL << (SIGHUP - 1))
    | (1ULL << (SIGQUIT - 1));

static void complain(const char *text)
{
    CALL3(write, 2, text, length_of(text));
}

static const char *name_of(int step)
{
    switch (step) {
    case S_WARRANT: return "the warrant on descriptor 99 is missing, not sealed or malformed";
    case S_TERMINAL: return "no terminal could be made";
    case S_LANDLOCK: return "the Landlock ruleset on descriptor 101 could not be entered";
    case S_LIMITS: return "the caller's limits could not be set";
    case S_DESCRIPTORS: return "the program's descriptors are not as agreed";
    case S_FORK: return "the program could not be started as a child of pid 1";
    case S_LOOKUP: return "the command was not found";
    default: return "the command could not be executed";
    }
}

/* Report why the program does not run, and end. Nothing else may be said: fd 2 is the broker's, not the caller's. */
__attribute__((noreturn)) static void fail(int step, long error)
{
    struct packet packet = {FAILED, step, (int32_t)-error, 0};
    send_packet(SOCKET_FD, packet, -1, 0);
    char digits[8] = "000\n";
    long number = -error;
    for (int at = 2; at >= 0; at--, number /= 10)
        digits[at] = (char)('0' + number % 10);
    complain("ral-trampoline: ");
    complain(name_of(step));
    complain("; errno ");
    complain(digits);
    exit_with(step == S_LOOKUP || (step == S_EXEC && error == -ENOENT) ? NOT_FOUND : CANNOT_EXECUTE);
}

/* ------------------------------------------------------------------------------------------------ the warrant */

static uint32_t u32_at(const uint8_t *bytes)
{
    return bytes[0] | (uint32_t)bytes[1] << 8 | (uint32_t)bytes[2] << 16 | (uint32_t)bytes[3] << 24;
}

static uint64_t u64_at(const uint8_t *bytes)
{
    return u32_at(bytes) | (uint64_t)u32_at(bytes + 4) << 32;
}

/* Map the warrant. The seals are looked at first: without them its bytes could change while they are read. */
static void map_warrant(struct warrant *w)
{
    long seals = CALL2(fcntl, WARRANT_FD, F_GET_SEALS);
    if (seals < 0)
        fail(S_WARRANT, seals);
    if ((seals & ALL_SEALS) != ALL_SEALS)
        fail(S_WARRANT, -EPERM);
    struct statx status;
    long result = CALL5(statx, WARRANT_FD, "", AT_EMPTY_PATH, STATX_SIZE, &status);
    if (result < 0)
        fail(S_WARRANT, result);
    if (status.stx_size < HEADER_BYTES || status.stx_size > MAX_WARRANT)
        fail(S_WARRANT, -EINVAL);
    w->size = status.stx_size;
    result = CALL(mmap, 0, w->size, PROT_READ, MAP_PRIVATE, WARRANT_FD, 0);
    if (result < 0 && result > -4096)
        fail(S_WARRANT, result);
    w->bytes = (const uint8_t *)result;
}

static int header_is_sound(struct warrant *w)
{
    static const char magic[16] = "ral-warrant/1";
    const uint8_t *b = w->bytes;
    for (size_t at = 0; at < sizeof magic; at++)
        if (b[at] != (uint8_t)magic[at])
            return 0;
    w->flags = u32_at(b + 20);
    w->umask = u32_at(b + 24);
    w->nice = (int32_t)u32_at(b + 28);
    w->ignored = u64_at(b + 32);
    w->limits = u32_at(b + 40);
    w->affinity_bytes = u32_at(b + 44);
    w->arguments = u32_at(b + 48);
    w->entries = u32_at(b + 52);
    int terminals = (w->flags / TERMINAL_0 & 7) != 0;
    return u32_at(b + 16) == w->size && !(w->flags & ~(uint32_t)ALL_FLAGS)
        && terminals == ((w->flags & MAKE_TERMINAL) != 0) && w->umask <= 0777 && w->nice >= -20 && w->nice <= 19
        && !(w->ignored & (signal_bit(SIGKILL) | signal_bit(SIGSTOP))) && w->limits <= MAX_LIMITS
        && w->affinity_bytes % 8 == 0 && w->affinity_bytes <= MAX_AFFINITY
        && ((w->flags & SET_AFFINITY) != 0) == (w->affinity_bytes != 0) && w->arguments >= 1
        && w->arguments <= MAX_STRINGS && w->entries <= MAX_STRINGS;
}

static int limits_are_sound(const struct warrant *w)
{
    int64_t last = -1;
    for (uint32_t index = 0; index < w->limits; index++) {
        const uint8_t *limit = w->limit_table + index * LIMIT_BYTES;
        int64_t resource = u32_at(limit);
        if (resource <= last || resource >= RLIM_NLIMITS || u32_at(limit + 4)
            || u64_at(limit + 8) > u64_at(limit + 16))
            return 0;
        last = resource;
    }
    return 1;
}

/* Fill the pointer arrays from the strings at `at`; false unless there are exactly as many as the header says. */
static int strings_are_sound(struct warrant *w, size_t at)
{
    size_t expected = (size_t)w->arguments + w->entries;
    char **next = w->argv;
    for (size_t count = 0; count < expected; count++) {
        size_t end = at;
        while (end < w->size && w->bytes[end])
            end++;
        if (end >= w->size)
            return 0;
        if (count == w->arguments)
            next = w->environment;
        *next++ = (char *)(uintptr_t)(w->bytes + at);
        at = end + 1;
    }
    return at == w->size;
}

static void read_warrant(struct warrant *w)
{
    map_warrant(w);
    if (!header_is_sound(w))
        fail(S_WARRANT, -EINVAL);
    size_t affinity_at = HEADER_BYTES + (size_t)w->limits * LIMIT_BYTES;
    size_t strings_at = affinity_at + w->affinity_bytes;
    if (strings_at > w->size)
        fail(S_WARRANT, -EINVAL);
    w->limit_table = w->bytes + HEADER_BYTES;
    w->affinity = w->bytes + affinity_at;
    w->pointer_bytes = ((size_t)w->arguments + w->entries + 3) * sizeof(char *);
    long result = CALL(mmap, 0, w->pointer_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (result < 0 && result > -4096)
        fail(S_WARRANT, result);
    w->pointers = (char **)result;
    w->argv = w->pointers + 1;
    w->environment = w->argv + w->arguments + 1;
    if (!limits_are_sound(w) || !strings_are_sound(w, strings_at))
        fail(S_WARRANT, -EINVAL);
}

/* -------------------------------------------------------------------------------------- before the caller's go */

/* Whatever bwrap left open goes, first of all: a status file or a mount source must not outlive the launch. */
static void close_all_but_slots(void)
{
    long result = CALL3(close_range, 3, WARRANT_FD - 1, 0);
    if (result == 0)
        result = CALL3(close_range, RULESET_FD + 1, ~0U, 0);
    if (result < 0)
        fail(S_DESCRIPTORS, result);
}

/* Make a terminal in the sandbox's own devpts, so that its name exists inside. */
static void make_terminal(int *master, int *slave)
{
    long fd = CALL4(openat, AT_FDCWD, "/dev/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC, 0);
    if (fd < 0)
        fail(S_TERMINAL, fd);
    int unlocked = 0;
    long result = CALL3(ioctl, fd, TIOCSPTLCK, &unlocked);
    if (result < 0)
        fail(S_TERMINAL, result);
    long peer = CALL3(ioctl, fd, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC);
    if (peer < 0)
        fail(S_TERMINAL, peer);
    *master = (int)fd;
    *slave = (int)peer;
}

/* Pid 1 itself leads the session. The program is a group of its own in it: its parent is then in the same session
 * and another group, so the group is not orphaned and Ctrl-Z stops it as it would under a shell (setpgid(2)). */
static void lead_session(int slave)
{
    long result = CALL0(setsid);
    if (result == -EPERM && CALL1(getsid, 0) == 1)
        result = 0; /* bwrap --new-session was faster */
    if (result < 0)
        fail(slave >= 0 ? S_TERMINAL : S_FORK, result);
    if (slave >= 0) {
        result = CALL3(ioctl, slave, TIOCSCTTY, 0);
        if (result < 0)
            fail(S_TERMINAL, result);
    }
}

static void enter_ruleset(void)
{
    long result = CALL5(prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    if (result == 0)
        result = CALL2(landlock_restrict_self, RULESET_FD, 0);
    if (result < 0)
        fail(S_LANDLOCK, result);
}

/* Signals go to a signalfd from here on. A blocked signal is kept for pid 1 even though its disposition is the
 * default one, which would otherwise be ignored for the init of a pid namespace (pid_namespaces(7)). */
static void take_signals(void)
{
    uint64_t mask = FORWARDED | signal_bit(SIGCHLD);
    reset_dispositions();
    set_signal_mask(mask | signal_bit(SIGTTOU));
    long fd = CALL4(signalfd4, -1, &mask, sizeof mask, O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        fail(S_DESCRIPTORS, fd);
    state.signals = (int)fd;
}

/* The number of one pending signal, or 0. */
static int next_signal(void)
{
    struct signalfd_siginfo info;
    if (CALL3(read, state.signals, &info, sizeof info) != (long)sizeof info)
        return 0;
    return (int)info.ssi_signo;
}

/* Receive the go: exactly as many descriptors as the warrant left open, in `received`. */
static void receive_go(const struct warrant *w, int received[3])
{
    struct packet packet;
    struct iovec_ part = {&packet, sizeof packet};
    struct rights rights = {0};
    struct msghdr_ message = {.iov = &part, .iov_count = 1, .control = &rights, .control_length = sizeof rights};
    long size = CALL3(recvmsg, SOCKET_FD, &message, MSG_CMSG_CLOEXEC_);
    if (size == 0 || size == -ECONNRESET)
        exit_with(LEASE_GONE);
    if (size < 0)
        fail(S_DESCRIPTORS, size);
    size_t wanted = 0;
    for (int index = 0; index < 3; index++)
        wanted += !(w->flags & (uint32_t)TERMINAL_0 << index);
    size_t length = message.control_length ? rights.length : 0;
    size_t exact = wanted ? offsetof(struct rights, fds) + wanted * sizeof(int) : 0;
    if (size != sizeof packet || message.flags & (MSG_TRUNC_ | MSG_CTRUNC_) || packet.kind != GO || packet.a
        || packet.b || packet.zero || length != exact
        || (wanted && (rights.level != SOCKET_LEVEL || rights.type != SCM_RIGHTS_)))
        fail(S_DESCRIPTORS, -EBADMSG);
    for (size_t index = 0; index < wanted; index++)
        received[index] = rights.fds[index];
}

static void wait_go(const struct warrant *w, int received[3])
{
    struct pollfd polled[2] = {{SOCKET_FD, POLLIN, 0}, {state.signals, POLLIN, 0}};
    for (;;) {
        long count = CALL5(ppoll, polled, 2, 0, 0, 0);
        if (count < 0 && count != -EINTR)
            fail(S_DESCRIPTORS, count);
        for (int number; (number = next_signal()) != 0;)
            if (ENDING & signal_bit(number))
                exit_with(SIGNALLED + number);
        if (count > 0 && polled[0].revents)
            return receive_go(w, received);
    }
}

/* -------------------------------------------------------------------------- the child, until it is the program */

static void report(int step, long error)
{
    int32_t words[2] = {step, (int32_t)error};
    CALL3(write, 3, words, sizeof words);
    exit_with(CANNOT_EXECUTE);
}

/* Put the program's descriptors at 0, 1, 2 and the pipe at 3. All are parked high up first, since a source may
 * have the number of another one's place. */
static void place_descriptors(const int source[3], int pipe)
{
    long parked[4];
    for (int index = 0; index < 4; index++)
        parked[index] = CALL3(fcntl, index < 3 ? source[index] : pipe, F_DUPFD_CLOEXEC, PARKED_FD);
    if (parked[3] < 0 || CALL3(dup3, parked[3], 3, O_CLOEXEC) < 0)
        exit_with(CANNOT_EXECUTE);
    for (int index = 0; index < 3; index++) {
        long result = parked[index] < 0 ? parked[index] : CALL3(dup3, parked[index], index, 0);
        if (result < 0)
            report(S_DESCRIPTORS, result);
    }
    long result = CALL3(close_range, 4, ~0U, 0);
    if (result < 0)
        report(S_DESCRIPTORS, result);
}

/* A limit can only be lowered here, so one above the present hard limit becomes that. */
static void set_limits(const struct warrant *w)
{
    for (uint32_t index = 0; index < w->limits; index++) {
        const uint8_t *bytes = w->limit_table + index * LIMIT_BYTES;
        struct rlimit64 present, wanted = {u64_at(bytes + 8), u64_at(bytes + 16)};
        long result = CALL4(prlimit64, 0, u32_at(bytes), 0, &present);
        if (wanted.rlim_max > present.rlim_max)
            wanted.rlim_max = present.rlim_max;
        if (wanted.rlim_cur > wanted.rlim_max)
            wanted.rlim_cur = wanted.rlim_max;
        if (result == 0)
            result = CALL4(prlimit64, 0, u32_at(bytes), &wanted, 0);
        if (result < 0)
            report(S_LIMITS, result);
    }
}

static void take_on_caller(const struct warrant *w)
{
    CALL1(umask, w->umask);
    long result = CALL2(getpriority, PRIO_PROCESS, 0); /* 20 minus the nice value: getpriority(2) */
    if (result >= 0 && w->nice > 20 - result)
        result = CALL3(setpriority, PRIO_PROCESS, 0, w->nice);
    if (result < 0)
        report(S_LIMITS, result);
    if (w->flags & SET_AFFINITY) {
        result = CALL3(sched_setaffinity, 0, w->affinity_bytes, w->affinity);
        /* EINVAL: none of those processors is allowed to us; the caller's cpuset is not ours to enter */
        if (result < 0 && result != -EINVAL)
            report(S_LIMITS, result);
    }
    set_limits(w);
}

/* Execute one file; returns a negated errno. A file without a format the kernel knows is a shell script. */
static long execute(const struct warrant *w, const char *path)
{
    long result = CALL3(execve, path, w->argv, w->environment);
    if (result == -ENOEXEC) {
        char *first = w->argv[0];
        w->pointers[0] = (char *)(uintptr_t)"/bin/sh";
        w->argv[0] = (char *)(uintptr_t)path;
        result = CALL3(execve, "/bin/sh", w->pointers, w->environment);
        w->argv[0] = first;
    }
    return result;
}

static const char *search_path(const struct warrant *w)
{
    for (char **entry = w->environment; *entry; entry++) {
        const char *text = *entry;
        if (text[0] == 'P' && text[1] == 'A' && text[2] == 'T' && text[3] == 'H' && text[4] == '=')
            return text + 5;
    }
    return "/usr/local/bin:/usr/bin:/bin";
}

/* Look the command up as execvp(3) does. A file that exists but whose interpreter does not is remembered like one
 * that may not be executed: the report then says that the command was there. */
static void execute_from_path(const struct warrant *w)
{
    char path[PATH_BYTES];
    size_t name = length_of(w->argv[0]);
    long remembered = 0;
    if (name == 0 || name > 255)
        report(S_LOOKUP, name ? -ENAMETOOLONG : -ENOENT);
    for (const char *from = search_path(w), *end = from;; from = ++end) {
        while (*end && *end != ':')
            end++;
        size_t directory = (size_t)(end - from);
        if (directory + name + 2 <= sizeof path) {
            memcpy(path, from, directory);
            if (directory)
                path[directory++] = '/';
            memcpy(path + directory, w->argv[0], name + 1);
            long result = execute(w, path);
            if (result == -EACCES || (result == -ENOENT && CALL3(faccessat, AT_FDCWD, path, 0) == 0))
                remembered = result;
            else if (result != -ENOENT && result != -ENOTDIR && result != -ESTALE && result != -ENODEV
                     && result != -ETIMEDOUT)
                report(S_EXEC, result);
        }
        if (!*end)
            break;
    }
    report(remembered ? S_EXEC : S_LOOKUP, remembered ? remembered : -ENOENT);
}

__attribute__((noreturn)) static void become_program(const struct warrant *w, const int source[3], int slave, int pipe)
{
    int group = (int)CALL0(getpid);
    CALL2(setpgid, 0, 0);
    /* SIGTTOU is blocked, so this works from what is still a background group (tcsetpgrp(3)) */
    long result = slave < 0 ? 0 : CALL3(ioctl, slave, TIOCSPGRP, &group);
    place_descriptors(source, pipe);
    if (result < 0)
        report(S_TERMINAL, result);
    take_on_caller(w);
    for (int number = 1; number <= LAST_SIGNAL; number++)
        if (w->ignored & signal_bit(number))
            set_disposition(number, 1);
    set_signal_mask(0);
    const char *at = w->argv[0];
    while (*at && *at != '/')
        at++;
    if (*at)
        report(S_EXEC, execute(w, w->argv[0]));
    execute_from_path(w);
    exit_with(CANNOT_EXECUTE);
}

/* Fork the program, and give up every descriptor of the caller: a pipe closes when the program closes it. */
static void start_program(struct warrant *w, int slave)
{
    int received[3] = {-1, -1, -1}, source[3], used = 0, ends[2];
    wait_go(w, received);
    for (int index = 0; index < 3; index++)
        source[index] = w->flags & (uint32_t)TERMINAL_0 << index ? slave : received[used++];
    long result = CALL2(pipe2, ends, O_CLOEXEC);
    if (result < 0)
        fail(S_DESCRIPTORS, result);
    result = CALL5(clone, SIGCHLD, 0, 0, 0, 0);
    if (result < 0)
        fail(S_FORK, result);
    if (result == 0)
        become_program(w, source, slave, ends[1]);
    state.program = (int)result;
    state.start_pipe = ends[0];
    close_fd(ends[1]);
    close_fd(slave);
    for (int index = 0; index < used; index++)
        close_fd(received[index]);
    CALL2(munmap, w->pointers, w->pointer_bytes);
    CALL2(munmap, w->bytes, w->size);
}

/* ------------------------------------------------------------------------------------------------------- pid 1 */

static void forward(int number)
{
    if (number < 1 || number > LAST_SIGNAL || !(FORWARDED & signal_bit(number)))
        return;
    if (CALL2(kill, -state.program, number) == -ESRCH)
        CALL2(kill, state.program, number); /* it left its group */
    /* What is stopped cannot act on its end, and nobody inside is there to continue it. */
    if (state.stopped_by && (number == SIGTERM || number == SIGHUP))
        CALL2(kill, -state.program, SIGCONT);
}

/* The pipe's end says what became of the execve: closed by it, or eight bytes. */
static void decide_start(void)
{
    int32_t words[2];
    long size = CALL3(read, state.start_pipe, words, sizeof words);
    if (size == -EINTR)
        return;
    if (size == sizeof words)
        fail(words[0], words[1]);
    close_fd(state.start_pipe);
    state.start_pipe = -1;
    struct packet packet = {STARTED, 0, 0, 0};
    if (send_packet(SOCKET_FD, packet, -1, 0) < 0)
        exit_with(LEASE_GONE);
}

/* Collect what ended or stopped; true if there may be more. In batches: a program that forks without end must not
 * keep us from noticing that the lease is gone. */
static int reap(void)
{
    for (int count = 0; count < REAPS_AT_ONCE; count++) {
        int status = 0;
        long pid = CALL4(wait4, -1, &status, WNOHANG | WUNTRACED | WCONTINUED, 0);
        if (pid <= 0)
            return 0;
        if (pid != state.program)
            continue;
        if (status == 0xffff) {
            state.stopped_by = 0;
        } else if ((status & 0xff) == 0x7f) {
            state.stopped_by = status >> 8 & 0xff;
        } else {
            exit_with(status & 0x7f ? SIGNALLED + (status & 0x7f) : status >> 8 & 0xff);
        }
    }
    return 1;
}

/* Tell the lease holder of a stop or continuation. A full socket is not waited for: only the last state counts. */
static void tell(void)
{
    struct packet packet = {state.stopped_by ? STOPPED : CONTINUED, state.stopped_by, 0, 0};
    if (state.told != state.stopped_by && send_packet(SOCKET_FD, packet, -1, MSG_DONTWAIT_) >= 0)
        state.told = state.stopped_by;
}

static void hear_lease(void)
{
    struct packet packet;
    struct iovec_ part = {&packet, sizeof packet};
    struct msghdr_ message = {.iov = &part, .iov_count = 1};
    long size = CALL3(recvmsg, SOCKET_FD, &message, MSG_DONTWAIT_ | MSG_CMSG_CLOEXEC_);
    if (size == -EAGAIN || size == -EINTR)
        return;
    if (size <= 0)
        exit_with(LEASE_GONE); /* and the kernel ends everything inside with us */
    if (size == sizeof packet && !(message.flags & MSG_TRUNC_) && packet.kind == SIGNAL && !packet.b && !packet.zero)
        forward(packet.a);
}

/* Pass on a batch of what arrived; true if a child changed its state. */
static int take_pending(void)
{
    int children = 0;
    for (int count = 0; count < REAPS_AT_ONCE; count++) {
        int number = next_signal();
        if (number == 0)
            break;
        if (number == SIGCHLD)
            children = 1;
        else
            forward(number);
    }
    return children;
}

/* Signals wait until the execve is decided: before it, a TERM would end the child and look like the program's end.
 * The lease does not wait, so an execve that hangs in a dead filesystem ends with its caller. */
__attribute__((noreturn)) static void supervise(void)
{
    static const struct timespec at_once;
    for (int more = 1;;) {
        int started = state.start_pipe < 0;
        struct pollfd polled[3] = {
            {SOCKET_FD, POLLIN, 0},
            {started ? state.signals : -1, POLLIN, 0},
            {state.start_pipe, POLLIN, 0},
        };
        if (state.told != state.stopped_by)
            polled[0].events |= POLLOUT;
        CALL5(ppoll, polled, 3, more && started ? &at_once : 0, 0, 0);
        if (polled[0].revents & (POLLIN | POLLHUP | POLLERR))
            hear_lease();
        if (polled[2].revents)
            decide_start();
        if (started)
            more |= take_pending();
        if (more && started)
            more = reap();
        tell();
    }
}

void entry(long *stack)
{
    (void)stack;
    struct warrant warrant = {0};
    int master = -1, slave = -1;
    CALL5(prctl, PR_SET_DUMPABLE, 0, 0, 0, 0);
    CALL5(prctl, PR_SET_NAME, "ral-trampoline", 0, 0, 0);
    close_all_but_slots();
    read_warrant(&warrant);
    if (CALL0(getpid) != 1)
        fail(S_FORK, -EPERM); /* only the death of a namespace's pid 1 ends everything inside */
    take_signals();
    if (warrant.flags & MAKE_TERMINAL)
        make_terminal(&master, &slave);
    lead_session(slave);
    if (warrant.flags & ENTER_RULESET)
        enter_ruleset();
    close_fd(RULESET_FD);
    close_fd(WARRANT_FD);
    struct packet ready = {READY, 0, 0, 0};
    long result = send_packet(SOCKET_FD, ready, master, 0);
    if (result < 0)
        exit_with(LEASE_GONE);
    close_fd(master);
    start_program(&warrant, slave);
    supervise();
}
