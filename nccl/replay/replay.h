/* The replay engine: when do the calls of thousands of ranks start and end?
 *
 * A world is ranks that follow programs. A program is lanes (host threads,
 * streams), each a sequence of instructions; lanes of a rank meet in channels,
 * ranks meet in communicators. All times are integer nanoseconds. Results depend
 * on the programs and durations alone, not on the order in which the engine works.
 *
 * Calls return 0, or a negative crystal_replay_error whose message
 * crystal_replay_message() gives. A world belongs to one thread at a time except
 * where a call says otherwise.
 */
#ifndef CRYSTAL_REPLAY_H
#define CRYSTAL_REPLAY_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define CRYSTAL_REPLAY_API __attribute__((visibility("default")))

typedef enum {
  CRYSTAL_REPLAY_INVALID = -1,  /* an argument names nothing that there is */
  CRYSTAL_REPLAY_MISMATCH = -2, /* two ranks make calls that do not fit together */
  CRYSTAL_REPLAY_DEADLOCK = -3, /* ranks wait and nobody can go on */
  CRYSTAL_REPLAY_MEMORY = -4,   /* out of memory */
  CRYSTAL_REPLAY_TIMEOUT = -5,  /* a limit is over */
  CRYSTAL_REPLAY_CLOSED = -6,   /* the live run was stopped */
  CRYSTAL_REPLAY_DIED = -7,     /* the process of a rank, or of the engine, has died */
  CRYSTAL_REPLAY_BUSY = -8,     /* more is open than there is room for */
} crystal_replay_error;

/* What an instruction does with its lane, which is free at time t. */
typedef enum {
  CRYSTAL_OP_RUN = 0,    /* t += duration of class `cls` */
  CRYSTAL_OP_POST = 1,   /* arrives at a call at t; the lane goes on at once */
  CRYSTAL_OP_COMM = 2,   /* the same, and the lane goes on at the call's end */
  CRYSTAL_OP_WAIT = 3,   /* t = max(t, end of the call posted with `handle`) */
  CRYSTAL_OP_SIGNAL = 4, /* puts t into channel `slot` of the rank */
  CRYSTAL_OP_AWAIT = 5,  /* t = max(t, the next time out of channel `slot`) */
  CRYSTAL_OP_MARK = 6,   /* an iteration of the rank ends at t */
} crystal_op;

/* How one participant's end follows from the arrivals (crystalllm/rules.py). */
typedef enum {
  CRYSTAL_ENDS_ALL = 0,        /* last arrival of all + transfer */
  CRYSTAL_ENDS_ROOT = 1,       /* max(own arrival, the root's) + transfer */
  CRYSTAL_ENDS_SELF = 2,       /* own arrival + transfer */
  CRYSTAL_ENDS_AFTER_DATA = 3, /* max(own arrival, the root's + transfer) + drain: an
                                  eager message's receiver, its sender being the root */
} crystal_ends;

/* The participant is the root (of a rooted collective, or an eager sender). */
#define CRYSTAL_FLAG_ROOT 1
/* The call is a message between two: waiting for the other side is bubble. */
#define CRYSTAL_FLAG_MESSAGE 2

typedef struct {
  uint8_t op;     /* crystal_op */
  uint8_t ends;   /* crystal_ends, of POST and COMM */
  uint16_t flags; /* CRYSTAL_FLAG_… */
  int32_t slot;   /* connection of the rank (POST, COMM), or its channel */
  int32_t handle; /* of POST, COMM and WAIT: below the program's num_handles */
  int32_t cls;    /* duration class of RUN; transfer class of POST and COMM */
  int32_t form;   /* of POST and COMM: equal for calls that fit together */
  int32_t call;   /* number that messages give; >= 0 */
} crystal_instruction;

/* Where a lane's instructions lie: prologue, body (repeated) and epilogue follow
 * one another. */
typedef struct {
  int64_t begin;
  int32_t prologue;
  int32_t body;
  int32_t epilogue;
} crystal_lane;

typedef struct crystal_replay crystal_replay;

CRYSTAL_REPLAY_API crystal_replay* crystal_replay_new(void);
/* Any state; NULL is fine. */
CRYSTAL_REPLAY_API void crystal_replay_free(crystal_replay*);
/* What the last call that failed had to say; valid until the next one. */
CRYSTAL_REPLAY_API const char* crystal_replay_message(const crystal_replay*);

