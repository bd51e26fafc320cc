/* The command `ral`: finds the client's modules and the interpreter that they were installed for, and becomes
 *
 *     PYTHON -I -S -Xutf8 SITE/ral_client/start.py MASK ARGUMENT...
 *
 * MASK is the set of signals that the caller ignores, bit n-1 for signal n: Python ignores two by itself before any
 * of the client's code runs. Arguments and environment are handed on as they came, entries included that a shell
 * drops because their names are no identifiers. -Xutf8 because what Python decodes by the locale it cannot always
 * encode again: in EUC and Big5 locales arguments change, in GB18030 the interpreter aborts.
 *
 * What is run follows from where this file is, never from the environment: the directory that /proc/self/exe names, so
 * links lead here; if that is of no use, the directory of the name that was executed. The modules are above it, in
 * lib or lib64, python3 or python3.N, site-packages or dist-packages. Beside a pyvenv.cfg the interpreter is the
 * environment's own and no other; else that of the modules' version: in this directory, in /usr/bin, in /usr/local/bin.
 *
 * Of start.py the interpreter gets the byte code that the installer made, if that is fresh: Python compiles a script
 * anew at every start, and looks at no cached code for it.
 *
 * It returns only where nothing was started: status 78, after one sentence on standard error.
 */

#include "kernel.h"

#include <linux/auxvec.h>

enum exit_status { REFUSED = 78 };

enum bound { PATH_BYTES = 4096, SENTENCE_BYTES = 5 * PATH_BYTES, MASK_BYTES = sizeof "0xffffffffffffffff" };

/* Python versions that ral supports, the newest first, and the magic numbers of their byte code (fixed since their first
 * beta; importlib.util.MAGIC_NUMBER); before them the directory that Debian's packages share. */
static const struct version {
    char name[5];
    uint16_t magic;
} VERSIONS[] = {{"3", 0}, {"3.13", 3571}, {"3.12", 3531}, {"3.11", 3495}};
static const char LIBRARIES[][6] = {"lib", "lib64"};
static const char SITES[][14] = {"site-packages", "dist-packages"};
static const char HEXADECIMAL[] = "0123456789abcdef";

#define COUNT(array) (sizeof(array) / sizeof(array)[0])

struct path {
    size_t size; /* without the NUL */
    int too_long;
    char bytes[PATH_BYTES];
};

/* Where an installation may be: the directory of this file, and the one above it. */
struct place {
    struct path bin;
    struct path prefix;
};

/* What the refusal says. */
static struct {
    int modules_found;
    struct path modules; /* where they could not be read */
    long modules_error;
    struct path python; /* what could not be executed */
    long python_error;
    int in_environment; /* one interpreter was tried, else three */
} seen;

/* ------------------------------------------------------------------------------------------------- a sentence */

static struct {
    size_t size;
    char bytes[SENTENCE_BYTES];
} sentence;

static void put(char byte)
{
    if (sentence.size < sizeof sentence.bytes)
        sentence.bytes[sentence.size++] = byte;
}

static void say(const char *text)
{
    while (*text)
        put(*text++);
}

/* A name that came from outside: what is not printable ASCII is escaped, as it could be an order to the terminal. */
static void say_name(const char *untrusted_name)
{
    for (; *untrusted_name; untrusted_name++) {
        unsigned char byte = (unsigned char)*untrusted_name;
        if (byte >= ' ' && byte <= '~' && byte != '\\') {
            put((char)byte);
        } else {
            say("\\x");
            put(HEXADECIMAL[byte >> 4]);
            put(HEXADECIMAL[byte & 15]);
        }
    }
}

static void say_error(long error)
{
    char digits[8] = "000";
    long number = -error;
    switch (error) {
    case -ENOENT: say("it does not exist"); return;
    case -EACCES: say("permission denied"); return;
    case -ENOEXEC: say("it is not a program for this machine"); return;
    case -ENOMEM: say("out of memory"); return;
    default:
        for (int at = 2; at >= 0; at--, number /= 10)
            digits[at] = (char)('0' + number % 10);
        say("errno ");
        say(digits);
    }
}

