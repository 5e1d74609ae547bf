/* Closing what a forked process has inherited and must not keep. */
#ifndef DESCRIPTORS_H
#define DESCRIPTORS_H

/* Closes everything but the standard streams and these, which it sorts. */
void close_all_but(int *kept, int count);

#endif
