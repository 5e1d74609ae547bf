/* The commands that run in a sandbox, what belongs to each, and ending one with all of it. */
#ifndef RUNNING_H
#define RUNNING_H

#include <sys/types.h>

#include "wire.h"

struct running {
    struct running *next;
    long long number;
    pid_t root;  /* its first process; 0 while the warm interpreter has not answered */
    pid_t *warm; /* Python programs that its shells asked for */
    size_t warm_count;
    double started, cpu_s;
    int fresh;          /* not for the warm interpreter */
    int doomed;         /* to be killed as soon as it has started */
    struct packet kept; /* the command itself, until the warm interpreter has taken it */
};

double now(void);
/* NULL without memory. */
struct running *add_running(long long number);
struct running *first_running(void);
struct running *find_by_number(long long number);
struct running *find_by_root(pid_t pid);
struct running *find_by_warm(pid_t pid);
/* Whether nothing else runs, in the foreground or behind it. */
int is_alone(const struct running *running);
void drop(struct running *running);

void remove_warm(struct running *running, pid_t pid);
/* Keeps the packet that a command came in, with descriptors of its own. */
int keep(struct running *running, const struct packet *packet);
void forget_kept(struct running *running);

/* Counts a Python program to the command whose process has asked for it, or to the background. */
void adopt(pid_t asking, pid_t program, pid_t zygote);
/* Remembers what outlives a command, so that a later command's timeout spares it. */
void note_background(const struct running *ended, pid_t zygote);
void forget_background(void);
/* Ends a command with everything it started, also what has left its process group. */
void kill_tree(const struct running *target, pid_t zygote);

#endif
