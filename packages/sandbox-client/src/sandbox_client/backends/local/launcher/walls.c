#define _GNU_SOURCE
#include "walls.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/if.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define STAGING CODE_FOLDER "/staging"
#define ENVIRONMENTS CODE_FOLDER "/trees"
#define SETTINGS_FILE CODE_FOLDER "/launcher.settings"
#define FILTER_FILE CODE_FOLDER "/filter"
#define MAX_FILTER 4096

char failure[1024];

static struct sock_filter filter_code[MAX_FILTER];
static struct sock_fprog filter = {0, filter_code};

static int fail(const char *format, ...) {
    const char *why = strerror(errno);
    va_list values;
    va_start(values, format);
    int used = vsnprintf(failure, sizeof failure, format, values);
    va_end(values);
    if (used >= 0 && (size_t)used < sizeof failure)
        snprintf(failure + used, sizeof failure - (size_t)used, ": %s", why);
    return -1;
}

/* -- before: in the launcher */

static ssize_t read_file(const char *path, void *space, size_t size) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return fail("open %s", path);
    ssize_t used = read(fd, space, size);
    close(fd);
    return used < 0 ? fail("read %s", path) : used;
}

char **take_row(struct fields *fields, size_t *count) {
    *count = next_count(fields);
    char **row = calloc(*count + 1, sizeof *row);
    if (!row) {
        fields->bad = 1;
        *count = 0;
        return NULL;
    }
    for (size_t at = 0; at < *count; at++) row[at] = next_text(fields);
    return row;
}

int read_settings(struct settings *settings) {
    static char text[64 * 1024];
    ssize_t size = read_file(SETTINGS_FILE, text, sizeof text);
    if (size < 0) return -1;
    struct fields fields = {text, text + size, size == 0 || text[size - 1] != '\0'};
    if (!fields.bad) {
        settings->uid = (uid_t)next_number(&fields);
        settings->gid = (gid_t)next_number(&fields);
        settings->python = next_text(&fields);
        settings->may_set_groups = next_number(&fields) != 0;
        settings->spares = (int)next_number(&fields);
        settings->rlimits = take_row(&fields, &settings->rlimit_count);
        settings->mounts = take_row(&fields, &settings->mount_count);
        settings->shims = take_row(&fields, &settings->shim_count);
    }
    errno = EINVAL;
    return fields.bad ? fail("read %s", SETTINGS_FILE) : 0;
}

static int clear_inheritable_capabilities(void) {
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct words[2];
    if (syscall(SYS_capget, &header, words) != 0) return fail("capget");
    words[0].inheritable = words[1].inheritable = 0;
    return syscall(SYS_capset, &header, words) != 0 ? fail("capset") : 0;
}

int prepare_walls(void) {
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) return fail("no_new_privs");
    if (unshare(CLONE_NEWUTS) != 0) return fail("unshare uts");
    if (sethostname("sandbox", strlen("sandbox")) != 0) return fail("sethostname");
    if (clear_inheritable_capabilities() != 0) return -1;
    /* Up to the first number that this kernel does not know. */
    for (unsigned long number = 0; prctl(PR_CAPBSET_DROP, number, 0, 0, 0) == 0; number++) continue;
    umask(022);
    ssize_t size = read_file(FILTER_FILE, filter_code, sizeof filter_code);
    if (size < 0) return -1;
    errno = E2BIG;
    if ((size_t)size == sizeof filter_code) return fail("read %s", FILTER_FILE);
    filter.len = (unsigned short)((size_t)size / sizeof *filter_code);
    return 0;
}

int make_folders(const char *path) {
    char part[4096];
    size_t size = strlen(path);
    errno = ENAMETOOLONG;
    if (size >= sizeof part) return fail("make folder %.100s", path);
    for (size_t at = 1; at <= size; at++) {
        if (path[at] != '/' && path[at] != '\0') continue;
        memcpy(part, path, at);
        part[at] = '\0';
        if (mkdir(part, 0755) != 0 && errno != EEXIST) return fail("make folder %s", part);
    }
    return 0;
}