/* A role's program; its number comes back. */
CRYSTAL_REPLAY_API int crystal_replay_add_program(
    crystal_replay*, const crystal_lane* lanes, int32_t num_lanes,
    const crystal_instruction* instructions, int64_t num_instructions, int32_t num_handles,
    int32_t num_channels);
/* Communicators, by the number of participants; pairs for messages are communicators
 * of two. Called once. */
CRYSTAL_REPLAY_API int crystal_replay_set_communicators(
    crystal_replay*, const int32_t* num_participants, int32_t num_communicators);
/* The next rank (from 0): its program, and the communicator of each of its connections. */
CRYSTAL_REPLAY_API int crystal_replay_add_ranks(
    crystal_replay*, int32_t num_ranks, const int32_t* programs, const int64_t* connection_begin,
    const int32_t* connections);

/* Durations by class, in ns, >= 0. `spread` widens a class to a lognormal of this
 * sigma around the duration, drawn by (seed, class, rank or communicator, count);
 * 0 is constant. `drain` is what an eager receiver adds. */
CRYSTAL_REPLAY_API int crystal_replay_set_durations(
    crystal_replay*, const int64_t* duration_ns, const double* spread, const int64_t* drain_ns,
    int32_t num_classes, uint64_t seed);
/* Makes a class take one of several durations, with these weights (> 0), drawn like a
 * spread: the sizes that an uneven all_to_all had, say. Call it after set_durations. */
CRYSTAL_REPLAY_API int crystal_replay_set_choices(
    crystal_replay*, int32_t cls, const int64_t* duration_ns, const int64_t* weights,
    int32_t num_choices);
/* Factor on the rank's RUN durations (rounded half up); NULL for 1. */
CRYSTAL_REPLAY_API int crystal_replay_set_rank_factors(crystal_replay*, const double* factors);
/* Factor on the transfers of each communicator; NULL for 1. */
CRYSTAL_REPLAY_API int crystal_replay_set_link_factors(crystal_replay*, const double* factors);

/* Link class of each communicator, from 0, or -1 where transfers were measured as they
 * overlap; NULL for -1 everywhere. Transfers that end for all participants together
 * (CRYSTAL_ENDS_ALL) and overlap at a rank in one class share its bandwidth: with n
 * of them at its busiest rank a transfer goes on at 1/n of its speed. Live, an end is
 * known once nothing can arrive before it. */
CRYSTAL_REPLAY_API int crystal_replay_set_link_classes(crystal_replay*, const int32_t* classes);
/* What-if: a rank that computes longer, or pauses. Iterations count from 1; with
 * `every` they are first, first + every, …; 0 means all from first on. */
typedef enum {
  CRYSTAL_SLOW = 0,     /* RUN durations of the rank times `factor`, in these iterations */
  CRYSTAL_PAUSE_IN = 1, /* `pause_ns` more in the first RUN of lane 0 of these iterations */
  CRYSTAL_PAUSE_AT = 2, /* `pause_ns` more in the first RUN of lane 0 that ends after `at_ns` */
} crystal_perturbation_kind;
typedef struct {
  int32_t kind; /* crystal_perturbation_kind */
  int32_t rank;
  int32_t first;
  int32_t every;
  double factor;
  int64_t pause_ns;
  int64_t at_ns;
} crystal_perturbation;
CRYSTAL_REPLAY_API int crystal_replay_set_perturbations(
    crystal_replay*, const crystal_perturbation*, int32_t num_perturbations);

/* Keeps what the critical path of one iteration (from 1) needs; 0 for none. */
CRYSTAL_REPLAY_API int crystal_replay_trace(crystal_replay*, int32_t iteration);

/* Keeps arrival, start and end of every call of a rank. */
CRYSTAL_REPLAY_API int crystal_replay_watch(crystal_replay*, int32_t rank);

/* Goes through prologue, `num_iterations` bodies and epilogue of all ranks. */
CRYSTAL_REPLAY_API int crystal_replay_run(crystal_replay*, int32_t num_iterations);

