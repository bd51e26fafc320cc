/* Changes the mounts of running sandboxes: forks, enters, does what the order lists, reports, exits.
 *
 * A resident child of the broker with the host's view, one for all sessions. docs/protocol.md section 5 is the
 * contract. Descriptor 3 is the socket that orders come from; when its other end is closed, this process ends.
 *
 * It has no capability and needs none: the user namespace of a session was made by this uid in the namespace that
 * this process is in, which gives its children every capability there once they enter (user_namespaces(7)). They
 * work on the descriptors of the order and on nothing else: no pid, no name in the host. This process itself
 * decides nothing and keeps nothing; whatever reads an order, or meets a session, is a child that ends with it.
 */

#include "kernel.h"

#include <asm/statfs.h>
#include <linux/capability.h>
#include <linux/mount.h>
#include <linux/nsfs.h>
#include <linux/openat2.h>
#include <linux/sched.h>
#include <linux/time.h>

enum slot { ORDERS = 3, FIRST_FREE };

enum answer { CHILD = 1, RESULTS };

enum operation { MASK_FILE = 1, MASK_DIRECTORY };

enum item_flag { HAS_IDENTITY = 1, ALL_ITEM_FLAGS = 1 };

enum stage {
    S_ORDER = 1, /* the list is not what section 5 says */
    S_FORK,
    S_NAMESPACE, /* what was lent is no mount namespace */
    S_HOST, /* it is the host's own */
    S_OWNER, /* it belongs to another user, or to none below us */
    S_ENTER,
    S_SOURCE, /* the empty objects cannot be made */
    S_FIND, /* nothing can be found at the path without following a link */
    S_IDENTITY, /* another object is there */
    S_KIND, /* a file where a directory should be, or the reverse */
    S_ATTACH,
    S_VERIFY, /* a second look does not find what was attached */
};

enum bound {
    MAX_LIST = 8 << 20,
    MAX_ITEMS = 4096,
    MAX_PATH = 4096, /* with its NUL */
    MAX_MILLISECONDS = 60000,
    LIST_HEADER = 24,
    ITEM_HEADER = 32,
    LENT = 3,
    LENT_ROOM = 16,
};

struct order {
    uint32_t version;
    uint32_t milliseconds; /* in which the child has to be done */
    uint64_t zero;
};

/* What comes with an order. */
enum lent { ANSWER, NAMESPACE, LIST };

struct lent_rights {
    size_t length;
    int level;
    int type;
    int fds[LENT_ROOM];
};

struct item {
    uint32_t operation;
    uint32_t flags;
    uint32_t major, minor; /* of the device, and */
    uint64_t inode; /* of the object that has to be at the path, with HAS_IDENTITY */
    uint32_t zero;
    uint32_t path_bytes;
    const char *path;
};

struct result {
    uint32_t stage; /* 0: done */
    int32_t error;
};

/* Four words, as struct packet has them; `count` results follow. */
struct report {
    uint32_t kind;
    uint32_t stage;
    int32_t error;
    uint32_t count;
};

struct identity {
    uint32_t major, minor;
    uint64_t inode;
};

/* The empty object of one kind: a mount of its own, detached until its first use. All others are clones of it. */
struct empty {
    int tree;
    int attached;
    struct identity identity;
};

static struct identity own_mounts, own_users;
static struct result results[MAX_ITEMS];
static const uint8_t *list;
static size_t list_bytes;

/* ------------------------------------------------------------------------------------------------------- looking */

static long look(int directory, const char *path, struct statx *status)
{
    return CALL5(statx, directory, path, AT_EMPTY_PATH, STATX_TYPE | STATX_INO, status);
}

static struct identity identity_of(const struct statx *status)
{
    return (struct identity){status->stx_dev_major, status->stx_dev_minor, status->stx_ino};
}

static int is_same(struct identity a, struct identity b)
{
    return a.major == b.major && a.minor == b.minor && a.inode == b.inode;
}

/* --------------------------------------------------------------------------------------------- the child: answers */