/* -- after: in the sandbox's first process */

static int mount_on(const char *source, const char *target, const char *kind, unsigned long flags,
                    const char *data) {
    if (mount(source, target, kind, flags, data) == 0) return 0;
    return fail("mount %s on %s", kind ? kind : source, target);
}

static int loopback_up(void) {
    struct ifreq request = {.ifr_name = "lo", .ifr_flags = IFF_UP};
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return fail("socket");
    int failed = ioctl(fd, SIOCSIFFLAGS, &request);
    close(fd);
    return failed ? fail("switch the loopback on") : 0;
}

static int own_folder(const struct settings *settings, const char *path) {
    if (mkdir(path, 0755) != 0) return fail("make folder %s", path);
    if (settings && chown(path, settings->uid, settings->gid) != 0) return fail("chown %s", path);
    return 0;
}

int isolate(const struct settings *settings) {
    const unsigned long plain = MS_NOSUID | MS_NODEV;
    char path[64];
    if (loopback_up() != 0) return -1;
    if (mount_on("tmpfs", STAGING, "tmpfs", plain, "size=64k,nr_inodes=64,mode=700") != 0) return -1;
    if (own_folder(settings, STAGING "/upper") != 0) return -1;
    if (own_folder(settings, STAGING "/work") != 0) return -1;
    for (size_t at = 0; at < settings->mount_count; at++) {
        snprintf(path, sizeof path, STAGING "/mount%zu", at);
        if (own_folder(settings, path) != 0) return -1;
        if (mount_on(path, settings->mounts[at], NULL, MS_BIND, NULL) != 0) return -1;
    }
    const unsigned long proc = plain | MS_NOEXEC;
    if (mount_on("proc", "/proc", "proc", proc, NULL) != 0) return -1;
    /* Whatever rights a program gets and mistakes a service makes, the host's settings stay. */
    if (mount_on("/proc/sys", "/proc/sys", NULL, MS_BIND, NULL) != 0) return -1;
    const unsigned long closed = MS_BIND | MS_REMOUNT | MS_RDONLY;
    if (mount_on("none", "/proc/sys", NULL, proc | closed, NULL) != 0) return -1;
    return mount_on("none", "/", NULL, closed | MS_NOSUID, NULL);
}

static int set_rlimits(char **numbers, size_t count) {
    for (size_t at = 0; at + 1 < count; at += 2) {
        int kind = atoi(numbers[at]);
        rlim_t wanted = (rlim_t)strtoull(numbers[at + 1], NULL, 10);
        struct rlimit now;
        if (getrlimit(kind, &now) != 0) return fail("getrlimit %d", kind);
        if (now.rlim_max != RLIM_INFINITY && now.rlim_max < wanted) wanted = now.rlim_max;
        struct rlimit then = {wanted, wanted};
        if (setrlimit(kind, &then) != 0) return fail("setrlimit %d", kind);
    }
    return 0;
}

int limit(const struct settings *settings) {
    return set_rlimits(settings->rlimits, settings->rlimit_count);
}

/* Mounts stored layers on a folder, to be written to in `upper` if that is given. */
static int mount_overlay(const char *target, char **lower, size_t count, const char *upper,
                         const char *work) {
    char data[4096];
    size_t used = (size_t)snprintf(data, sizeof data, "lowerdir=");
    for (size_t at = 0; at < count && used < sizeof data; at++)
        used += (size_t)snprintf(data + used, sizeof data - used, "%s" ENVIRONMENTS "/%s",
                                 at ? ":" : "", lower[at]);
    if (used < sizeof data)
        used += (size_t)snprintf(data + used, sizeof data - used,
                                 ",index=off,metacopy=off,redirect_dir=nofollow,xino=off");
    if (upper && used < sizeof data)
        used += (size_t)snprintf(data + used, sizeof data - used,
                                 ",upperdir=" STAGING "/%s,workdir=" STAGING "/%s", upper, work);
    errno = E2BIG;
    if (used >= sizeof data) return fail("mount overlay on %s", target);
    unsigned long flags = MS_NOSUID | MS_NODEV | (upper ? 0 : MS_RDONLY);
    return mount_on("overlay", target, "overlay", flags, data);
}

