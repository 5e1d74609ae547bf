/* Stands in for `python` in a sandbox: asks the sandbox's first process to run the program in a
 * forked, warm interpreter. If that is not possible, becomes the real interpreter.
 *
 * Request: one packet of argc, the current folder, the arguments and the environment, each ended
 * by a NUL, with descriptors 0, 1 and 2 beside it. Answer: one byte once the program has started,
 * then the four bytes of a wait status; or an end of file at once for "run it yourself". While it
 * waits, a signal goes on as one byte.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#ifndef REAL_PYTHON
#error "REAL_PYTHON must name the interpreter"
#endif

#define MAX_PACKET (192 * 1024)
#define MAX_DESCRIPTOR 256

extern char **environ;
static char packet[MAX_PACKET];
static size_t used;

static int append(const char *text) {
    size_t size = strlen(text) + 1;
    if (used + size > sizeof packet) return 0;
    memcpy(packet + used, text, size);
    used += size;
    return 1;
}

/* The standard three can go along, no fewer and no more: else the program has to run here. */
static int has_three_descriptors(void) {
    struct pollfd all[MAX_DESCRIPTOR];
    for (int at = 0; at < MAX_DESCRIPTOR; at++) all[at] = (struct pollfd){at, 0, 0};
    if (poll(all, MAX_DESCRIPTOR, 0) < 0) return 0;
    for (int at = 0; at < MAX_DESCRIPTOR; at++)
        if (!(all[at].revents & POLLNVAL) != (at < 3)) return 0;
    return 1;
}

static int fill(int argc, char **argv) {
    char number[16], folder[4096];
    snprintf(number, sizeof number, "%d", argc);
    if (!getcwd(folder, sizeof folder) || !append(number) || !append(folder)) return 0;
    for (char **at = argv; *at; at++)
        if (!append(*at)) return 0;
    for (char **at = environ; *at; at++)
        if (!append(*at)) return 0;
    return 1;
}

static int request(int channel) {
    static const char name[] = "\0tailrace-python";
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    memcpy(address.sun_path, name, sizeof name - 1);
    socklen_t length = offsetof(struct sockaddr_un, sun_path) + sizeof name - 1;
    if (connect(channel, (struct sockaddr *)&address, length) != 0) return 0;
    int fds[3] = {0, 1, 2};
    union {
        char space[CMSG_SPACE(sizeof fds)];
        struct cmsghdr align;
    } control;
    memset(&control, 0, sizeof control);
    struct iovec part = {.iov_base = packet, .iov_len = used};
    struct msghdr message = {.msg_iov = &part,
                             .msg_iovlen = 1,
                             .msg_control = control.space,
                             .msg_controllen = sizeof control.space};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof fds);
    memcpy(CMSG_DATA(header), fds, sizeof fds);
    return sendmsg(channel, &message, MSG_NOSIGNAL) == (ssize_t)used;
}

/* Waits for the answer, passing signals on. Returns 0 if the program has to run here. */
static int wait_for(int channel, int signals, int *status) {
    int started = 0;
    for (;;) {
        struct pollfd ready[2] = {{channel, POLLIN, 0}, {signals, POLLIN, 0}};
        if (poll(ready, 2, -1) < 0) {
            if (errno == EINTR) continue;
            return 0;
        }
        if (ready[1].revents & POLLIN) {
            struct signalfd_siginfo info;
            if (read(signals, &info, sizeof info) == (ssize_t)sizeof info) {
                unsigned char number = (unsigned char)info.ssi_signo;
                (void)!send(channel, &number, 1, MSG_NOSIGNAL);
            }
        }
        if (ready[0].revents) {
            ssize_t size = recv(channel, status, sizeof *status, 0);
            if (size == (ssize_t)sizeof *status) return 1;
            if (size == 1) {
                started = 1;
                continue;
            }
            *status = SIGKILL; /* who knew how it ended was killed */
            return started;
        }
    }
}

static void end_like(int status, const sigset_t *old) {
    if (WIFEXITED(status)) _exit(WEXITSTATUS(status));
    int number = WTERMSIG(status);
    signal(number, SIG_DFL);
    sigprocmask(SIG_SETMASK, old, NULL);
    raise(number);
    _exit(128 + number);
}

int main(int argc, char **argv) {
    int whole = has_three_descriptors();
    int channel = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    sigset_t passed, old;
    sigemptyset(&passed);
    int numbers[] = {SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
    for (size_t at = 0; at < sizeof numbers / sizeof *numbers; at++) sigaddset(&passed, numbers[at]);
    sigprocmask(SIG_BLOCK, &passed, &old);
    int signals = signalfd(-1, &passed, SFD_CLOEXEC);
    int status;
    if (whole && channel >= 0 && signals >= 0 && fill(argc, argv) && request(channel) &&
        wait_for(channel, signals, &status))
        end_like(status, &old);
    sigprocmask(SIG_SETMASK, &old, NULL);
    /* By its own path: it finds its library by the name it is started under. */
    argv[0] = REAL_PYTHON;
    execv(REAL_PYTHON, argv);
    fprintf(stderr, "cannot run %s: %s\n", REAL_PYTHON, strerror(errno));
    return 127;
}
