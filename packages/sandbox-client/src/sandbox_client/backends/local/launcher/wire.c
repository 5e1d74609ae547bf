#define _GNU_SOURCE
#include "wire.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static char incoming[MAX_PACKET];
static char outgoing[MAX_PACKET];
static size_t written;
static int too_long;

union control {
    char space[CMSG_SPACE(MAX_FDS * sizeof(int))];
    struct cmsghdr align;
};

static void take_fds(struct msghdr *message, struct packet *packet) {
    packet->fd_count = 0;
    for (struct cmsghdr *at = CMSG_FIRSTHDR(message); at; at = CMSG_NXTHDR(message, at)) {
        if (at->cmsg_level != SOL_SOCKET || at->cmsg_type != SCM_RIGHTS) continue;
        packet->fd_count = (int)((at->cmsg_len - CMSG_LEN(0)) / sizeof(int));
        memcpy(packet->fds, CMSG_DATA(at), (size_t)packet->fd_count * sizeof(int));
    }
}

enum received receive(int channel, struct packet *packet, int flags) {
    union control control;
    struct iovec part = {.iov_base = incoming, .iov_len = sizeof incoming};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    message.msg_control = control.space;
    message.msg_controllen = sizeof control.space;
    ssize_t size;
    do size = recvmsg(channel, &message, flags | MSG_CMSG_CLOEXEC);
    while (size < 0 && errno == EINTR);
    packet->fd_count = 0;
    if (size < 0) return errno == EAGAIN ? NOTHING : ENDED;
    take_fds(&message, packet);
    packet->bytes = incoming;
    packet->size = (size_t)size;
    int whole = size > 0 && !incoming[size - 1] && !(message.msg_flags & (MSG_TRUNC | MSG_CTRUNC));
    if (!whole) close_fds(packet);
    return whole ? RECEIVED : ENDED;
}

void close_fds(struct packet *packet) {
    for (int at = 0; at < packet->fd_count; at++) close(packet->fds[at]);
    packet->fd_count = 0;
}

struct fields fields_of(const struct packet *packet) {
    return (struct fields){packet->bytes, packet->bytes + packet->size, 0};
}

char *next_text(struct fields *fields) {
    static char nothing[1];
    if (fields->at == fields->end) {
        fields->bad = 1;
        return nothing;
    }
    char *text = fields->at;
    fields->at += strlen(text) + 1;
    return text;
}

long long next_number(struct fields *fields) {
    char *text = next_text(fields), *end;
    errno = 0;
    long long number = strtoll(text, &end, 10);
    if (end == text || *end || errno) fields->bad = 1;
    return number;
}

size_t count_rest(const struct fields *fields) {
    size_t count = 0;
    for (const char *at = fields->at; at < fields->end; at++) count += !*at;
    return count;
}

size_t next_count(struct fields *fields) {
    long long count = next_number(fields);
    if (count < 0 || (unsigned long long)count > count_rest(fields)) {
        fields->bad = 1;
        return 0;
    }
    return (size_t)count;
}

void begin(const char *kind) {
    written = 0;
    too_long = 0;
    put_text(kind);
}

void put_text(const char *text) {
    size_t size = strlen(text) + 1;
    if (size > sizeof outgoing - written) {
        too_long = 1;
        return;
    }
    memcpy(outgoing + written, text, size);
    written += size;
}

void put_number(long long number) {
    char text[24];
    snprintf(text, sizeof text, "%lld", number);
    put_text(text);
}

int send_message(int channel, const int *fds, int fd_count, int flags) {
    if (too_long) {
        errno = EMSGSIZE;
        return -1;
    }
    return send_raw(channel, outgoing, written, fds, fd_count, flags);
}

int send_raw(int channel, const char *bytes, size_t size, const int *fds, int fd_count, int flags) {
    union control control;
    struct iovec part = {.iov_base = (char *)bytes, .iov_len = size};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (fd_count) {
        size_t length = (size_t)fd_count * sizeof(int);
        memset(&control, 0, sizeof control);
        message.msg_control = control.space;
        message.msg_controllen = CMSG_SPACE(length);
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(length);
        memcpy(CMSG_DATA(header), fds, length);
    }
    ssize_t sent;
    do sent = sendmsg(channel, &message, flags | MSG_NOSIGNAL);
    while (sent < 0 && errno == EINTR);
    return sent < 0 ? -1 : 0;
}
