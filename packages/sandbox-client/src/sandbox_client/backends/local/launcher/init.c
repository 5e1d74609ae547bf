/* It has no privileges of its own: it runs as the commands' user, without capabilities, under their
 * seccomp filter. Being pid 1, it cannot be killed from inside, and its memory is closed to the
 * commands. If the service's end of its channel closes, it exits, and the kernel ends the rest.
 *
 * Python programs run in forks of an interpreter, which joins the sandbox when the first is asked
 * for (jail/zygote.py). It is no more than another process in here: when it has been killed, what
 * was asked of it is run by a fresh interpreter, and the next program gets a new one. */
#define _GNU_SOURCE
#include "init.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "commands.h"
#include "running.h"
#include "wire.h"

#define CANNOT_START 126
#define NOT_FOUND 127
#define BACKLOG 16
/* Each interpreter costs the host more than the sandbox that kills it. */
#define MOST_ZYGOTES 16
#define ZYGOTES_PER_S 2

static const struct settings *settings;
static int channel, launcher, listener;
static int zygote = -1;
static pid_t zygote_pid;

static void must(int result) {
    if (result < 0) _exit(0); /* the service is gone */
}

/* -- the ends of commands */

static void report(struct running *running, int status) {
    begin("ended");
    put_number(running->number);
    put_number(status);
    put_number((long long)((now() - running->started) * 1e6));
    put_number((long long)(running->cpu_s * 1e6));
    must(send_message(channel, NULL, 0, 0));
}

/* The command could not start: that is a result, as it would be from a shell. */
static void refuse(struct running *running, const struct asked *asked, const char *what,
                   const char *why, int code) {
    char text[4096 + 256];
    int size = snprintf(text, sizeof text, "%.4096s: %s\n", what, why);
    /* If nobody reads, the exit code says it too. */
    (void)!write(asked->packet->fds[2], text, (size_t)size);
    report(running, code << 8);
    drop(running);
}

static int has_children(void) {
    siginfo_t info;
    return waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) == 0;
}

static void finish(struct running *running, int status) {
    if (has_children())
        note_background(running, zygote_pid);
    else
        forget_background();
    report(running, status);
    drop(running);
}

static void program_ended(pid_t pid, int status, double cpu_s) {
    struct running *running = find_by_root(pid);
    if (running) {
        running->cpu_s += cpu_s;
        finish(running, status);
        return;
    }
    running = find_by_warm(pid);
    if (running) {
        running->cpu_s += cpu_s;
        remove_warm(running, pid);
    }
}

static double seconds(const struct rusage *usage) {
    return (double)(usage->ru_utime.tv_sec + usage->ru_stime.tv_sec) +
           (double)(usage->ru_utime.tv_usec + usage->ru_stime.tv_usec) / 1e6;
}

static void reap(void) {
    struct rusage usage;
    int status;
    for (pid_t pid; (pid = wait4(-1, &status, WNOHANG, &usage)) > 0;)
        program_ended(pid, status, seconds(&usage));
    if (!has_children()) forget_background();
}

/* -- the warm interpreter */

/* Whether there may be one more by now. */
static int take_turn(void) {
    static double left = MOST_ZYGOTES, since;
    double then = since;
    since = now();
    left += (since - then) * ZYGOTES_PER_S;
    if (left > MOST_ZYGOTES) left = MOST_ZYGOTES;
    if (left < 1) return 0;
    left--;
    return 1;
}

static int need_zygote(void) {
    if (zygote >= 0) return 0;
    int ends[2];
    if (!take_turn()) return -1;
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) return -1;
    int fds[2] = {ends[1], listener};
    begin("python");
    int failed = send_message(launcher, fds, 2, MSG_DONTWAIT);
    close(ends[1]);
    if (failed) {
        close(ends[0]);
        return -1;
    }
    zygote = ends[0];
    zygote_pid = 0;
    return 0;
}

static int ask_zygote(const struct asked *asked, const char *path) {
    size_t argc = 0;
    while (asked->argv[argc]) argc++;
    begin("run");
    put_number(asked->number);
    put_text(path);
    put_text(asked->cwd);
    put_number((long long)argc);
    for (char **at = asked->argv; *at; at++) put_text(*at);
    for (char **at = asked->environ; *at; at++) put_text(*at);
    /* Commands can stop the interpreter, which then reads nothing. */
    return send_message(zygote, asked->packet->fds, 3, MSG_DONTWAIT);
}

static void start(struct running *running, struct asked *asked);

/* Runs a program that the warm interpreter does not. */
static void start_fresh(struct running *running) {
    struct packet kept = running->kept;
    struct asked asked;
    running->kept = (struct packet){0};
    if (running->doomed) {
        report(running, SIGKILL);
        drop(running);
    } else if (read_asked(&kept, &asked) == 0) {
        running->fresh = 1;
        start(running, &asked);
        free_asked(&asked);
    }
    close_fds(&kept);
    free(kept.bytes);
}

/* Stand-ins that nobody answers run the real interpreter themselves. Not without end: commands may
 * come as fast as they are sent away. */
static void turn_shims_away(void) {
    for (int count = 0; count <= BACKLOG; count++) {
        int shim = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        if (shim < 0) return;
        close(shim);
    }
}

static void lose_zygote(void) {
    close(zygote);
    zygote = -1;
    if (!zygote_pid) turn_shims_away(); /* it never came up */
    zygote_pid = 0;
    struct running *next;
    for (struct running *running = first_running(); running; running = next) {
        next = running->next;
        if (running->kept.bytes)
            start_fresh(running);
        else if (kill(running->root, 0) != 0)
            finish(running, SIGKILL); /* it ended, and who knew how is gone */
    }
}

