/* The walls around a sandbox; see jail/walls.py, whose steps these are. */
#ifndef WALLS_H
#define WALLS_H

#include <sys/types.h>

#include "wire.h"

#define CODE_FOLDER "/.tailrace"

/* What is the same for every sandbox. The texts last as long as the process. */
struct settings {
    uid_t uid;
    gid_t gid;
    char *python; /* the real interpreter, as sandboxes see it */
    int may_set_groups;
    int spares;
    size_t rlimit_count; /* numbers: resource and limit in turn */
    char **rlimits;
    size_t mount_count; /* writable folders beside the work folder */
    char **mounts;
    size_t shim_count; /* programs that stand in for python */
    char **shims;
};

/* Why the last step failed. */
extern char failure[1024];

/* All of these return -1 with `failure` set if something does not work. */
int read_settings(struct settings *settings);
int prepare_walls(void);
int make_folders(const char *path);
int isolate(const struct settings *settings);
int limit(const struct settings *settings);
/* Mounts what a message asks for, which `fields` has been read up to its disk space. Puts two or
 * three descriptors into `mounted` and returns how many. */
int mount_all(const struct settings *settings, const char *workdir, struct fields *fields,
              int *mounted);
int drop_privileges(const struct settings *settings, char **rlimits, size_t rlimit_count);
/* Takes a counted row of fields; the array is the caller's to free. */
char **take_row(struct fields *fields, size_t *count);

#endif