/* In one write, so that the lines of other processes do not come in between. */
__attribute__((noreturn)) static void refuse(void)
{
    put('\n');
    CALL3(write, 2, sentence.bytes, sentence.size);
    exit_with(REFUSED);
}

/* ------------------------------------------------------------------------------------------------------- paths */

static void append(struct path *path, const char *text)
{
    for (; *text; text++) {
        if (path->size + 1 >= sizeof path->bytes) {
            path->too_long = 1;
            return;
        }
        path->bytes[path->size++] = *text;
    }
    path->bytes[path->size] = 0;
}

static void start_with(struct path *path, const char *text)
{
    path->size = 0;
    path->too_long = 0;
    path->bytes[0] = 0;
    append(path, text);
}

/* Cut the last component off; false if there is no slash. */
static int cut(struct path *path)
{
    size_t at = path->size;
    while (at > 0 && path->bytes[at - 1] != '/')
        at--;
    if (at == 0)
        return 0;
    path->size = at - 1;
    path->bytes[path->size] = 0;
    return 1;
}

/* The kernel's own answer, through every link. False without /proc, or outside of our root directory. */
static int place_of_this_file(struct place *place)
{
    char name[PATH_BYTES];
    long size = CALL4(readlinkat, AT_FDCWD, "/proc/self/exe", name, sizeof name - 1);
    if (size <= 0 || size >= (long)sizeof name - 1 || name[0] != '/')
        return 0;
    name[size] = 0;
    start_with(&place->bin, name);
    cut(&place->bin);
    place->prefix = place->bin;
    cut(&place->prefix);
    return 1;
}

/* The name that was executed, which may lead through links: only `..` is right above it. */
static int place_of_name(struct place *place, const char *name)
{
    if (!name)
        return 0;
    start_with(&place->bin, name);
    if (!cut(&place->bin))
        start_with(&place->bin, ".");
    place->prefix = place->bin;
    append(&place->prefix, "/..");
    return !place->prefix.too_long;
}

static int exists(const struct place *place, const char *name)
{
    struct path path = place->prefix;
    append(&path, name);
    return !path.too_long && CALL3(faccessat, AT_FDCWD, path.bytes, 0) == 0;
}

/* --------------------------------------------------------------------------------------------------- byte code */

static int is_equal(const char *a, const char *b)
{
    while (*a && *a == *b)
        a++, b++;
    return *a == *b;
}

/* The version that the interpreter's file is named for, through every link: a link may lead elsewhere since the modules
 * were installed. NULL where the name does not say it, and without /proc. */
static const struct version *version_of(const char *python)
{
    long fd = CALL4(openat, AT_FDCWD, python, O_PATH | O_CLOEXEC, 0);
    if (fd < 0)
        return 0;
    char digits[12];
    char *digit = digits + sizeof digits;
    long left = fd;
    *--digit = 0;
    do
        *--digit = (char)('0' + left % 10);
    while (left /= 10);
    struct path link;
    char name[PATH_BYTES];
    start_with(&link, "/proc/self/fd/");
    append(&link, digit);
    long size = CALL4(readlinkat, AT_FDCWD, link.bytes, name, sizeof name - 1);
    close_fd((int)fd);
    if (size <= 0)
        return 0;
    name[size] = 0;
    const char *last = name + size;
    while (last > name && last[-1] != '/')
        last--;
    for (size_t at = 0; at < COUNT(VERSIONS); at++) {
        struct path wanted;
        start_with(&wanted, "python");
        append(&wanted, VERSIONS[at].name);
        if (VERSIONS[at].magic && is_equal(last, wanted.bytes))
            return &VERSIONS[at];
    }
    return 0;
}

/* Find the byte code of the script `start` that `python` itself would take for it; false if there is none. It is that
 * when its first 16 bytes hold the interpreter's magic number, no flags, and the time and size of the source. */
