/* Makes sandboxes on request, ends them on request, says when one has ended.
 *
 * It holds root's capabilities in its own mount namespace, runs no foreign code and talks to the
 * service and to the warm interpreter alone (jail/warm_server.py). It dies with the service; every
 * sandbox dies with it. It does what jail/forkserver.py does in Python. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "commands.h"
#include "descriptors.h"
#include "init.h"
#include "walls.h"
#include "wire.h"

#define CONTROL 3
#define WARM 4
#define MAX_JOINS 4
#define MAX_EVENTS 64
/* Not at once: the sandbox that has just been asked for needs the processors now. */
#define SPARE_AFTER_MS 2
#define WARM_ROOM (4 << 20)
#define NAMESPACES (CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWNET)

/* A process in namespaces of its own: first a spare, then a sandbox. */
struct sandbox {
    struct sandbox *next;
    char *id; /* NULL: a spare */
    pid_t pid;
    int pidfd;
    int channel; /* what it is to become goes this way, and later its wish for an interpreter */
    int joins[MAX_JOINS];
    int join_count;
    char *rlimits; /* the fields as they came */
    size_t rlimits_size, rlimit_count;
};

static struct settings settings;
static struct sandbox *sandboxes;
static pid_t warm_pid;
static int events_fd;

_Noreturn static void die(const char *what) {
    fprintf(stderr, "the launcher cannot %s: %s\n", what, strerror(errno));
    exit(1);
}

static void watch(int fd, void *what) {
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = what};
    if (epoll_ctl(events_fd, EPOLL_CTL_ADD, fd, &event) != 0) die("watch a descriptor");
}

/* Not by closing alone: a process that was just forked may still hold the descriptor. */
static void close_channel(struct sandbox *sandbox) {
    if (sandbox->channel < 0) return;
    epoll_ctl(events_fd, EPOLL_CTL_DEL, sandbox->channel, NULL);
    close(sandbox->channel);
    sandbox->channel = -1;
}

static void tell(const char *kind, const char *id, const char *why) {
    begin(kind);
    put_text(id);
    put_text(why);
    if (send_message(CONTROL, NULL, 0, 0) != 0) exit(0); /* the service is gone */
}

/* -- in the new process */

_Noreturn static void give_up(int channel, const char *step) {
    begin("failed");
    put_text(step);
    put_text(failure);
    (void)send_message(channel, NULL, 0, 0);
    _exit(1);
}

static void close_mounted(const int *mounted, int count) {
    for (int at = 0; at < count; at++) close(mounted[at]);
}

static int join_cgroups(struct packet *packet) {
    for (int at = 1; at < packet->fd_count; at++) {
        if (write(packet->fds[at], "0", 1) != 1) {
            snprintf(failure, sizeof failure, "%s", strerror(errno));
            return -1;
        }
        close(packet->fds[at]);
    }
    packet->fd_count = 1;
    return 0;
}

_Noreturn static void become_sandbox(int launcher, struct packet *packet, int isolated) {
    int channel = packet->fds[0], mounted[3];
    struct fields fields = fields_of(packet);
    size_t rlimit_count;
    next_text(&fields);
    next_text(&fields);
    const char *workdir = next_text(&fields);
    char **rlimits = take_row(&fields, &rlimit_count);
    if (isolated != 0) give_up(channel, "isolate");
    if (join_cgroups(packet) != 0) give_up(channel, "join cgroups");
    int count = mount_all(&settings, workdir, &fields, mounted);
    if (count < 0) give_up(channel, "mount");
    /* As root and without limits still: what a user has under way is counted for all sandboxes. */
    begin("mounted");
    if (send_message(channel, mounted, count, 0) != 0) _exit(0);
    close_mounted(mounted, count);
    int kept[] = {launcher, channel, open_oom_score(), listen_for_shims()};
    if (kept[2] < 0 || kept[3] < 0) {
        snprintf(failure, sizeof failure, "%s", strerror(errno));
        give_up(channel, "listen");
    }
    if (limit(&settings) != 0 || drop_privileges(&settings, rlimits, rlimit_count) != 0)
        give_up(channel, "drop privileges");
    free(rlimits);
    begin("ready");
    if (send_message(channel, NULL, 0, 0) != 0) _exit(0);
    int listener = kept[3];
    close_all_but(kept, 4);
    serve_sandbox(&settings, channel, launcher, listener);
}

