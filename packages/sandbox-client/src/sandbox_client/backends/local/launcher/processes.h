/* Who is whose in a sandbox's pid namespace, as /proc tells it; see jail/processes.py. */
#ifndef PROCESSES_H
#define PROCESSES_H

#include <stddef.h>
#include <sys/types.h>

struct process {
    pid_t pid, parent, session;
    unsigned long long started; /* tells a reused pid from the earlier one */
    int inside;                 /* belongs to the tree that was last looked for */
    int spared;
};

struct crowd {
    struct process *all;
    size_t count, room;
};

/* All processes but the first one, those that have ended, and `except`. */
void list_processes(struct crowd *crowd, pid_t except);
/* Marks as `inside` what descends from the roots or lives in a session that one of them leads. */
void mark_tree(struct crowd *crowd, const pid_t *roots, size_t count);
const struct process *find_process(const struct crowd *crowd, pid_t pid,
                                   unsigned long long started);
int add_process(struct crowd *crowd, const struct process *process);

#endif
