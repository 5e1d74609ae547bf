#define _GNU_SOURCE
#include "commands.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define COMMAND_OOM_SCORE 500
#define MAX_PATH 4096

static char *shell_argv[] = {"sh", "-c", NULL, NULL};
static int oom_fd = -1;
static int own_oom_score;

int read_asked(const struct packet *packet, struct asked *asked) {
    struct fields fields = fields_of(packet);
    *asked = (struct asked){.packet = packet};
    next_text(&fields); /* what it is */
    asked->number = next_number(&fields);
    asked->cwd = next_text(&fields);
    asked->has_shell = next_number(&fields) != 0;
    asked->shell = next_text(&fields);
    size_t argc = next_count(&fields), variables = count_rest(&fields) - argc;
    asked->argv = calloc(argc + 1, sizeof(char *));
    asked->environ = calloc(variables + 1, sizeof(char *));
    int whole = !fields.bad && packet->fd_count == 3 && (argc || asked->has_shell);
    if (!whole || !asked->argv || !asked->environ) {
        free_asked(asked);
        return -1;
    }
    for (size_t at = 0; at < argc; at++) asked->argv[at] = next_text(&fields);
    for (size_t at = 0; at < variables; at++) asked->environ[at] = next_text(&fields);
    if (argc == 0) ask_shell(asked);
    return 0;
}

void free_asked(struct asked *asked) {
    if (asked->argv != shell_argv) free(asked->argv);
    free(asked->environ);
    asked->argv = asked->environ = NULL;
}

void ask_shell(struct asked *asked) {
    free_asked(&(struct asked){.argv = asked->argv});
    shell_argv[2] = asked->shell;
    asked->argv = shell_argv;
    asked->through_shell = 1;
}

static const char *variable(const struct asked *asked, const char *name) {
    size_t size = strlen(name);
    for (char **at = asked->environ; *at; at++)
        if (strncmp(*at, name, size) == 0 && (*at)[size] == '=') return *at + size + 1;
    return "";
}

static int is_program(const char *path) {
    struct stat found;
    return access(path, X_OK) == 0 && stat(path, &found) == 0 && !S_ISDIR(found.st_mode);
}

const char *find_program(const struct asked *asked) {
    static char candidate[MAX_PATH];
    const char *name = asked->argv[0];
    if (asked->through_shell) return "/bin/sh";
    if (strchr(name, '/')) return name;
    for (const char *folder = variable(asked, "PATH");; folder++) {
        const char *end = strchrnul(folder, ':');
        int size = (int)(end - folder);
        int used = size ? snprintf(candidate, sizeof candidate, "%.*s/%s", size, folder, name)
                        : snprintf(candidate, sizeof candidate, "./%s", name);
        if (used < (int)sizeof candidate && is_program(candidate)) return candidate;
        if (!*end) break;
        folder = end;
    }
    errno = ENOENT;
    return NULL;
}

int spawn(const char *path, const struct asked *asked, pid_t *pid) {
    posix_spawn_file_actions_t streams;
    posix_spawnattr_t attributes;
    sigset_t reset, none;
    posix_spawn_file_actions_init(&streams);
    for (int to = 0; to < 3; to++)
        posix_spawn_file_actions_adddup2(&streams, asked->packet->fds[to], to);
    sigemptyset(&none);
    sigemptyset(&reset);
    sigaddset(&reset, SIGINT);
    sigaddset(&reset, SIGPIPE);
    sigaddset(&reset, SIGXFSZ);
    posix_spawnattr_init(&attributes);
    posix_spawnattr_setsigmask(&attributes, &none);
    posix_spawnattr_setsigdefault(&attributes, &reset);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSID | POSIX_SPAWN_SETSIGMASK |
                                              POSIX_SPAWN_SETSIGDEF);
    raise_oom_score();
    int failed = posix_spawn(pid, path, &streams, &attributes, asked->argv, asked->environ);
    lower_oom_score();
    posix_spawn_file_actions_destroy(&streams);
    posix_spawnattr_destroy(&attributes);
    return failed;
}

int open_oom_score(void) {
    char text[16] = "";
    oom_fd = open("/proc/self/oom_score_adj", O_RDWR | O_CLOEXEC);
    if (oom_fd < 0) return -1;
    ssize_t size = pread(oom_fd, text, sizeof text - 1, 0);
    own_oom_score = size > 0 ? atoi(text) : 0;
    /* Lowering it below what it was takes a right that an ordinary user's service lacks. */
    if (own_oom_score < 0) own_oom_score = 0;
    return oom_fd;
}

static void set_oom_score(int score) {
    char text[16];
    if (score < own_oom_score) score = own_oom_score;
    int size = snprintf(text, sizeof text, "%d", score);
    (void)!pwrite(oom_fd, text, (size_t)size, 0);
}

void raise_oom_score(void) { set_oom_score(COMMAND_OOM_SCORE); }

void lower_oom_score(void) { set_oom_score(own_oom_score); }
