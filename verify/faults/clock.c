/* A wall clock that can be set, for one process: loaded with LD_PRELOAD. The file that CLOCK_OFFSET_FILE names holds how
   far it is from the machine's, as a 64-bit number of nanoseconds, which may be changed at any time.
   (libfaketime does the same, but takes a semaphore at each look: a mongod under it needs 100 ms for a write.) */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const int64_t second = 1000000000;
static const int64_t none = 0;
static volatile const int64_t *offset = &none;

__attribute__((constructor)) static void map_offset(void) {
    const char *path = getenv("CLOCK_OFFSET_FILE");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *mapped = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
    if (mapped != MAP_FAILED) offset = mapped;
    close(file);
}

static struct timespec add(struct timespec t, int64_t nanoseconds) {
    int64_t sum = t.tv_sec * second + t.tv_nsec + nanoseconds;
    if (sum < 0) sum = 0;
    return (struct timespec){sum / second, sum % second};
}

int clock_gettime(clockid_t clock, struct timespec *t) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real ? real(clock, t) : syscall(SYS_clock_gettime, clock, t);
    if (!result && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) *t = add(*t, *offset);
    return result;
}

int gettimeofday(struct timeval *restrict t, void *restrict zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    *t = (struct timeval){now.tv_sec, now.tv_nsec / 1000};
    return 0;
}

time_t time(time_t *t) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (t) *t = now.tv_sec;
    return now.tv_sec;
}

/* Who waits until a time of this clock must wake at the same moment by the machine's. WiredTiger waits by the monotonic
   clock, which no machine has had running for thirty years. */
int pthread_cond_timedwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
    static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    if (!real) real = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    if (!real) real = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    struct timespec there = until->tv_sec < second ? *until : add(*until, -*offset);
    return real(cond, mutex, &there);
}
