/* Starting a command in a sandbox: finding its program, executing it, or saying why not. */
#ifndef COMMANDS_H
#define COMMANDS_H

#include <stddef.h>
#include <sys/types.h>

#include "wire.h"

/* A command as the service asks for it; see jail/messages.py. The texts lie in the packet. */
struct asked {
    const struct packet *packet; /* with its three standard streams */
    long long number;
    char *cwd;
    int has_shell;
    char *shell;
    char **argv;    /* of the program itself; what only a shell can tell is given to one */
    char **environ; /* both are the caller's to free, by `free_asked` */
    int through_shell;
};

int read_asked(const struct packet *packet, struct asked *asked);
void free_asked(struct asked *asked);
/* Lets a shell read the command. */
void ask_shell(struct asked *asked);
/* The file that a shell would run, or NULL with errno. Good until the next call. */
const char *find_program(const struct asked *asked);
/* Executes a program in a session of its own. Returns 0 or an error number. */
int spawn(const char *path, const struct asked *asked, pid_t *pid);
/* The kernel ends processes with the highest score first when memory runs out: what is started
 * between these has a higher one than the first process. */
int open_oom_score(void);
void raise_oom_score(void);
void lower_oom_score(void);

#endif
