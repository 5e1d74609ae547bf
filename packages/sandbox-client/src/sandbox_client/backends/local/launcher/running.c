#define _GNU_SOURCE
#include "running.h"

#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "processes.h"

#define MAX_KILL_ROUNDS 100
#define PAUSE_NS 10000000

static struct running *all;
static struct running nobody; /* for programs that only a process without any tie has asked for */
static struct crowd everyone, background, killed;

double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

struct running *add_running(long long number) {
    struct running *running = calloc(1, sizeof *running);
    if (!running) return NULL;
    running->number = number;
    running->started = now();
    running->next = all;
    return all = running;
}

struct running *first_running(void) { return all; }

struct running *find_by_number(long long number) {
    struct running *at = all;
    while (at && at->number != number) at = at->next;
    return at;
}

struct running *find_by_root(pid_t pid) {
    struct running *at = all;
    while (at && at->root != pid) at = at->next;
    return at;
}

static int has_warm(const struct running *running, pid_t pid) {
    for (size_t at = 0; at < running->warm_count; at++)
        if (running->warm[at] == pid) return 1;
    return 0;
}

struct running *find_by_warm(pid_t pid) {
    struct running *at = all;
    while (at && !has_warm(at, pid)) at = at->next;
    return !at && has_warm(&nobody, pid) ? &nobody : at;
}

int is_alone(const struct running *running) {
    return all == running && !running->next && !background.count;
}

void drop(struct running *running) {
    struct running **at = &all;
    while (*at != running) at = &(*at)->next;
    *at = running->next;
    forget_kept(running);
    free(running->warm);
    free(running);
}

static void add_warm(struct running *running, pid_t pid) {
    pid_t *warm = realloc(running->warm, (running->warm_count + 1) * sizeof *warm);
    if (!warm) return;
    running->warm = warm;
    warm[running->warm_count++] = pid;
}

void remove_warm(struct running *running, pid_t pid) {
    size_t at = 0;
    while (running->warm[at] != pid) at++;
    running->warm[at] = running->warm[--running->warm_count];
}

int keep(struct running *running, const struct packet *packet) {
    struct packet *kept = &running->kept;
    kept->bytes = malloc(packet->size);
    if (!kept->bytes) return -1;
    memcpy(kept->bytes, packet->bytes, packet->size);
    kept->size = packet->size;
    for (int at = 0; at < packet->fd_count; at++) {
        int fd = fcntl(packet->fds[at], F_DUPFD_CLOEXEC, 3);
        if (fd < 0) {
            forget_kept(running);
            return -1;
        }
        kept->fds[kept->fd_count++] = fd;
    }
    return 0;
}

void forget_kept(struct running *running) {
    close_fds(&running->kept);
    free(running->kept.bytes);
    running->kept = (struct packet){0};
}

/* -- who belongs to whom */

struct pids {
    pid_t *all;
    size_t count;
};

static void add_pid(struct pids *pids, pid_t pid) {
    pid_t *more = realloc(pids->all, (pids->count + 1) * sizeof *more);
    if (!more) return;
    pids->all = more;
    more[pids->count++] = pid;
}

static void add_roots(struct pids *pids, const struct running *running) {
    if (running->root) add_pid(pids, running->root);
    for (size_t at = 0; at < running->warm_count; at++) add_pid(pids, running->warm[at]);
}

/* Programs that the warm interpreter has just started: whose they are is about to be told. */
static void add_unknown(struct pids *pids, pid_t zygote) {
    for (size_t at = 0; zygote && at < everyone.count; at++) {
        pid_t pid = everyone.all[at].pid;
        if (everyone.all[at].parent == zygote && !find_by_root(pid) && !find_by_warm(pid))
            add_pid(pids, pid);
    }
}

/* Marks in `everyone` what belongs to any command but this one. */
static void mark_others(const struct running *without, pid_t zygote) {
    struct pids roots = {0};
    for (struct running *at = all; at; at = at->next)
        if (at != without) add_roots(&roots, at);
    add_unknown(&roots, zygote);
    mark_tree(&everyone, roots.all, roots.count);
    free(roots.all);
}

