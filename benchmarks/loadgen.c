/* A closed-loop HTTP/1.1 load generator: one thread, epoll, keep-alive connections.
 *
 *   loadgen HOST PORT PATH BODY_FILE CONNECTIONS SECONDS MAX_REQUESTS STREAM
 *
 * Every connection sends the same POST again as soon as the last answer has ended; where the body has
 * eight # in a row, each request has its own number there instead. STREAM 1 reads
 * the answer as server-sent events and times each event that carries text. SIGTERM ends the time
 * early. One JSON object goes to standard output. It knows nothing of servers' processes: load.py
 * reads their CPU.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define STALL_SECONDS 0.035 /* a delayed ACK against Nagle's algorithm takes 40 ms */
#define GRACE_SECONDS 30.0  /* for answers under way when the time is over */
#define HEAD_LIMIT 16384

/* ---- small things ---------------------------------------------------------------------------- */

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void *must(void *memory) {
    if (!memory) {
        fputs("loadgen: out of memory\n", stderr);
        exit(2);
    }
    return memory;
}

typedef struct {
    char *data;
    size_t used, room;
} Text;

static void text_add(Text *text, const char *data, size_t size) {
    if (text->used + size + 1 > text->room) {
        text->room = 2 * (text->used + size + 1);
        text->data = must(realloc(text->data, text->room));
    }
    memcpy(text->data + text->used, data, size);
    text->used += size;
    text->data[text->used] = 0;
}

typedef struct {
    double *values;
    size_t used, room;
} Samples;

