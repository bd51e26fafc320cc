/* Keeps a detached session: holds its terminal and its lease, shows it to whoever attaches, ends with it.
 *
 * Runs in the host, one for each session, and outlives broker and client. docs/protocol.md section 4 is the
 * contract, also for the numbers of its descriptors. `ral-holder ID`.
 *
 * One poll loop, nothing in it waits. The program's output is a stream of bytes with 64-bit offsets, of which the
 * last 256 KiB are kept; every client has an offset of its own. So a new client, an attached one and one that
 * stood still differ only in where they are.
 */

#include "kernel.h"
#include "screen.h"

enum slot { MASTER = 3, LEASE, MONITOR, INIT, STATUS, LISTENER, DIRECTORY, FIRST_FREE };

enum bound {
    RING_BYTES = 256 << 10,
    INPUT_BYTES = 64 << 10,
    PACKET_BYTES = 32 << 10,
    CHUNK_BYTES = 16 << 10,
    DRAIN_BYTES = 16 << 20,
    LOG_BYTES = 1 << 20,
    MAX_CLIENTS = 24,
    MAX_WATCHERS = 16,
    ID_BYTES = 8,
};

enum milliseconds {
    PACE = 50, /* how long a client that stands still may hold the program up */
    REDRAW = 60, /* between the two sizes that make a program repaint */
    RETRY = 200,
    GRACE = 5000, /* between TERM and KILL; and for clients to fetch the rest */
    DEATH = 10000, /* for a killed pid 1 to be gone */
};

enum exit_status { ENDED = 0, MISUSED = 2, LOST = 137 };

enum role { NEW, WATCHER, WRITER };

struct client {
    int fd; /* -1: free */
    enum role role;
    uint32_t number; /* of the connection, for the oldest */
    uint64_t at; /* of the stream: the next byte it gets */
    uint64_t replay_end; /* what lies before is old, and filtered */
    struct screen view; /* the state at `at` while that is old */
    struct screen missed; /* the state where it was when it fell behind */
    int behind; /* the byte at `at` is no longer kept */
    int greeted;
    int stop_signal; /* to be told */
    int blocked; /* its socket is full */
    int64_t progress; /* when it last took something */
    uint8_t prelude[PRELUDE_BYTES];
    size_t prelude_size;
};

static uint8_t ring[RING_BYTES];
static uint8_t input[INPUT_BYTES];
static uint8_t scratch[1 + PACKET_BYTES];
static struct client clients[MAX_CLIENTS];
static struct statx own_namespaces[3];

static struct {
    uint64_t head, tail; /* offsets of the stream: ring holds [tail, head) */
    struct screen current, oldest; /* the states at head and tail */
    size_t input_size;
    int64_t time;
    int64_t redraw_at, kill_at, leave_at, master_at, listen_at; /* 0: not set */
    struct winsize size;
    uint32_t connections;
    int slave; /* keeps the terminal alive while the program has it closed */
    int signals;
    int stopped_by;
    int wants_continue;
    int lease_gone;
    int ended;
    int32_t status;
    uint8_t lost;
    int log;
    uint64_t log_size;
    int64_t log_at;
    char log_name[ID_BYTES + 5], old_name[ID_BYTES + 7], socket_name[ID_BYTES + 6];
} h = {.slave = -1, .log = -1};

