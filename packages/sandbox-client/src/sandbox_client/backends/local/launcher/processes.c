#define _GNU_SOURCE
#include "processes.h"

#include <ctype.h>
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int read_process(pid_t pid, struct process *process) {
    char path[32], text[1024], state;
    int parent, session;
    unsigned long long started;
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0; /* it ended meanwhile */
    ssize_t size = read(fd, text, sizeof text - 1);
    close(fd);
    if (size <= 0) return 0;
    text[size] = '\0';
    /* The name in parentheses may contain anything, so what follows the last one counts. */
    char *rest = strrchr(text, ')');
    if (!rest) return 0;
    int found = sscanf(rest + 1,
                       " %c %d %*d %d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d"
                       " %llu",
                       &state, &parent, &session, &started);
    if (found != 4 || state == 'Z' || state == 'X') return 0;
    *process = (struct process){.pid = pid, .parent = parent, .session = session};
    process->started = started;
    return 1;
}

int add_process(struct crowd *crowd, const struct process *process) {
    if (crowd->count == crowd->room) {
        size_t room = crowd->room ? 2 * crowd->room : 64;
        struct process *all = realloc(crowd->all, room * sizeof *all);
        if (!all) return -1;
        crowd->all = all;
        crowd->room = room;
    }
    crowd->all[crowd->count++] = *process;
    return 0;
}

void list_processes(struct crowd *crowd, pid_t except) {
    crowd->count = 0;
    DIR *folder = opendir("/proc");
    if (!folder) return;
    for (struct dirent *entry; (entry = readdir(folder));) {
        pid_t pid = isdigit((unsigned char)*entry->d_name) ? atoi(entry->d_name) : 0;
        struct process process;
        if (pid > 1 && pid != except && read_process(pid, &process)) add_process(crowd, &process);
    }
    closedir(folder);
}

static int leads(const struct process *process, pid_t pid) {
    return process->parent == pid || process->session == pid;
}

void mark_tree(struct crowd *crowd, const pid_t *roots, size_t count) {
    for (size_t at = 0; at < crowd->count; at++) {
        struct process *process = &crowd->all[at];
        process->inside = 0;
        for (size_t root = 0; root < count && !process->inside; root++)
            process->inside = process->pid == roots[root] || leads(process, roots[root]);
    }
    for (int grew = 1; grew;) {
        grew = 0;
        for (size_t at = 0; at < crowd->count; at++) {
            struct process *process = &crowd->all[at];
            for (size_t over = 0; over < crowd->count && !process->inside; over++) {
                const struct process *parent = &crowd->all[over];
                if (parent->inside && process->parent == parent->pid) grew = process->inside = 1;
            }
        }
    }
}

const struct process *find_process(const struct crowd *crowd, pid_t pid,
                                   unsigned long long started) {
    for (size_t at = 0; at < crowd->count; at++)
        if (crowd->all[at].pid == pid && crowd->all[at].started == started) return &crowd->all[at];
    return NULL;
}
