#define _GNU_SOURCE
#include "descriptors.h"

#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#define HIGHEST 0x7fffffff
#define HIGHEST_TRIED (1 << 20) /* one by one, where the kernel is older than 5.9 */

static void close_from(int from, int to) {
    if (to >= from && syscall(SYS_close_range, from, to, 0) != 0)
        for (int fd = from; fd <= to && fd < HIGHEST_TRIED; fd++) close(fd);
}

static int by_number(const void *one, const void *other) {
    return *(const int *)one - *(const int *)other;
}

void close_all_but(int *kept, int count) {
    int from = 3;
    qsort(kept, (size_t)count, sizeof *kept, by_number);
    for (int at = 0; at < count; at++) {
        close_from(from, kept[at] - 1);
        from = kept[at] + 1;
    }
    close_from(from, HIGHEST);
}