/* Does what is the same for all, then waits for what is not. */
_Noreturn static void wait_to_become(int launcher) {
    struct packet packet;
    close_all_but(&launcher, 1);
    int isolated = isolate(&settings);
    if (receive(launcher, &packet, 0) != RECEIVED || packet.fd_count == 0) _exit(0);
    become_sandbox(launcher, &packet, isolated);
}

/* -- in the launcher */

static void forget(struct sandbox *sandbox) {
    struct sandbox **at = &sandboxes;
    while (*at != sandbox) at = &(*at)->next;
    *at = sandbox->next;
    close(sandbox->pidfd);
    close_channel(sandbox);
    for (int join = 0; join < sandbox->join_count; join++) close(sandbox->joins[join]);
    free(sandbox->id);
    free(sandbox->rlimits);
    free(sandbox);
}

static int make_spare(void) {
    int ends[2];
    struct sandbox *spare = calloc(1, sizeof *spare);
    if (!spare) return -1;
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) {
        free(spare);
        return -1;
    }
    pid_t pid = (pid_t)syscall(SYS_clone, NAMESPACES | CLONE_PIDFD | SIGCHLD, 0, &spare->pidfd, 0, 0);
    if (pid == 0) wait_to_become(ends[1]);
    close(ends[1]);
    if (pid < 0) {
        int why = errno;
        close(ends[0]);
        free(spare);
        errno = why;
        return -1;
    }
    spare->pid = pid;
    spare->channel = ends[0];
    spare->next = sandboxes;
    sandboxes = spare;
    watch(spare->channel, spare);
    return 0;
}

static int count_spares(void) {
    int count = 0;
    for (struct sandbox *at = sandboxes; at; at = at->next) count += !at->id && at->channel >= 0;
    return count;
}

static struct sandbox *find_spare(void) {
    struct sandbox *at = sandboxes, *oldest = NULL;
    for (; at; at = at->next)
        if (!at->id && at->channel >= 0) oldest = at;
    return oldest;
}

/* The one that a spare has become, or NULL: it has ended, and will be reaped. */
static struct sandbox *give_to(struct sandbox *spare, const struct packet *packet) {
    if (send_raw(spare->channel, packet->bytes, packet->size, packet->fds, packet->fd_count, 0) == 0)
        return spare;
    close_channel(spare);
    return NULL;
}

/* What the warm interpreter has to know when it joins the sandbox. */
static void note(struct sandbox *sandbox, const char *id, struct packet *packet,
                 struct fields *fields) {
    sandbox->rlimit_count = next_count(fields);
    const char *from = fields->at;
    for (size_t at = 0; at < sandbox->rlimit_count; at++) next_text(fields);
    sandbox->rlimits_size = (size_t)(fields->at - from);
    sandbox->rlimits = malloc(sandbox->rlimits_size + 1);
    sandbox->id = strdup(id);
    if (!sandbox->rlimits || !sandbox->id) die("find memory");
    memcpy(sandbox->rlimits, from, sandbox->rlimits_size);
    close(packet->fds[0]);
    for (int at = 1; at < packet->fd_count; at++)
        sandbox->joins[sandbox->join_count++] = packet->fds[at];
    packet->fd_count = 0;
}

static void refuse(const char *id, const char *what, const char *why) {
    char text[1200];
    snprintf(text, sizeof text, "%s: %s", what, why);
    tell("failed", id, text);
}

static void create(struct packet *packet, struct fields *fields) {
    const char *id = next_text(fields), *workdir = next_text(fields);
    if (packet->fd_count < 1 || packet->fd_count > 1 + MAX_JOINS) {
        refuse(id, "create", "unexpected descriptors");
        return;
    }
    /* The root's file system is shared, so a folder is made once for all sandboxes. */
    if (make_folders(workdir) != 0) {
        refuse(id, "fork", failure);
        return;
    }
    struct sandbox *made = NULL;
    for (struct sandbox *spare; !made && (spare = find_spare());) made = give_to(spare, packet);
    if (!made) {
        if (make_spare() != 0) {
            refuse(id, "fork", strerror(errno));
            return;
        }
        made = give_to(find_spare(), packet);
    }
    if (made)
        note(made, id, packet, fields);
    else
        refuse(id, "fork", "the process for it was killed");
}

static void kill_sandbox(const char *id) {
    for (struct sandbox *at = sandboxes; at; at = at->next)
        /* Ours and not reaped yet, so the number cannot mean anyone else. */
        if (at->id && strcmp(at->id, id) == 0) kill(at->pid, SIGKILL);
}