static int detach(const char *target) {
    return umount2(target, MNT_DETACH) != 0 ? fail("unmount %s", target) : 0;
}

static int open_folder(const char *path, int flags) {
    int fd = open(path, flags | O_DIRECTORY | O_CLOEXEC);
    return fd < 0 ? fail("open %s", path) : fd;
}

static int mount_contents(const struct settings *settings, char **contents, size_t count) {
    char upper[32], work[32], path[96];
    for (size_t at = 0; at + 1 < count; at += 2) {
        size_t number = strtoul(contents[at], NULL, 10);
        errno = EINVAL;
        if (number >= settings->mount_count) return fail("mount folder %zu", number);
        snprintf(upper, sizeof upper, "mount%zu", number);
        snprintf(work, sizeof work, "work%zu", number);
        snprintf(path, sizeof path, STAGING "/%s", work);
        if (own_folder(NULL, path) != 0) return -1;
        if (mount_overlay(settings->mounts[number], contents + at + 1, 1, upper, work) != 0)
            return -1;
    }
    return 0;
}

static int mount_layers(const struct settings *settings, const char *workdir, char **lower,
                        size_t lower_count, char **contents, size_t content_count, int *mounted) {
    int count = 2;
    if (lower_count > 1) {
        /* All that lies below the upper layer, to compare with. */
        if (mount_overlay(workdir, lower, lower_count, NULL, NULL) != 0) return -1;
        if ((mounted[count++] = open_folder(workdir, O_RDONLY)) < 0) return -1;
        if (detach(workdir) != 0) return -1;
    }
    if (mount_overlay(workdir, lower, lower_count, "upper", "work") != 0) return -1;
    if (mount_contents(settings, contents, content_count) != 0) return -1;
    if ((mounted[1] = open_folder(STAGING "/upper", O_RDONLY)) < 0) return -1;
    /* With all that is mounted below it: the stored trees, the tmpfs by its own path. */
    if (detach(CODE_FOLDER) != 0) return -1;
    return (mounted[0] = open_folder("/", O_PATH)) < 0 ? -1 : count;
}

int mount_all(const struct settings *settings, const char *workdir, struct fields *fields,
              int *mounted) {
    char options[96];
    long long disk_bytes = next_number(fields), inodes = next_number(fields);
    snprintf(options, sizeof options, "size=%lld,nr_inodes=%lld", disk_bytes, inodes);
    size_t lower_count, content_count;
    char **lower = take_row(fields, &lower_count);
    char **contents = take_row(fields, &content_count);
    int count = -1;
    errno = EINVAL;
    if (fields->bad)
        fail("read what to mount");
    else if (mount_on("tmpfs", STAGING, "tmpfs", MS_NOSUID | MS_NODEV | MS_REMOUNT, options) == 0)
        count = mount_layers(settings, workdir, lower, lower_count, contents, content_count, mounted);
    free(lower);
    free(contents);
    return count;
}

int drop_privileges(const struct settings *settings, char **rlimits, size_t rlimit_count) {
    if (settings->may_set_groups && setgroups(0, NULL) != 0) return fail("setgroups");
    if (setresgid(settings->gid, settings->gid, settings->gid) != 0) return fail("setresgid");
    if (setresuid(settings->uid, settings->uid, settings->uid) != 0) return fail("setresuid");
    if (set_rlimits(rlimits, rlimit_count) != 0) return -1;
    /* Commands run as the same user: this keeps them out of the first process's memory. */
    if (prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0) return fail("close its memory");
    /* Changing the uid has cleared it. */
    if (prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0) != 0) return fail("tie to the launcher");
    if (filter.len && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter, 0, 0) != 0)
        return fail("filter system calls");
    return 0;
}