static int find_byte_code(struct path *code, const struct path *start, const char *python)
{
    const struct version *version = version_of(python);
    struct statx source;
    if (!version || CALL5(statx, AT_FDCWD, start->bytes, 0, STATX_MTIME | STATX_SIZE, &source) < 0)
        return 0;
    *code = *start;
    cut(code);
    append(code, "/__pycache__/start.cpython-3");
    append(code, version->name + 2);
    append(code, ".pyc");
    if (code->too_long)
        return 0;
    uint32_t head[4];
    long fd = CALL4(openat, AT_FDCWD, code->bytes, O_RDONLY | O_CLOEXEC, 0);
    long size = fd < 0 ? fd : CALL3(read, fd, head, sizeof head);
    close_fd((int)fd);
    return size == sizeof head && head[0] == (version->magic | (uint32_t)'\r' << 16 | (uint32_t)'\n' << 24) &&
           head[1] == 0 && head[2] == (uint32_t)source.stx_mtime.tv_sec && head[3] == (uint32_t)source.stx_size;
}

/* ------------------------------------------------------------------------------------------------------- start */

struct command {
    const char **argv;
    char **environment;
};

enum argument { PYTHON, ISOLATED, NO_SITE, UTF8, START, MASK, FIRST_ARGUMENT };

/* Become the interpreter in `directory`; if that fails, note the failure that says most and return. */
static void try_python(const struct command *command, const struct path *start, const char *directory,
                       const char *version)
{
    struct path path, code;
    start_with(&path, directory);
    append(&path, "/python");
    append(&path, version);
    command->argv[PYTHON] = path.bytes;
    command->argv[START] = find_byte_code(&code, start, path.bytes) ? code.bytes : start->bytes;
    long error = path.too_long ? -ENAMETOOLONG : CALL3(execve, path.bytes, command->argv, command->environment);
    if (error == -E2BIG) {
        say("ral: not started: the arguments and the environment leave no room for the interpreter's own; "
            "shorten them");
        refuse();
    }
    if (error == -ENOTDIR)
        error = -ENOENT;
    if (!seen.python_error || (seen.python_error == -ENOENT && error != -ENOENT)) {
        seen.python = path;
        seen.python_error = error;
    }
}

/* Start the client from one directory of modules, if it is there. */
static void try_modules(const struct command *command, const struct place *place, int is_environment,
                        const char *library, const char *version, const char *site)
{
    struct path path = place->prefix;
    append(&path, "/");
    append(&path, library);
    append(&path, "/python");
    append(&path, version);
    append(&path, "/");
    append(&path, site);
    append(&path, "/ral_client/start.py");
    if (path.too_long)
        return;
    long error = CALL3(faccessat, AT_FDCWD, path.bytes, 4 /* R_OK */);
    if (error == -ENOENT || error == -ENOTDIR)
        return;
    if (error < 0) {
        seen.modules = path;
        seen.modules_error = error;
        return;
    }
    seen.modules_found = 1;
    seen.in_environment = is_environment;
    if (is_environment) {
        /* Another interpreter would not find what the environment holds for the broker. */
        try_python(command, &path, place->bin.bytes, "3");
        return;
    }
    try_python(command, &path, place->bin.bytes, version);
    try_python(command, &path, "/usr/bin", version);
    try_python(command, &path, "/usr/local/bin", version);
}

static void try_place(const struct command *command, const struct place *place)
{
    int is_environment = exists(place, "/pyvenv.cfg");
    for (size_t version = 0; version < COUNT(VERSIONS); version++)
        for (size_t library = 0; library < COUNT(LIBRARIES); library++)
            for (size_t site = 0; site < COUNT(SITES); site++)
                try_modules(command, place, is_environment, LIBRARIES[library], VERSIONS[version].name, SITES[site]);
}