/* Marks in `everyone` what goes on behind the commands. */
static void mark_background(void) {
    struct pids roots = {0};
    for (size_t at = 0; at < everyone.count; at++) {
        const struct process *process = &everyone.all[at];
        if (find_process(&background, process->pid, process->started))
            add_pid(&roots, process->pid);
    }
    mark_tree(&everyone, roots.all, roots.count);
    free(roots.all);
}

static const struct process *find_marked(pid_t pid) {
    for (size_t at = 0; at < everyone.count; at++)
        if (everyone.all[at].pid == pid) return everyone.all[at].inside ? &everyone.all[at] : NULL;
    return NULL;
}

/* Which command's tree a process belongs to; NULL if none. */
static struct running *owner_of(pid_t pid) {
    for (struct running *at = all; at; at = at->next) {
        struct pids roots = {0};
        add_roots(&roots, at);
        mark_tree(&everyone, roots.all, roots.count);
        free(roots.all);
        if (find_marked(pid)) return at;
    }
    return NULL;
}

void adopt(pid_t asking, pid_t program, pid_t zygote) {
    if (all && is_alone(all)) {
        add_warm(all, program);
        return;
    }
    list_processes(&everyone, zygote);
    struct running *owner = owner_of(asking);
    if (owner) {
        add_warm(owner, program);
        return;
    }
    mark_background();
    if (!find_marked(asking)) {
        add_warm(&nobody, program);
        return;
    }
    for (size_t at = 0; at < everyone.count; at++)
        if (everyone.all[at].pid == program) add_process(&background, &everyone.all[at]);
}

void note_background(const struct running *ended, pid_t zygote) {
    list_processes(&everyone, zygote);
    mark_others(ended, zygote);
    struct crowd before = background;
    background = (struct crowd){0};
    for (size_t at = 0; at < everyone.count; at++) {
        const struct process *process = &everyone.all[at];
        if (!process->inside || find_process(&before, process->pid, process->started))
            add_process(&background, process);
    }
    free(before.all);
}

void forget_background(void) { background.count = 0; }

/* -- the end of a command */

/* Waits, a second at most, so that who gets the command's result finds none of them running. */
static void await_ends(pid_t zygote) {
    for (int round = 0; round < MAX_KILL_ROUNDS; round++) {
        size_t left = 0;
        list_processes(&everyone, zygote);
        for (size_t at = 0; at < everyone.count; at++)
            left += find_process(&killed, everyone.all[at].pid, everyone.all[at].started) != NULL;
        if (!left) return;
        nanosleep(&(struct timespec){0, PAUSE_NS}, NULL);
    }
}

static void spare(const struct running *target, pid_t zygote) {
    mark_others(target, zygote);
    for (size_t at = 0; at < everyone.count; at++) everyone.all[at].spared = everyone.all[at].inside;
    mark_background();
    for (size_t at = 0; at < everyone.count; at++) everyone.all[at].spared |= everyone.all[at].inside;
}

/* Kills who is neither spared nor killed already, and says how many they are. */
static size_t kill_the_rest(const struct running *target) {
    size_t first = killed.count;
    for (size_t at = 0; at < everyone.count; at++) {
        const struct process *process = &everyone.all[at];
        if (!process->spared && !find_process(&killed, process->pid, process->started))
            add_process(&killed, process);
    }
    /* The command's own process before its children: a shell that sees its child die first ends by
     * itself, as if nobody had killed it. */
    for (size_t at = first; at < killed.count; at++)
        if (killed.all[at].pid == target->root) kill(target->root, SIGKILL);
    for (size_t at = first; at < killed.count; at++) kill(killed.all[at].pid, SIGKILL);
    return killed.count - first;
}

void kill_tree(const struct running *target, pid_t zygote) {
    killed.count = 0;
    if (is_alone(target)) {
        /* One call, which no fork can outrun: the kernel holds its list of processes meanwhile. */
        kill(-1, SIGKILL);
        list_processes(&killed, 0);
        await_ends(0);
        return;
    }
    /* What others own is spared. A process that has cut every tie while several commands ran is
     * nobody's and ends with the first that is killed. */
    for (int round = 0; round < MAX_KILL_ROUNDS; round++) {
        list_processes(&everyone, zygote);
        spare(target, zygote);
        /* Who is killed may still be there for a while, but forks no more. */
        if (!kill_the_rest(target)) {
            await_ends(zygote);
            return;
        }
    }
    kill(-1, SIGKILL);
}