static void sample(Samples *samples, double value) {
    if (samples->used == samples->room) {
        samples->room = samples->room ? 2 * samples->room : 4096;
        samples->values = must(realloc(samples->values, samples->room * sizeof(double)));
    }
    samples->values[samples->used++] = value;
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double quantile(const Samples *samples, double share) {
    return 1e3 * samples->values[(size_t)((double)(samples->used - 1) * share)];
}

static void print_samples(const char *name, Samples *samples) {
    if (!samples->used) {
        printf("\"%s\":null,", name);
        return;
    }
    double sum = 0;
    size_t stalls = 0;
    for (size_t i = 0; i < samples->used; i++) {
        sum += samples->values[i];
        stalls += samples->values[i] > STALL_SECONDS;
    }
    qsort(samples->values, samples->used, sizeof(double), ascending);
    printf("\"%s\":{\"n\":%zu,\"mean\":%.4f,\"p50\":%.4f,\"p90\":%.4f,\"p99\":%.4f,\"max\":%.4f,"
           "\"over_35ms\":%zu},",
           name, samples->used, 1e3 * sum / (double)samples->used, quantile(samples, 0.5),
           quantile(samples, 0.9), quantile(samples, 0.99), quantile(samples, 1.0), stalls);
}

/* ---- the run --------------------------------------------------------------------------------- */

typedef enum { CONNECTING, SENDING, HEAD, BODY, CHUNK_SIZE, CHUNK, CHUNK_END, TRAILER, IDLE } State;

typedef struct {
    int fd;
    State state;
    size_t sent;
    Text head; /* of the answer; later the size line of a chunk or a trailer line */
    Text text; /* a plain answer, or one line of an event stream */
    int status, done, closing, ended; /* ended: the stream said [DONE] */
    long left; /* bytes of the body or chunk; -1: until the server closes */
    long tokens;
    double started, first, last; /* last: when the previous text came */
} Connection;

static struct {
    struct sockaddr_in address;
    Text request;
    char *number; /* where in the request its own number goes, or NULL */
    int epoll, stream, active;
    long begun, most;
    double deadline;
} run;

static struct {
    Samples latency, first, gap;
    long ok, bad, events, tokens, bytes, reconnects;
    long statuses[600];
    char error[400];
} found;

static void note_error(const char *what, const char *detail) {
    if (!found.error[0])
        snprintf(found.error, sizeof found.error, "%s %.360s", what, detail);
}

static void watch(Connection *c, unsigned events, int operation) {
    struct epoll_event event = {.events = events, .data.ptr = c};
    epoll_ctl(run.epoll, operation, c->fd, &event);
}

static int may_begin(void) { return now() < run.deadline && run.begun < run.most; }

static void drop(Connection *c) {
    close(c->fd); /* epoll forgets it by itself */
    c->fd = -1;
    c->state = IDLE;
}

static void dial(Connection *c) {
    c->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    int one = 1;
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (connect(c->fd, (struct sockaddr *)&run.address, sizeof run.address) && errno != EINPROGRESS) {
        perror("loadgen: connect");
        exit(2);
    }
    c->closing = 0;
    c->state = CONNECTING;
    watch(c, EPOLLOUT, EPOLL_CTL_ADD);
}

static void send_request(Connection *c) {
    while (c->sent < run.request.used) {
        ssize_t n = write(c->fd, run.request.data + c->sent, run.request.used - c->sent);
        if (n < 0) {
            if (errno == EAGAIN)
                watch(c, EPOLLIN | EPOLLOUT, EPOLL_CTL_MOD);
            return; /* any other error shows when reading */
        }
        c->sent += (size_t)n;
    }
    watch(c, EPOLLIN, EPOLL_CTL_MOD);
    c->state = HEAD;
}

static void put_number(long number) {
    for (int i = 7; i >= 0; i--, number /= 10)
        run.number[i] = (char)('0' + number % 10);
}

static void begin(Connection *c) {
    run.begun++;
    if (run.number)
        put_number(run.begun);
    c->sent = c->head.used = c->text.used = 0;
    c->status = c->done = c->closing = c->ended = 0;
    c->tokens = 0;
    c->first = c->last = 0;
    c->started = now();
    c->state = SENDING;
    send_request(c);
}

static void go_on(Connection *c, int broken) {
    if (broken || c->closing) {
        drop(c);
        if (may_begin()) {
            found.reconnects++;
            dial(c);
        } else {
            run.active--;
        }
    } else if (may_begin()) {
        begin(c);
    } else {
        drop(c);
        run.active--;
    }
}

/* ---- answers --------------------------------------------------------------------------------- */

static long completion_tokens(const char *text) {
    const char *at = strstr(text, "\"completion_tokens\":");
    return at ? strtol(at + 20, NULL, 10) : 0;
}

/* Does the event carry text: a "content" or "text" string that is not empty? */
static int carries_text(const char *line) {
    static const char *const names[] = {"\"content\":", "\"text\":"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const char *at = strstr(line, names[i]);
        if (!at)
            continue;
        at += strlen(names[i]);
        at += strspn(at, " ");
        if (at[0] == '"' && at[1] != '"')
            return 1;
    }
    return 0;
}

static void take_line(Connection *c) {
    const char *line = c->text.data;
    if (c->text.used < 5 || memcmp(line, "data:", 5))
        return;
    if (strstr(line, "[DONE]")) {
        c->ended = 1;
        return;
    }
    found.events++;
    if (carries_text(line)) {
        double time = now();
        if (c->first)
            sample(&found.gap, time - c->last);
        else
            c->first = time;
        c->last = time;
    }
    long tokens = completion_tokens(line);
    if (tokens)
        c->tokens = tokens;
    if (strstr(line, "\"error\":"))
        note_error("event", line);
}

static void take_body(Connection *c, const char *data, size_t size) {
    if (!run.stream || c->status != 200) {
        if (!c->first)
            c->first = now();
        text_add(&c->text, data, size);
        return;
    }
    while (size) {
        const char *newline = memchr(data, '\n', size);
        size_t part = newline ? (size_t)(newline - data) : size;
        text_add(&c->text, data, part);
        if (!newline)
            return;
        take_line(c);
        c->text.used = 0;
        data += part + 1;
        size -= part + 1;
    }
}

static void finish(Connection *c) {
    double time = now();
    found.statuses[c->status > 0 && c->status < 600 ? c->status : 599]++;
    if (!run.stream || c->status != 200) {
        text_add(&c->text, "", 0);
        if (c->status == 200)
            c->tokens = completion_tokens(c->text.data);
        else
            note_error("status", c->text.data);
    }
    c->done = 1;
    if (c->status != 200 || (run.stream && !c->ended)) {
        note_error("unfinished", "the stream ended without [DONE]");
        found.bad++;
        return;
    }
    found.ok++;
    found.tokens += c->tokens;
    sample(&found.latency, time - c->started);
    if (c->first)
        sample(&found.first, c->first - c->started);
}

static void take_head(Connection *c) {
    const char *length = strcasestr(c->head.data, "\r\ncontent-length:");
    c->status = atoi(c->head.data + 9);
    c->closing = strcasestr(c->head.data, "\r\nconnection: close") != NULL;
    if (strcasestr(c->head.data, "\r\ntransfer-encoding: chunked")) {
        c->state = CHUNK_SIZE;
    } else {
        c->state = BODY;
        c->left = length ? atol(length + 17) : -1;
        if (c->left == 0)
            finish(c);
    }
    c->head.used = 0;
}

/* Reads one answer out of what came; returns 0 when the server talks nonsense. */
static int take(Connection *c, const char *data, size_t size) {
    while (size && !c->done) {
        size_t part = 1;
        switch (c->state) {
        case HEAD:
            text_add(&c->head, data, 1);
            if (c->head.used > HEAD_LIMIT)
                return 0;
            if (c->head.used >= 4 && !memcmp(c->head.data + c->head.used - 4, "\r\n\r\n", 4))
                take_head(c);
            break;
        case BODY:
        case CHUNK:
            part = c->left >= 0 && (size_t)c->left < size ? (size_t)c->left : size;
            take_body(c, data, part);
            if (c->left >= 0 && (c->left -= (long)part) == 0) {
                if (c->state == BODY)
                    finish(c);
                else
                    c->state = CHUNK_END;
            }
            break;
        case CHUNK_SIZE:
            text_add(&c->head, data, 1);
            if (c->head.used > HEAD_LIMIT)
                return 0;
            if (*data == '\n') {
                c->left = strtol(c->head.data, NULL, 16);
                c->state = c->left ? CHUNK : TRAILER;
                c->head.used = 0;
            }
            break;
        case CHUNK_END:
            if (*data == '\n')
                c->state = CHUNK_SIZE;
            break;
        case TRAILER:
            text_add(&c->head, data, 1);
            if (*data == '\n') {
                if (c->head.used <= 2)
                    finish(c);
                c->head.used = 0;
            }
            break;
        default:
            return 0;
        }
        data += part;
        size -= part;
    }
    return 1;
}

static void receive(Connection *c) {
    static char buffer[1 << 18];
    ssize_t n = read(c->fd, buffer, sizeof buffer);
    if (n < 0 && errno == EAGAIN)
        return;
    if (n <= 0) {
        if (c->state == BODY && c->left < 0) {
            finish(c);
        } else {
            found.bad++;
            note_error("connection", n ? strerror(errno) : "closed by the server");
        }
        go_on(c, 1);
        return;
    }
    found.bytes += n;
    if (c->state == SENDING) /* an answer before the request has gone out: an error of the server's */
        c->state = HEAD;
    int sane = take(c, buffer, (size_t)n);
    if (!sane) {
        found.bad++;
        note_error("answer", "not HTTP");
    }
    if (c->done || !sane)
        go_on(c, !sane);
}

static void serve(Connection *c, unsigned events) {
    if (c->fd < 0)
        return;
    if (c->state == CONNECTING) {
        int error = 0;
        socklen_t size = sizeof error;
        getsockopt(c->fd, SOL_SOCKET, SO_ERROR, &error, &size);
        if (error) {
            found.bad++;
            note_error("connect", strerror(error));
            drop(c);
            run.active--;
        } else {
            go_on(c, 0);
        }
        return;
    }
    if (c->state == SENDING && (events & EPOLLOUT))
        send_request(c);
    if (events & (EPOLLIN | EPOLLHUP | EPOLLERR))
        receive(c);
}

/* ---- beginning and end ----------------------------------------------------------------------- */

static void read_request(const char *host, const char *port, const char *path, const char *file) {
    Text body = {0};
    char buffer[1 << 16];
    FILE *in = fopen(file, "rb");
    if (!in) {
        perror("loadgen: body");
        exit(2);
    }
    for (size_t n; (n = fread(buffer, 1, sizeof buffer, in)) > 0;)
        text_add(&body, buffer, n);
    fclose(in);
    int size = snprintf(buffer, sizeof buffer,
                        "POST %s HTTP/1.1\r\nHost: %s:%s\r\nContent-Type: application/json\r\n"
                        "Accept: %s\r\nAuthorization: Bearer none\r\nContent-Length: %zu\r\n\r\n",
                        path, host, port, run.stream ? "text/event-stream" : "application/json",
                        body.used);
    text_add(&run.request, buffer, (size_t)size);
    if (body.used)
        text_add(&run.request, body.data, body.used);
    free(body.data);
    run.number = memmem(run.request.data, run.request.used, "########", 8);
}

static double own_cpu(void) {
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    return (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
           (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec) * 1e-6;
}

static void print_found(double elapsed) {
    printf("{");
    print_samples("latency_ms", &found.latency);
    print_samples("ttft_ms", &found.first);
    print_samples("itl_ms", &found.gap);
    printf("\"seconds\":%.4f,\"ok\":%ld,\"bad\":%ld,\"events\":%ld,\"tokens\":%ld,\"bytes_in\":%ld,"
           "\"request_bytes\":%zu,\"reconnects\":%ld,\"own_cpu_s\":%.4f,\"requests_per_s\":%.2f,"
           "\"tokens_per_s\":%.1f,\"statuses\":{",
           elapsed, found.ok, found.bad, found.events, found.tokens, found.bytes, run.request.used,
           found.reconnects, own_cpu(), (double)found.ok / elapsed, (double)found.tokens / elapsed);
    const char *comma = "";
    for (int i = 0; i < 600; i++) {
        if (!found.statuses[i])
            continue;
        printf("%s\"%d\":%ld", comma, i, found.statuses[i]);
        comma = ",";
    }
    printf("},\"first_error\":\"");
    for (const char *at = found.error; *at; at++) {
        if (*at == '"' || *at == '\\')
            putchar('\\');
        if ((unsigned char)*at >= ' ' && (unsigned char)*at < 127)
            putchar(*at);
    }
    printf("\"}\n");
}

static volatile sig_atomic_t told; /* to ask no more */

static void be_told(int number) {
    (void)number;
    told = 1;
}

int main(int count, char **words) {
    if (count != 9) {
        fputs("usage: loadgen HOST PORT PATH BODY_FILE CONNECTIONS SECONDS MAX_REQUESTS STREAM\n",
              stderr);
        return 2;
    }
    int connections = atoi(words[5]);
    run.most = atol(words[7]);
    run.stream = atoi(words[8]);
    read_request(words[1], words[2], words[3], words[4]);
    run.address.sin_family = AF_INET;
    run.address.sin_port = htons((unsigned short)atoi(words[2]));
    if (inet_pton(AF_INET, words[1], &run.address.sin_addr) != 1 || connections < 1) {
        fputs("loadgen: HOST must be an IPv4 address and CONNECTIONS at least 1\n", stderr);
        return 2;
    }
    signal(SIGTERM, be_told);
    run.epoll = epoll_create1(0);
    run.active = connections;
    Connection *all = must(calloc((size_t)connections, sizeof(Connection)));
    double begun = now();
    run.deadline = begun + atof(words[6]);
    for (int i = 0; i < connections; i++)
        dial(&all[i]);
    while (run.active > 0 && now() < run.deadline + GRACE_SECONDS) {
        struct epoll_event events[512];
        int n = epoll_wait(run.epoll, events, 512, 200);
        if (told && run.deadline > now())
            run.deadline = now();
        for (int i = 0; i < n; i++)
            serve(events[i].data.ptr, events[i].events);
    }
    if (run.active > 0) {
        found.bad += run.active;
        note_error("timeout", "answers were still missing at the end");
    }
    print_found(now() - begun);
    return 0;
}
