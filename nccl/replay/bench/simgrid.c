// A replayed world as an MPI program, for SimGrid's SMPI (crystalllm/bench/simgrid.py).
//
// world.h is generated: how many of what (NUM_…); the steps of each program; which slots
// are groups; and of each rank its program and, by slot, its communicator and its peer,
// which is -1 where the slot is not a direction of messages.
// Nothing is computed between the calls, and every call carries one float: the least
// that SimGrid can be asked to do.
#include <mpi.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum what { ALLREDUCE, REDUCTION, REDUCED, RECEIVE, SEND, SENT };

struct step {
  unsigned char what, slot, handle;
};

#include "world.h"

struct rank {
  MPI_Comm groups[NUM_SLOTS];
  MPI_Request sends[NUM_HANDLES];
  MPI_Request reductions[NUM_REDUCTIONS];
  float reduced[NUM_REDUCTIONS];
  float sent;
  int num_reductions;
  long participations;
};

// By the clock of the machine: SMPI makes clock_gettime tell the simulated time.
static double seconds(void) {
  struct timespec now;
  syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &now);
  return now.tv_sec + now.tv_nsec * 1e-9;
}

static void take(struct rank* self, int number, struct step step) {
  const int communicator = connections[number][step.slot], peer = peers[number][step.slot];
  const float mine = 1;
  float other;
  switch (step.what) {
    case ALLREDUCE:
      MPI_Allreduce(&mine, &other, 1, MPI_FLOAT, MPI_SUM, self->groups[step.slot]);
      break;
    case REDUCTION: {
      const int i = self->num_reductions++;
      self->reduced[i] = 1;
      MPI_Iallreduce(MPI_IN_PLACE, &self->reduced[i], 1, MPI_FLOAT, MPI_SUM,
                     self->groups[step.slot], &self->reductions[i]);
      break;
    }
    case REDUCED:
      MPI_Waitall(self->num_reductions, self->reductions, MPI_STATUSES_IGNORE);
      self->num_reductions = 0;
      return;
    case RECEIVE:
      MPI_Recv(&other, 1, MPI_FLOAT, peer, communicator, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
      break;
    case SEND:
      MPI_Issend(&self->sent, 1, MPI_FLOAT, peer, communicator, MPI_COMM_WORLD,
                 &self->sends[step.handle]);
      break;
    case SENT:
      MPI_Wait(&self->sends[step.handle], MPI_STATUS_IGNORE);
      return;
  }
  ++self->participations;
}

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int number;
  MPI_Comm_rank(MPI_COMM_WORLD, &number);
  struct rank self = {.sent = 1};
  for (int slot = 0; slot < NUM_SLOTS; ++slot)
    if (is_group[slot])
      MPI_Comm_split(MPI_COMM_WORLD, connections[number][slot], number, &self.groups[slot]);
  for (int i = 0; i < NUM_HANDLES; ++i) self.sends[i] = MPI_REQUEST_NULL;

  const struct step* steps = programs[program_of[number]];
  const int num_steps = lengths[program_of[number]];
  MPI_Barrier(MPI_COMM_WORLD);
  const double start = seconds(), simulated = MPI_Wtime();
  for (int iteration = 0; iteration < NUM_ITERATIONS; ++iteration)
    for (int i = 0; i < num_steps; ++i) take(&self, number, steps[i]);
  MPI_Waitall(NUM_HANDLES, self.sends, MPI_STATUSES_IGNORE);
  MPI_Barrier(MPI_COMM_WORLD);
  const double took = seconds() - start, simulated_took = MPI_Wtime() - simulated;

  long all;
  MPI_Reduce(&self.participations, &all, 1, MPI_LONG, MPI_SUM, 0, MPI_COMM_WORLD);
  if (number == 0)
    printf("{\"participations\": %ld, \"seconds\": %.6f, \"simulated_s\": %.9f}\n", all, took,
           simulated_took);
  MPI_Finalize();
  return 0;
}