static void from_zygote(void) {
    struct packet packet;
    enum received got = receive(zygote, &packet, MSG_DONTWAIT);
    if (got == NOTHING) return;
    if (got == ENDED) {
        lose_zygote();
        return;
    }
    struct fields fields = fields_of(&packet);
    const char *kind = next_text(&fields);
    long long first = next_number(&fields);
    if (strcmp(kind, "ready") == 0) {
        zygote_pid = (pid_t)first;
    } else if (strcmp(kind, "started") == 0) {
        struct running *running = find_by_number(first);
        pid_t pid = (pid_t)next_number(&fields);
        if (running) {
            running->root = pid;
            forget_kept(running);
            if (running->doomed) kill_tree(running, zygote_pid);
        } else {
            kill(pid, SIGKILL);
        }
    } else if (strcmp(kind, "refused") == 0) {
        struct running *running = find_by_number(first);
        if (running) start_fresh(running);
    } else if (strcmp(kind, "shim") == 0) {
        adopt((pid_t)first, (pid_t)next_number(&fields), zygote_pid);
    } else if (strcmp(kind, "ended") == 0) {
        int status = (int)next_number(&fields);
        program_ended((pid_t)first, status, (double)next_number(&fields) / 1e6);
    }
    close_fds(&packet);
}

/* -- commands of the service */

static int is_shim(const char *path) {
    for (size_t at = 0; at < settings->shim_count; at++)
        if (strcmp(path, settings->shims[at]) == 0) return 1;
    return 0;
}

/* Starts it, or refuses it, which ends `running`. */
static void start(struct running *running, struct asked *asked) {
    if (chdir(asked->cwd) != 0) {
        char what[4096];
        snprintf(what, sizeof what, "cannot enter %s", asked->cwd);
        refuse(running, asked, what, strerror(errno), CANNOT_START);
        return;
    }
    const char *path = find_program(asked);
    int failed = path ? 0 : errno;
    const char *why = path ? NULL : "not found";
    if (path && !asked->through_shell && is_shim(path)) {
        if (!running->fresh && keep(running, asked->packet) == 0 && need_zygote() == 0 &&
            ask_zygote(asked, path) == 0) {
            (void)!chdir("/");
            return;
        }
        forget_kept(running);
        /* By its own path: it finds its library by the name it is started under. */
        path = asked->argv[0] = settings->python;
    }
    if (path && (failed = spawn(path, asked, &running->root)) != 0) why = strerror(failed);
    (void)!chdir("/");
    if (!failed) return;
    if (asked->has_shell && !asked->through_shell) {
        /* Only a shell gives a shell's own message, and runs a script without "#!". */
        ask_shell(asked);
        start(running, asked);
    } else {
        refuse(running, asked, asked->argv[0], why, failed == ENOENT ? NOT_FOUND : CANNOT_START);
    }
}

static void kill_command(struct running *running) {
    if (running->kept.bytes) {
        running->doomed = 1;
        if (!is_alone(running)) {
            report(running, SIGKILL); /* whenever its program starts, it will be killed */
            drop(running);
            return;
        }
    }
    kill_tree(running, zygote_pid);
}

static void from_service(void) {
    struct packet packet;
    if (receive(channel, &packet, 0) != RECEIVED) _exit(0);
    struct fields fields = fields_of(&packet);
    if (strcmp(next_text(&fields), "exec") == 0) {
        struct asked asked;
        /* The service is trusted to send what it should. */
        if (read_asked(&packet, &asked) != 0) _exit(1);
        struct running *running = add_running(asked.number);
        if (!running) _exit(1);
        start(running, &asked);
        free_asked(&asked);
    } else {
        struct running *running = find_by_number(next_number(&fields));
        if (running) kill_command(running);
    }
    close_fds(&packet);
}

int listen_for_shims(void) {
    /* Abstract names belong to the network namespace, so every sandbox has its own. */
    static const char name[] = "\0tailrace-python";
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    memcpy(address.sun_path, name, sizeof name - 1);
    socklen_t length = offsetof(struct sockaddr_un, sun_path) + sizeof name - 1;
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0 || bind(fd, (struct sockaddr *)&address, length) != 0 || listen(fd, BACKLOG) != 0)
        return -1;
    return fd;
}

_Noreturn void serve_sandbox(const struct settings *given, int from, int to, int listening) {
    settings = given;
    channel = from;
    launcher = to;
    listener = listening;
    sigset_t child;
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    sigprocmask(SIG_BLOCK, &child, NULL);
    int signals = signalfd(-1, &child, SFD_CLOEXEC | SFD_NONBLOCK);
    if (signals < 0) _exit(1);
    for (;;) {
        /* As long as there is a warm interpreter, the stand-ins are its own. */
        struct pollfd ready[] = {
            {channel, POLLIN, 0},
            {signals, POLLIN, 0},
            {zygote >= 0 ? zygote : listener, POLLIN, 0},
        };
        if (poll(ready, 3, -1) < 0) continue;
        if (ready[2].revents) {
            if (zygote >= 0)
                from_zygote();
            else if (need_zygote() != 0)
                turn_shims_away();
        }
        if (ready[1].revents) {
            struct signalfd_siginfo info;
            while (read(signals, &info, sizeof info) > 0) continue;
            reap();
        }
        if (ready[0].revents) from_service();
    }
}