static void answer(int socket, uint32_t stage, long error, uint32_t count)
{
    struct report report = {RESULTS, stage, (int32_t)error, count};
    struct iovec_ parts[2] = {{&report, sizeof report}, {results, count * sizeof *results}};
    struct msghdr_ message = {.iov = parts, .iov_count = 2};
    CALL3(sendmsg, socket, &message, MSG_DONTWAIT_ | MSG_NOSIGNAL_);
}

/* The order as a whole could not be carried out: nothing of it was done. */
__attribute__((noreturn)) static void give_up(int socket, enum stage stage, long error)
{
    answer(socket, stage, -error, 0);
    exit_with(1);
}

/* ------------------------------------------------------------------------------------------------ the child: list */

/* Absolute, no empty component, no dot or two of them, nothing at the end: the only spelling of its place. */
static int is_canonical(const char *path, size_t length)
{
    size_t component = 0;
    if (length < 2 || path[0] != '/')
        return 0;
    for (size_t at = 1; at <= length; at++) {
        if (at < length && path[at] != '/') {
            component++;
            continue;
        }
        if (component == 0 || (component == 1 && path[at - 1] == '.')
            || (component == 2 && path[at - 1] == '.' && path[at - 2] == '.'))
            return 0;
        component = 0;
    }
    return 1;
}

/* Take the item at `*at` and go on to the next; false if it is not sound. */
static int take_item(size_t *at, struct item *item)
{
    if (list_bytes - *at < ITEM_HEADER)
        return 0;
    memcpy(item, list + *at, ITEM_HEADER);
    *at += ITEM_HEADER;
    size_t size = item->path_bytes;
    if ((item->operation != MASK_FILE && item->operation != MASK_DIRECTORY) || item->flags & ~(uint32_t)ALL_ITEM_FLAGS
        || item->zero || size > MAX_PATH || size > list_bytes - *at)
        return 0;
    if (!(item->flags & HAS_IDENTITY) && (item->major || item->minor || item->inode))
        return 0;
    item->path = (const char *)list + *at;
    *at += size;
    return size > 1 && !item->path[size - 1] && length_of(item->path) == size - 1
        && is_canonical(item->path, size - 1);
}

/* Map the list; return its number of items. The seals are looked at first: without them it could change while it
 * is read. All of it is decoded before any of it is done. */
static uint32_t read_list(int socket, int fd)
{
    static const char magic[16] = "ral-changes/1";
    struct statx status;
    long seals = CALL2(fcntl, fd, F_GET_SEALS);
    if (seals < 0 || (seals & ALL_SEALS) != ALL_SEALS)
        give_up(socket, S_ORDER, seals < 0 ? seals : -EPERM);
    long result = CALL5(statx, fd, "", AT_EMPTY_PATH, STATX_SIZE, &status);
    if (result < 0 || status.stx_size < LIST_HEADER || status.stx_size > MAX_LIST)
        give_up(socket, S_ORDER, result < 0 ? result : -EMSGSIZE);
    list_bytes = (size_t)status.stx_size;
    result = CALL(mmap, 0, list_bytes, PROT_READ, MAP_PRIVATE, fd, 0);
    if (result < 0 && result > -4096)
        give_up(socket, S_ORDER, result);
    list = (const uint8_t *)result;
    uint32_t words[2];
    memcpy(words, list + sizeof magic, sizeof words);
    int sound = words[0] == list_bytes && words[1] >= 1 && words[1] <= MAX_ITEMS;
    for (size_t index = 0; index < sizeof magic; index++)
        sound = sound && list[index] == (uint8_t)magic[index];
    size_t at = LIST_HEADER;
    struct item item;
    for (uint32_t index = 0; sound && index < words[1]; index++)
        sound = take_item(&at, &item);
    if (!sound || at != list_bytes)
        give_up(socket, S_ORDER, -EBADMSG);
    return words[1];
}

/* ----------------------------------------------------------------------------------------------- the child: entry */