__attribute__((noreturn)) static void refuse_start(const struct place *place)
{
    say("ral: not started: ");
    if (seen.modules_found && seen.python_error == -ENOENT && !seen.in_environment) {
        const char *name = seen.python.bytes + seen.python.size;
        while (name > seen.python.bytes && name[-1] != '/')
            name--;
        say(name);
        say(", for which it was installed, is neither in its directory nor in /usr/bin or /usr/local/bin; "
            "install that Python, or ral again");
    } else if (seen.modules_found) {
        say("the interpreter for which it was installed, ");
        say_name(seen.python.bytes);
        say(", cannot be executed: ");
        say_error(seen.python_error);
        say("; install that Python, or ral again");
    } else if (seen.modules_error) {
        say("its Python modules cannot be read: ");
        say_name(seen.modules.bytes);
        say(": ");
        say_error(seen.modules_error);
        say("; have them made readable, or ral installed again with umask 022");
    } else {
        say("its Python modules are not below ");
        say_name(place->prefix.size ? place->prefix.bytes : "/");
        say("; install ral again (in a checkout: make develop)");
    }
    refuse();
}

/* ------------------------------------------------------------------------------------------------- the caller's */

/* Python would end with status 1 and a message of its own; and a program could open by that descriptor what its
 * sandbox does not show. */
static void refuse_directories(void)
{
    for (int fd = 0; fd <= 2; fd++) {
        struct statx status;
        if (CALL5(statx, fd, "", AT_EMPTY_PATH, STATX_TYPE, &status) < 0 || (status.stx_mode & S_IFMT) != S_IFDIR)
            continue;
        say("ral: standard ");
        say(fd == 0 ? "input" : fd == 1 ? "output" : "error");
        say(" is a directory: the program could open everything below it; redirect it elsewhere");
        refuse();
    }
}

/* Signals 32 and 33 are the C library's own: it leaves them ignored in children (posix_spawn(3)), nobody asked. */
static uint64_t ignored_signals(void)
{
    uint64_t mask = 0;
    for (int number = 1; number <= LAST_SIGNAL; number++) {
        if (number == 32 || number == 33)
            continue;
        struct action action = {0};
        if (CALL4(rt_sigaction, number, 0, &action, sizeof action.mask) == 0 && action.handler == 1 /* SIG_IGN */)
            mask |= signal_bit(number);
    }
    return mask;
}

static void write_hexadecimal(char text[MASK_BYTES], uint64_t value)
{
    int shift = 60;
    while (shift && !(value >> shift))
        shift -= 4;
    *text++ = '0';
    *text++ = 'x';
    for (; shift >= 0; shift -= 4)
        *text++ = HEXADECIMAL[value >> shift & 15];
    *text = 0;
}

static const char *executed_name(char **environment)
{
    char **end = environment;
    while (*end)
        end++;
    for (const unsigned long *entry = (const unsigned long *)(end + 1); entry[0] != AT_NULL; entry += 2)
        if (entry[0] == AT_EXECFN)
            return (const char *)entry[1];
    return 0;
}

void entry(long *stack)
{
    static struct place place;
    char mask[MASK_BYTES];
    size_t given = (size_t)stack[0];
    char **argv = (char **)(stack + 1);
    struct command command = {.environment = argv + given + 1};
    refuse_directories();
    size_t pointers = FIRST_ARGUMENT + given + 1;
    long memory = CALL(mmap, 0, pointers * sizeof(char *), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory < 0 && memory > -4096) {
        say("ral: not started: out of memory; end something, or raise the limit on memory (ulimit -v)");
        refuse();
    }
    command.argv = (const char **)memory;
    command.argv[ISOLATED] = "-I";
    command.argv[NO_SITE] = "-S";
    command.argv[UTF8] = "-Xutf8";
    command.argv[MASK] = mask;
    write_hexadecimal(mask, ignored_signals());
    /* The array ends with NULL because mmap gave zeros; the caller may have passed no argv[0] at all. */
    for (size_t at = 1; at < given; at++)
        command.argv[FIRST_ARGUMENT + at - 1] = argv[at];
    /* The second only where the first does not help: no /proc, or an installer that links files to its cache. */
    int known = place_of_this_file(&place);
    if (known)
        try_place(&command, &place);
    struct place named;
    if (!seen.modules_found && !seen.modules_error && place_of_name(&named, executed_name(command.environment))) {
        try_place(&command, &named);
        if (!known)
            place = named;
    }
    refuse_start(&place);
}
