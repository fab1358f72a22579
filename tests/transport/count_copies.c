/* Preloaded into a process, counts the bytes that it copies (memcpy, memmove) and that the kernel copies for it. */
#define _GNU_SOURCE
#include <stdatomic.h>
#include <stddef.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { SMALL = 1024 }; /* headers and the like; a payload goes in larger pieces */

static atomic_ulong copied, received, sent;

unsigned long kvoy_copied(void) { return copied; }
unsigned long kvoy_received(void) { return received; }
unsigned long kvoy_sent(void) { return sent; }

static void *copy(void *into, const void *from, size_t n) {
    if (n >= SMALL) copied += n;
    unsigned char *to = into;
    const unsigned char *of = from;
    if (to <= of || to >= of + n) {
        __asm__ volatile("rep movsb" : "+D"(to), "+S"(of), "+c"(n) : : "memory");
    } else {
        to += n - 1, of += n - 1;
        __asm__ volatile("std; rep movsb; cld" : "+D"(to), "+S"(of), "+c"(n) : : "memory");
    }
    return into;
}

void *memcpy(void *into, const void *from, size_t n) { return copy(into, from, n); }
void *memmove(void *into, const void *from, size_t n) { return copy(into, from, n); }
void *__memcpy_chk(void *into, const void *from, size_t n, size_t room) { (void)room; return copy(into, from, n); }
void *__memmove_chk(void *into, const void *from, size_t n, size_t room) { (void)room; return copy(into, from, n); }

static ssize_t counted(ssize_t n, atomic_ulong *total) {
    if (n > 0) *total += (unsigned long)n;
    return n;
}

ssize_t recv(int fd, void *into, size_t n, int flags) {
    return recvfrom(fd, into, n, flags, NULL, NULL);
}
ssize_t recvfrom(int fd, void *into, size_t n, int flags, struct sockaddr *who, socklen_t *length) {
    ssize_t got = syscall(SYS_recvfrom, fd, into, n, flags, who, length);
    return flags & MSG_PEEK ? got : counted(got, &received);
}
ssize_t recvmsg(int fd, struct msghdr *message, int flags) {
    return counted(syscall(SYS_recvmsg, fd, message, flags), &received);
}
ssize_t readv(int fd, const struct iovec *parts, int count) {
    return counted(syscall(SYS_readv, fd, parts, count), &received);
}
ssize_t process_vm_readv(pid_t pid, const struct iovec *here, unsigned long heres, const struct iovec *there,
                         unsigned long theres, unsigned long flags) {
    return counted(syscall(SYS_process_vm_readv, pid, here, heres, there, theres, flags), &received);
}
ssize_t send(int fd, const void *from, size_t n, int flags) {
    return counted(syscall(SYS_sendto, fd, from, n, flags, NULL, 0), &sent);
}
ssize_t sendto(int fd, const void *from, size_t n, int flags, const struct sockaddr *who, socklen_t length) {
    return counted(syscall(SYS_sendto, fd, from, n, flags, who, length), &sent);
}
ssize_t sendmsg(int fd, const struct msghdr *message, int flags) {
    return counted(syscall(SYS_sendmsg, fd, message, flags), &sent);
}
ssize_t writev(int fd, const struct iovec *parts, int count) {
    return counted(syscall(SYS_writev, fd, parts, count), &sent);
}