/* After a run. */
CRYSTAL_REPLAY_API int64_t crystal_replay_num_participations(const crystal_replay*);
/* Marks of a rank, in order. */
CRYSTAL_REPLAY_API int64_t crystal_replay_marks(
    const crystal_replay*, int32_t rank, int64_t* at_ns, int64_t capacity);
/* When each lane of a rank ended. */
CRYSTAL_REPLAY_API int64_t crystal_replay_lane_ends(
    const crystal_replay*, int32_t rank, int64_t* at_ns, int64_t capacity);
/* Where the time before each mark of a rank went, on the lane that marks. */
typedef struct {
  int64_t compute_ns; /* RUN */
  int64_t host_ns;    /* waits for another lane of the rank (launches) */
  int64_t wait_ns;    /* waits for the last participant of a collective, or its root */
  int64_t bubble_ns;  /* waits for the other side of a message */
  int64_t exposed_ns; /* waits for transfers */
} crystal_breakdown;
CRYSTAL_REPLAY_API int64_t crystal_replay_breakdown(
    const crystal_replay*, int32_t rank, crystal_breakdown* parts, int64_t capacity);
/* Calls of watched ranks, in the order of the rank's lanes. */
typedef struct {
  int32_t rank;
  int32_t lane;      /* -1 of an external rank */
  int32_t iteration; /* 0 is the prologue, k the k-th body, n + 1 the epilogue */
  int32_t call;
  int64_t arrival_ns;
  int64_t start_ns; /* of the transfer */
  int64_t end_ns;
} crystal_event;
CRYSTAL_REPLAY_API int64_t crystal_replay_events(
    const crystal_replay*, crystal_event* events, int64_t capacity);

/* The critical path of the traced iteration, from its last mark back to its begin:
 * what each moment had to wait for. `slack_ns` says how much earlier it could have
 * been before something else would have bound it; -1 where nothing else does. */
typedef struct {
  int32_t rank;
  int32_t lane;
  int32_t position; /* of the instruction in the lane's body */
  int32_t op;       /* crystal_op */
  int32_t call;
  int32_t cls;
  int64_t start_ns;
  int64_t end_ns;
  int64_t slack_ns;
} crystal_step;
CRYSTAL_REPLAY_API int64_t crystal_replay_critical_path(
    const crystal_replay*, crystal_step* steps, int64_t capacity);
/* ---- The live run: some ranks are external, real programs whose calls arrive. ----
 *
 * Times are ns of CLOCK_MONOTONIC since the start of the run. Everybody else is
 * computed ahead, as far as the arrivals determine it; times depend on the arrivals
 * alone, so that a run whose arrivals are those of an offline run gives its times.
 *
 * External ranks are threads of the engine's process or other processes of the same
 * user, host and pid namespace. Memory between them has no name: whoever is killed,
 * nothing stays behind. Once something fails (a mismatch, a circle of waiting, a
 * process that died, a stop) the run is over, and every call of every rank gives that
 * error. A call whose result is negative, or NULL, has failed; crystal_live_message
 * says why. After a fork only the parent may use what it had; ending it in the child
 * does nothing.
 */
typedef struct crystal_live crystal_live;     /* the engine's end */
typedef struct crystal_client crystal_client; /* an external rank's */

/* Of the last live call of this thread that failed; valid until the next one. */
CRYSTAL_REPLAY_API const char* crystal_live_message(void);

typedef struct {
  int32_t num_iterations; /* bodies that the other ranks go through */
  int32_t ahead;          /* iterations that they may be ahead of the slowest external rank
                             (by its marks), unless all external ranks wait for them */
  int64_t engine_spin_ns; /* how long the engine's thread looks for work before it sleeps */
  int64_t client_spin_ns; /* how long a wait looks for its release before it sleeps */
  int32_t has_thread;     /* 0: the engine has no thread of its own, and only waits and
                             arrivals of this process make it go on */
  int32_t helps;          /* waits and arrivals of this process compute, too */
} crystal_live_options;

/* Starts a run of a world that is set up; until its stop nothing else may be asked of
 * the world. NULL: INVALID (a rank that is not there), or no memory or thread. */
CRYSTAL_REPLAY_API crystal_live* crystal_live_start(
    crystal_replay*, const int32_t* external, int32_t num_external, const crystal_live_options*);
