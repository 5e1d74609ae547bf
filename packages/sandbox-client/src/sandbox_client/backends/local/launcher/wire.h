/* Messages between the service, the launcher and the processes it starts; see jail/wire.py. */
#ifndef WIRE_H
#define WIRE_H

#include <stddef.h>

#define MAX_PACKET (192 * 1024)
#define MAX_FDS 8

/* A received message, good until the next is received. */
struct packet {
    char *bytes;
    size_t size;
    int fds[MAX_FDS];
    int fd_count;
};

/* The fields that are left of a message. `bad` is set once one was asked for that is not there. */
struct fields {
    char *at, *end;
    int bad;
};

enum received { RECEIVED, NOTHING, ENDED };

/* ENDED also stands for a channel that brings nonsense. */
enum received receive(int channel, struct packet *packet, int flags);
void close_fds(struct packet *packet);

struct fields fields_of(const struct packet *packet);
char *next_text(struct fields *fields);
long long next_number(struct fields *fields);
/* Length of a counted row: never more than there are fields left. */
size_t next_count(struct fields *fields);
/* How many fields are left. */
size_t count_rest(const struct fields *fields);

/* The message being written; there is one at a time. */
void begin(const char *kind);
void put_text(const char *text);
void put_number(long long number);
/* Sends it. Returns -1 with errno; EMSGSIZE if it did not fit. */
int send_message(int channel, const int *fds, int fd_count, int flags);
int send_raw(int channel, const char *bytes, size_t size, const int *fds, int fd_count, int flags);

#endif
