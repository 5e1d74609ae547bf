/* The first process of a sandbox; see jail/init.py. */
#ifndef INIT_H
#define INIT_H

#include "walls.h"

/* Works until the service goes away, then ends the process.
 *
 * channel: from the service. launcher: where a warm interpreter is asked for. listener: the
 * address of python's stand-ins. */
_Noreturn void serve_sandbox(const struct settings *settings, int channel, int launcher,
                             int listener);
/* Takes the address of the stand-ins; -1 with errno. */
int listen_for_shims(void);

#endif