static int from_service(void) {
    struct packet packet;
    if (receive(CONTROL, &packet, 0) != RECEIVED) exit(0);
    struct fields fields = fields_of(&packet);
    int creates = strcmp(next_text(&fields), "create") == 0;
    if (creates)
        create(&packet, &fields);
    else
        kill_sandbox(next_text(&fields));
    close_fds(&packet);
    return creates;
}

/* A sandbox asks for a warm interpreter: passes on how to join it, and the ends that it sent. */
static void from_sandbox(struct sandbox *sandbox) {
    struct packet packet;
    enum received got = receive(sandbox->channel, &packet, MSG_DONTWAIT);
    if (got == NOTHING) return;
    if (got == ENDED) {
        close_channel(sandbox);
        return;
    }
    if (sandbox->id && packet.fd_count == 2) {
        int fds[3 + MAX_JOINS] = {sandbox->pidfd, packet.fds[0], packet.fds[1]};
        for (int at = 0; at < sandbox->join_count; at++) fds[3 + at] = sandbox->joins[at];
        begin("join");
        put_number((long long)sandbox->rlimit_count);
        for (const char *at = sandbox->rlimits; at < sandbox->rlimits + sandbox->rlimits_size;
             at += strlen(at) + 1)
            put_text(at);
        /* If there is no room, the sandbox sees its end closed and does without. */
        (void)send_message(WARM, fds, 3 + sandbox->join_count, MSG_DONTWAIT);
    }
    close_fds(&packet);
}

static void reap(void) {
    char text[16];
    int status;
    for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;) {
        if (pid == warm_pid) {
            fprintf(stderr, "the warm interpreter ended with wait status %d\n", status);
            exit(1);
        }
        struct sandbox *at = sandboxes;
        while (at && at->pid != pid) at = at->next;
        if (!at) continue;
        snprintf(text, sizeof text, "%d", status);
        if (at->id) tell("exited", at->id, text);
        forget(at);
    }
}

/* Returns once the warm interpreter can be asked. */
static void await_warm(void) {
    struct packet packet;
    int room = WARM_ROOM;
    setsockopt(WARM, SOL_SOCKET, SO_SNDBUFFORCE, &room, sizeof room);
    if (receive(WARM, &packet, 0) != RECEIVED) {
        errno = EPIPE;
        die("start the warm interpreter");
    }
    struct fields fields = fields_of(&packet);
    next_text(&fields);
    warm_pid = (pid_t)next_number(&fields);
}

static void prepare(void) {
    if (prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0) != 0) die("tie itself to the service");
    signal(SIGINT, SIG_IGN);
    signal(SIGPIPE, SIG_IGN);
    fcntl(CONTROL, F_SETFD, FD_CLOEXEC);
    fcntl(WARM, F_SETFD, FD_CLOEXEC);
    if (read_settings(&settings) != 0 || prepare_walls() != 0) {
        fprintf(stderr, "the launcher cannot prepare: %s\n", failure);
        exit(1);
    }
    for (size_t at = 0; at < settings.mount_count; at++)
        if (make_folders(settings.mounts[at]) != 0) die("make the writable folders");
}

int main(void) {
    static int is_control, is_signal, is_warm;
    struct epoll_event ready[MAX_EVENTS];
    sigset_t child;
    prepare();
    await_warm();
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    sigprocmask(SIG_BLOCK, &child, NULL);
    int signals = signalfd(-1, &child, SFD_CLOEXEC | SFD_NONBLOCK);
    events_fd = epoll_create1(EPOLL_CLOEXEC);
    if (signals < 0 || events_fd < 0) die("wait for events");
    watch(CONTROL, &is_control);
    watch(signals, &is_signal);
    watch(WARM, &is_warm);
    begin("serving");
    if (send_message(CONTROL, NULL, 0, 0) != 0) return 0;
    for (int refill = settings.spares > 0;;) {
        int count = epoll_wait(events_fd, ready, MAX_EVENTS, refill ? SPARE_AFTER_MS : -1);
        int ended = 0;
        if (count == 0) {
            refill = 0;
            /* If it cannot be, the next create will say why. */
            while (count_spares() < settings.spares && make_spare() == 0) continue;
        }
        for (int at = 0; at < count; at++) {
            void *what = ready[at].data.ptr;
            if (what == &is_control)
                refill |= from_service() && settings.spares > 0;
            else if (what == &is_signal || what == &is_warm)
                ended = 1;
            else
                from_sandbox(what);
        }
        /* Last, so that no event is left of a sandbox that has been forgotten. */
        if (ended) {
            struct signalfd_siginfo info;
            while (read(signals, &info, sizeof info) > 0) continue;
            reap();
        }
    }
}