/* The user namespace that owns the lent mount namespace. Refuses what is the host's or another user's. */
static int owner_of(int socket, int namespace)
{
    struct statx status;
    uint32_t uid = 0;
    long type = CALL3(ioctl, namespace, NS_GET_NSTYPE, 0);
    if (type != CLONE_NEWNS)
        give_up(socket, S_NAMESPACE, type < 0 ? type : -EINVAL);
    long result = look(namespace, "", &status);
    if (result < 0 || is_same(identity_of(&status), own_mounts))
        give_up(socket, S_HOST, result < 0 ? result : -EPERM);
    long users = CALL3(ioctl, namespace, NS_GET_USERNS, 0);
    if (users < 0)
        give_up(socket, S_OWNER, users); /* EPERM: none of those below ours */
    result = look((int)users, "", &status);
    if (result < 0 || is_same(identity_of(&status), own_users))
        give_up(socket, S_HOST, result < 0 ? result : -EPERM);
    result = CALL3(ioctl, users, NS_GET_OWNER_UID, &uid);
    if (result < 0 || uid != (uint32_t)CALL0(geteuid))
        give_up(socket, S_OWNER, result < 0 ? result : -EPERM);
    return (int)users;
}

static void enter(int socket, int namespace, int users, int parent)
{
    long result = CALL2(setns, users, CLONE_NEWUSER);
    if (result == 0)
        result = CALL2(setns, namespace, CLONE_NEWNS);
    /* Not before: new capabilities clear it (prctl(2)). */
    if (result == 0)
        result = CALL5(prctl, PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
    if (result < 0)
        give_up(socket, S_ENTER, result);
    if (CALL0(getppid) != parent)
        exit_with(1);
    close_fd(users);
}

/* ----------------------------------------------------------------------------------------------- the child: masks */

/* A new file system in memory, read-only, in which there is nothing but an empty file and an empty directory. */
static long make_filesystem(void)
{
    const long wanted = MS_RDONLY | MS_NOSUID | MS_NODEV; /* statfs(2): its ST_ flags have the same values */
    struct mount_attr closed = {.attr_set = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV};
    struct statfs filesystem;
    long fs = CALL2(fsopen, "tmpfs", FSOPEN_CLOEXEC);
    if (fs < 0)
        return fs;
    long result = CALL5(fsconfig, fs, FSCONFIG_SET_STRING, "source", "ral-mask", 0);
    if (result == 0)
        result = CALL5(fsconfig, fs, FSCONFIG_SET_STRING, "mode", "0555", 0);
    if (result == 0)
        result = CALL5(fsconfig, fs, FSCONFIG_CMD_CREATE, 0, 0, 0);
    if (result == 0)
        result = CALL3(fsmount, fs, FSMOUNT_CLOEXEC, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV);
    close_fd((int)fs);
    if (result < 0)
        return result;
    int tree = (int)result;
    long file = CALL4(openat, tree, "file", O_RDONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0444);
    if (file < 0)
        return file;
    close_fd((int)file);
    result = CALL3(mkdirat, tree, "directory", 0555);
    /* here, before anything of it is visible anywhere; clones keep these attributes */
    if (result == 0)
        result = CALL5(mount_setattr, tree, "", AT_EMPTY_PATH, &closed, sizeof closed);
    if (result == 0)
        result = CALL2(fstatfs, tree, &filesystem);
    if (result == 0 && (filesystem.f_flags & wanted) != wanted)
        result = -EROFS;
    return result < 0 ? result : tree;
}

/* Make the detached empty objects. A tree can be cloned only where it is mounted (before Linux 6.15), and it must
 * not be mounted in the session as a whole: so that is done in a copy of the session's namespace, which ends here. */
static void make_empties(int socket, int namespace, struct empty empties[2])
{
    struct statx status;
    long result = CALL1(unshare, CLONE_NEWNS);
    long tree = result < 0 ? result : make_filesystem();
    if (tree < 0)
        give_up(socket, S_SOURCE, tree);
    result = CALL5(move_mount, tree, "", AT_FDCWD, "/", MOVE_MOUNT_F_EMPTY_PATH);
    for (int kind = 0; kind < 2 && result >= 0; kind++) {
        result = CALL3(open_tree, tree, kind ? "directory" : "file", OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC);
        if (result < 0)
            break;
        empties[kind].tree = (int)result;
        result = look(empties[kind].tree, "", &status);
        empties[kind].identity = identity_of(&status);
    }
    close_fd((int)tree);
    if (result >= 0)
        result = CALL2(setns, namespace, CLONE_NEWNS);
    if (result < 0)
        give_up(socket, S_SOURCE, result);
}

/* What is at a path of the session, as an O_PATH descriptor. */
static long find(int root, const char *path)
{
    struct open_how how = {
        .flags = O_PATH | O_CLOEXEC,
        .resolve = RESOLVE_IN_ROOT | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS,
    };
    return CALL4(openat2, root, path, &how, sizeof how);
}

static struct result failed(enum stage stage, long error)
{
    return (struct result){stage, (int32_t)-error};
}

/* Lay the empty object over what `target` is open at: over that very object, whatever its name is by now. */
static struct result cover(int target, struct empty *empty)
{
    const unsigned flags = MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH;
    long tree = empty->tree;
    if (empty->attached)
        tree = CALL3(open_tree, tree, "", AT_EMPTY_PATH | OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC);
    if (tree < 0)
        return failed(S_SOURCE, tree);
    long error = CALL5(move_mount, tree, "", target, "", flags);
    if (empty->attached)
        close_fd((int)tree);
    else
        empty->attached = error == 0;
    return error < 0 ? failed(S_ATTACH, error) : (struct result){0};
}

static struct result mask(int root, const struct item *item, struct empty *empty)
{
    struct statx status;
    struct result result = {0};
    struct identity wanted = {item->major, item->minor, item->inode};
    int want_directory = item->operation == MASK_DIRECTORY;
    long target = find(root, item->path);
    if (target < 0)
        return failed(S_FIND, target);
    long error = look((int)target, "", &status);
    if (error < 0)
        result = failed(S_FIND, error);
    else if (item->flags & HAS_IDENTITY && !is_same(identity_of(&status), wanted))
        result = failed(S_IDENTITY, -ESTALE);
    else if (((status.stx_mode & S_IFMT) == S_IFDIR) != want_directory)
        result = failed(S_KIND, want_directory ? -ENOTDIR : -EISDIR);
    else
        result = cover((int)target, empty);
    close_fd((int)target);
    return result;
}

/* Look again, by name, as a program would: the empty object has to be what is found there. One call, since it is
 * made for every mask of a launch. */
static struct result verify(int root, const struct item *item, const struct empty *empty)
{
    struct statx status;
    /* relative to the root and not absolute, which says the same and depends on nothing else */
    long error = CALL5(statx, root, item->path + 1, AT_SYMLINK_NOFOLLOW | AT_NO_AUTOMOUNT, STATX_INO, &status);
    if (error == 0 && (!is_same(identity_of(&status), empty->identity)
                       || !(status.stx_attributes & STATX_ATTR_MOUNT_ROOT)))
        error = -ESTALE;
    return error < 0 ? failed(S_VERIFY, error) : (struct result){0};
}

/* In the order of the list; then all are looked at once more, so that none hides what another one did. */
static void change_mounts(int socket, int namespace, uint32_t count)
{
    struct empty empties[2] = {0};
    struct item item;
    make_empties(socket, namespace, empties);
    long root = CALL4(openat, AT_FDCWD, "/", O_PATH | O_DIRECTORY | O_CLOEXEC, 0);
    if (root < 0)
        give_up(socket, S_ENTER, root);
    size_t at = LIST_HEADER;
    for (uint32_t index = 0; index < count && take_item(&at, &item); index++)
        results[index] = mask((int)root, &item, &empties[item.operation == MASK_DIRECTORY]);
    at = LIST_HEADER;
    for (uint32_t index = 0; index < count && take_item(&at, &item); index++)
        if (!results[index].stage)
            results[index] = verify((int)root, &item, &empties[item.operation == MASK_DIRECTORY]);
}

/* ----------------------------------------------------------------------------------------------------- the child */

__attribute__((noreturn)) static void serve(const int lent[LENT], uint32_t milliseconds, int parent)
{
    /* The kernel ends a child that hangs, also when nobody else is left to do it. */
    struct __kernel_old_itimerval clock = {{0, 0}, {milliseconds / 1000, milliseconds % 1000 * 1000}};
    long result = CALL3(setitimer, ITIMER_REAL, &clock, 0);
    close_fd(ORDERS);
    if (result < 0)
        give_up(lent[ANSWER], S_FORK, result);
    uint32_t count = read_list(lent[ANSWER], lent[LIST]);
    int users = owner_of(lent[ANSWER], lent[NAMESPACE]);
    enter(lent[ANSWER], lent[NAMESPACE], users, parent);
    change_mounts(lent[ANSWER], lent[NAMESPACE], count);
    answer(lent[ANSWER], 0, 0, count);
    exit_with(0);
}

/* ---------------------------------------------------------------------------------------------------- the zygote */

static void start_child(const int lent[LENT], uint32_t milliseconds)
{
    int pidfd = -1, parent = (int)CALL0(getpid);
    long pid = CALL5(clone, CLONE_PIDFD | SIGCHLD, 0, &pidfd, 0, 0);
    if (pid == 0)
        serve(lent, milliseconds, parent);
    if (pid < 0)
        answer(lent[ANSWER], S_FORK, -pid, 0);
    else
        send_packet(lent[ANSWER], (struct packet){CHILD, 0, 0, 0}, pidfd, MSG_DONTWAIT_);
    close_fd(pidfd);
}

/* Take one order. What is none is dropped with its descriptors, and so its sender reads the end of its answer. */
static void take_order(void)
{
    struct order order;
    struct iovec_ part = {&order, sizeof order};
    struct lent_rights rights = {0};
    struct msghdr_ message = {.iov = &part, .iov_count = 1, .control = &rights, .control_length = sizeof rights};
    long size = CALL3(recvmsg, ORDERS, &message, MSG_CMSG_CLOEXEC_);
    if (size == -EINTR)
        return;
    if (size <= 0)
        exit_with(0); /* the broker has gone */
    size_t count = 0;
    if (message.control_length && rights.level == SOCKET_LEVEL && rights.type == SCM_RIGHTS_)
        count = (rights.length - offsetof(struct lent_rights, fds)) / sizeof(int);
    if (size == sizeof order && !(message.flags & (MSG_TRUNC_ | MSG_CTRUNC_)) && count == LENT && order.version == 1
        && order.milliseconds >= 1 && order.milliseconds <= MAX_MILLISECONDS && !order.zero)
        start_child(rights.fds, order.milliseconds);
    for (size_t index = 0; index < count && index < LENT_ROOM; index++)
        close_fd(rights.fds[index]);
}

/* Root's broker has capabilities; what the owner of a namespace may do there does not depend on them. */
static void drop_capabilities(void)
{
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct none[2] = {0};
    if (CALL2(capset, &header, none) < 0)
        exit_with(1);
}

void entry(long *stack)
{
    struct statx mounts, users;
    (void)stack;
    CALL5(prctl, PR_SET_NAME, "ral-zygote", 0, 0, 0);
    CALL5(prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    CALL3(close_range, FIRST_FREE, ~0U, 0);
    CALL1(umask, 0);
    reset_dispositions();
    set_signal_mask(0);
    set_disposition(SIGCHLD, 1); /* children leave no zombie */
    drop_capabilities();
    if (look(AT_FDCWD, "/proc/self/ns/mnt", &mounts) < 0 || look(AT_FDCWD, "/proc/self/ns/user", &users) < 0)
        exit_with(1);
    own_mounts = identity_of(&mounts);
    own_users = identity_of(&users);
    for (;;)
        take_order();
}