static int64_t milliseconds_now(void)
{
    struct timespec now;
    CALL2(clock_gettime, CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* -------------------------------------------------------------------------------------------------------- log */

/* Open the log: made by us, or one of ours from before. Never through a link: the directory is the user's. */
static void open_log(void)
{
    const int flags = O_WRONLY | O_APPEND | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK;
    struct statx status;
    long fd = CALL4(openat, DIRECTORY, h.log_name, flags | O_CREAT | O_EXCL, 0600);
    if (fd == -EEXIST)
        fd = CALL4(openat, DIRECTORY, h.log_name, flags, 0);
    if (fd < 0)
        return;
    long result = CALL5(statx, fd, "", AT_EMPTY_PATH, STATX_BASIC_STATS, &status);
    if (result < 0 || (status.stx_mode & S_IFMT) != S_IFREG || status.stx_nlink != 1
        || status.stx_uid != (uint32_t)CALL0(geteuid)) {
        close_fd((int)fd);
        return;
    }
    h.log = (int)fd;
    h.log_size = status.stx_size;
}

/* Errors are of no consequence: a log that cannot be written is incomplete, the session goes on. */
static void write_log(const uint8_t *bytes, size_t size)
{
    if (h.log < 0) {
        if (h.time < h.log_at)
            return;
        h.log_at = h.time + 1000;
        open_log();
    }
    if (h.log >= 0 && h.log_size + size > LOG_BYTES) {
        if (CALL5(renameat2, DIRECTORY, h.log_name, DIRECTORY, h.old_name, 0) < 0)
            return;
        close_fd(h.log);
        h.log = -1;
        open_log();
    }
    if (h.log < 0)
        return;
    long written = CALL3(write, h.log, bytes, size);
    if (written > 0)
        h.log_size += (uint64_t)written;
}

/* ----------------------------------------------------------------------------------------------------- stream */

static uint8_t byte_at(uint64_t offset)
{
    return ring[offset % RING_BYTES];
}

/* Advance the state over kept bytes. */
static void advance(struct screen *s, uint64_t from, uint64_t to)
{
    for (; from < to; from++)
        screen_step(s, byte_at(from));
}

/* Append output. A client that has not taken what now goes is behind; the state its terminal is in is noted, since
 * it cannot be found out later. */
static void append(const uint8_t *bytes, size_t size)
{
    uint64_t tail = h.head + size > RING_BYTES ? h.head + size - RING_BYTES : 0;
    if (tail > h.tail) {
        for (int index = 0; index < MAX_CLIENTS; index++) {
            struct client *c = &clients[index];
            if (c->fd < 0 || c->role == NEW || c->behind || c->at >= tail)
                continue;
            c->behind = 1;
            c->missed = h.oldest;
            advance(&c->missed, h.tail, c->at);
        }
        advance(&h.oldest, h.tail, tail);
        h.tail = tail;
    }
    for (size_t index = 0; index < size; index++) {
        ring[(h.head + index) % RING_BYTES] = bytes[index];
        screen_step(&h.current, bytes[index]);
    }
    h.head += size;
    write_log(bytes, size);
}

/* Where a replay may begin: after the first line end, or where no character or sequence is cut. `*s` becomes the
 * state there. */
static uint64_t replay_start(struct screen *s)
{
    struct screen whole = h.current;
    uint64_t start = h.head;
    *s = h.oldest;
    if (h.tail == 0)
        return 0;
    for (uint64_t at = h.tail; at < h.head; at++) {
        uint8_t byte = byte_at(at);
        if (start == h.head && s->state == GROUND && (byte & 0xc0) != 0x80) {
            start = at;
            whole = *s;
        }
        screen_step(s, byte);
        if (byte == '\n' && s->state == GROUND)
            return at + 1;
    }
    *s = whole;
    return start;
}

/* Copy old output from the client's place to `out`, leaving out what must not happen twice. Stops before a sequence
 * that does not fit; one that alone is larger than `out` is left out. */
static size_t copy_replay(struct client *c, uint8_t *out, size_t room)
{
    size_t used = 0, begun = 0;
    uint64_t begun_at = c->at;
    struct screen before = c->view;
    int inside = 0, too_long = 0;
    while (c->at < c->replay_end && (used < room || inside)) {
        if (used == room && !too_long) {
            if (begun) {
                c->at = begun_at;
                c->view = before;
                return begun;
            }
            too_long = 1;
        }
        uint8_t byte = byte_at(c->at);
        struct screen previous = c->view;
        enum seen seen = screen_step(&c->view, byte);
        if (!inside && seen == INSIDE) {
            inside = 1;
            begun = used;
            begun_at = c->at;
            before = previous;
        }
        c->at++;
        if (seen != NOISE && !too_long)
            out[used++] = byte;
        if (seen == LEFT_OUT || (too_long && seen == REPEATED))
            used = inside ? begun : used - 1;
        if (seen != INSIDE)
            inside = too_long = 0;
    }
    return too_long ? begun : used;
}

/* ---------------------------------------------------------------------------------------------------- terminal */

static void set_size(const struct winsize *size)
{
    CALL3(ioctl, MASTER, TIOCSWINSZ, size);
}

/* Two sizes, some time apart: a program that finds its window unchanged does not repaint. */
static void force_redraw(void)
{
    struct winsize other = h.size;
    if (other.ws_row > 1)
        other.ws_row--;
    else if (other.ws_col > 1)
        other.ws_col--;
    else
        return;
    set_size(&other);
    h.redraw_at = h.time + REDRAW;
}

static void take_size(const uint8_t *bytes)
{
    struct winsize size = {
        (uint16_t)(bytes[0] | bytes[1] << 8), (uint16_t)(bytes[2] | bytes[3] << 8),
        (uint16_t)(bytes[4] | bytes[5] << 8), (uint16_t)(bytes[6] | bytes[7] << 8),
    };
    if (!size.ws_row || !size.ws_col)
        return;
    h.size = size;
    h.redraw_at = 0;
    set_size(&size);
}

/* Nobody inside can continue a stopped program, so whoever attaches or types does. */
static void continue_program(void)
{
    struct packet packet = {SIGNAL, SIGCONT, 0, 0};
    if (!h.stopped_by)
        return;
    h.wants_continue = send_packet(LEASE, packet, -1, MSG_DONTWAIT_) == -EAGAIN;
}

static void write_input(void)
{
    while (h.input_size) {
        long written = CALL3(write, MASTER, input, h.input_size);
        if (written <= 0)
            return;
        for (size_t index = (size_t)written; index < h.input_size; index++)
            input[index - (size_t)written] = input[index];
        h.input_size -= (size_t)written;
    }
}

/* True if a read brought something. */
static int read_master(void)
{
    long size = CALL3(read, MASTER, scratch, CHUNK_BYTES);
    if (size > 0) {
        append(scratch, (size_t)size);
        return 1;
    }
    /* EIO: the last copy of the slave is closed. With one of our own that is the end; else it may be opened again. */
    if (size != -EAGAIN && size != -EINTR)
        h.master_at = h.time + RETRY;
    return 0;
}

/* ----------------------------------------------------------------------------------------------------- clients */

static void drop(struct client *c)
{
    close_fd(c->fd);
    c->fd = -1;
}

static int count_of(enum role role)
{
    int count = 0;
    for (int index = 0; index < MAX_CLIENTS; index++)
        count += clients[index].fd >= 0 && clients[index].role == role;
    return count;
}

/* Send one packet: its kind, then up to two parts. 1 sent, 0 the socket is full, -1 the client is gone. */
static int send_client(struct client *c, uint8_t kind, const void *a, size_t a_size, const void *b, size_t b_size)
{
    struct iovec_ parts[3] = {{&kind, 1}, {a, a_size}, {b, b_size}};
    struct msghdr_ message = {.iov = parts, .iov_count = 3};
    long result = CALL3(sendmsg, c->fd, &message, MSG_DONTWAIT_ | MSG_NOSIGNAL_);
    if (result >= 0) {
        c->progress = h.time;
        return 1;
    }
    if (result == -EAGAIN || result == -EINTR || result == -ENOBUFS) {
        c->blocked = 1;
        return 0;
    }
    drop(c);
    return -1;
}

/* Bring the client's terminal from `from` to the present, as far as that is known. */
static void show(struct client *c, const struct screen *from)
{
    if (h.current.alternate) {
        /* what a full-screen program drew before is of no use: it paints anew */
        c->view = h.current;
        c->at = h.head;
        force_redraw();
    } else {
        c->at = replay_start(&c->view);
    }
    c->replay_end = h.head;
    c->prelude_size = screen_change(from, &c->view, c->prelude);
}

/* Catch up with what is still kept. CAN ends a sequence that was cut in the middle. */
static void jump_ahead(struct client *c)
{
    show(c, &c->missed);
    uint8_t cut[] = "\030\033[0m";
    size_t size = sizeof cut - 1;
    for (size_t at = c->prelude_size; at-- > 0;)
        c->prelude[at + size] = c->prelude[at];
    memcpy(c->prelude, cut, size);
    c->prelude_size += size;
    c->behind = 0;
    c->replay_end = c->at; /* the program may still be waiting for answers to this part */
}

static int send_output(struct client *c)
{
    if (c->at < c->replay_end) {
        uint64_t at = c->at;
        struct screen view = c->view;
        size_t size = copy_replay(c, scratch, CHUNK_BYTES);
        int sent = size ? send_client(c, 'O', scratch, size, 0, 0) : 1;
        if (sent == 0) {
            c->at = at;
            c->view = view;
        }
        return sent;
    }
    size_t size = h.head - c->at < CHUNK_BYTES ? (size_t)(h.head - c->at) : CHUNK_BYTES;
    size_t from = c->at % RING_BYTES;
    size_t first = size < RING_BYTES - from ? size : RING_BYTES - from;
    int sent = send_client(c, 'O', ring + from, first, ring, size - first);
    if (sent > 0)
        c->at += size;
    return sent;
}

static int has_something_for(const struct client *c)
{
    return c->role != NEW
        && (!c->greeted || c->prelude_size || c->stop_signal || c->behind || c->at < h.head || h.ended);
}

/* Send what the client lacks, as far as its socket takes it. */
static void serve(struct client *c)
{
    while (c->fd >= 0 && !c->blocked && has_something_for(c)) {
        uint8_t byte = 0;
        if (!c->greeted) {
            c->greeted = send_client(c, 'H', &byte, 1, 0, 0) > 0;
        } else if (c->behind) {
            jump_ahead(c);
        } else if (c->prelude_size) {
            if (send_client(c, 'O', c->prelude, c->prelude_size, 0, 0) > 0)
                c->prelude_size = 0;
        } else if (c->stop_signal) {
            byte = (uint8_t)c->stop_signal;
            if (send_client(c, 'T', &byte, 1, 0, 0) > 0)
                c->stop_signal = 0;
        } else if (c->at < h.head) {
            send_output(c);
        } else if (send_client(c, 'X', &h.status, sizeof h.status, &h.lost, 1) > 0) {
            drop(c);
        }
    }
}

static void refuse(struct client *c, uint8_t reason)
{
    if (send_client(c, 'H', &reason, 1, 0, 0) >= 0)
        drop(c);
}

/* First packet of a connection: 'A', flags, size. */
static void attach(struct client *c, const uint8_t *packet, size_t size)
{
    struct screen fresh;
    if (size != 10 || packet[0] != 'A' || packet[1] > 1)
        return drop(c);
    enum role role = packet[1] ? WATCHER : WRITER;
    if (role == WRITER && count_of(WRITER))
        return refuse(c, 1);
    if (role == WATCHER && count_of(WATCHER) >= MAX_WATCHERS)
        return refuse(c, 2);
    c->role = role;
    if (role == WRITER) {
        take_size(packet + 2);
        continue_program();
    }
    screen_reset(&fresh);
    show(c, &fresh);
    if (h.stopped_by && role == WATCHER)
        c->stop_signal = h.stopped_by;
}

static void take_packet(struct client *c, const uint8_t *packet, size_t size)
{
    if (c->role == NEW)
        return attach(c, packet, size);
    int is_size = packet[0] == 'W' && size == 9;
    if (packet[0] != 'I' && !is_size)
        return drop(c);
    if (c->role != WRITER)
        return; /* read only: whatever it says changes nothing */
    if (is_size)
        return take_size(packet + 1);
    memcpy(input + h.input_size, packet + 1, size - 1);
    h.input_size += size - 1;
    continue_program();
    write_input();
}

static int has_room(const struct client *c)
{
    return c->role != WRITER || INPUT_BYTES - h.input_size >= PACKET_BYTES;
}

/* Take the client's packets while there is room for a whole one. */
static void hear(struct client *c)
{
    for (int count = 0; count < 16 && c->fd >= 0 && has_room(c); count++) {
        struct iovec_ part = {scratch, sizeof scratch};
        struct msghdr_ message = {.iov = &part, .iov_count = 1};
        long size = CALL3(recvmsg, c->fd, &message, MSG_DONTWAIT_ | MSG_CMSG_CLOEXEC_);
        if (size == -EAGAIN || size == -EINTR)
            return;
        if (size <= 0 || message.flags & MSG_TRUNC_)
            return drop(c);
        take_packet(c, scratch, (size_t)size);
    }
}

/* ------------------------------------------------------------------------------------------------- who may attach */

static const char *namespace_name(int index)
{
    return index == 0 ? "user" : index == 1 ? "pid" : "mnt";
}

static int namespace_call(int index)
{
    return index == 0 ? PIDFD_GET_USER_NAMESPACE_ : index == 1 ? PIDFD_GET_PID_NAMESPACE_ : PIDFD_GET_MNT_NAMESPACE_;
}

static long open_namespace_by_name(int pid, int index)
{
    uint8_t path[48];
    uint8_t *at = put_number(put_text(path, "/proc/"), (uint32_t)pid);
    at = put_text(put_text(at, "/ns/"), namespace_name(index));
    *at = 0;
    return CALL4(openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC, 0);
}

static int same_namespace(int pidfd, int pid, int index)
{
    struct statx theirs, *own = &own_namespaces[index];
    long fd = CALL3(ioctl, pidfd, namespace_call(index), 0);
    if (fd == -ENOTTY || fd == -EINVAL)
        fd = open_namespace_by_name(pid, index);
    if (fd < 0)
        return 0;
    long result = CALL5(statx, fd, "", AT_EMPTY_PATH, STATX_INO, &theirs);
    close_fd((int)fd);
    return result == 0 && theirs.stx_ino == own->stx_ino && theirs.stx_dev_major == own->stx_dev_major
        && theirs.stx_dev_minor == own->stx_dev_minor;
}

/* The program inside has our uid, so the uid alone proves nothing: the peer has to stand where we stand. */
static int is_ours(int fd)
{
    struct ucred_ peer;
    int pidfd = -1, ours = 1;
    unsigned size = sizeof peer;
    if (CALL5(getsockopt, fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) < 0 || peer.uid != (unsigned)CALL0(geteuid))
        return 0;
    size = sizeof pidfd;
    long result = CALL5(getsockopt, fd, SOL_SOCKET, SO_PEERPIDFD_, &pidfd, &size);
    if (result == -ENOPROTOOPT)
        pidfd = (int)CALL2(pidfd_open, peer.pid, 0); /* before Linux 6.5 */
    else if (result < 0)
        return 0;
    if (pidfd < 0)
        return 0;
    for (int index = 0; index < 3; index++)
        ours = ours && same_namespace(pidfd, peer.pid, index);
    /* Only of a process that still lives can it be said that /proc/PID was its own. */
    struct pollfd alive = {pidfd, POLLIN, 0};
    struct timespec at_once = {0, 0};
    ours = ours && CALL5(ppoll, &alive, 1, &at_once, 0, 0) == 0;
    close_fd(pidfd);
    return ours;
}

/* A place for a connection. There is always one: those that have attached are fewer, and of the others the oldest
 * goes. */
static struct client *place(void)
{
    struct client *oldest = 0;
    for (int index = 0; index < MAX_CLIENTS; index++) {
        struct client *c = &clients[index];
        if (c->fd < 0)
            return c;
        if (c->role == NEW && (!oldest || c->number < oldest->number))
            oldest = c;
    }
    drop(oldest);
    return oldest;
}

static void accept_clients(void)
{
    for (int count = 0; count < MAX_CLIENTS; count++) {
        long fd = CALL4(accept4, LISTENER, 0, 0, O_NONBLOCK | O_CLOEXEC);
        if (fd == -EAGAIN || fd == -ECONNABORTED || fd == -EINTR)
            return;
        if (fd < 0) {
            h.listen_at = h.time + RETRY; /* no descriptors left: not a reason to spin */
            return;
        }
        if (!is_ours((int)fd)) {
            close_fd((int)fd);
            continue;
        }
        struct client *c = place();
        *c = (struct client){.fd = (int)fd, .number = ++h.connections};
    }
}

/* -------------------------------------------------------------------------------------------------- the session */

static void kill_init(void)
{
    CALL4(pidfd_send_signal, INIT, SIGKILL, 0, 0);
}

/* TERM to us ends the session as `ral kill` does; a second one does not wait. */
static void ask_to_end(void)
{
    struct packet packet = {SIGNAL, SIGTERM, 0, 0};
    if (h.kill_at || send_packet(LEASE, packet, -1, MSG_DONTWAIT_) < 0)
        kill_init();
    h.kill_at = h.time + GRACE;
}

static void hear_lease(void)
{
    struct packet packet;
    struct iovec_ part = {&packet, sizeof packet};
    struct msghdr_ message = {.iov = &part, .iov_count = 1};
    long size = CALL3(recvmsg, LEASE, &message, MSG_DONTWAIT_ | MSG_CMSG_CLOEXEC_);
    if (size == -EAGAIN || size == -EINTR)
        return;
    if (size <= 0) {
        /* pid 1 has ended; the monitor will say how. Not closed: its number must not become a client's. */
        h.lease_gone = 1;
        h.stopped_by = h.wants_continue = 0;
        return;
    }
    if (size != sizeof packet || (packet.kind != STOPPED && packet.kind != CONTINUED))
        return;
    h.stopped_by = packet.kind == STOPPED ? packet.a & 0x7f : 0;
    for (int index = 0; index < MAX_CLIENTS; index++)
        clients[index].stop_signal = clients[index].role == NEW ? 0 : h.stopped_by;
}

/* The last exit-code of the status file, -1 if there is none. Only lines that are complete count. */
static int32_t recorded_status(void)
{
    static const char key[] = "\"exit-code\"";
    static uint8_t text[4096];
    struct statx file;
    int32_t found = -1;
    if (CALL5(statx, STATUS, "", AT_EMPTY_PATH, STATX_SIZE, &file) < 0)
        return -1;
    uint64_t from = file.stx_size > sizeof text ? file.stx_size - sizeof text : 0;
    long size = CALL4(pread64, STATUS, text, sizeof text, from);
    while (size > 0 && text[size - 1] != '\n')
        size--;
    for (long at = 0; at + (long)sizeof key - 1 < size; at++) {
        size_t same = 0;
        while (same < sizeof key - 1 && text[(size_t)at + same] == (uint8_t)key[same])
            same++;
        if (same < sizeof key - 1)
            continue;
        long digit = at + (long)same;
        while (text[digit] == ' ' || text[digit] == ':')
            digit++; /* the newline at the end stops this */
        int32_t value = text[digit] >= '0' && text[digit] <= '9' ? 0 : -1;
        for (; text[digit] >= '0' && text[digit] <= '9' && value <= 255; digit++)
            value = value * 10 + (text[digit] - '0');
        found = value <= 255 ? value : -1;
    }
    return found;
}

/* The monitor has ended: make sure that the sandbox has, take the rest of its output and its status. */
static void end_session(void)
{
    struct pollfd init = {INIT, POLLIN, 0};
    struct timespec no_time = {0, 0}, limit = {DEATH / 1000, 0};
    int32_t status = recorded_status();
    if (CALL5(ppoll, &init, 1, &no_time, 0, 0) == 0) {
        kill_init();
        CALL5(ppoll, &init, 1, &limit, 0, 0);
    }
    close_fd(h.slave);
    h.slave = -1;
    for (size_t drained = 0; drained < DRAIN_BYTES && read_master(); drained += CHUNK_BYTES) {
    }
    h.lost = status < 0;
    h.status = h.lost ? LOST : status;
    CALL3(unlinkat, DIRECTORY, h.socket_name, 0);
    accept_clients();
    close_fd(LISTENER);
    for (int index = 0; index < MAX_CLIENTS; index++) {
        struct client *c = &clients[index];
        if (c->fd >= 0 && c->role == NEW)
            hear(c);
        if (c->fd >= 0 && c->role == NEW)
            drop(c); /* did not say in time what it wants */
    }
    h.ended = 1;
    h.leave_at = h.time + GRACE;
}

/* --------------------------------------------------------------------------------------------------------- loop */

/* A client that takes what it gets is not left behind: the program waits for it, as it would for a terminal. One
 * that stands still holds it up for PACE, once. */
static int64_t paced_until(void)
{
    int64_t until = 0;
    for (int index = 0; index < MAX_CLIENTS; index++) {
        struct client *c = &clients[index];
        if (c->fd >= 0 && c->role == WRITER && !c->behind && h.head - c->at > RING_BYTES / 2)
            until = c->progress + PACE;
    }
    return until > h.time ? until : 0;
}

static void run_timers(void)
{
    if (h.redraw_at && h.time >= h.redraw_at) {
        h.redraw_at = 0;
        set_size(&h.size);
    }
    if (h.kill_at && h.time >= h.kill_at && !h.ended) {
        kill_init();
        h.kill_at = h.time + GRACE;
    }
    if (h.master_at && h.time >= h.master_at)
        h.master_at = 0;
    if (h.listen_at && h.time >= h.listen_at)
        h.listen_at = 0;
}

/* Milliseconds to the next deadline, -1 for none. */
static int64_t time_left(int64_t paced)
{
    int64_t deadlines[] = {h.redraw_at, h.ended ? 0 : h.kill_at, h.leave_at, h.master_at, h.listen_at, paced};
    int64_t next = 0;
    for (size_t index = 0; index < sizeof deadlines / sizeof *deadlines; index++)
        if (deadlines[index] && (!next || deadlines[index] < next))
            next = deadlines[index];
    if (!next)
        return -1;
    return next > h.time ? next - h.time : 0;
}

enum polled { P_MASTER, P_LEASE, P_MONITOR, P_LISTENER, P_SIGNALS, P_CLIENTS, P_COUNT = P_CLIENTS + MAX_CLIENTS };

static void fill(struct pollfd polled[P_COUNT], int64_t paced)
{
    polled[P_MASTER] = (struct pollfd){h.ended || h.master_at || (paced && !h.input_size) ? -1 : MASTER, 0, 0};
    polled[P_MASTER].events = (short)((paced ? 0 : POLLIN) | (h.input_size ? POLLOUT : 0));
    polled[P_LEASE] = (struct pollfd){h.ended || h.lease_gone ? -1 : LEASE, POLLIN, 0};
    polled[P_LEASE].events = (short)(POLLIN | (h.wants_continue ? POLLOUT : 0));
    polled[P_MONITOR] = (struct pollfd){h.ended ? -1 : MONITOR, POLLIN, 0};
    polled[P_LISTENER] = (struct pollfd){h.ended || h.listen_at ? -1 : LISTENER, POLLIN, 0};
    polled[P_SIGNALS] = (struct pollfd){h.signals, POLLIN, 0};
    for (int index = 0; index < MAX_CLIENTS; index++) {
        struct client *c = &clients[index];
        short events = (short)((has_room(c) ? POLLIN : 0) | (has_something_for(c) ? POLLOUT : 0));
        polled[P_CLIENTS + index] = (struct pollfd){c->fd, events, 0};
    }
}

static void act_on(const struct pollfd polled[P_COUNT])
{
    struct signalfd_siginfo info;
    /* Clients first: the places of those that go may be needed by those that come. */
    for (int index = 0; index < MAX_CLIENTS; index++) {
        struct client *c = &clients[index];
        short events = polled[P_CLIENTS + index].revents;
        if (events & POLLOUT)
            c->blocked = 0;
        if (events & POLLIN)
            hear(c);
        else if (events & (POLLHUP | POLLERR | POLLNVAL))
            drop(c);
    }
    if (polled[P_SIGNALS].revents && CALL3(read, h.signals, &info, sizeof info) > 0)
        ask_to_end();
    if (polled[P_LEASE].revents & POLLOUT)
        continue_program();
    if (polled[P_LEASE].revents & ~POLLOUT)
        hear_lease();
    if (polled[P_MASTER].revents & POLLOUT)
        write_input();
    if (polled[P_MASTER].revents & ~POLLOUT)
        read_master();
    if (polled[P_LISTENER].revents)
        accept_clients();
    if (polled[P_MONITOR].revents)
        end_session();
}

__attribute__((noreturn)) static void hold(void)
{
    struct pollfd polled[P_COUNT];
    for (;;) {
        h.time = milliseconds_now();
        run_timers();
        for (int index = 0; index < MAX_CLIENTS; index++)
            serve(&clients[index]);
        if (h.ended && (h.time >= h.leave_at || !(count_of(NEW) + count_of(WATCHER) + count_of(WRITER))))
            exit_with(ENDED);
        int64_t paced = paced_until(), left = time_left(paced);
        struct timespec wait = {left / 1000, left % 1000 * 1000000};
        fill(polled, paced);
        if (CALL5(ppoll, polled, P_COUNT, left < 0 ? 0 : &wait, 0, 0) > 0) {
            h.time = milliseconds_now();
            act_on(polled);
        }
    }
}

/* -------------------------------------------------------------------------------------------------------- start */

__attribute__((noreturn)) static void misuse(const char *text)
{
    CALL3(write, 2, "ral-holder: ", 12);
    CALL3(write, 2, text, length_of(text));
    CALL3(write, 2, "\n", 1);
    exit_with(MISUSED);
}

static void take_name(const char *id)
{
    size_t size = length_of(id);
    for (size_t at = 0; at < size; at++)
        if (!((id[at] >= '0' && id[at] <= '9') || (id[at] >= 'a' && id[at] <= 'f')))
            size = 0;
    if (size != ID_BYTES)
        misuse("the only argument is a session's id, 8 hexadecimal digits; the broker starts this program");
    put_text(put_text((uint8_t *)h.log_name, id), ".log");
    put_text(put_text((uint8_t *)h.old_name, id), ".log.1");
    put_text(put_text((uint8_t *)h.socket_name, id), ".sock");
}

/* Nothing but the broker's descriptors, and none of them waits. */
static void take_descriptors(void)
{
    for (int fd = MASTER; fd < FIRST_FREE; fd++) {
        long flags = CALL2(fcntl, fd, F_GETFL);
        if (flags < 0)
            misuse("one of the descriptors 3 to 9 is missing; the broker starts this program");
        if (fd == MASTER || fd == LISTENER)
            CALL3(fcntl, fd, F_SETFL, flags | O_NONBLOCK);
        CALL3(fcntl, fd, F_SETFD, FD_CLOEXEC);
    }
    if (CALL3(close_range, FIRST_FREE, ~0U, 0) < 0)
        misuse("descriptors cannot be closed (close_range needs Linux 5.9)");
    if (CALL3(ioctl, MASTER, TIOCGWINSZ, &h.size) < 0)
        misuse("descriptor 3 is not a terminal");
    long slave = CALL3(ioctl, MASTER, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC);
    h.slave = slave < 0 ? -1 : (int)slave;
}

static void find_own_namespaces(void)
{
    for (int index = 0; index < 3; index++) {
        uint8_t path[32];
        *put_text(put_text(path, "/proc/self/ns/"), namespace_name(index)) = 0;
        if (CALL5(statx, AT_FDCWD, path, 0, STATX_INO, &own_namespaces[index]) < 0)
            misuse("own namespaces cannot be read below /proc/self/ns");
    }
}

/* Only TERM is heard; what a terminal, a logout or a limit sends must not end a session that was detached. */
static void set_signals(void)
{
    const uint64_t faults = signal_bit(SIGILL) | signal_bit(SIGTRAP) | signal_bit(SIGABRT) | signal_bit(SIGBUS)
        | signal_bit(SIGFPE) | signal_bit(SIGSEGV) | signal_bit(SIGSYS);
    uint64_t term = signal_bit(SIGTERM);
    for (int number = 1; number <= LAST_SIGNAL; number++)
        set_disposition(number, !(faults & signal_bit(number)) && number != SIGTERM);
    set_signal_mask(term);
    h.signals = (int)CALL4(signalfd4, -1, &term, sizeof term, O_CLOEXEC | O_NONBLOCK);
    if (h.signals < 0)
        misuse("no signalfd");
}

static void detach(void)
{
    CALL0(setsid);
    CALL1(chdir, "/");
    CALL1(umask, 077);
    long null = CALL4(openat, AT_FDCWD, "/dev/null", O_RDWR | O_CLOEXEC, 0);
    for (int fd = 0; null >= 0 && fd < 3; fd++)
        CALL3(dup3, null, fd, 0);
    if (null > 2)
        close_fd((int)null);
}

void entry(long *stack)
{
    char **argv = (char **)(stack + 1);
    CALL5(prctl, PR_SET_DUMPABLE, 0, 0, 0, 0);
    CALL5(prctl, PR_SET_NAME, "ral-holder", 0, 0, 0);
    take_name(stack[0] == 2 ? argv[1] : "");
    take_descriptors();
    find_own_namespaces();
    set_signals();
    detach();
    for (int index = 0; index < MAX_CLIENTS; index++)
        clients[index].fd = -1;
    screen_reset(&h.current);
    screen_reset(&h.oldest);
    h.time = milliseconds_now();
    open_log();
    hold();
}