/* In any state, NULL included: whoever waits gets CLOSED, the thread ends, memory goes
 * with the last client. Marks, breakdowns and events of the world can be read then. */
CRYSTAL_REPLAY_API void crystal_live_stop(crystal_live*);
/* By which other processes attach; valid until the stop. */
CRYSTAL_REPLAY_API const char* crystal_live_address(const crystal_live*);
/* Returns once everything is computed that arrivals so far determine, or TIMEOUT. */
CRYSTAL_REPLAY_API int crystal_live_settle(crystal_live*, int64_t limit_ns);

/* [k] counts what took from 2^k to below 2^(k+1) ns; [0] also less, the last one more. */
#define CRYSTAL_LIVE_BUCKETS 40
typedef struct {
  int64_t num_arrivals;
  int64_t num_releases;
  int64_t num_late; /* releases that became known after their time; they go out at once */
  int64_t late_sum_ns;
  int64_t late_max_ns;
  int64_t num_answers; /* releases that their own arrival determined */
  int64_t answer_sum_ns; /* from the request to the release being known */
  int64_t answer_max_ns;
  int64_t late_log2[CRYSTAL_LIVE_BUCKETS];
  int64_t answer_log2[CRYSTAL_LIVE_BUCKETS];
} crystal_live_stats;
CRYSTAL_REPLAY_API void crystal_live_get_stats(crystal_live*, crystal_live_stats*);

/* The end of an external rank in the engine's process. `num_threads` of the rank make
 * calls, and when all of them wait the rank makes no other; 0 if that is not so (then
 * no circle of waiting is found through it). NULL: INVALID. */
CRYSTAL_REPLAY_API crystal_client* crystal_live_client(
    crystal_live*, int32_t rank, int32_t num_threads);
/* The same in another process. */
CRYSTAL_REPLAY_API crystal_client* crystal_client_attach(
    const char* address, int32_t rank, int32_t num_threads);
/* The rank makes no more calls. Not while a thread is in a call of this client; before or
 * after the stop. A process that ends without it has died, and the run with it. */
CRYSTAL_REPLAY_API void crystal_client_detach(crystal_client*);
/* The run's time. */
CRYSTAL_REPLAY_API int64_t crystal_client_now(const crystal_client*);
/* The rank makes a call: slot, cls, ends, flags, form and call of the instruction count.
 * `at_ns` >= 0 is when, -1 is now. Calls in one slot come in their order. The ticket comes
 * back at once; BUSY if 1024 calls are open. From any thread. */
CRYSTAL_REPLAY_API int64_t crystal_client_arrive(
    crystal_client*, const crystal_instruction* call, int64_t at_ns);
/* An iteration of the rank ends. */
CRYSTAL_REPLAY_API int crystal_client_mark(crystal_client*, int64_t at_ns);
/* From here on virtual ranks compute `factor` times as long as their durations say; of several
 * ranks that tell one, by their mean. What is computed already stays. */
CRYSTAL_REPLAY_API int crystal_client_slowness(crystal_client*, double factor);
typedef struct {
  int64_t start_ns; /* of the transfer */
  int64_t end_ns;   /* when the call is to be released; it may be past (late) or to come */
} crystal_release;
/* Returns once the release is known, which is not when it is due. TIMEOUT after limit_ns,
 * with a message that says what the call waits for; 0 only looks. A ticket can be waited
 * for until 1024 later ones have been given, INVALID afterwards. */
CRYSTAL_REPLAY_API int crystal_client_wait(
    crystal_client*, int64_t ticket, int64_t limit_ns, crystal_release* release);
/* The same for a thread that makes no calls of its own: the rank does not count as waiting. */
CRYSTAL_REPLAY_API int crystal_client_watch(
    crystal_client*, int64_t ticket, int64_t limit_ns, crystal_release* release);
/* Returns at this time of the run: sleeps, spins over the last client_spin_ns, and computes
 * ahead instead of sleeping where this process may. What a release is waited out with. */
CRYSTAL_REPLAY_API int crystal_client_wait_until(crystal_client*, int64_t at_ns);

#ifdef __cplusplus
}
#endif
#endif
